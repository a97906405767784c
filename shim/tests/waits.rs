//! Keeps docs/reference/waits.md true: it lists every kind of wait in every file of the shim and of the
//! transaction crate, with its deadline.
#![allow(
    clippy::unwrap_used,
    reason = "a page or a source that cannot be read is a test that fails"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Calls that wait. Those that begin with a dot are methods of any type.
const WAITS: [&str; 26] = [
    "blocking(",
    "stoppable(",
    "stoppable_until(",
    "bounded(",
    "tidy(",
    "on_thread(",
    "look(",
    "timeout(",
    "sleep(",
    "recv_timeout(",
    "wait_for(",
    "readable()",
    "writable()",
    ".at(|",
    ".recv()",
    ".wait()",
    ".cancelled()",
    ".stopped()",
    ".cancelled_for(",
    ".accept()",
    ".output(",
    ".output_with_input(",
    ".join()",
    ".write().await",
    ".read().await",
    ".lock().await",
];

type Waits = BTreeMap<String, BTreeSet<String>>;

fn name(wait: &str) -> String {
    wait.trim_start_matches('.')
        .replace("()", "")
        .replace("(|", "")
        .replace('(', "")
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Whether the code calls the function; its definition is no call.
fn calls(code: &str, wait: &str) -> bool {
    code.match_indices(wait).any(|(at, _)| {
        let before = &code[..at];
        let is_part = !wait.starts_with('.') && before.bytes().last().is_some_and(is_word);
        !is_part && !before.ends_with("fn ")
    })
}

/// The waits in the sources of a crate, by `CRATE/FILE` below its `src`.
fn of_crate(name: &str, found: &mut Waits) {
    let src = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .join(name)
        .join("src");
    let mut of_files = Waits::new();
    of_sources(&src, &src, &mut of_files);
    found.extend(
        of_files
            .into_iter()
            .map(|(file, waits)| (format!("{name}/{file}"), waits)),
    );
}

fn of_sources(dir: &Path, root: &Path, found: &mut Waits) {
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let (path, name_of) = (entry.path(), entry.file_name().into_string().unwrap());
        if path.is_dir() {
            of_sources(&path, root, found);
            continue;
        }
        if name_of.ends_with("tests.rs")
            || ["fuzz.rs", "stub.rs", "testing.rs"].contains(&name_of.as_str())
            || dir.ends_with("tests")
            || dir.ends_with("testing")
        {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let is_code =
            |line: &&str| !line.trim_start().starts_with("//") && !line.trim_start().starts_with("use ");
        let code: String = code
            .lines()
            .filter(is_code)
            .flat_map(|line| [line, "\n"])
            .collect();
        let waits: BTreeSet<String> = WAITS
            .iter()
            .filter(|wait| calls(&code, wait))
            .map(|wait| name(wait))
            .collect();
        if !waits.is_empty() {
            let file = path.strip_prefix(root).unwrap().to_str().unwrap();
            found.insert(file.to_owned(), waits);
        }
    }
}

fn of_page(page: &str) -> Waits {
    let rows = page
        .lines()
        .filter(|line| line.starts_with("| ") && line.contains(".rs |"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        assert!(!cells[3].is_empty(), "{}: no deadline", cells[1]);
        let waits = cells[2].split_whitespace().map(str::to_owned);
        (cells[1].to_owned(), waits.collect())
    })
    .collect()
}

#[test]
fn the_list_has_every_wait_with_its_deadline() {
    let shim = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(shim.join("../docs/reference/waits.md")).unwrap();
    let (listed, mut found) = (of_page(&page), Waits::new());
    of_crate("shim", &mut found);
    of_crate("process", &mut found);
    of_crate("transaction", &mut found);
    assert!(found.len() > 40, "the sources are elsewhere: {found:?}");
    for (file, waits) in &found {
        let cell: Vec<&str> = waits.iter().map(String::as_str).collect();
        assert_eq!(
            listed.get(file),
            Some(waits),
            "docs/reference/waits.md, row {file}: state how long each wait lasts; second cell: {}",
            cell.join(" ")
        );
    }
    let gone: Vec<_> = listed.keys().filter(|file| !found.contains_key(*file)).collect();
    assert!(gone.is_empty(), "no waits any more in {gone:?}");
}
