//! Reads the Markdown pages and the schemas of this repository, for tests that compare them with the code.
//!
//! Only what the pages use: fenced blocks, code spans in one line, inline links, headings with `#`.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};

mod commands;
pub mod console;
pub mod schema;

pub use commands::Command;

/// Root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A Markdown file.
#[derive(Debug)]
pub struct Page {
    /// Below the root of the repository.
    pub path: PathBuf,
    pub text: String,
}

/// A piece of a page and the number of its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct At<T> {
    pub line: usize,
    pub what: T,
}

/// A fenced block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    pub language: String,
    pub lines: Vec<String>,
}

/// Every Markdown file of the repository.
///
/// # Panics
/// If a directory or file cannot be read.
pub fn pages() -> Vec<Page> {
    files(&["md"])
}

/// Every text file of the repository whose name ends with one of these extensions.
///
/// # Panics
/// If a directory or file cannot be read.
pub fn files(extensions: &[&str]) -> Vec<Page> {
    let root = root();
    let mut pages = Vec::new();
    collect(&root, &root, extensions, &mut pages);
    pages.sort_by(|a, b| a.path.cmp(&b.path));
    pages
}

fn collect(dir: &Path, root: &Path, extensions: &[&str], pages: &mut Vec<Page>) {
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("list {}: {error}", dir.display()));
    for entry in entries.flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let is_ours = !name.to_string_lossy().starts_with('.') && name != "target";
        let extension = path.extension().unwrap_or_default();
        if is_ours && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&path, root, extensions, pages);
        } else if extensions.iter().any(|wanted| extension == *wanted) {
            let text =
                fs::read_to_string(&path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()));
            let path = path.strip_prefix(root).unwrap_or(&path).to_owned();
            pages.push(Page { path, text });
        }
    }
}

/// What a line of a page belongs to.
enum Part<'a> {
    Prose(&'a str),
    /// The first line of a block, with its language.
    Opens(&'a str),
    Inside(&'a str),
    Closes,
}

impl Page {
    /// A page with this text.
    pub fn new(path: impl Into<PathBuf>, text: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            text: text.into(),
        }
    }

    fn parts(&self) -> impl Iterator<Item = At<Part<'_>>> {
        let mut is_inside = false;
        self.text.lines().enumerate().map(move |(index, line)| {
            let what = match (line.trim_start().strip_prefix("```"), is_inside) {
                (Some(language), false) => Part::Opens(language.trim()),
                (Some(_), true) => Part::Closes,
                (None, false) => Part::Prose(line),
                (None, true) => Part::Inside(line),
            };
            match what {
                Part::Opens(_) => is_inside = true,
                Part::Closes => is_inside = false,
                Part::Prose(_) | Part::Inside(_) => {}
            }
            At {
                line: index + 1,
                what,
            }
        })
    }

    /// Lines outside of blocks.
    pub fn prose(&self) -> impl Iterator<Item = At<&str>> {
        self.parts().filter_map(|At { line, what }| match what {
            Part::Prose(text) => Some(At { line, what: text }),
            _ => None,
        })
    }

    /// Fenced blocks, at their first line. Their lines have lost the indentation of the first one.
    pub fn blocks(&self) -> Vec<At<Block>> {
        let mut blocks: Vec<At<Block>> = Vec::new();
        for At { line, what } in self.parts() {
            match what {
                Part::Opens(language) => blocks.push(At {
                    line: line + 1,
                    what: Block {
                        language: language.to_owned(),
                        lines: Vec::new(),
                    },
                }),
                Part::Inside(text) => {
                    if let Some(At { what: block, .. }) = blocks.last_mut() {
                        block.lines.push(text.to_owned());
                    }
                }
                Part::Prose(_) | Part::Closes => {}
            }
        }
        for At { what: block, .. } in &mut blocks {
            let indent = block
                .lines
                .first()
                .map_or(0, |first| first.len() - first.trim_start().len());
            for line in &mut block.lines {
                let cut = indent.min(line.len() - line.trim_start().len());
                line.drain(..cut);
            }
        }
        blocks
    }

    /// Targets of inline links, `[text](target)`.
    pub fn links(&self) -> Vec<At<String>> {
        let mut links = Vec::new();
        for At { line, what } in self.prose() {
            let text = without_spans(what);
            for (at, _) in text.match_indices("](") {
                let target = &text[at + 2..];
                if let Some(end) = target.find(')') {
                    let what = target[..end].to_owned();
                    links.push(At { line, what });
                }
            }
        }
        links
    }

    /// Code spans that begin and end in one line.
    pub fn spans(&self) -> Vec<At<String>> {
        let mut spans = Vec::new();
        for At { line, what } in self.prose() {
            let odd = what.split('`').skip(1).step_by(2);
            let whole = what.matches('`').count() / 2;
            spans.extend(odd.take(whole).map(|span| At {
                line,
                what: span.to_owned(),
            }));
        }
        spans
    }

    /// The anchors of its headings, as GitHub makes them.
    pub fn anchors(&self) -> Vec<String> {
        let mut anchors: Vec<String> = Vec::new();
        for At { what, .. } in self.prose() {
            let title = what.trim_start_matches('#');
            if title.len() == what.len() || !title.starts_with(' ') {
                continue;
            }
            let plain = slug(title.trim());
            let repeated = (1..).map(|number| format!("{plain}-{number}"));
            let free = std::iter::once(plain.clone())
                .chain(repeated)
                .find(|anchor| !anchors.contains(anchor));
            anchors.extend(free);
        }
        anchors
    }
}

fn slug(title: &str) -> String {
    let kept = title
        .chars()
        .filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c })
        .collect::<String>()
        .to_lowercase()
}

/// The line with blanks in the place of its code spans.
fn without_spans(line: &str) -> String {
    let last = line.matches('`').count();
    let pieces = line.split('`').enumerate();
    pieces
        .map(|(index, piece)| {
            // A backquote without a partner begins no span.
            if index % 2 == 1 && index < last {
                " ".repeat(piece.len() + 2)
            } else {
                piece.to_owned()
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_and_anchors_are_those_that_github_makes() {
        let page = Page::new(
            "a.md",
            "# One `[two]`: 3.4\n## Same\n## Same\n[a](b.md#c) `[no](x)` [d](#same-1)\n```\n# not\n[no](y)\n\
             ```\n",
        );
        assert_eq!(page.anchors(), ["one-two-34", "same", "same-1"]);
        let links: Vec<_> = page.links().into_iter().map(|at| at.what).collect();
        assert_eq!(links, ["b.md#c", "#same-1"]);
    }

    #[test]
    fn blocks_lose_their_indentation() {
        let page = Page::new("a.md", "1. x:\n\n   ```toml\n   [a]\n     b = 1\n   ```\n");
        let blocks = page.blocks();
        assert_eq!(blocks[0].line, 4);
        assert_eq!(blocks[0].what.language, "toml");
        assert_eq!(blocks[0].what.lines, ["[a]", "  b = 1"]);
    }

    #[test]
    fn spans_end_in_their_line() {
        let page = Page::new("a.md", "a `b c` d `e` f ` g\n");
        let spans: Vec<_> = page.spans().into_iter().map(|at| at.what).collect();
        assert_eq!(spans, ["b c", "e"]);
    }
}
