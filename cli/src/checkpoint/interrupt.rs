//! The wish of the person at the terminal to end what is in progress.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that end a program in an orderly way.
pub struct Interrupts([Signal; 3]);

impl Interrupts {
    /// From now on these signals do not end the program.
    pub fn new() -> io::Result<Self> {
        Ok(Self([
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
        ]))
    }

    /// Waits for one of them.
    pub async fn next(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }

    /// The result of `work`, or none if it was interrupted: it is dropped then.
    pub async fn unless<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            done = work => Some(done),
            () = self.next() => None,
        }
    }
}
