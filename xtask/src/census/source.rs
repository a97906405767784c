//! Rust sources and what their lines are.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Directories that hold no sources of this workspace.
const SKIPPED: [&str; 5] = ["target", ".git", "corpus", "artifacts", "mutants.out"];

/// A source file. Blank lines count only in `lines`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Source {
    pub path: PathBuf,
    /// All lines.
    pub lines: usize,
    pub code: usize,
    pub comments: usize,
    /// Lines of unit tests.
    pub tests: usize,
    /// Lines of a crate below `tests/`, or of a crate's directory `tests`.
    pub suites: usize,
    pub public_items: usize,
}

impl Source {
    /// The file `path` of a crate that lies in `krate`.
    pub fn new(path: &Path, krate: &Path, text: &str) -> Self {
        let inside = path.strip_prefix(krate).unwrap_or(path);
        let mut source = Self {
            path: path.to_owned(),
            ..Self::default()
        };
        let suite = krate.starts_with("tests") || inside.starts_with("tests");
        let mut in_tests = is_test_file(inside);
        let mut lines = text.lines().peekable();
        let mut inline = false;
        while let Some(line) = lines.next() {
            source.lines += 1;
            if line == "#[cfg(test)]" && lines.peek().is_some_and(|next| next.ends_with('{')) {
                (in_tests, inline) = (true, true);
            }
            match line.trim_start() {
                "" => {}
                _ if suite => source.suites += 1,
                _ if in_tests => source.tests += 1,
                comment if comment.starts_with("//") => source.comments += 1,
                code => {
                    source.code += 1;
                    source.public_items += usize::from(is_public_item(code));
                }
            }
            if inline && line == "}" {
                (in_tests, inline) = (false, false);
            }
        }
        source
    }
}

/// Whether a file of a crate is built for tests or fuzz targets alone.
fn is_test_file(inside: &Path) -> bool {
    const NAMES: [&str; 7] = [
        "tests",
        "fuzz",
        "testing",
        "fixtures",
        "stub",
        "world",
        "failpoint",
    ];
    let named = |name: &str| NAMES.contains(&name) || name.ends_with("_tests");
    let stem = |path: &Path| {
        path.file_stem()
            .is_some_and(|stem| named(&stem.to_string_lossy()))
    };
    inside.ancestors().any(stem)
}

fn is_public_item(code: &str) -> bool {
    let Some(item) = code.strip_prefix("pub ") else {
        return false;
    };
    let kinds = [
        "fn", "struct", "enum", "trait", "const", "static", "type", "union", "async", "unsafe",
    ];
    kinds.contains(&item.split_whitespace().next().unwrap_or_default())
}

/// Root directories of the crates in `root`, relative to it, sorted.
pub fn crates(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    walk(root, Path::new(""), &mut |path| {
        if path.ends_with("Cargo.toml") && path != Path::new("Cargo.toml") {
            found.extend(path.parent().map(Path::to_owned));
        }
        Ok(())
    })?;
    found.sort();
    Ok(found)
}

/// The sources of a crate, sorted. A crate within belongs to itself.
pub fn sources(root: &Path, krate: &Path, crates: &[PathBuf]) -> Result<Vec<Source>> {
    let mut found = Vec::new();
    let inner: Vec<&PathBuf> = crates
        .iter()
        .filter(|other| *other != krate && other.starts_with(krate))
        .collect();
    walk(root, krate, &mut |path| {
        let rust = path.extension().is_some_and(|extension| extension == "rs");
        if rust && !inner.iter().any(|inner| path.starts_with(inner)) {
            let text =
                fs::read_to_string(root.join(path)).with_context(|| format!("read {}", path.display()))?;
            found.push(Source::new(path, krate, &text));
        }
        Ok(())
    })?;
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

fn walk(root: &Path, dir: &Path, visit: &mut impl FnMut(&Path) -> Result<()>) -> Result<()> {
    let at = root.join(dir);
    for entry in fs::read_dir(&at).with_context(|| format!("list {}", at.display()))? {
        let entry = entry?;
        let (path, kind) = (dir.join(entry.file_name()), entry.file_type()?);
        if kind.is_dir() && !SKIPPED.iter().any(|skipped| path.ends_with(skipped)) {
            walk(root, &path, visit)?;
        } else if kind.is_file() {
            visit(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "//! Head.\n\npub fn one() {\n    // No line.\n    two();\n}\n\n\
                        pub(crate) const X: u8 = 1;\n\n\
                        trait T {\n    fn declared(\n        a: u8,\n    ) -> u8;\n}\n\n#[cfg(test)]\n\
                        mod tests {\n    \
                        use super::*;\n}\n";

    #[test]
    fn lines_are_counted_by_what_they_are() {
        let source = Source::new(Path::new("shim/src/a.rs"), Path::new("shim"), TEXT);
        assert_eq!((source.lines, source.comments, source.tests), (19, 2, 4));
        let of = |path: &str, krate: &str| Source::new(Path::new(path), Path::new(krate), TEXT);
        assert_eq!(source.public_items, 1);
        assert_eq!(of("shim/src/a/tests.rs", "shim").tests, 15);
        assert_eq!(of("shim/src/tests/b.rs", "shim").tests, 15);
        assert_eq!(of("shim/tests/b.rs", "shim").suites, 15);
        assert_eq!(of("tests/node/src/b.rs", "tests/node").suites, 15);
    }
}
