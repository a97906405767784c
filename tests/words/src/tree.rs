//! The files that are checked.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::rules::{Rules, is_in};

/// What the text of a file looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Markdown,
    Rust,
    /// Comments begin with `#`.
    Script,
}

impl Format {
    /// By the file's name; `None` for what is not checked.
    pub(crate) fn of(path: &str) -> Option<Self> {
        match Path::new(path).extension()?.to_str()? {
            "md" => Some(Self::Markdown),
            "rs" => Some(Self::Rust),
            "toml" | "sh" | "py" => Some(Self::Script),
            _ => None,
        }
    }
}

/// Paths of the files, relative to the root, sorted.
pub(crate) struct Tree(Vec<String>);

impl Tree {
    pub(crate) fn new(root: &Path, rules: &Rules) -> Result<Self> {
        let mut files = Vec::new();
        walk(root, "", rules, &mut files)?;
        files.sort();
        Ok(Self(files))
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

fn walk(root: &Path, dir: &str, rules: &Rules, files: &mut Vec<String>) -> Result<()> {
    let at = root.join(dir);
    for entry in fs::read_dir(&at).with_context(|| format!("list {}", at.display()))? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let path = if dir.is_empty() {
            name.clone()
        } else {
            format!("{dir}/{name}")
        };
        let skipped = |skip: &String| *skip == name || is_in(&path, skip);
        if rules.skip.iter().any(skipped) {
            continue;
        }
        let kind = entry.file_type()?;
        if kind.is_dir() {
            walk(root, &path, rules, files)?;
        } else if kind.is_file() && Format::of(&path).is_some() {
            files.push(path);
        }
    }
    Ok(())
}
