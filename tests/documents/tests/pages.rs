//! The pages hold together, and name only what is in the code.
#![allow(
    clippy::unwrap_used,
    reason = "a page or a source that cannot be read is a test that fails"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use firn_documents::{At, Page, files, pages, root};

/// Longest line of a page, but for tables and words that cannot be broken.
const WIDTH: usize = 120;

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

/// `docs/guide` and `../design/x.md`: `docs/design/x.md`.
fn joined(dir: &Path, target: &str) -> PathBuf {
    let mut path = PathBuf::new();
    for part in dir.join(target).components() {
        match part {
            Component::ParentDir => assert!(path.pop(), "{target} leads out of the repository"),
            Component::CurDir => {}
            part => path.push(part),
        }
    }
    path
}

#[test]
fn every_relative_link_leads_to_a_file_and_to_one_of_its_headings() {
    let pages = pages();
    assert!(pages.len() > 30, "the pages are elsewhere: {}", pages.len());
    let anchors: BTreeMap<&Path, Vec<String>> = pages
        .iter()
        .map(|page| (page.path.as_path(), page.anchors()))
        .collect();
    let mut broken = Vec::new();
    for page in &pages {
        for At { line, what: link } in page.links() {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = match link.split_once('#') {
                Some((file, anchor)) => (file, Some(anchor)),
                None => (link.as_str(), None),
            };
            let target = match file {
                "" => page.path.clone(),
                file => joined(page.path.parent().unwrap(), file),
            };
            let is_there = root().join(&target).exists();
            let has_anchor = match (anchor, anchors.get(target.as_path())) {
                (None, _) => true,
                (Some(anchor), Some(known)) => known.iter().any(|known| known == anchor),
                (Some(_), None) => false,
            };
            if !is_there || !has_anchor {
                broken.push(found(page, line, link));
            }
        }
    }
    none(&broken, "links that lead nowhere");
}

/// Whether this is the path of a file or directory below one of the directories of the repository.
fn is_ours(path: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    let first = path.split('/').next().unwrap_or_default();
    !first.is_empty()
        && path.contains('/')
        && path.chars().all(is_part)
        && !first.starts_with('.')
        && root().join(first).is_dir()
}

#[test]
fn every_path_in_a_page_is_there() {
    let mut missing = Vec::new();
    for page in pages() {
        for At { line, what } in page.spans() {
            let is_built = what.starts_with("target/");
            if is_ours(&what) && !is_built && !root().join(&what).exists() {
                missing.push(found(&page, line, what));
            }
        }
    }
    none(&missing, "files and directories that have gone");
}

#[test]
fn every_page_that_the_sources_name_is_there() {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    let mut missing = Vec::new();
    for page in files(&["rs", "toml", "sh", "py", "yaml"]) {
        // Unit tests have paths of their own making.
        let code = page.text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        for (index, line) in code.lines().enumerate() {
            let names = words(line, "docs/", is_part);
            for name in names.iter().map(|name| name.trim_end_matches(['.', '/'])) {
                let is_page = Path::new(name)
                    .extension()
                    .is_some_and(|extension| extension == "md");
                // So has this file.
                if is_page && !page.path.ends_with("tests/pages.rs") && !root().join(name).is_file() {
                    missing.push(found(&page, index + 1, name));
                }
            }
        }
    }
    none(&missing, "pages that have gone");
}

#[test]
fn no_line_is_too_long() {
    let mut long = Vec::new();
    for page in pages() {
        for (index, line) in page.text.lines().enumerate() {
            let indent = line.len() - line.trim_start().len();
            let can_be_broken =
                line.trim().contains(' ') && line.find(' ').is_some_and(|at| at > 0 || indent > 0);
            if line.chars().count() > WIDTH && !line.trim_start().starts_with('|') && can_be_broken {
                long.push(found(
                    &page,
                    index + 1,
                    format_args!("{} characters", line.chars().count()),
                ));
            }
        }
    }
    none(&long, "lines of more than 120 characters");
}

/// Words of a text that begin so and go on with these characters.
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

