//! The log lines that containerd passes on: logfmt, one `write` per line, on stderr.
//!
//! The server has the bundle's fifo `log` as stderr ([`redirect_stderr`]), so panic messages take the same
//! way. A line never blocks the shim: when containerd does not read and the fifo is full, it is lost.

use std::fmt::{self, Write as _};
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use firn_host::Rfc3339;
use firn_transaction::recording;
use log::{LevelFilter, Log, Metadata, Record, SetLoggerError};

/// Makes the fifo that containerd reads our standard error.
///
/// It is opened for reading too, so that a containerd that restarts finds the lines of the meantime instead
/// of the shim finding a broken pipe.
pub fn redirect_stderr(fifo: &Path) -> io::Result<()> {
    let fifo = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(fifo)?;
    nix::unistd::dup2_stderr(&fifo)?;
    Ok(())
}

/// Sends the `log` macros to stderr from now on; `fields` stands at the end of each line,
/// `id=... namespace=...`.
pub fn init(debug: bool, fields: String) -> Result<(), SetLoggerError> {
    let level = if debug {
        LevelFilter::Debug
    } else {
        LevelFilter::Info
    };
    log::set_max_level(level);
    log::set_boxed_logger(Box::new(Logger { fields, debug }))
}

struct Logger {
    fields: String,
    debug: bool,
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // The RPC library reports every client that goes away.
        let ours = !metadata.target().starts_with("ttrpc");
        metadata.level() <= log::max_level() && (ours || self.debug)
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let level = match record.level() {
            log::Level::Warn => "warning",
            log::Level::Error => "error",
            log::Level::Info => "info",
            log::Level::Debug => "debug",
            log::Level::Trace => "trace",
        };
        let mut line = String::with_capacity(160);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let message = Quoted(&record.args().to_string()).to_string();
        let written = write!(line, "time=\"{}\" level={level} msg={message}", Rfc3339(now));
        written.expect("a string takes everything");
        if !self.fields.is_empty() {
            line.push(' ');
            line.push_str(&self.fields);
        }
        if let Some(recording) = recording::current() {
            line.push(' ');
            line.push_str(&recording.fields());
        }
        line.push('\n');
        // There is nobody to report a failure to.
        let _lost = io::stderr().write(line.as_bytes());
    }

    fn flush(&self) {}
}

/// A value in double quotes, on one line.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        for c in self.0.chars() {
            match c {
                '"' | '\\' => write!(f, "\\{c}")?,
                '\n' => f.write_str("\\n")?,
                '\t' => f.write_str("\\t")?,
                c if c.is_control() => write!(f, "\\x{:02x}", u32::from(c))?,
                c if firn_config::text::acts(c) => write!(f, "{}", c.escape_unicode())?,
                c => f.write_char(c)?,
            }
        }
        f.write_char('"')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_stays_on_one_line() {
        assert_eq!(Quoted("a \"b\"\n\\c\u{7}").to_string(), r#""a \"b\"\n\\c\x07""#);
    }
}
