//! firn's own events: the phases of its transactions.

use firn_containerd::Message;
use firn_containerd::events::{Envelope, Progress, SUBSCRIBE, SubscribeRequest};
use tonic::Streaming;

use super::{CallError, Containerd, failed};

/// A phase of a container has begun, or its copy of memory continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Phase {
    pub namespace: String,
    pub container: String,
    pub name: String,
    /// Bytes that are copied, and that are to be copied; zeros for a phase that copies nothing.
    pub copied: (u64, u64),
}

impl Phase {
    fn of(envelope: &Envelope) -> Option<Self> {
        let event = Progress::decode(&*envelope.event.as_ref()?.value).ok()?;
        let bytes = |count: i64| u64::try_from(count).unwrap_or(0);
        Some(Self {
            namespace: envelope.namespace.clone(),
            container: event.name,
            name: event.event,
            copied: (bytes(event.progress), bytes(event.total)),
        })
    }

    /// Whether it is the end of the transaction.
    pub fn is_end(&self) -> bool {
        self.name == "done" || self.name.starts_with("failed")
    }
}

/// The events of firn in all namespaces.
pub struct Phases(Streaming<Envelope>);

impl Phases {
    /// None: containerd publishes none any more.
    pub async fn next(&mut self) -> Result<Option<Phase>, CallError> {
        loop {
            match self.0.message().await.map_err(failed(SUBSCRIBE))? {
                None => return Ok(None),
                Some(envelope) => match Phase::of(&envelope) {
                    None => {}
                    phase => return Ok(phase),
                },
            }
        }
    }
}

impl Containerd {
    /// The phases of firn's transactions, from now on. containerd answers with the first event.
    pub async fn phases(&self) -> Result<Phases, CallError> {
        let filters = vec!["topic~=\"^/firn/\"".to_owned()];
        let request = SubscribeRequest { filters };
        Ok(Phases(self.stream(SUBSCRIBE, request).await?))
    }
}
