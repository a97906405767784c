//! Text that others have written, as a person's terminal may be given it.
//!
//! firn quotes what containers, images, specs and tools contain: names of files and processes, log lines. A
//! terminal acts on control characters, and shows text that holds marks of direction in another order than it
//! has.

use std::fmt;
use std::io::{self, Write};

/// Writes a line for a person: one, whatever is quoted in it.
pub fn write_line(mut to: impl Write, text: fmt::Arguments<'_>) -> io::Result<()> {
    to.write_all((one_line(&text.to_string()) + "\n").as_bytes())
}

/// The text without what would act on a terminal: that is shown as an escape. Ends of lines and tabs stay.
pub fn printable(text: &str) -> String {
    escaped(text, "\n\t", |c| c.escape_default().to_string())
}

/// As [`printable`], for what has to stay one line: nobody who is quoted there can make another.
pub fn one_line(text: &str) -> String {
    escaped(text, "", |c| c.escape_default().to_string())
}

/// JSON text of the same meaning that does nothing to a terminal. JSON itself lets most of these characters
/// be in its strings.
pub fn printable_json(text: &str) -> String {
    escaped(text, "\n\t\r", |c| {
        let mut units = [0; 2];
        let units = c.encode_utf16(&mut units).iter();
        units.map(|unit| format!("\\u{unit:04x}")).collect()
    })
}

fn escaped(text: &str, stays: &str, escape: fn(char) -> String) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if stays.contains(c) || !acts(c) {
            shown.push(c)
        } else {
            shown.push_str(&escape(c))
        }
    }
    shown
}

/// Whether a terminal acts on it or does not show it: control characters, marks of direction, and what takes
/// no room.
pub fn acts(c: char) -> bool {
    let unseen = matches!(
        c,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'
            ..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'
    );
    c.is_control() || unseen
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "a\u{1b}[2J\r\u{7}\u{9b}\u{202e}b\0";
    const SHOWN: &str = "a\\u{1b}[2J\\r\\u{7}\\u{9b}\\u{202e}b\\u{0}";

    #[test]
    fn what_would_act_on_a_terminal_is_shown() {
        let plain = "FIRN-DUMP: cannot: \"ä\" c:\\x 日本\n\tat";
        assert_eq!(printable(plain), plain);
        assert_eq!(printable(HOSTILE), SHOWN);
        assert_eq!(one_line(HOSTILE), SHOWN);
        assert_eq!(one_line("a\nverdict can\tb"), "a\\nverdict can\\tb");
        for c in [
            '\u{ad}',
            '\u{61c}',
            '\u{2066}',
            '\u{2069}',
            '\u{e0041}',
            '\u{7f}',
            '\u{80}',
        ] {
            assert_eq!(printable(&c.to_string()), c.escape_default().to_string());
        }
    }

    #[test]
    fn json_keeps_its_meaning() {
        let value = format!("[\n  {{\"{HOSTILE}\": \"x\u{e0041}y\"}}\n]")
            .replace(['\u{1b}', '\r', '\u{7}', '\0'], "");
        let shown = printable_json(&value);
        assert!(shown.chars().all(|c| c == '\n' || !acts(c)), "{shown}");
        assert_eq!(shown, "[\n  {\"a[2J\\u009b\\u202eb\": \"x\\udb40\\udc41y\"}\n]");
    }
}
