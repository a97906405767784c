//! Captures log records for unit tests.

use std::cell::RefCell;
use std::sync::Once;

use log::{LevelFilter, Log, Metadata, Record};

thread_local! {
    static LINES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

struct Keeper;

impl Log for Keeper {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        // The record of a thread that is ending is lost.
        let _late = LINES.try_with(|lines| lines.borrow_mut().push(record.args().to_string()));
    }

    fn flush(&self) {}
}

/// Warnings and errors of this thread since the last call. The first call starts the capture.
pub fn warnings() -> Vec<String> {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_max_level(LevelFilter::Warn);
        log::set_logger(&Keeper).unwrap();
    });
    LINES.take()
}
