//! Which transaction the code at hand works for: log lines name it, its phases are measured for the history,
//! and its journal states who began it.
//!
//! A call of a client runs [`within_call`]; blocking work that it starts does, too. Code outside of any
//! call, such as unit tests of a phase, finds none and continues.

use std::fs::File;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use firn_host::{UnlessAbsent, clock, open_regular};
use firn_process::OrWarn;
use firn_process::call;
use firn_process::panics::lock;
use serde::{Deserialize, Serialize};

use crate::phase::{Operation, Phase};

/// More phases than a transaction has.
const PHASES: usize = 64;

/// A call of a client.
#[derive(Debug, Default)]
struct Call {
    current: Mutex<Option<Arc<Recording>>>,
}

/// Runs `work` as a call.
pub fn within_call<T>(work: impl Future<Output = T>) -> impl Future<Output = T> {
    call::within(Arc::<Call>::default(), work)
}

/// The transaction of this call; none before it begins.
pub fn current() -> Option<Arc<Recording>> {
    lock(&call::subject::<Call>()?.current).clone()
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
    /// CRIU's log of the call that has failed.
    log: Mutex<Option<File>>,
}

#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) phases: Vec<PhaseTime>,
    /// The phase in progress, and when it began.
    open: Option<(Phase, Instant)>,
    /// A phase has failed: what follows is its rollback.
    has_failed: bool,
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
    if let Some(call) = call::subject::<Call>() {
        *lock(&call.current) = Some(recording.clone());
    }
    recording
}

/// This call works for a transaction that another process has begun and not ended.
pub(crate) fn adopt(origin: &Origin, operation: Operation, container: &str) {
    let of = Recording {
        id: origin.id.clone(),
        ..Recording::of(operation, container, &origin.namespace)
    };
    if let Some(call) = call::subject::<Call>() {
        *lock(&call.current) = Some(Arc::new(of));
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
            log: Mutex::default(),
            measured: Mutex::new(Measured {
                phases: Vec::new(),
                open: None,
                has_failed: false,
                gpu_bytes: 0,
                image_bytes: 0,
            }),
        }
    }

    /// As log lines have it.
    pub fn fields(&self) -> String {
        format!("container={} transaction={}", self.container, self.id)
    }

    /// Has the history keep CRIU's log, also if its directory is removed meanwhile.
    pub(crate) fn keep_log(&self, log: &Path) {
        let opened = open_regular(log).if_present();
        let opened = opened.or_warn(format_args!("cannot keep CRIU's log"));
        *lock(&self.log) = opened.flatten();
    }

    /// The log that the history is to keep.
    pub fn take_log(&self) -> Option<File> {
        lock(&self.log).take()
    }

    /// What the journal keeps, for a shim that is killed.
    pub(crate) fn origin(&self) -> Origin {
        Origin {
            id: self.id.clone(),
            namespace: self.namespace.clone(),
        }
    }

    /// `phase` begins, and the one in progress has ended. A phase that is in progress already continues. A
    /// rollback begins because the phase in progress has failed.
    pub(crate) fn enter(&self, phase: Phase) {
        let mut measured = lock(&self.measured);
        if measured.open.is_none_or(|(open, _)| open != phase) {
            let is_rollback = phase == Phase::Rollback;
            let failed = is_rollback && !measured.has_failed;
            self.close(&mut measured, failed);
            measured.has_failed |= is_rollback;
            measured.open = Some((phase, Instant::now()));
        }
    }

    /// The phase in progress has failed: `phase`, or one that only divides its time.
    pub(crate) fn fail(&self, phase: Phase) {
        let mut measured = lock(&self.measured);
        if let Some((open, _)) = &mut measured.open
            && matches!(open, Phase::Inspect | Phase::Freeze)
        {
            *open = phase;
        }
        self.close(&mut measured, true);
    }

    /// The phase in progress has failed, and what follows makes up for it.
    pub(crate) fn fail_open(&self) {
        self.close(&mut lock(&self.measured), true);
    }

    /// The phases are over, with success or not. A transaction that fails without a phase that has failed
    /// has failed in the phase in progress.
    pub(crate) fn end(&self, ok: bool) {
        let mut measured = lock(&self.measured);
        let failed = !ok && !measured.has_failed;
        self.close(&mut measured, failed);
    }

    fn close(&self, measured: &mut Measured, failed: bool) {
        let Some((phase, begun)) = measured.open.take() else {
            return;
        };
        let ms = millis(begun.elapsed());
        let (op, container, name) = (self.operation.name(), &self.container, phase.name());
        log::info!("op={op} container={container} phase={name} ms={ms:.1}");
        measured.has_failed |= failed;
        if measured.phases.len() < PHASES {
            measured.phases.push(PhaseTime {
                name: name.to_owned(),
                at_ms: millis(begun.duration_since(self.begun)),
                ms,
                failed,
            });
        }
    }

    pub(crate) fn gpu_bytes(&self, bytes: u64) {
        lock(&self.measured).gpu_bytes = bytes;
    }

    pub(crate) fn image_bytes(&self, bytes: u64) {
        lock(&self.measured).image_bytes = bytes;
    }
}
