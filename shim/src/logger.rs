//! The log lines that containerd passes on: logfmt, one `write` per line, on stderr.
//!
//! The server has the bundle's fifo `log` as stderr ([`redirect_stderr`]), so panic messages take the same way.
//! A line never blocks the shim: when containerd does not read and the fifo is full, it is lost.

use std::error::Error;
use std::fmt::{self, Write as _};
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use log::{LevelFilter, Log, Metadata, Record, SetLoggerError};

/// An error with all its causes, `what failed: cause: cause of the cause`.
pub struct Chain<'a>(pub &'a dyn Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

/// Makes the fifo that containerd reads our standard error.
///
/// It is opened for reading too, so that a containerd that restarts finds the lines of the meantime instead of the
/// shim finding a broken pipe.
pub fn redirect_stderr(fifo: &Path) -> io::Result<()> {
    let fifo = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(fifo)?;
    nix::unistd::dup2_stderr(&fifo)?;
    Ok(())
}

/// Sends the `log` macros to stderr from now on; `fields` stands at the end of each line, `id=... namespace=...`.
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
        line.push('\n');
        // Nobody is left to tell when this fails.
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

/// Time since 1970 as UTC, in nanoseconds, `2026-01-31T23:59:59.000000000Z`.
pub(crate) struct Rfc3339(pub(crate) Duration);

impl fmt::Display for Rfc3339 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
        // Days since 0000-03-01, so that a leap day ends its year; then in cycles of 400, 100, 4 and 1 years.
        let day = seconds / 86_400 + 719_468;
        let (era, day) = (day / 146_097, day % 146_097);
        let year_of_era = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let from_march = (5 * day + 2) / 153;
        let date = day - (153 * from_march + 2) / 5 + 1;
        let month = if from_march < 10 {
            from_march + 3
        } else {
            from_march - 9
        };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        let nanos = self.0.subsec_nanos();
        write!(
            f,
            "{year:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second:02}.{nanos:09}Z"
        )
    }
}

/// What is told on this thread, for tests of what the log must and must not say.
#[cfg(test)]
pub(crate) mod testing {
    use std::cell::RefCell;
    use std::sync::Once;

    use log::{LevelFilter, Log, Metadata, Record};

    thread_local! {
        static TOLD: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    struct Keeper;

    impl Log for Keeper {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn log(&self, record: &Record<'_>) {
            // A thread that ends tells nobody.
            let _late = TOLD.try_with(|told| told.borrow_mut().push(record.args().to_string()));
        }

        fn flush(&self) {}
    }

    /// Warnings and errors since the last call. The first one begins.
    pub(crate) fn warnings() -> Vec<String> {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            log::set_max_level(LevelFilter::Warn);
            log::set_logger(&Keeper).unwrap();
        });
        TOLD.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000000000Z"),
            (951_782_399, "2000-02-28T23:59:59.000000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000000Z"),
            (951_868_800, "2000-03-01T00:00:00.000000000Z"),
            (1_798_761_599, "2026-12-31T23:59:59.000000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000000Z"),
        ] {
            assert_eq!(Rfc3339(Duration::from_secs(seconds)).to_string(), text);
        }
        let fraction = Duration::new(1, 2_003);
        assert_eq!(Rfc3339(fraction).to_string(), "1970-01-01T00:00:01.000002003Z");
    }

    #[test]
    fn a_message_stays_on_one_line() {
        assert_eq!(Quoted("a \"b\"\n\\c\u{7}").to_string(), r#""a \"b\"\n\\c\x07""#);
    }

    #[test]
    fn a_chain_shows_every_cause() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot open")]
        struct Open(#[source] std::num::ParseIntError);
        let error = Open("x".parse::<u8>().unwrap_err());
        assert_eq!(
            Chain(&error).to_string(),
            "cannot open: invalid digit found in string"
        );
    }
}
