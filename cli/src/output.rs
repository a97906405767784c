//! What firn prints. Control characters are escaped, so that text of others does nothing to a terminal.
//!
//! It is no failure if the reader ends early (`firn inspect DIR | head`). Any other failure to write is one.

use std::fmt;
use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicBool, Ordering};

use firn_config::text::{printable_json, write_line};
use serde::Serialize;

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

/// Prints a line on standard output.
macro_rules! line {
    ($($text:tt)*) => {
        $crate::output::print_out(format_args!($($text)*))
    };
}

/// Prints a line on standard error.
macro_rules! note {
    ($($text:tt)*) => {
        $crate::output::print_err(format_args!($($text)*))
    };
}

pub(crate) use {line, note};

pub fn print_out(text: fmt::Arguments<'_>) {
    record(write_line(io::stdout().lock(), text));
}

pub fn print_err(text: fmt::Arguments<'_>) {
    // A failure of standard error cannot be reported.
    let _lost = write_line(io::stderr().lock(), text);
}

/// Prints a value as JSON.
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    let text = printable_json(&serde_json::to_string_pretty(value)?) + "\n";
    raw(&text);
    Ok(())
}

/// Reports why a command has failed, as JSON on standard output or for a person. Returns the command's
/// result.
pub fn failed(as_json: bool, message: impl fmt::Display) -> anyhow::Result<bool> {
    match as_json {
        true => json(&serde_json::json!({"failure": message.to_string()}))?,
        false => note!("firn: {message}"),
    }
    Ok(false)
}

/// Prints rows in columns, below their heads.
pub fn table<const N: usize>(head: [&str; N], rows: impl Iterator<Item = [String; N]>) {
    let rows: Vec<[String; N]> = [head.map(str::to_owned)].into_iter().chain(rows).collect();
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max();
    let widths: Vec<usize> = (0..N).filter_map(width).collect();
    for row in &rows {
        let cells = row.iter().zip(&widths);
        let cells = cells.map(|(cell, width)| format!("{cell:<width$}"));
        line!("{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
}

/// Prints text of firn itself.
pub fn raw(text: &str) {
    record(io::Write::write_all(&mut io::stdout().lock(), text.as_bytes()));
}

fn record(written: io::Result<()>) {
    if let Err(error) = written {
        CLOSED.store(true, Ordering::Relaxed);
        if error.kind() != ErrorKind::BrokenPipe {
            INCOMPLETE.store(true, Ordering::Relaxed);
        }
    }
}
