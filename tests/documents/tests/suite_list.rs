//! Every suite is in the program of suites and has a row in tests/README.md.
#![allow(clippy::unwrap_used, reason = "a failed invariant fails the test")]

use std::collections::BTreeSet;
use std::fs;

use firn_documents::root;

/// Names of the suites: files and directories next to the program's main file.
fn suites() -> BTreeSet<String> {
    let entries = fs::read_dir(root().join("tests/integration/tests")).unwrap();
    let stem = |entry: fs::DirEntry| entry.path().file_stem().unwrap().to_string_lossy().into_owned();
    let mut suites: BTreeSet<String> = entries.map(|entry| stem(entry.unwrap())).collect();
    assert!(suites.remove("main") && suites.len() > 20, "only {suites:?}");
    suites
}

#[test]
fn every_suite_has_a_row_in_the_readme() {
    let readme = fs::read_to_string(root().join("tests/README.md")).unwrap();
    for suite in suites() {
        let row = format!("| `{suite}` |");
        assert!(readme.contains(&row), "tests/README.md has no row for {suite}");
    }
}

#[test]
fn every_suite_is_run() {
    let main = fs::read_to_string(root().join("tests/integration/tests/main.rs")).unwrap();
    // A program of its own.
    for suite in suites().into_iter().filter(|suite| suite != "cluster") {
        let entry = format!("(\"{suite}\", {suite}::suite())");
        assert!(
            main.contains(&entry),
            "tests/integration/tests/main.rs does not run {suite}"
        );
    }
}
