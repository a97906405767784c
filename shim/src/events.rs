//! Publishes task events to containerd, in order, and keeps them while containerd is away.
//!
//! One worker task owns the connection to `TTRPC_ADDRESS`. It forwards one event at a time and takes the next
//! only when containerd has acknowledged this one, so the order in which [`Publisher::publish`] was called is
//! the order in which containerd sees them. Any failure of the connection, of whatever kind, leads to a new
//! connection and the same event again: an event can arrive twice, it is never lost while the shim lives.
//! Only two things drop an event, and both are logged: containerd itself refuses it several times, or the
//! queue is full, which drops the oldest (containerd asks for the state of all tasks when it comes back, so
//! the newest matter most).

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, SystemTime};

use containerd_shim_protos::api::ForwardRequest;
use containerd_shim_protos::events::task::{
    TaskCheckpointed, TaskCreate, TaskDelete, TaskExecAdded, TaskExecStarted, TaskExit, TaskOOM, TaskPaused,
    TaskResumed, TaskStart,
};
use containerd_shim_protos::shim::event::Envelope;
use containerd_shim_protos::shim_async::{Client, EventsClient};
use containerd_shim_protos::topics;
use protobuf::well_known_types::any::Any;
use protobuf::well_known_types::timestamp::Timestamp;
use protobuf::{Message, MessageField};
use tokio::net::UnixStream;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use ttrpc::r#async::transport::Socket;

use firn_host::Chain;

/// How many events wait for containerd at most.
const QUEUE: usize = 2048;
/// How long containerd may take for one event.
const CALL_LIMIT: Duration = Duration::from_secs(5);
/// First pause between two attempts; doubled up to [`MAX_PAUSE`].
const MIN_PAUSE: Duration = Duration::from_millis(20);
/// Longest pause between two attempts.
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// How often an event is offered to a containerd that answers with a refusal.
const REFUSALS: u32 = 8;

/// An event of containerd's task topics.
pub trait TaskEvent: Message {
    /// Where it is published, `/tasks/exit`.
    const TOPIC: &'static str;
}

macro_rules! task_events {
    ($($event:ty => $topic:ident,)*) => {
        $(impl TaskEvent for $event {
            const TOPIC: &'static str = topics::$topic;
        })*
    };
}

task_events! {
    TaskCreate => TASK_CREATE_EVENT_TOPIC,
    TaskStart => TASK_START_EVENT_TOPIC,
    TaskExecAdded => TASK_EXEC_ADDED_EVENT_TOPIC,
    TaskExecStarted => TASK_EXEC_STARTED_EVENT_TOPIC,
    TaskExit => TASK_EXIT_EVENT_TOPIC,
    TaskDelete => TASK_DELETE_EVENT_TOPIC,
    TaskOOM => TASK_OOM_EVENT_TOPIC,
    TaskPaused => TASK_PAUSED_EVENT_TOPIC,
    TaskResumed => TASK_RESUMED_EVENT_TOPIC,
    TaskCheckpointed => TASK_CHECKPOINTED_EVENT_TOPIC,
}

/// Why an event did not get through.
#[derive(Debug, thiserror::Error)]
enum SendError {
    #[error("cannot reach containerd at {address}")]
    Connect { address: String, source: io::Error },
    #[error("containerd did not take the event")]
    Call(#[source] ttrpc::Error),
    #[error("containerd did not answer within {CALL_LIMIT:?}")]
    Overdue,
}

/// What the worker finds in its queue.
enum Item {
    Event(Envelope),
    /// Everything before it is delivered.
    Mark(oneshot::Sender<()>),
}

/// Handle to the publisher; cheap to clone. The worker ends with the last handle, once its queue is empty.
#[derive(Clone, Debug)]
pub struct Publisher {
    inbox: Option<UnboundedSender<Item>>,
    namespace: String,
}

impl Publisher {
    /// Starts the worker on the current tokio runtime.
    ///
    /// `address` is containerd's ttrpc socket as `TTRPC_ADDRESS` names it: a path, or `unix://` and a path.
    /// Without an address (a shim started by hand) events go nowhere.
    pub fn new(address: &str, namespace: &str) -> Self {
        let address = address.strip_prefix("unix://").unwrap_or(address).to_owned();
        let namespace = namespace.to_owned();
        if address.is_empty() {
            log::warn!("no address for events: they are not published");
            let inbox = None;
            return Self { inbox, namespace };
        }
        let (sender, inbox) = unbounded_channel();
        let worker = Worker {
            address,
            inbox,
            queue: VecDeque::new(),
            client: None,
        };
        tokio::spawn(worker.run());
        let inbox = Some(sender);
        Self { inbox, namespace }
    }

