//! What firn prints. Control characters are escaped, so that text of others does nothing to a terminal.
//!
//! It is no failure if the reader ends early (`firn inspect DIR | head`). Any other failure to write is one.

mod json;
#[cfg(test)]
pub mod schema;
mod table;
mod terminal;

use std::fmt;
use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicBool, Ordering};

use firn_config::text::{one_line, write_line};

pub(crate) use json::printed;
pub use json::{Failure, Printed, failed, failed_with, json, json_line};
pub use table::table;
pub use terminal::Tone;

/// Whether output is missing.
static INCOMPLETE: AtomicBool = AtomicBool::new(false);

/// Whether nobody reads the output any more.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// Whether nobody reads the output any more, or it cannot be written.
pub fn is_closed() -> bool {
    CLOSED.load(Ordering::Relaxed)
}

/// Whether all output was written that had a reader.
pub fn is_complete() -> bool {
    !INCOMPLETE.load(Ordering::Relaxed)
}

/// Prints a line on standard output. A terminal shows it in as many as it needs.
macro_rules! line {
    ($($text:tt)*) => {
        $crate::output::print_out(format_args!($($text)*))
    };
}

/// Prints a line for a program or a shell, which is never wrapped.
macro_rules! verbatim {
    ($($text:tt)*) => {
        $crate::output::print_verbatim(format_args!($($text)*))
    };
}

/// Prints a line on standard error.
macro_rules! note {
    ($($text:tt)*) => {
        $crate::output::print_err(format_args!($($text)*))
    };
}

pub(crate) use {line, note, verbatim};

pub fn print_out(text: fmt::Arguments<'_>) {
    print_toned(None, &text.to_string());
}

pub fn print_verbatim(text: fmt::Arguments<'_>) {
    record(write_line(io::stdout().lock(), text));
}

/// Prints a line, of which a word has a tone.
pub fn print_toned(tone: Option<(Tone, &str)>, text: &str) {
    let text = one_line(text);
    let lines = match terminal::columns() {
        Some(columns) => terminal::wrapped(&text, columns),
        None => vec![text],
    };
    let mut shown = lines.join("\n") + "\n";
    if let Some((tone, word)) = tone {
        shown = shown.replacen(word, &terminal::painted(tone, word), 1);
    }
    raw(&shown);
}

pub fn print_err(text: fmt::Arguments<'_>) {
    // A failure of standard error cannot be reported.
    let _lost = write_line(io::stderr().lock(), text);
}

/// Prints text of firn itself.
pub fn raw(text: &str) {
    record(io::Write::write_all(&mut io::stdout().lock(), text.as_bytes()));
}

/// Prints what a container has written, as it is.
pub fn bytes(bytes: &[u8]) {
    record(io::Write::write_all(&mut io::stdout().lock(), bytes));
}

fn record(written: io::Result<()>) {
    if let Err(error) = written {
        CLOSED.store(true, Ordering::Relaxed);
        if error.kind() != ErrorKind::BrokenPipe {
            INCOMPLETE.store(true, Ordering::Relaxed);
        }
    }
}
