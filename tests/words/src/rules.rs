//! `words.toml`: the rules, their exceptions and the ceilings.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// The table that `--lower` writes; the last one of the file.
const CEILINGS: &str = "\n[ceilings]\n";

/// The file as a whole.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Rules {
    pub(crate) lines: Lines,
    pub(crate) spelling: Spelling,
    pub(crate) banned: Vec<Banned>,
    #[serde(default)]
    pub(crate) exceptions: Vec<Exception>,
    /// Files and directories that are not checked: a path, or the name of a directory at any place.
    pub(crate) skip: Vec<String>,
    /// Paths of each area. The longest path that a file is in decides; `.` is the root.
    pub(crate) areas: BTreeMap<String, Vec<String>>,
    ceilings: BTreeMap<String, Counts>,
}

/// Longest lines, in characters.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Lines {
    pub(crate) rust: usize,
    pub(crate) markdown: usize,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Spelling {
    /// Words that the dictionary takes for errors, with the reason why they are none.
    pub(crate) allow: BTreeMap<String, String>,
}

/// Words and phrases that are not used, and the words to use.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Banned {
    pub(crate) words: Vec<String>,
    pub(crate) instead: String,
}

/// A banned word that may stand in a file or directory.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Exception {
    pub(crate) path: String,
    pub(crate) words: Vec<String>,
    pub(crate) why: String,
}

/// Numbers of findings.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(crate) struct Counts {
    pub(crate) spelling: usize,
    pub(crate) banned: usize,
    pub(crate) lines: usize,
}

/// Kinds of findings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Spelling,
    Banned,
    Lines,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Spelling, Self::Banned, Self::Lines];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Spelling => "spelling",
            Self::Banned => "banned words",
            Self::Lines => "long lines",
        })
    }
}

impl Counts {
    pub(crate) fn of(self, kind: Kind) -> usize {
        match kind {
            Kind::Spelling => self.spelling,
            Kind::Banned => self.banned,
            Kind::Lines => self.lines,
        }
    }
}

impl Rules {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let rules: Self = toml::from_str(text).context("words.toml is not valid")?;
        for exception in &rules.exceptions {
            ensure!(
                !exception.why.is_empty(),
                "words.toml: {}: no reason",
                exception.path
            );
        }
        Ok(rules)
    }

    /// The area of a file.
    pub(crate) fn area(&self, path: &str) -> &str {
        let paths = self
            .areas
            .iter()
            .flat_map(|(area, paths)| paths.iter().map(move |path| (area, path)));
        let holding = paths.filter(|(_, dir)| *dir == "." || is_in(path, dir));
        let longest = holding.max_by_key(|(_, dir)| if *dir == "." { 0 } else { dir.len() });
        longest.map_or("rest", |(area, _)| area)
    }

    /// The ceilings of an area; zero where none is listed.
    pub(crate) fn ceiling(&self, area: &str) -> Counts {
        self.ceilings.get(area).copied().unwrap_or_default()
    }
}

/// Whether `path` is `dir` or lies in it.
pub(crate) fn is_in(path: &str, dir: &str) -> bool {
    path.strip_prefix(dir)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The text of `words.toml` with ceilings that are no higher than `counts`.
pub(crate) fn lowered(text: &str, rules: &Rules, counts: &BTreeMap<String, Counts>) -> Result<String> {
    let (head, _) = text
        .split_once(CEILINGS)
        .context("words.toml has no [ceilings] of its own")?;
    let mut lowered = format!("{head}{CEILINGS}");
    for (area, now) in counts {
        let old = rules.ceiling(area);
        let [spelling, banned, lines] = Kind::ALL.map(|kind| old.of(kind).min(now.of(kind)));
        lowered += &format!("{area} = {{ spelling = {spelling}, banned = {banned}, lines = {lines} }}\n");
    }
    Ok(lowered)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "skip = []\n[lines]\nrust = 1\nmarkdown = 1\n[spelling.allow]\n[[banned]]\n\
                        words = [\"a\"]\n\
                        instead = \"b\"\n[areas]\none = [\".\"]\ntwo = [\"pages\", \"tests/x\"]\n\n\
                        [ceilings]\n\
                        one = { spelling = 1, banned = 5, lines = 0 }\n";

    #[test]
    fn the_longest_path_decides_the_area() {
        let rules = Rules::parse(TEXT).unwrap();
        assert_eq!(rules.area("pages/a.md"), "two");
        assert_eq!(rules.area("pages-old/a.md"), "one");
        assert_eq!(rules.area("tests/x/y/z.rs"), "two");
        assert_eq!(rules.area("README.md"), "one");
    }

    #[test]
    fn ceilings_only_fall() {
        let rules = Rules::parse(TEXT).unwrap();
        let now = Counts {
            spelling: 4,
            banned: 2,
            lines: 7,
        };
        let text = lowered(TEXT, &rules, &BTreeMap::from([("one".to_owned(), now)])).unwrap();
        let (head, ceilings) = text.split_once(CEILINGS).unwrap();
        assert!(TEXT.starts_with(head));
        assert_eq!(ceilings, "one = { spelling = 1, banned = 2, lines = 0 }\n");
    }
}
