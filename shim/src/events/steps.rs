//! What containerd's clients see of firn's transactions while they continue: docs/reference/events.md.
//!
//! containerd's tools show events of types that they know, and no others. So these have the type of its own
//! progress of transfers.

use firn_transaction::steps::Step;
use protobuf::CodedOutputStream;

use super::Publisher;

const TYPE: &str = "containerd.types.transfer.Progress";

/// Characters of a warning.
const LONGEST: usize = 1024;

/// Fields of that type.
mod field {
    pub(super) const EVENT: u32 = 1;
    pub(super) const NAME: u32 = 2;
    pub(super) const PROGRESS: u32 = 4;
    pub(super) const TOTAL: u32 = 5;
}

impl Publisher {
    /// Publishes a step of a transaction of this container.
    pub fn step(&self, container: &str, operation: &str, step: Step<'_>) {
        match step {
            Step::Phase(phase) => self.progress(container, operation, phase.name(), 0, 0),
            Step::Copied(copied) => {
                self.progress(container, operation, &copied.phase, copied.done, copied.all);
            }
        }
    }

    /// Publishes that a transaction has ended; if it has failed, with the code of its error, if that has one.
    pub fn publish_end(&self, container: &str, operation: &str, result: Result<(), Option<String>>) {
        let outcome = match result {
            Ok(()) => "done".to_owned(),
            Err(None) => "failed".to_owned(),
            Err(Some(code)) => format!("failed: {code}"),
        };
        self.progress(container, operation, &outcome, 0, 0);
    }

    /// Publishes what of a new container has no effect.
    pub fn publish_warning(&self, container: &str, warning: &str) {
        let event: String = warning.chars().take(LONGEST).collect();
        self.progress(container, "create", &format!("warning: {event}"), 0, 0);
    }

    fn progress(&self, container: &str, operation: &str, event: &str, done: u64, all: u64) {
        let topic = format!("/firn/{operation}");
        match encoded(container, event, done, all) {
            Ok(value) => self.send(topic, TYPE.to_owned(), value),
            Err(error) => log::error!("cannot encode an event for {topic}: {error}"),
        }
    }
}

fn encoded(container: &str, event: &str, done: u64, all: u64) -> protobuf::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut message = CodedOutputStream::vec(&mut bytes);
    message.write_string(field::EVENT, event)?;
    message.write_string(field::NAME, container)?;
    for (field, number) in [(field::PROGRESS, done), (field::TOTAL, all)] {
        message.write_int64(field, i64::try_from(number).unwrap_or(i64::MAX))?;
    }
    message.flush()?;
    drop(message);
    Ok(bytes)
}
