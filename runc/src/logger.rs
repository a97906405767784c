//! The log: in the file of `--log` as runc writes it, else on stderr, where only warnings go.
//!
//! With a file nothing but the final error goes to stderr: that may be the container's own.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use firn_config::text::write_line;
use firn_host::{Chain, Rfc3339};
use firn_transaction::recording;
use log::{Level, LevelFilter, Log, Metadata, Record};

use crate::command_line::CommandLine;
use crate::error::Failure;

struct Logger(Sink);

enum Sink {
    File { file: Mutex<File>, json: bool },
    Stderr,
}

fn sink(line: Option<&CommandLine>) -> Sink {
    let named = line.and_then(|line| Some((line.log()?, line.logs_json())));
    let opened = named.and_then(|(path, json)| {
        let mut options = OpenOptions::new();
        let file = options.append(true).create(true).mode(0o600).open(path).ok()?;
        Some(Sink::File {
            file: Mutex::new(file),
            json,
        })
    });
    opened.unwrap_or(Sink::Stderr)
}

/// Sends the `log` macros there from now on.
pub fn start(line: &CommandLine) {
    let sink = sink(Some(line));
    let level = match (&sink, line.has_global("debug")) {
        (_, true) => LevelFilter::Debug,
        (Sink::File { .. }, false) => LevelFilter::Info,
        (Sink::Stderr, false) => LevelFilter::Warn,
    };
    log::set_max_level(level);
    log::set_boxed_logger(Box::new(Logger(sink))).expect("the logger is set once per process");
}

/// Shows the client why its call failed: on stderr, and in its log.
pub fn report(line: Option<&CommandLine>, failure: &Failure) {
    let text = Chain(failure).to_string();
    if let sink @ Sink::File { .. } = sink(line) {
        sink.write(Level::Error, &text);
    }
    // There is nobody to report a failure to.
    let _lost = write_line(io::stderr().lock(), format_args!("{text}"));
}

impl Sink {
    fn write(&self, level: Level, text: &str) {
        let level = match level {
            Level::Error => "error",
            Level::Warn => "warning",
            Level::Info => "info",
            Level::Debug | Level::Trace => "debug",
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let time = Rfc3339(now).to_string();
        let of = recording::current();
        let fields = of
            .as_ref()
            .map(|of| format!(" {}", of.fields()))
            .unwrap_or_default();
        let _lost = match self {
            Self::File { file, json: true } => {
                let mut entry = serde_json::json!({"level": level, "msg": text, "time": time});
                if let Some(of) = &of {
                    entry["container"] = of.container.as_str().into();
                    entry["transaction"] = of.id.as_str().into();
                }
                writeln!(firn_process::panics::lock(file), "{entry}")
            }
            Self::File { file, json: false } => {
                let mut file = firn_process::panics::lock(file);
                write_line(
                    &mut *file,
                    format_args!("time={time:?} level={level} msg={text:?}{fields}"),
                )
            }
            Self::Stderr => write_line(
                io::stderr().lock(),
                format_args!("firn-runc: {level}: {text}{fields}"),
            ),
        };
    }
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            self.0.write(record.level(), &record.args().to_string());
        }
    }

    fn flush(&self) {}
}
