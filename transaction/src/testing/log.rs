//! The log as unit tests see it.

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
pub fn warnings() -> Vec<String> {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_max_level(LevelFilter::Warn);
        log::set_logger(&Keeper).unwrap();
    });
    TOLD.take()
}
