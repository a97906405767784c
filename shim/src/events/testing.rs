//! Events for tests that read them, in the place of containerd.

use super::{Duration, Envelope, Item, Publisher, TaskEvent, UnboundedReceiver, unbounded_channel};

/// Longest time for an event that should come.
const LIMIT: Duration = Duration::from_secs(10);

/// What was published, in order.
pub(crate) struct Published(UnboundedReceiver<Item>);

impl Published {
    /// A publisher, and what comes of it.
    pub(crate) fn new() -> (Publisher, Self) {
        let (sender, inbox) = unbounded_channel();
        let publisher = Publisher {
            inbox: Some(sender),
            namespace: "default".to_owned(),
        };
        (publisher, Self(inbox))
    }

    /// The next event, which is of this kind.
    pub(crate) async fn next<E: TaskEvent>(&mut self) -> E {
        let next = tokio::time::timeout(LIMIT, self.0.recv()).await;
        let Some(Item::Event(Envelope { topic, event, .. })) = next.expect("an event comes") else {
            panic!("no event");
        };
        assert_eq!(topic, E::TOPIC);
        E::parse_from_bytes(&event.value).unwrap()
    }

    /// Whether there is one by now.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
