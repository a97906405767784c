//! docs/errors.md lists every code that the sources use, and no others.

use std::collections::BTreeSet;
use std::path::Path;

const CRATES: [&str; 7] = ["config", "gpu", "oci", "cdi", "hooks", "cli", "shim"];

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

#[test]
fn the_list_of_codes_is_complete_and_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let (mut used, mut listed) = (BTreeSet::new(), BTreeSet::new());
    for name in CRATES {
        codes_of_sources(&root.join(name).join("src"), &mut used);
    }
    let list = std::fs::read_to_string(root.join("docs/errors.md")).expect("docs/errors.md is there");
    for row in list.lines().filter(|line| line.starts_with("| FIRN-")) {
        codes(row.split('|').nth(1).unwrap_or_default(), &mut listed);
    }
    assert!(used.len() > 40, "the sources are searched: {used:?}");
    let missing: Vec<_> = used.difference(&listed).collect();
    let stale: Vec<_> = listed.difference(&used).collect();
    assert!(missing.is_empty(), "docs/errors.md lacks {missing:?}");
    assert!(
        stale.is_empty(),
        "docs/errors.md lists {stale:?}, which no source uses"
    );
}
