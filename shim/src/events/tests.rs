use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use containerd_shim_protos::api::Empty;
use containerd_shim_protos::shim_async::{Events, create_events};
use tokio::sync::mpsc;
use ttrpc::r#async::{Server, TtrpcContext};

use firn_image::memory::progress::Progress;
use firn_transaction::phase::Phase;
use firn_transaction::steps::Step;

use super::*;

const SOON: Duration = Duration::from_secs(30);

/// A fake of containerd's event service.
#[derive(Clone)]
struct Daemon {
    seen: mpsc::UnboundedSender<Envelope>,
    /// Errors that the next events are answered with, instead of accepting them.
    refuse: Arc<Mutex<Vec<ttrpc::Code>>>,
}

#[async_trait]
impl Events for Daemon {
    async fn forward(&self, _: &TtrpcContext, request: ForwardRequest) -> ttrpc::Result<Empty> {
        if let Some(code) = self.refuse.lock().unwrap().pop() {
            return Err(ttrpc::error::get_rpc_status(code, "not now"));
        }
        self.seen.send(request.envelope.unwrap()).unwrap();
        Ok(Empty::default())
    }
}

impl Daemon {
    fn new() -> (Self, mpsc::UnboundedReceiver<Envelope>) {
        let (seen, received) = mpsc::unbounded_channel();
        (
            Self {
                seen,
                refuse: Arc::default(),
            },
            received,
        )
    }

    async fn serve(&self, path: &Path) -> Server {
        let _left_over = std::fs::remove_file(path);
        let server = Server::new().bind(&format!("unix://{}", path.display())).unwrap();
        let mut server = server.register_service(create_events(Arc::new(self.clone())));
        server.start().await.unwrap();
        server
    }
}

fn socket(dir: &tempfile::TempDir) -> PathBuf {
    dir.path().join("containerd.sock.ttrpc")
}

fn exit(number: u32) -> TaskExit {
    TaskExit {
        container_id: "c".into(),
        exit_status: number,
        ..TaskExit::default()
    }
}

async fn next(received: &mut mpsc::UnboundedReceiver<Envelope>) -> Envelope {
    tokio::time::timeout(SOON, received.recv())
        .await
        .expect("an event in time")
        .unwrap()
}

fn number(envelope: &Envelope) -> u32 {
    TaskExit::parse_from_bytes(&envelope.event.value)
        .unwrap()
        .exit_status
}

/// Bytes as protoc's encoder writes them for containerd's message.
#[tokio::test]
async fn steps_have_a_type_that_containerd_shows() {
    let dir = tempfile::tempdir().unwrap();
    let (daemon, mut received) = Daemon::new();
    let _server = daemon.serve(&socket(&dir)).await;
    let publisher = Publisher::new(socket(&dir).to_str().unwrap(), "default");
    let copied = Progress {
        phase: "copy-memory".to_owned(),
        begun: 0,
        done: 300,
        all: 1 << 33,
    };
    publisher.step("job", "checkpoint", Step::Phase(Phase::GpuLock));
    publisher.step("job", "checkpoint", Step::Copied(&copied));
    publisher.publish_end("job", "move", Err(Some("FIRN-GPU-BUSY".to_owned())));
    for (topic, value) in [
        (
            "/firn/checkpoint",
            &b"\x0a\x08gpu-lock\x12\x03job\x20\0\x28\0"[..],
        ),
        (
            "/firn/checkpoint",
            b"\x0a\x0bcopy-memory\x12\x03job\x20\xac\x02\x28\x80\x80\x80\x80\x20",
        ),
        (
            "/firn/move",
            b"\x0a\x15failed: FIRN-GPU-BUSY\x12\x03job\x20\0\x28\0",
        ),
    ] {
        let envelope = next(&mut received).await;
        assert_eq!(envelope.topic, topic);
        assert_eq!(envelope.event.type_url, "containerd.types.transfer.Progress");
        assert_eq!(envelope.event.value, value, "{topic}");
    }
}

#[tokio::test]
async fn the_envelope_is_what_containerd_expects() {
    let dir = tempfile::tempdir().unwrap();
    let (daemon, mut received) = Daemon::new();
    let _server = daemon.serve(&socket(&dir)).await;
    let before = SystemTime::now();
    let publisher = Publisher::new(&format!("unix://{}", socket(&dir).display()), "k8s.io");
    publisher.publish(&exit(137));
    assert!(publisher.flush(SOON).await);
    let envelope = next(&mut received).await;
    assert_eq!(envelope.namespace, "k8s.io");
    assert_eq!(envelope.topic, "/tasks/exit");
    assert_eq!(envelope.event.type_url, "containerd.events.TaskExit");
    assert_eq!(number(&envelope), 137);
    let at: SystemTime = envelope.timestamp.unwrap().into();
    assert!(at >= before && at <= SystemTime::now());
}