#[test]
fn every_error_code_in_a_page_is_in_the_list() {
    let is_code = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '-';
    let list = read("docs/reference/errors.md");
    let rows = list.lines().filter_map(|line| line.strip_prefix("| FIRN-"));
    let known: BTreeSet<String> = rows
        .map(|row| format!("FIRN-{}", row.split(' ').next().unwrap()))
        .collect();
    let mut unknown = Vec::new();
    for page in pages() {
        for (index, line) in page.text.lines().enumerate() {
            for code in words(line, "FIRN-", is_code) {
                let code = code.trim_end_matches('-');
                // `FIRN-<CODE>`, `FIRN-CODE` and `FIRN-` stand for any.
                if !["FIRN", "FIRN-CODE"].contains(&code) && !known.contains(code) {
                    unknown.push(found(&page, index + 1, code));
                }
            }
        }
    }
    none(&unknown, "error codes that docs/reference/errors.md lacks");
}

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

#[test]
fn every_page_is_on_the_map() {
    let map = Page::new("docs/README.md", read("docs/README.md"));
    let linked: BTreeSet<PathBuf> = map
        .links()
        .iter()
        .map(|link| joined(Path::new("docs"), &link.what))
        .collect();
    let all = pages();
    let missing: Vec<_> = all
        .iter()
        .map(|page| &page.path)
        .filter(|path| path.starts_with("docs") && !path.starts_with("docs/design/decisions"))
        .filter(|path| *path != &map.path && !linked.contains(*path))
        .collect();
    assert!(missing.is_empty(), "docs/README.md does not link {missing:?}");
    let list = Page::new("x.md", read("docs/design/decisions/README.md"));
    let listed: BTreeSet<PathBuf> = list
        .links()
        .iter()
        .map(|link| PathBuf::from(&link.what))
        .collect();
    let decisions = all
        .iter()
        .filter_map(|page| page.path.strip_prefix("docs/design/decisions").ok());
    let missing: Vec<_> = decisions
        .filter(|path| *path != Path::new("README.md") && !listed.contains(*path))
        .collect();
    assert!(
        missing.is_empty(),
        "docs/design/decisions/README.md does not link {missing:?}"
    );
}

/// Names of the suites in test nodes.
fn suites() -> BTreeSet<String> {
    let entries = fs::read_dir(root().join("tests/integration/tests")).unwrap();
    let stem = |path: PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
    entries.map(|entry| stem(entry.unwrap().path())).collect()
}

#[test]
fn every_package_and_suite_in_a_command_line_is_there() {
    let manifests = files(&["toml"]);
    let packages: BTreeSet<&str> = manifests
        .iter()
        .filter(|file| file.path.ends_with("Cargo.toml"))
        .flat_map(|file| file.text.lines())
        .filter_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'))
        .collect();
    let suites = suites();
    let mut missing = Vec::new();
    for page in pages() {
        for At { line, what } in page.commands() {
            let Some(arguments) = what.after(&["cargo"]) else {
                continue;
            };
            for pair in arguments.windows(2) {
                let is_there = match pair[0].as_str() {
                    "-p" | "--package" => packages.contains(pair[1].as_str()),
                    "--test" => {
                        suites.contains(&pair[1]) || !arguments.iter().any(|word| word == "firn-integration")
                    }
                    _ => true,
                };
                if !is_there {
                    missing.push(found(&page, line, pair.join(" ")));
                }
            }
        }
    }
    none(&missing, "packages and suites that have gone");
}

/// Pages that name tests.
const NAMING_TESTS: [&str; 3] = [
    "docs/design/guarantees.md",
    "docs/design/security.md",
    "docs/guide/gpu-requests.md",
];

#[test]
fn every_test_that_a_page_names_is_there() {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let sources = files(&["rs"]);
    let mut missing = Vec::new();
    for page in pages() {
        if !NAMING_TESTS.iter().any(|path| page.path == Path::new(path)) {
            continue;
        }
        let mut count = 0;
        for (index, line) in page.text.lines().enumerate() {
            for name in line.split(|c| !is_part(c)).map(|name| name.trim_matches('_')) {
                if name.matches('_').count() < 3 {
                    continue;
                }
                count += 1;
                if !sources.iter().any(|source| source.text.contains(name)) {
                    missing.push(found(&page, index + 1, name));
                }
            }
        }
        assert!(count > 4, "the names are elsewhere: {}", page.path.display());
    }
    none(&missing, "tests that have gone");
}

