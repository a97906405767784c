//! Error codes, packages, suites, tests and identifiers in the pages.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use firn_documents::{At, Page, files, pages};

use crate::{found, none, read, suites, words};

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
fn every_package_and_suite_in_a_command_line_is_there() {
    let manifests = files(&["toml"]);
    let packages: BTreeSet<&str> = manifests
        .iter()
        .filter(|file| file.path.ends_with("Cargo.toml"))
        .flat_map(|file| file.text.lines())
        .filter_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'))
        .collect();
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
                        let of_suites = arguments.iter().any(|word| word == "firn-integration");
                        !of_suites || ["suites", "cluster"].contains(&&*pair[1])
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
        // A type, a function or a macro, perhaps with its path; no plain word, and nothing like NAME.
        let is_identifier = what.chars().all(|c| is_part(c) || ":!".contains(c))
            && what.contains(|c: char| c.is_ascii_uppercase() || "_:!".contains(c))
            && what.contains(|c: char| c.is_ascii_lowercase());
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

/// The package that each program, and each library that is no crate's, is built from.
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
        if manifest.text.contains("crate-type = [\"cdylib\"]")
            && let Some((_, library)) = manifest.text.split_once("[lib]\nname = \"")
        {
            let library = library.split('"').next().unwrap_or_default();
            programs.insert(format!("lib{library}.so"), package.to_owned());
        }
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
    assert_eq!(installed.len(), 7, "{installed:?}");
    // A workspace of its own, which cargo builds by its manifest.
    let library = "interposer/library/Cargo.toml";
    assert!(installed.remove("libfirn_cuda.so") && page.text.contains(library));
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