#[test]
fn type_names_are_those_of_the_messages() {
    fn check<E: TaskEvent + protobuf::MessageFull>() {
        assert_eq!(
            E::descriptor().full_name(),
            format!("containerd.events.{}", E::NAME)
        );
    }
    check::<TaskCreate>();
    check::<TaskStart>();
    check::<TaskExit>();
    check::<TaskDelete>();
    check::<TaskOOM>();
    check::<TaskExecAdded>();
    check::<TaskExecStarted>();
    check::<TaskPaused>();
    check::<TaskResumed>();
    check::<TaskCheckpointed>();
}

#[tokio::test]
async fn nothing_is_lost_or_reordered_when_containerd_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket(&dir);
    let (daemon, mut received) = Daemon::new();
    let publisher = Publisher::new(path.to_str().unwrap(), "default");
    let mut order = Vec::new();
    let mut published = 0;
    let mut publish = |count: u32| {
        for _ in 0..count {
            publisher.publish(&exit(published));
            published += 1;
        }
        published
    };
    // Before the first daemon, during each of three runs, and while it is away.
    publish(5);
    for _ in 0..3 {
        let mut server = daemon.serve(&path).await;
        let until = publish(5);
        while order.last() != Some(&(until - 1)) {
            order.push(number(&next(&mut received).await));
        }
        publish(3);
        server.shutdown().await.unwrap();
        publish(3);
    }
    let _server = daemon.serve(&path).await;
    let count = publish(1);
    assert!(publisher.flush(SOON).await);
    while let Ok(envelope) = received.try_recv() {
        order.push(number(&envelope));
    }
    // An event whose response was lost arrives twice, at the same position.
    order.dedup();
    assert_eq!(order, (0..count).collect::<Vec<_>>());
}

#[tokio::test]
async fn flush_fails_while_containerd_is_away() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = Publisher::new(socket(&dir).to_str().unwrap(), "default");
    assert!(publisher.flush(SOON).await, "nothing to deliver");
    publisher.publish(&exit(1));
    assert!(!publisher.flush(Duration::from_millis(100)).await);
}

#[tokio::test]
async fn an_event_that_containerd_refuses_does_not_stop_later_ones() {
    let dir = tempfile::tempdir().unwrap();
    let (daemon, mut received) = Daemon::new();
    let _server = daemon.serve(&socket(&dir)).await;
    let publisher = Publisher::new(socket(&dir).to_str().unwrap(), "default");
    let refusals = usize::try_from(REFUSALS).unwrap();
    *daemon.refuse.lock().unwrap() = vec![ttrpc::Code::INTERNAL; refusals - 1];
    publisher.publish(&exit(1));
    assert_eq!(number(&next(&mut received).await), 1, "offered until it is taken");
    *daemon.refuse.lock().unwrap() = vec![ttrpc::Code::INVALID_ARGUMENT; refusals];
    publisher.publish(&exit(2));
    publisher.publish(&exit(3));
    assert_eq!(
        number(&next(&mut received).await),
        3,
        "the refused event was not dropped"
    );
}

#[tokio::test]
async fn the_queue_keeps_the_newest() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket(&dir);
    let publisher = Publisher::new(path.to_str().unwrap(), "default");
    let count = u32::try_from(QUEUE).unwrap() + 100;
    for event in 0..count {
        publisher.publish(&exit(event));
    }
    // Once the oldest events are dropped, the worker has noticed that containerd is away.
    assert!(!publisher.flush(Duration::from_millis(200)).await);
    let (daemon, mut received) = Daemon::new();
    let _server = daemon.serve(&path).await;
    let mut order = Vec::new();
    while order.last() != Some(&(count - 1)) {
        order.push(number(&next(&mut received).await));
    }
    assert!(order.len() <= QUEUE + 1, "{} events", order.len());
    assert!(order.is_sorted());
    // The event in hand was already being sent; the newest follow without a gap.
    assert_eq!(
        order[1..],
        (count - u32::try_from(order.len()).unwrap() + 1..count).collect::<Vec<_>>()
    );
}

#[tokio::test]
async fn a_daemon_that_never_answers_gets_a_new_connection() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket(&dir);
    let silent = tokio::net::UnixListener::bind(&path).unwrap();
    let publisher = Publisher::new(path.to_str().unwrap(), "default");
    publisher.publish(&exit(9));
    let (connection, _) = tokio::time::timeout(SOON, silent.accept())
        .await
        .unwrap()
        .unwrap();
    let (daemon, mut received) = Daemon::new();
    let _server = daemon.serve(&path).await;
    assert_eq!(number(&next(&mut received).await), 9);
    drop((connection, silent));
}

#[tokio::test]
async fn without_an_address_nothing_waits() {
    let publisher = Publisher::new("", "default");
    publisher.publish(&exit(1));
    assert!(publisher.flush(Duration::ZERO).await);
}
