//! docs/reference/errors.md lists every code that the sources use, and no others; each is named by a test.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Directories with crates that are no product.
const TOOLS: [&str; 3] = ["bench", "fuzz", "xtask"];

/// The crates of the product.
fn crates(root: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root).expect("the workspace can be listed");
    let dirs = entries.map(|entry| entry.expect("the workspace can be listed").path());
    let is_product = |dir: &PathBuf| {
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        dir.join("Cargo.toml").is_file() && dir.join("src").is_dir() && !TOOLS.contains(&&*name)
    };
    dirs.filter(is_product).collect()
}

/// Every `FIRN-...` code in a text.
fn codes(text: &str, found: &mut BTreeSet<String>) {
    for (at, _) in text.match_indices("FIRN-") {
        let is_code = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '-';
        let end = text[at..]
            .find(|c| !is_code(c))
            .map_or(text.len(), |length| at + length);
        let code = text[at..end].trim_end_matches('-');
        if code != "FIRN" {
            found.insert(code.to_owned());
        }
    }
}

fn codes_of_sources(dir: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(dir).expect("the sources are there") {
        let path = entry.expect("the sources can be listed").path();
        if path.is_dir() {
            codes_of_sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            codes(&std::fs::read_to_string(&path).expect("sources are text"), found);
        }
    }
}

/// Codes in tests: files of test programs, test modules, and what follows `#[cfg(test)]` in other sources.
fn codes_of_tests(dir: &Path, is_test: bool, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(dir).expect("the sources are there") {
        let path = entry.expect("the sources can be listed").path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let is_test = is_test || name.trim_end_matches(".rs").ends_with("tests");
        if path.is_dir() {
            codes_of_tests(&path, is_test, found);
        } else if name.ends_with(".rs") {
            let text = std::fs::read_to_string(&path).expect("sources are text");
            let from = if is_test {
                Some(0)
            } else {
                text.find("#[cfg(test)]")
            };
            codes(from.map_or("", |from| &text[from..]), found);
        }
    }
}

#[test]
fn every_code_is_named_by_a_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let (mut used, mut tested) = (BTreeSet::new(), BTreeSet::new());
    for dir in crates(&root) {
        codes_of_sources(&dir.join("src"), &mut used);
        codes_of_tests(&dir.join("src"), false, &mut tested);
        let tests = dir.join("tests");
        if tests.is_dir() {
            codes_of_tests(&tests, true, &mut tested);
        }
    }
    codes_of_tests(&root.join("tests/integration/tests"), true, &mut tested);
    let untested: Vec<_> = used.difference(&tested).collect();
    assert!(untested.is_empty(), "no test names {untested:?}");
}

#[test]
fn the_list_of_codes_is_complete_and_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let (mut used, mut listed) = (BTreeSet::new(), BTreeSet::new());
    for dir in crates(&root) {
        codes_of_sources(&dir.join("src"), &mut used);
    }
    let page = root.join("docs/reference/errors.md");
    let list = std::fs::read_to_string(page).expect("docs/reference/errors.md is there");
    for row in list.lines().filter(|line| line.starts_with("| FIRN-")) {
        codes(row.split('|').nth(1).unwrap_or_default(), &mut listed);
    }
    assert!(used.len() > 40, "the sources are searched: {used:?}");
    let missing: Vec<_> = used.difference(&listed).collect();
    let stale: Vec<_> = listed.difference(&used).collect();
    assert!(missing.is_empty(), "docs/reference/errors.md lacks {missing:?}");
    assert!(
        stale.is_empty(),
        "docs/reference/errors.md lists {stale:?}, which no source uses"
    );
}
