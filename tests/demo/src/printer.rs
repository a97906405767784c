//! The demo's progress as text: on standard output, with `--json` on standard error.

use std::cell::Cell;
use std::io::{IsTerminal, Write};
use std::time::Instant;

use anyhow::Result;

/// Columns of a command line that is shown.
const WIDTH: usize = 100;

/// Prints the progress.
pub(crate) struct Printer {
    /// Whether standard output is left to the JSON.
    to_stderr: bool,
    titles: Cell<u32>,
}

impl Printer {
    pub(crate) fn new(to_stderr: bool) -> Self {
        Self {
            to_stderr,
            titles: Cell::new(0),
        }
    }

    /// Prints one or more lines.
    pub(crate) fn line(&self, text: &str) {
        self.write(&format!("{text}\n"));
    }

    /// Prints the numbered heading of the next part.
    pub(crate) fn title(&self, text: &str) {
        self.titles.set(self.titles.get() + 1);
        let bold = if self.terminal() {
            ("\x1b[1m", "\x1b[0m")
        } else {
            ("", "")
        };
        self.line(&format!("\n{}{}. {text}{}", bold.0, self.titles.get(), bold.1));
    }

    /// Prints what takes a while, and how long it took.
    pub(crate) fn step<T>(&self, what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.write(&format!("{what} ... "));
        let begun = Instant::now();
        let done = work();
        let word = if done.is_ok() { "done" } else { "failed" };
        self.line(&format!("{word} after {:.1} s", begun.elapsed().as_secs_f64()));
        done
    }

    fn terminal(&self) -> bool {
        if self.to_stderr {
            std::io::stderr().is_terminal()
        } else {
            std::io::stdout().is_terminal()
        }
    }

    /// Ignores errors: when nobody reads the output any more, the nodes have to be removed all the same.
    fn write(&self, text: &str) {
        if self.to_stderr {
            let _ = std::io::stderr().write_all(text.as_bytes());
        } else {
            let mut out = std::io::stdout();
            let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        }
    }
}

/// A command line that a shell would understand, broken before options where it gets long.
pub(crate) fn shown(argv: &[&str]) -> String {
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
    fn words_that_a_shell_would_split_are_quoted() {
        assert_eq!(shown(&["ctr", "a=b,c", "two words"]), "ctr a=b,c 'two words'");
    }

    #[test]
    fn a_long_command_is_broken_before_an_option() {
        let long = "x".repeat(WIDTH - 10);
        let broken = format!("ctr {long} \\\n         --device a");
        assert_eq!(shown(&["ctr", &long, "--device", "a"]), broken);
    }
}
