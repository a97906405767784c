//! What is different where a person looks at a terminal: lines that fit it, and colours.
//!
//! What is piped is whole and plain. A line is wrapped between words, and below the value that it continues
//! with; a command in backticks stays one word, so that it can be copied.

use std::io::{self, IsTerminal};

use anstream::{AutoStream, ColorChoice};
use anstyle::{AnsiColor, Style};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Narrower than this, nothing is laid out.
const LEAST: usize = 20;

/// Spaces before what continues below a long key.
const BELOW: usize = 4;

/// Columns that may have the keys of a line.
const KEYS: usize = 24;

/// What a word is to the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    Good,
    Warning,
    Bad,
    Head,
}

impl Tone {
    fn style(self) -> Style {
        match self {
            Self::Good => AnsiColor::Green.on_default(),
            Self::Warning => AnsiColor::Yellow.on_default(),
            Self::Bad => AnsiColor::Red.on_default().bold(),
            Self::Head => Style::new().bold(),
        }
    }
}

/// Columns of the terminal that standard output is; none if it is none.
pub fn columns() -> Option<usize> {
    if !io::stdout().is_terminal() {
        return None;
    }
    let of_variable = std::env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
    let of_terminal = || terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
    of_variable
        .or_else(of_terminal)
        .filter(|columns| *columns >= LEAST)
}

/// The text in the colour of its tone, where standard output has colours: on a terminal, unless `NO_COLOR` is
/// set.
pub fn painted(tone: Tone, text: &str) -> String {
    match AutoStream::choice(&io::stdout()) {
        ColorChoice::Never => text.to_owned(),
        _ => {
            let style = tone.style();
            format!("{style}{text}{style:#}")
        }
    }
}

/// The text in so many columns, with … where it was cut.
pub fn cut(text: &str, columns: usize) -> String {
    if text.width() <= columns {
        return text.to_owned();
    }
    let mut room = columns.saturating_sub(1);
    let fits = |c: &char| {
        let width = c.width().unwrap_or(0);
        let fits = width <= room;
        room = room.saturating_sub(width);
        fits
    };
    text.chars().take_while(fits).chain(['…']).collect()
}

/// The lines of a text in so many columns.
pub fn wrapped(text: &str, columns: usize) -> Vec<String> {
    if text.width() <= columns {
        return vec![text.to_owned()];
    }
    let (key, rest) = text.split_at(indent(text));
    // On a narrow terminal, long keys leave no room for values in their line.
    let is_in_line = key.width() <= columns / 3;
    let indent = " ".repeat(if is_in_line { key.width() } else { BELOW });
    let (mut lines, mut is_empty) = (vec![key.to_owned()], true);
    for word in words(rest) {
        let last = lines.last().map_or(0, |line| line.width());
        let is_full = last + usize::from(!is_empty) + word.width() > columns;
        if is_full && last > indent.width() {
            lines.push(indent.clone());
            is_empty = true;
        }
        if let Some(line) = lines.last_mut() {
            if !is_empty {
                line.push(' ');
            }
            line.push_str(word);
        }
        is_empty = false;
    }
    lines.iter().map(|line| line.trim_end().to_owned()).collect()
}

/// Where the value begins: behind the last gap of two spaces or more among the first columns.
fn indent(text: &str) -> usize {
    let end = text.char_indices().nth(KEYS).map_or(text.len(), |(at, _)| at);
    let gap = text[..end].rfind("  ");
    gap.map_or(0, |gap| text.len() - text[gap..].trim_start_matches(' ').len())
}

/// Words, of which one in backticks may have spaces.
fn words(text: &str) -> Vec<&str> {
    let mut is_code = false;
    text.split(move |c| {
        is_code ^= c == '`';
        c == ' ' && !is_code
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_is_cut_to_its_columns() {
        for (text, columns, shown) in [
            ("checkpoint/job", 14, "checkpoint/job"),
            ("checkpoint/job", 6, "check…"),
            ("日本語", 4, "日…"),
            ("日本語", 5, "日本…"),
            ("job", 1, "…"),
        ] {
            assert_eq!(cut(text, columns), shown);
            assert!(shown.width() <= columns);
        }
    }

    #[test]
    fn a_line_goes_on_below_its_value() {
        let check = "warn  leftovers     /tmp/x is left. hint: `firn images prune /tmp/x`, or keep it";
        let lines = wrapped(check, 40);
        assert_eq!(
            lines,
            [
                "warn  leftovers     /tmp/x is left.",
                "    hint: `firn images prune /tmp/x`, or",
                "    keep it",
            ]
        );
        let lines = wrapped(check, 60);
        assert_eq!(
            lines[1],
            "                    `firn images prune /tmp/x`, or keep it"
        );
        assert_eq!(wrapped(check, 200), [check]);
        assert_eq!(
            wrapped("a text without a key", 12),
            ["a text", "without a", "key"]
        );
    }

    #[test]
    fn no_word_is_lost_and_only_a_long_word_is_too_wide() {
        let text = "verdict    FIRN-IMAGE-CORRUPT: /srv/job/pages-1.img has 12 bytes in the place of 40";
        for columns in 20..100 {
            let lines = wrapped(text, columns);
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            assert_eq!(words(&lines.join(" ")), words(text));
            let is_long = |line: &&String| line.width() > columns && line.split_whitespace().count() > 2;
            assert_eq!(lines.iter().find(is_long), None);
        }
    }
}
