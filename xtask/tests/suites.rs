//! The page about tests has every suite, and what a commit does without.
#![allow(
    clippy::unwrap_used,
    reason = "a workspace that cannot be read is a test that fails"
)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const PROGRAM: &str = "tests/integration/tests/main.rs";
const PAGE: &str = "tests/README.md";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().into()
}

fn text(file: &str) -> String {
    fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn suites() -> BTreeSet<String> {
    let text = text(PROGRAM);
    let modules = text
        .lines()
        .filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
    let suites: BTreeSet<_> = modules.map(str::to_owned).collect();
    assert!(suites.len() > 30, "the suites are elsewhere");
    suites
}

/// Whether the suite leaves all of its trials out of a commit's tier.
fn is_only_in_all(suite: &str) -> bool {
    let dir = root().join("tests/integration/tests");
    let files = [dir.join(format!("{suite}.rs")), dir.join(suite).join("mod.rs")];
    let code = files.iter().find_map(|file| fs::read_to_string(file).ok());
    let code = code.unwrap_or_else(|| panic!("{suite} has no file"));
    code.contains(".only_in_all()")
}

/// The names in the first cell of a row: those of suites have nothing else there.
fn names(row: &str) -> Vec<String> {
    let cell = row.trim_start_matches("| ").split(" | ").next().unwrap();
    let quoted = |name: &str| name.strip_prefix('`')?.strip_suffix('`').map(str::to_owned);
    cell.split(", ")
        .map(quoted)
        .collect::<Option<_>>()
        .unwrap_or_default()
}

#[test]
fn every_suite_has_a_row() {
    let page = text(PAGE);
    let table = page
        .lines()
        .skip_while(|line| *line != "## Suites")
        .take_while(|line| *line != "## Two tiers");
    let rows: BTreeSet<_> = table.filter(|line| line.starts_with("| `")).collect();
    let named: BTreeSet<_> = rows.into_iter().flat_map(names).collect();
    let missing: Vec<_> = suites().difference(&named).cloned().collect();
    assert!(missing.is_empty(), "{PAGE} lacks {missing:?}");
}

#[test]
fn the_page_names_the_suites_that_a_commit_does_without() {
    let page = text(PAGE);
    let table = page
        .lines()
        .skip_while(|line| !line.starts_with("| only in `--all` |"))
        .take_while(|line| line.starts_with('|'));
    let suites = suites();
    let named: BTreeSet<_> = table
        .flat_map(names)
        .filter(|name| suites.contains(name))
        .collect();
    let left_out: BTreeSet<_> = suites.into_iter().filter(|name| is_only_in_all(name)).collect();
    assert_eq!(named, left_out, "{PAGE}, {PROGRAM}");
}
