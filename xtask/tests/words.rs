//! Words that this tree does not use, and the length of lines. The spelling is checked by typos
//! (`_typos.toml`).
#![allow(
    clippy::unwrap_used,
    reason = "a file that cannot be read is a test that fails"
)]

mod tree;

use std::collections::BTreeMap;

/// Words and phrases, each with what is written instead.
const BANNED: [(&[&str], &str); 14] = [
    (
        &["told", "tells", "tell", "telling"],
        "reports, prints, returns or shows",
    ),
    (&["said", "says", "say", "saying"], "reports, prints or states"),
    (&["mend", "mends", "mended", "mending"], "fix or repair"),
    (&["anew"], "again"),
    (
        &["heed", "heeds", "heeded", "heeding", "obey", "obeys", "obeyed"],
        "honour or follow",
    ),
    (&["spare", "spares", "spared", "sparing"], "save, omit or leave"),
    (
        &[
            "way back",
            "ways back",
            "take back",
            "takes back",
            "took back",
            "taken back",
            "abandon",
            "abandons",
            "abandoned",
        ],
        "rollback or roll back",
    ),
    (&["undo", "undoes", "undid", "undone", "undoing"], "roll back"),
    (
        &[
            "give back",
            "gives back",
            "gave back",
            "given back",
            "giving back",
        ],
        "restore (gpu-restore), return or release",
    ),
    (&["stray", "strays"], "leftover process"),
    (&["surroundings"], "environment"),
    (&["beside", "besides"], "next to, as well as, or concurrent"),
    (&["waver", "wavers", "wavered", "wavering"], "flaky"),
    (
        &["settle", "settles", "settled", "settling"],
        "apply, resolve or decide",
    ),
];

/// Characters of a line of Rust. rustfmt breaks code, and neither comments nor texts.
const WIDTH: usize = 110;

/// Directories of what others have made, or is made.
const SKIPPED: [&str; 8] = [
    ".git",
    ".gpu",
    "target",
    "fixtures",
    "golden",
    "corpus",
    "artifacts",
    "mutants.out",
];

/// This file.
const OWN: &str = "xtask/tests/words.rs";

/// Files with text.
fn files() -> Vec<(String, String)> {
    tree::files(&["md", "rs", "toml", "sh", "py"], &SKIPPED, OWN)
}

/// The words of a text in lower case, each with the number of its line.
fn words(text: &str) -> Vec<(usize, String)> {
    let lines = text.lines().enumerate();
    let words = lines.flat_map(|(number, line)| {
        let words = line
            .split(|c: char| !c.is_alphanumeric())
            .filter(|word| !word.is_empty());
        words.map(move |word| (number + 1, word.to_lowercase()))
    });
    words.collect()
}

/// A banned word or phrase.
struct Phrase {
    words: Vec<&'static str>,
    instead: &'static str,
}

/// All of them, by their first words.
fn phrases() -> BTreeMap<&'static str, Vec<Phrase>> {
    let mut by_first = BTreeMap::<_, Vec<Phrase>>::new();
    for (phrases, instead) in BANNED {
        for phrase in phrases {
            let words: Vec<&str> = phrase.split(' ').collect();
            by_first
                .entry(words[0])
                .or_default()
                .push(Phrase { words, instead });
        }
    }
    by_first
}

/// What is wrong in a text, with the number of its line.
fn banned(text: &str, phrases: &BTreeMap<&str, Vec<Phrase>>) -> Vec<(usize, String)> {
    let words = words(text);
    let mut found = Vec::new();
    for (at, (line, first)) in words.iter().enumerate() {
        for Phrase {
            words: phrase,
            instead,
        } in phrases.get(&**first).into_iter().flatten()
        {
            let here = words[at..].iter().map(|(_, word)| &**word);
            if here.take(phrase.len()).eq(phrase.iter().copied()) {
                found.push((*line, format!("{:?}: write {instead}", phrase.join(" "))));
            }
        }
    }
    found
}

#[test]
fn no_file_has_a_banned_word() {
    let files = files();
    assert!(files.len() > 500, "the tree is searched: {}", files.len());
    let phrases = phrases();
    let all = files.iter().flat_map(|(path, text)| {
        let found = banned(text, &phrases).into_iter();
        found.map(move |(line, why)| format!("{path}:{line}: {why}"))
    });
    let all: Vec<_> = all.collect();
    assert!(all.is_empty(), "{}", all.join("\n"));
}

#[test]
fn no_line_of_rust_is_too_long() {
    let files = files();
    let rust = files.iter().filter(|(path, _)| path.ends_with(".rs"));
    let long = rust.flat_map(|(path, text)| {
        let lines = text.lines().enumerate();
        let long = lines.filter(|(_, line)| line.chars().count() > WIDTH);
        long.map(move |(number, _)| format!("{path}:{}", number + 1))
    });
    let long: Vec<_> = long.collect();
    assert!(long.is_empty(), "more than {WIDTH} characters: {long:?}");
}

#[test]
fn words_and_phrases_are_found_across_lines_and_punctuation() {
    let phrases = phrases();
    let text = "Nothing.\nIt is Told, and is given\n  back: so_told is found, foretold is not";
    let found = banned(text, &phrases);
    let lines: Vec<usize> = found.iter().map(|(line, _)| *line).collect();
    assert_eq!(lines, [2, 2, 3], "{found:?}");
}
