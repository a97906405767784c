//! The progress of a benchmark, on standard error.

use std::io::{IsTerminal, Write, stderr};
use std::time::Instant;

/// One line: what is measured, the steps done, and the time at the end.
pub(crate) struct Progress {
    what: String,
    steps: u32,
    done: u32,
    begun: Instant,
    terminal: bool,
}

impl Progress {
    /// Prints the name of the measurement, which has so many steps.
    pub(crate) fn begin(what: &str, steps: u32) -> Self {
        let progress = Self {
            what: what.to_owned(),
            steps,
            done: 0,
            begun: Instant::now(),
            terminal: stderr().is_terminal(),
        };
        progress.show();
        progress
    }

    /// A step is done.
    pub(crate) fn step(&mut self) {
        self.done += 1;
        if self.terminal {
            self.show();
        }
    }

    /// Everything is done.
    pub(crate) fn end(self) {
        let again = if self.terminal {
            format!("\r\x1b[K{}: ", self.what)
        } else {
            String::new()
        };
        eprintln!("{again}{:.0} s", self.begun.elapsed().as_secs_f64());
    }

    fn show(&self) {
        if self.terminal {
            eprint!("\r\x1b[K{}: {} of {}", self.what, self.done, self.steps)
        } else {
            eprint!("{}: ", self.what)
        }
        // The progress is not worth failing for.
        let _ = stderr().flush();
    }
}
