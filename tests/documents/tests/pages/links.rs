//! Links, paths and lines of the pages.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use firn_documents::{At, Page, files, pages, root};

use crate::{found, none, read, words};

/// Longest line of a page, but for tables and words that cannot be broken.
const WIDTH: usize = 120;

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
                if is_page && !page.path.ends_with("pages/links.rs") && !root().join(name).is_file() {
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
