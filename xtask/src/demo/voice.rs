//! What the demo says while it goes on. With `--json` it says it on standard error.

use std::cell::Cell;
use std::io::{IsTerminal, Write};
use std::time::Instant;

use anyhow::Result;

/// Columns of a command line that is shown.
const WIDTH: usize = 100;

/// Tells people what happens.
pub(super) struct Voice {
    /// Standard output belongs to a program.
    aside: bool,
    titles: Cell<u32>,
}

impl Voice {
    pub(super) fn new(aside: bool) -> Self {
        Self {
            aside,
            titles: Cell::new(0),
        }
    }

    /// One or more lines.
    pub(super) fn say(&self, text: &str) {
        self.write(&format!("{text}\n"));
    }

    /// The next chapter.
    pub(super) fn title(&self, text: &str) {
        self.titles.set(self.titles.get() + 1);
        let bold = if self.terminal() {
            ("\x1b[1m", "\x1b[0m")
        } else {
            ("", "")
        };
        self.say(&format!("\n{}{}. {text}{}", bold.0, self.titles.get(), bold.1));
    }

    /// Something that takes a while.
    pub(super) fn working<T>(&self, what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.write(&format!("{what} ... "));
        let begun = Instant::now();
        let done = work();
        let word = if done.is_ok() { "done" } else { "failed" };
        self.say(&format!("{word} after {:.1} s", begun.elapsed().as_secs_f64()));
        done
    }

    fn terminal(&self) -> bool {
        if self.aside {
            std::io::stderr().is_terminal()
        } else {
            std::io::stdout().is_terminal()
        }
    }

    /// A reader that has gone away is no reason to stop before the nodes are taken down.
    fn write(&self, text: &str) {
        if self.aside {
            let _ = std::io::stderr().write_all(text.as_bytes());
        } else {
            let mut out = std::io::stdout();
            let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        }
    }
}

/// A command line that a shell would understand, broken before options where it gets long.
pub(super) fn shown(argv: &[&str]) -> String {
    let plain = |word: &str| {
        word.bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_./:=,@".contains(&byte))
    };
    let (mut text, mut column) = (String::new(), 0);
    for (index, word) in argv.iter().enumerate() {
        let word = if plain(word) {
            (*word).to_owned()
        } else {
            format!("'{word}'")
        };
        // An option and its value stay together.
        let value = argv
            .get(index + 1)
            .filter(|_| word.starts_with("--"))
            .map_or(0, |value| value.len());
        if column > 0 && column + word.len() + value > WIDTH {
            text += " \\\n         ";
            column = 0;
        } else if index > 0 {
            text.push(' ');
        }
        text += &word;
        column += word.len() + 1;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_a_shell_would_take_apart_are_quoted() {
        assert_eq!(shown(&["ctr", "a=b,c", "two words"]), "ctr a=b,c 'two words'");
    }

    #[test]
    fn a_long_command_is_broken_before_an_option() {
        let long = "x".repeat(WIDTH - 10);
        let broken = format!("ctr {long} \\\n         --device a");
        assert_eq!(shown(&["ctr", &long, "--device", "a"]), broken);
    }
}
