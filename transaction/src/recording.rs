//! Which transaction the code at hand works for: log lines name it, its phases are measured for the history,
//! and its journal states who began it.
//!
//! A call of a client runs [`within_call`]; blocking work that it starts does, too. Code outside of any
//! call, such as unit tests of a phase, finds none and continues.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use firn_host::clock;
use serde::{Deserialize, Serialize};

use crate::panics::lock;
use crate::phase::{Operation, Phase};

tokio::task_local! {
    static CALL: Arc<Call>;
}

/// More phases than a transaction has.
const PHASES: usize = 64;

/// A call of a client.
#[derive(Debug, Default)]
struct Call {
    current: Mutex<Option<Arc<Recording>>>,
}

/// Runs `work` as a call.
pub fn within_call<T>(work: impl Future<Output = T>) -> impl Future<Output = T> {
    CALL.scope(Arc::default(), work)
}

/// Runs blocking work on another thread as part of the call that has started it.
pub(crate) fn inherit<T>(work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let call = CALL.try_with(Arc::clone);
    move || match call {
        Ok(call) => CALL.sync_scope(call, work),
        Err(_) => work(),
    }
}

/// The transaction of this call; none before it begins.
pub fn current() -> Option<Arc<Recording>> {
    CALL.try_with(|call| lock(&call.current).clone()).ok().flatten()
}

/// Whose transaction it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Random id of the transaction.
    pub id: String,
    /// containerd's namespace.
    pub namespace: String,
}

impl Origin {
    /// As one text: none of its parts has spaces.
    pub(crate) fn to_text(&self) -> String {
        format!("{} {}", self.id, self.namespace)
    }

    pub(crate) fn of_text(text: &str) -> Option<Self> {
        let (id, rest) = text.split_once(' ')?;
        // An earlier firn has written more.
        let namespace = rest.split(' ').next()?;
        Some(Self {
            id: id.to_owned(),
            namespace: namespace.to_owned(),
        })
    }
}

/// A phase of a transaction.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PhaseTime {
    pub name: String,
    /// When it began, after the transaction's begin.
    pub at_ms: f64,
    pub ms: f64,
    /// It is the phase that has failed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
}

/// A transaction in progress.
#[derive(Debug)]
pub struct Recording {
    pub id: String,
    pub operation: Operation,
    pub container: String,
    pub(crate) namespace: String,
    pub(crate) at: u64,
    pub(crate) begun: Instant,
    pub(crate) measured: Mutex<Measured>,
}

#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) phases: Vec<PhaseTime>,
    /// When the last phase ended.
    last: Instant,
    /// The phase that was entered and has not ended.
    pub(crate) open: Option<Phase>,
    pub(crate) gpu_bytes: u64,
    pub(crate) image_bytes: u64,
}

pub(crate) fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// A random id.
pub(crate) fn new_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default();
    id.trim().to_owned()
}

/// A transaction begins in this call.
pub fn begin(operation: Operation, container: &str, namespace: &str) -> Arc<Recording> {
    let recording = Arc::new(Recording::of(operation, container, namespace));
    // Outside of a call there is no log line to name it.
    let _ = CALL.try_with(|call| *lock(&call.current) = Some(recording.clone()));
    recording
}

/// This call works for a transaction that another process has begun and not ended.
pub(crate) fn adopt(origin: &Origin, operation: Operation, container: &str) {
    let of = Recording {
        id: origin.id.clone(),
        ..Recording::of(operation, container, &origin.namespace)
    };
    let _ = CALL.try_with(|call| *lock(&call.current) = Some(Arc::new(of)));
}

impl Measured {
    pub(crate) fn push(&mut self, begun: Instant, phase: Phase, failed: bool) {
        let now = Instant::now();
        if self.phases.len() < PHASES {
            self.phases.push(PhaseTime {
                name: phase.name().to_owned(),
                at_ms: millis(self.last.duration_since(begun)),
                ms: millis(now.duration_since(self.last)),
                failed,
            });
        }
        self.last = now;
        // A part of the open phase leaves it open.
        self.open = self.open.filter(|open| *open != phase);
    }
}

impl Recording {
    fn of(operation: Operation, container: &str, namespace: &str) -> Self {
        let now = Instant::now();
        Self {
            id: new_id(),
            operation,
            container: container.to_owned(),
            namespace: namespace.to_owned(),
            at: clock::now(),
            begun: now,
            measured: Mutex::new(Measured {
                phases: Vec::new(),
                last: now,
                open: None,
                gpu_bytes: 0,
                image_bytes: 0,
            }),
        }
    }

    /// As log lines have it.
    pub fn fields(&self) -> String {
        format!("container={} transaction={}", self.container, self.id)
    }

    /// What the journal keeps, for a shim that is killed.
    pub(crate) fn origin(&self) -> Origin {
        Origin {
            id: self.id.clone(),
            namespace: self.namespace.clone(),
        }
    }

    /// `phase` begins. A rollback ends the phase that was open: that one has failed.
    pub(crate) fn enter(&self, phase: Phase) {
        let mut measured = lock(&self.measured);
        match measured.open {
            Some(open) if phase == Phase::Rollback => measured.push(self.begun, open, true),
            _ => {}
        }
        measured.open = Some(phase);
    }

    /// `phase` has ended; it has taken the time since the last one.
    pub(crate) fn mark(&self, phase: Phase) {
        lock(&self.measured).push(self.begun, phase, false);
    }

    pub(crate) fn gpu_bytes(&self, bytes: u64) {
        lock(&self.measured).gpu_bytes = bytes;
    }

    pub(crate) fn image_bytes(&self, bytes: u64) {
        lock(&self.measured).image_bytes = bytes;
    }
}