    /// Queues an event; never waits.
    pub fn publish<E: TaskEvent>(&self, event: &E) {
        let value = match event.write_to_bytes() {
            Ok(value) => value,
            Err(error) => return log::error!("cannot encode an event for {}: {error}", E::TOPIC),
        };
        // containerd looks up the bare name; `Any::pack` would put a host before it.
        let type_url = format!("containerd.events.{}", E::NAME);
        self.send(E::TOPIC.to_owned(), type_url, value);
    }

    fn send(&self, topic: String, type_url: String, value: Vec<u8>) {
        let Some(inbox) = &self.inbox else { return };
        let envelope = Envelope {
            timestamp: MessageField::some(Timestamp::from(SystemTime::now())),
            namespace: self.namespace.clone(),
            topic,
            event: MessageField::some(Any {
                type_url,
                value,
                ..Any::default()
            }),
            ..Envelope::default()
        };
        // The worker is gone only when the runtime is: nobody is left to publish for.
        let _sent = inbox.send(Item::Event(envelope));
    }

    /// Waits until containerd has acknowledged every event published so far. Returns whether it has.
    pub async fn flush(&self, limit: Duration) -> bool {
        let Some(inbox) = &self.inbox else { return true };
        let (done, delivered) = oneshot::channel();
        let sent = inbox.send(Item::Mark(done)).is_ok();
        sent && matches!(tokio::time::timeout(limit, delivered).await, Ok(Ok(())))
    }
}

struct Worker {
    address: String,
    inbox: UnboundedReceiver<Item>,
    queue: VecDeque<Item>,
    client: Option<EventsClient>,
}

impl Worker {
    async fn run(mut self) {
        loop {
            let next = match self.queue.pop_front() {
                Some(item) => Some(item),
                None => self.inbox.recv().await,
            };
            match next {
                Some(Item::Event(envelope)) => self.deliver(envelope).await,
                // Whoever asked may have stopped waiting.
                Some(Item::Mark(done)) => drop(done.send(())),
                None => return,
            }
        }
    }

    async fn deliver(&mut self, envelope: Envelope) {
        let topic = envelope.topic.clone();
        let request = ForwardRequest {
            envelope: MessageField::some(envelope),
            ..ForwardRequest::default()
        };
        let mut failures = 0;
        let mut refusals = 0;
        let mut pause = Duration::ZERO;
        while let Err(error) = self.forward(&request).await {
            failures += 1;
            refusals += u32::from(matches!(error, SendError::Call(ttrpc::Error::RpcStatus(_))));
            if refusals == REFUSALS {
                return log::error!("dropped an event for {topic}: {}", Chain(&error));
            }
            // The first failure is what a connection to a former containerd looks like; a fresh one cures it.
            if failures == 2 {
                log::warn!("an event for {topic} waits: {}", Chain(&error));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).clamp(MIN_PAUSE, MAX_PAUSE);
            self.bound_queue();
        }
        if failures > 1 {
            log::info!("containerd took the event for {topic} after {failures} failures");
        }
    }

    /// One attempt. Whatever fails, the connection is not used again.
    async fn forward(&mut self, request: &ForwardRequest) -> Result<(), SendError> {
        let client = match self.client.take() {
            Some(client) => client,
            None => self.connect().await?,
        };
        let call = client.forward(ttrpc::context::with_duration(CALL_LIMIT), request);
        match tokio::time::timeout(CALL_LIMIT, call).await {
            Ok(Ok(_)) => {
                self.client = Some(client);
                Ok(())
            }
            Ok(Err(error)) => Err(SendError::Call(error)),
            Err(_) => Err(SendError::Overdue),
        }
    }

    async fn connect(&self) -> Result<EventsClient, SendError> {
        // Not ttrpc's own connect, which blocks the thread while containerd's backlog is full.
        let stream = tokio::time::timeout(CALL_LIMIT, UnixStream::connect(&self.address)).await;
        let stream = stream.map_err(|_| SendError::Overdue)?;
        let stream = stream.map_err(|source| SendError::Connect {
            address: self.address.clone(),
            source,
        })?;
        Ok(EventsClient::new(Client::new(Socket::from(stream))))
    }

    /// Takes in what was published meanwhile and keeps the newest [`QUEUE`].
    fn bound_queue(&mut self) {
        while let Ok(item) = self.inbox.try_recv() {
            self.queue.push_back(item);
        }
        while self.queue.len() > QUEUE {
            match self.queue.pop_front() {
                Some(Item::Event(oldest)) => {
                    log::error!(
                        "{QUEUE} events wait for containerd: dropped one for {}",
                        oldest.topic
                    );
                }
                // Nobody can learn that all before it was delivered: the sender is dropped.
                Some(Item::Mark(_)) | None => {}
            }
        }
    }
}

mod steps;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