#[test]
fn every_suite_in_the_guarantees_is_there() {
    let page = Page::new("docs/design/guarantees.md", read("docs/design/guarantees.md"));
    let suites = suites();
    let (mut missing, mut count) = (Vec::new(), 0);
    for (index, row) in page
        .text
        .lines()
        .enumerate()
        .filter(|(_, line)| line.starts_with("| "))
    {
        let last = row.trim_end_matches(['|', ' ']).rsplit(" | ").next().unwrap();
        let before_tests = last.split(';').map(|part| part.split(':').next().unwrap());
        for name in before_tests.flat_map(|part| part.split(',')).map(str::trim) {
            let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase());
            count += usize::from(is_name);
            if is_name && !["fuzz", "firn"].contains(&name) && !suites.contains(name) {
                missing.push(found(&page, index + 1, name));
            }
        }
    }
    assert!(count > 40, "the names are elsewhere: {count}");
    none(&missing, "suites that have gone");
}

#[test]
fn every_identifier_in_the_recipes_is_there() {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let sources = files(&["rs"]);
    let known: BTreeSet<&str> = sources
        .iter()
        .flat_map(|source| source.text.split(|c| !is_part(c)))
        .collect();
    let suites = suites();
    let page = Page::new("CONTRIBUTING.md", read("CONTRIBUTING.md"));
    let (mut missing, mut count) = (Vec::new(), 0);
    for At { line, what } in page.spans() {
        // A type, a function or a macro, perhaps with its path. Words that are none of these are names of files and suites.
        let is_identifier = what.chars().all(|c| is_part(c) || ":!".contains(c))
            && what.contains(|c: char| c.is_ascii_uppercase() || "_:!".contains(c))
            && !what.contains(|c: char| c.is_ascii_uppercase())
                | what.contains(|c: char| c.is_ascii_lowercase());
        if !is_identifier {
            continue;
        }
        count += 1;
        let parts = what.split([':', '!']).filter(|part| !part.is_empty());
        let unknown = parts.filter(|part| !known.contains(part) && !suites.contains(*part));
        missing.extend(unknown.map(|part| found(&page, line, part)));
    }
    assert!(count > 15, "the names are elsewhere: {count}");
    none(&missing, "identifiers that have gone");
}

/// The package that each program is built from.
fn programs() -> BTreeMap<String, String> {
    let mut programs = BTreeMap::new();
    for manifest in files(&["toml"]) {
        let names: Vec<(bool, &str)> = manifest
            .text
            .split("\n[")
            .filter_map(|table| {
                let is_bin = table.starts_with("[bin]]");
                let is_package = table.trim_start_matches('[').starts_with("package]");
                let name = table
                    .lines()
                    .find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'))?;
                (is_bin || is_package).then_some((is_bin, name))
            })
            .collect();
        let Some(&(_, package)) = names.iter().find(|(is_bin, _)| !is_bin) else {
            continue;
        };
        let has_bins = names.iter().any(|(is_bin, _)| *is_bin);
        let of_package = names.iter().filter(|(is_bin, _)| *is_bin == has_bins);
        programs.extend(of_package.map(|(_, program)| ((*program).to_owned(), package.to_owned())));
    }
    programs
}

#[test]
fn the_programs_that_are_installed_have_been_built() {
    let page = Page::new("docs/guide/install.md", read("docs/guide/install.md"));
    let (mut built, mut installed) = (BTreeSet::new(), BTreeSet::new());
    for At { what, .. } in page.console() {
        if let Some(arguments) = what.after(&["cargo", "build"]) {
            let packages = arguments.windows(2).filter(|pair| pair[0] == "--package");
            built.extend(packages.map(|pair| pair[1].clone()));
        } else if let Some([source, ..]) = what.after(&["install"]) {
            let file = source.rsplit('/').next().unwrap().trim_matches(['{', '}']);
            installed.extend(file.split(',').map(str::to_owned));
        }
    }
    let programs = programs();
    assert_eq!(installed.len(), 4, "{installed:?}");
    for program in &installed {
        let package = programs
            .get(program)
            .unwrap_or_else(|| panic!("no package builds {program}"));
        assert!(
            built.contains(package),
            "docs/guide/install.md: {program} is built from {package}"
        );
    }
}
