//! The pages hold together, and name only what is in the code.
#![allow(
    clippy::unwrap_used,
    reason = "a page or a source that cannot be read is a test that fails"
)]

mod configuration;
mod links;
mod names;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use firn_documents::{Page, root};

/// Fails with all findings, `page:line: text`.
fn none(findings: &[String], what: &str) {
    assert!(findings.is_empty(), "{what}:\n{}", findings.join("\n"));
}

fn found(page: &Page, line: usize, text: impl std::fmt::Display) -> String {
    format!("{}:{line}: {text}", page.path.display())
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

/// Words of a text that begin so and continue with these characters.
fn words<'t>(text: &'t str, prefix: &str, is_part: impl Fn(char) -> bool) -> Vec<&'t str> {
    let starts = text.match_indices(prefix).map(|(at, _)| at);
    starts
        .map(|at| {
            let rest = &text[at + prefix.len()..];
            let length = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
            &text[at..at + prefix.len() + length]
        })
        .collect()
}

/// Names of the suites in test nodes.
fn suites() -> BTreeSet<String> {
    let entries = fs::read_dir(root().join("tests/integration/tests")).unwrap();
    let stem = |path: PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
    entries.map(|entry| stem(entry.unwrap().path())).collect()
}
