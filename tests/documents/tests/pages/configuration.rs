//! Configuration keys and annotations in the pages.

use std::collections::BTreeSet;

use firn_documents::{At, pages};

use crate::{found, none, read, words};

#[test]
fn every_annotation_in_a_page_is_declared_and_described() {
    let is_name = |c: char| c.is_ascii_lowercase() || c == '-';
    let names = read("config/src/names.rs");
    let quoted = names.lines().filter(|line| line.contains("pub const"));
    let declared: BTreeSet<&str> = quoted
        .flat_map(|line| words(line, "firn.dev/", is_name))
        .collect();
    assert!(declared.len() > 3, "the names are elsewhere: {declared:?}");
    let mut unknown = Vec::new();
    for page in pages() {
        for (index, line) in page.text.lines().enumerate() {
            for name in words(line, "firn.dev/", is_name) {
                if name != "firn.dev/" && !declared.contains(name) {
                    unknown.push(found(&page, index + 1, name));
                }
            }
        }
    }
    none(&unknown, "annotations that config/src/names.rs lacks");
    let page = read("docs/reference/annotations.md");
    let described: BTreeSet<&str> = words(&page, "firn.dev/", is_name).into_iter().collect();
    assert_eq!(declared, described, "docs/reference/annotations.md");
}

/// `section key` for each key of the shipped configuration file, where all of them are comments.
fn shipped_keys() -> BTreeSet<(String, String)> {
    let text = read("config/config.toml");
    let mut section = String::new();
    let mut keys = BTreeSet::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            name.clone_into(&mut section);
        } else if let Some((key, _)) = line.strip_prefix('#').and_then(|line| line.split_once(" = "))
            && !key.contains(' ')
        {
            keys.insert((section.clone(), key.to_owned()));
        }
    }
    keys
}

/// The keys that docs/reference/configuration.md describes: the first cells of its tables, below headings
/// that name a section.
fn described_keys() -> BTreeSet<(String, String)> {
    let page = read("docs/reference/configuration.md");
    let mut section = None;
    let mut keys = BTreeSet::new();
    for line in page.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            section = title
                .strip_prefix("`[")
                .and_then(|title| title.strip_suffix("]`"))
                .filter(|title| !title.contains('`'));
            continue;
        }
        let Some(cell) = line.strip_prefix("| `").and_then(|row| row.split('`').next()) else {
            continue;
        };
        // A row may name its section itself.
        let own = cell.strip_prefix('[').and_then(|cell| cell.split_once("] "));
        if let Some((section, key)) = own.or_else(|| section.map(|section| (section, cell))) {
            keys.insert((section.to_owned(), key.to_owned()));
        }
    }
    keys
}

#[test]
fn the_configuration_page_describes_every_key_and_no_other() {
    assert_eq!(described_keys(), shipped_keys());
}

#[test]
fn every_configuration_key_in_a_page_exists() {
    let known = shipped_keys();
    let sections: BTreeSet<&str> = known.iter().map(|(section, _)| section.as_str()).collect();
    let is_known = |section: &str, key: &str| known.contains(&(section.to_owned(), key.to_owned()));
    let mut unknown = Vec::new();
    for page in pages() {
        for At { line, what } in page.spans() {
            // `[section]`, `[section] key`, `[section] key = value`
            let Some((section, key)) = what.strip_prefix('[').and_then(|span| span.split_once(']')) else {
                continue;
            };
            let key = key.split('=').next().unwrap().trim();
            let is_section = sections.contains(section);
            // Sections of others' files, and links.
            let is_ours = is_section || (!key.is_empty() && !section.contains(['.', '/', ' ']));
            if is_ours && (!is_section || (!key.is_empty() && !is_known(section, key))) {
                unknown.push(found(&page, line, what));
            }
        }
        for block in page.blocks().iter().filter(|block| block.what.language == "toml") {
            let mut section = String::new();
            for (line, text) in (block.line..).zip(&block.what.lines) {
                if let Some(name) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
                    name.clone_into(&mut section);
                } else if let Some((key, _)) = text.split_once('=')
                    && !is_known(&section, key.trim())
                {
                    unknown.push(found(&page, line, text));
                }
            }
        }
    }
    none(&unknown, "keys that config/config.toml lacks");
}
