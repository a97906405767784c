//! firn's own events: the phases of its transactions.

use prost::Message;
use tonic::Streaming;

use super::{Any, CallError, Containerd, failed};

/// `containerd.types.Envelope`
#[derive(Clone, PartialEq, Message)]
pub struct Envelope {
    #[prost(string, tag = "2")]
    namespace: String,
    #[prost(string, tag = "3")]
    topic: String,
    #[prost(message, optional, tag = "4")]
    event: Option<Any>,
}

/// `containerd.types.transfer.Progress`
#[derive(Clone, PartialEq, Message)]
struct Progress {
    #[prost(string, tag = "1")]
    event: String,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(int64, tag = "4")]
    progress: i64,
    #[prost(int64, tag = "5")]
    total: i64,
}

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

const SUBSCRIBE: &str = "/containerd.services.events.v1.Events/Subscribe";

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
        let request = super::ListContainers { filters };
        Ok(Phases(self.stream(SUBSCRIBE, request).await?))
    }
}
