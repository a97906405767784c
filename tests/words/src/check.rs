//! The checks of one file.

use std::collections::BTreeSet;
use std::fmt;

use crate::rules::{Exception, Kind, Rules, is_in};
use crate::spelling::{Wanted, misspelled};
use crate::text::prose;
use crate::tree::Format;

/// A place that breaks a rule.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) kind: Kind,
    path: String,
    line: usize,
    message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.message)
    }
}

/// A banned word or phrase, as the lower-case words that it has.
struct Phrase<'r> {
    words: Vec<&'r str>,
    name: &'r str,
    instead: &'r str,
}

pub(crate) struct Checker<'r> {
    rules: &'r Rules,
    phrases: Vec<Phrase<'r>>,
    allowed: BTreeSet<String>,
    /// The exceptions that were needed.
    used: BTreeSet<usize>,
}

impl<'r> Checker<'r> {
    pub(crate) fn new(rules: &'r Rules) -> Self {
        let phrases = rules.banned.iter().flat_map(|banned| {
            banned.words.iter().map(|name| Phrase {
                words: name.split(' ').collect(),
                name,
                instead: &banned.instead,
            })
        });
        Self {
            rules,
            phrases: phrases.collect(),
            allowed: rules.spelling.allow.keys().cloned().collect(),
            used: BTreeSet::new(),
        }
    }

    /// All findings of a file.
    pub(crate) fn check(&mut self, path: &str, text: &str) -> Vec<Finding> {
        let Some(format) = Format::of(path) else {
            return Vec::new();
        };
        let ends = text.match_indices('\n').map(|(at, _)| at + 1);
        let starts: Vec<usize> = std::iter::once(0).chain(ends).collect();
        let finding = |kind, offset, message| Finding {
            kind,
            path: path.to_owned(),
            line: starts.partition_point(|start| *start <= offset),
            message,
        };
        let mut findings = Vec::new();
        for (offset, message) in self.spelling(text, format) {
            findings.push(finding(Kind::Spelling, offset, message));
        }
        for (offset, message) in self.banned(path, text) {
            findings.push(finding(Kind::Banned, offset, message));
        }
        for (offset, message) in self.long_lines(text, format) {
            findings.push(finding(Kind::Lines, offset, message));
        }
        findings
    }

    fn spelling(&self, text: &str, format: Format) -> Vec<(usize, String)> {
        let errors = misspelled(text, Wanted::Errors, &self.allowed);
        let variants = misspelled(&prose(text, format), Wanted::Variants, &self.allowed);
        let message = |word: &str, corrections: &[String]| format!("{word}: {}?", corrections.join(" or "));
        let all = errors.into_iter().chain(variants);
        all.map(|found| (found.offset, message(&found.word, &found.corrections)))
            .collect()
    }

    fn banned(&mut self, path: &str, text: &str) -> Vec<(usize, String)> {
        let words = words(text);
        let mut found = Vec::new();
        for (at, (offset, _)) in words.iter().enumerate() {
            for phrase in &self.phrases {
                let here = words[at..].iter().map(|(_, word)| word.as_str());
                if !here.take(phrase.words.len()).eq(phrase.words.iter().copied()) {
                    continue;
                }
                match self
                    .rules
                    .exceptions
                    .iter()
                    .position(|exception| holds(exception, path, phrase.name))
                {
                    Some(exception) => _ = self.used.insert(exception),
                    None => found.push((*offset, format!("{:?}: write {}", phrase.name, phrase.instead))),
                }
            }
        }
        found
    }

    fn long_lines(&self, text: &str, format: Format) -> Vec<(usize, String)> {
        let limit = match format {
            Format::Rust => self.rules.lines.rust,
            Format::Markdown => self.rules.lines.markdown,
            Format::Script => return Vec::new(),
        };
        let mut found = Vec::new();
        let mut offset = 0;
        for line in text.split_inclusive('\n') {
            let length = line.trim_end_matches('\n').chars().count();
            let table = format == Format::Markdown && line.trim_start().starts_with('|');
            if length > limit && !table {
                found.push((offset, format!("{length} characters, more than {limit}")));
            }
            offset += line.len();
        }
        found
    }

    /// Exceptions that no file needs any more.
    pub(crate) fn stale_exceptions(&self) -> Vec<Finding> {
        let exceptions = self.rules.exceptions.iter().enumerate();
        let stale = exceptions.filter(|(index, _)| !self.used.contains(index));
        let finding = |exception: &Exception| Finding {
            kind: Kind::Banned,
            path: "words.toml".to_owned(),
            line: 1,
            message: format!("the exception of {} is not needed", exception.path),
        };
        stale.map(|(_, exception)| finding(exception)).collect()
    }
}

fn holds(exception: &Exception, path: &str, word: &str) -> bool {
    is_in(path, &exception.path) && exception.words.iter().any(|excepted| excepted == word)
}

/// The words of a text in lower case, with their offsets. `camelCase` and `snake_case` are split.
fn words(text: &str) -> Vec<(usize, String)> {
    let mut words: Vec<(usize, String)> = Vec::new();
    // Whether the last letter was upper case; `None` between words.
    let mut last: Option<bool> = None;
    for (offset, char) in text.char_indices() {
        if !char.is_alphabetic() {
            // `doesn't` and `firn's` stay one word.
            let inside = char == '\'' && text[offset + 1..].starts_with(char::is_alphabetic);
            last = last.filter(|_| inside);
            continue;
        }
        let upper = char.is_uppercase();
        let begins = match last {
            None => true,
            Some(was_upper) => upper && !was_upper,
        };
        if begins {
            words.push((offset, String::new()));
        }
        if let Some((_, word)) = words.last_mut() {
            word.extend(char.to_lowercase());
        }
        last = Some(upper);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: &str = "skip = []\n[lines]\nrust = 20\nmarkdown = 10\n[spelling.allow]\n[[banned]]\n\
                         words = [\"foo\", \"bar baz\"]\ninstead = \"x\"\n[[exceptions]]\n\
                         path = \"pages/quote.md\"\nwords = [\"foo\"]\nwhy = \"a quotation\"\n[areas]\n\
                         [ceilings]\n";

    fn findings(path: &str, text: &str) -> Vec<String> {
        let rules = Rules::parse(RULES).unwrap();
        let found = Checker::new(&rules).check(path, text);
        found.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn banned_words_are_found_in_prose_identifiers_and_across_lines() {
        let found = findings("a.rs", "// The bar\n// baz.\nfn is_foo() {}\nFooBy\n");
        assert_eq!(
            found,
            [
                "a.rs:1: \"bar baz\": write x",
                "a.rs:3: \"foo\": write x",
                "a.rs:4: \"foo\": write x",
            ]
        );
        assert!(findings("a.rs", "unfoo fooable\n").is_empty());
    }

    #[test]
    fn an_exception_holds_for_its_file() {
        assert!(findings("pages/quote.md", "foo\n").is_empty());
        let rules = Rules::parse(RULES).unwrap();
        let mut checker = Checker::new(&rules);
        assert_eq!(checker.stale_exceptions().len(), 1);
        checker.check("pages/quote.md", "foo\n");
        assert!(checker.stale_exceptions().is_empty());
    }

    #[test]
    fn tables_may_have_long_lines() {
        assert!(findings("a.md", "| 23456789012\n").is_empty());
        assert_eq!(
            findings("a.md", "ok\nabc 67890 2\n"),
            ["a.md:2: 11 characters, more than 10"]
        );
        assert!(findings("a.rs", "abc 67890 2\n").is_empty());
    }
}
