//! Prose in Markdown documents and comments.

use crate::tree::Format;

/// The text with everything that is no prose replaced by spaces: code blocks, code spans, targets of links,
/// and in programs all but the comments that have a line of their own. Offsets stay the same.
pub(crate) fn prose(text: &str, format: Format) -> String {
    let mut masked = String::with_capacity(text.len());
    let mut in_block = false;
    for line in text.split_inclusive('\n') {
        let Some(content) = content(line, format) else {
            blank(line, &mut masked);
            continue;
        };
        let (before, content) = line.split_at(line.len() - content.len());
        blank(before, &mut masked);
        if content.trim_start().starts_with("```") {
            in_block = !in_block;
            blank(content, &mut masked);
        } else if in_block {
            blank(content, &mut masked);
        } else {
            without_code(content, &mut masked);
        }
    }
    masked
}

/// The part of a line that may be prose.
fn content(line: &str, format: Format) -> Option<&str> {
    let trimmed = line.trim_start();
    match format {
        Format::Markdown => Some(line),
        Format::Rust => {
            let comment = trimmed.strip_prefix("//")?;
            Some(comment.trim_start_matches(['/', '!']))
        }
        Format::Script => trimmed.strip_prefix('#'),
    }
}

fn blank(text: &str, masked: &mut String) {
    for char in text.chars() {
        match char {
            '\n' => masked.push('\n'),
            _ => masked.extend(std::iter::repeat_n(' ', char.len_utf8())),
        }
    }
}

/// Adds a line of prose without its code spans and targets of links.
fn without_code(line: &str, masked: &mut String) {
    let mut rest = line;
    while let Some(at) = rest.find(['`', ']']) {
        let (before, from) = rest.split_at(at);
        masked.push_str(before);
        let close = match from.as_bytes() {
            [b'`', ..] => from[1..].find('`').map(|end| end + 2),
            [b']', b'(', ..] => from.find(')').map(|end| end + 1),
            _ => None,
        };
        let end = close.unwrap_or(1);
        blank(&from[..end], masked);
        rest = &from[end..];
    }
    masked.push_str(rest);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str, format: Format) -> Vec<String> {
        let masked = prose(text, format);
        assert_eq!(masked.len(), text.len());
        masked.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn code_and_targets_are_no_prose() {
        let text = "a `b c` [d](e/f.md) é\n```\ng\n```\nh\n";
        assert_eq!(words(text, Format::Markdown), ["a", "[d", "é", "h"]);
    }

    #[test]
    fn of_a_program_only_the_comments_are_prose() {
        let text = "//! one\nlet color = 1; // no\n    /// two `x`\nfn f() {}\n";
        assert_eq!(words(text, Format::Rust), ["one", "two"]);
        assert_eq!(words("# one\nx = 2\n", Format::Script), ["one"]);
    }
}
