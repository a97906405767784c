//! What firn says, on standard output and standard error: nothing that a terminal would act on, whoever has written it.
//!
//! A reader that goes away early (`firn inspect DIR | head`) is no failure. Any other one is.

use std::fmt;
use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicBool, Ordering};

use firn_config::text::{printable_json, write_line};
use serde::Serialize;

/// Whether something could not be written.
static INCOMPLETE: AtomicBool = AtomicBool::new(false);

/// Whether all was written, as far as anybody has read it.
pub fn is_complete() -> bool {
    !INCOMPLETE.load(Ordering::Relaxed)
}

/// A line of the answer.
macro_rules! line {
    ($($text:tt)*) => {
        $crate::output::answer(format_args!($($text)*))
    };
}

/// A line beside the answer.
macro_rules! note {
    ($($text:tt)*) => {
        $crate::output::aside(format_args!($($text)*))
    };
}

pub(crate) use {line, note};

pub fn answer(text: fmt::Arguments<'_>) {
    noted(write_line(io::stdout().lock(), text));
}

pub fn aside(text: fmt::Arguments<'_>) {
    // Nobody is left to tell when this fails.
    let _lost = write_line(io::stderr().lock(), text);
}

/// The whole answer as JSON.
pub fn json(answer: &impl Serialize) -> anyhow::Result<()> {
    let text = printable_json(&serde_json::to_string_pretty(answer)?) + "\n";
    raw(&text);
    Ok(())
}

/// Text that is firn's own.
pub fn raw(text: &str) {
    noted(io::Write::write_all(&mut io::stdout().lock(), text.as_bytes()));
}

fn noted(written: io::Result<()>) {
    if written.is_err_and(|error| error.kind() != ErrorKind::BrokenPipe) {
        INCOMPLETE.store(true, Ordering::Relaxed);
    }
}
