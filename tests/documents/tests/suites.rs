//! Every suite lists its cases itself and has a row in tests/README.md.
#![allow(clippy::unwrap_used, reason = "a failed invariant fails the test")]

use std::collections::BTreeSet;
use std::fs;

use firn_documents::root;

/// Names of the suites, as the manifest of tests/integration lists them.
fn suites() -> BTreeSet<String> {
    let manifest = fs::read_to_string(root().join("tests/integration/Cargo.toml")).unwrap();
    let tests = manifest.split("[[test]]").skip(1);
    let names = tests.filter_map(|test| test.split("name = \"").nth(1)?.split('"').next());
    names.map(str::to_owned).collect()
}

#[test]
fn every_suite_has_a_row_in_the_readme() {
    let readme = fs::read_to_string(root().join("tests/README.md")).unwrap();
    let suites = suites();
    assert!(suites.len() > 20, "only {suites:?}");
    for suite in suites {
        let row = format!("| `{suite}` |");
        assert!(readme.contains(&row), "tests/README.md has no row for {suite}");
    }
}

#[test]
fn every_suite_is_in_the_manifest() {
    let suites = suites();
    for entry in fs::read_dir(root().join("tests/integration/tests")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        assert!(
            suites.contains(&name),
            "tests/integration/Cargo.toml has no [[test]] {name}"
        );
    }
}
