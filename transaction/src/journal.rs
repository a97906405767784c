//! The journal of a transaction: what a checkpoint or restore is about to do is on disk before it is done.
//!
//! One file in the bundle, [`FILE`], for as long as the transaction lasts; none when nothing is under way.
//! Each line is one JSON object, written by one call and synced, and is never changed. A last line that is
//! cut short counts as not written.
//!
//! ```text
//! begin                          which operation, on which container, with which image and work directory
//! enter PHASE ... leave PHASE    the intent, and what became of it
//! image                          what the image directory was, before the first file is put there
//! memory                         GPU memory that the processes had when they were locked
//! cuda, child                    processes that the operation touches or has started
//! end                            the outcome; then the file is removed, unless the container is suspended
//! ```
//!
//! It is read by `recovery` after a shim was killed, and by `checkpoint` after a panic.

#[cfg(debug_assertions)]
mod failpoint;
mod record;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use firn_gpu::protocol::GpuMemory;
use firn_host::{Problem, clock};
use firn_preflight::{Inherited, RefusedBefore};
use serde::{Deserialize, Serialize};

pub use self::record::Record;
pub use crate::phase::Operation;
use firn_host::procfs;
use firn_process::blocking::blocking;

use crate::phase::Phase;
use crate::recording;
pub use crate::recording::Origin;
use firn_process::OrWarn;

use crate::steps::{Follower, Step};
use firn_gpu::CudaProcess;

/// A failpoint between two phases: a shim that was built for tests waits here while a test names it.
pub async fn point(name: &str) {
    #[cfg(debug_assertions)]
    failpoint::hold(name).await;
    #[cfg(not(debug_assertions))]
    let _ = name;
}

/// The journal, in the bundle.
pub const FILE: &str = "firn-journal";

/// Format of the lines.
const VERSION: u32 = 1;

/// How long the file system of the bundle may take for a line.
const PATIENCE: Duration = Duration::from_secs(10);

/// Size limit of a journal that is read: more than any transaction writes.
const LIMIT: u64 = 1 << 20;

/// What an image directory was before the dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ImageWas {
    /// There was none.
    Absent,
    /// It held nothing.
    Empty,
    /// It held files.
    Filled,
}

/// Identifies a directory, because its path may name another one later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirId {
    pub dev: u64,
    pub ino: u64,
}

/// A program that works for the transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The OCI runtime; CRIU is in its process group.
    Runc,
    /// The driver worker.
    Worker,
}

/// How a transaction ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It did what the client requested.
    Done,
    /// It failed and was rolled back.
    Failed,
    /// The container has ended meanwhile.
    Ended,
    /// The container is frozen: its GPU state could not be restored yet.
    #[serde(alias = "lost")]
    Suspended,
}

/// What an operation is and works on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begin {
    pub op: Operation,
    pub container: String,
    pub gpu: bool,
    /// The container ends with its dump.
    pub exit: bool,
    pub image: PathBuf,
    pub work: PathBuf,
    /// The work directory is firn's own.
    pub work_is_ours: bool,
    pub was_frozen: bool,
    /// Id of the checkpoint, for the job's hooks.
    #[serde(default)]
    pub checkpoint: String,
}

/// A child of the shim. Its start time distinguishes it from a later process with its pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChildProcess {
    pub role: Role,
    pub pid: i32,
    /// Clock ticks since the boot.
    pub started: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
enum Line {
    Begin {
        version: u32,
        boot: String,
        shim: u32,
        /// When, in milliseconds since 1970; 0 in journals of earlier versions.
        #[serde(default)]
        at: u64,
        /// Empty in journals of earlier versions.
        #[serde(default)]
        origin: String,
        #[serde(flatten)]
        begin: Begin,
    },
    Enter {
        phase: Phase,
        #[serde(default)]
        at: u64,
    },
    Leave {
        phase: Phase,
        ok: bool,
    },
    Image {
        was: ImageWas,
        #[serde(default)]
        id: Option<DirId>,
    },
    Cuda {
        processes: Vec<CudaProcess>,
    },
    /// The complete image is about to be put into a second directory.
    Rescue {
        dir: PathBuf,
    },
    /// GPU memory that the processes had when they were locked.
    Memory {
        gpus: GpuMemory,
    },
    Child(ChildProcess),
    End {
        outcome: Outcome,
        /// Why the container is suspended.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
}

/// The journal cannot be written: nothing may be begun.
#[derive(Debug, thiserror::Error, Problem)]
#[error("cannot write {path}")]
#[problem(
    "FIRN-JOURNAL",
    "see that containerd's state directory is writable and not full"
)]
pub struct JournalError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// The journal of a transaction that is under way; cheap to clone.
#[derive(Clone, Debug)]
pub struct Journal(Arc<Open>);

#[derive(Debug)]
struct Open {
    file: File,
    path: PathBuf,
    /// A line was not written in time. No later line is written, because the late one may still come.
    hangs: AtomicBool,
    /// Who gets the steps of the operation.
    follower: OnceLock<(Operation, Follower)>,
}

impl Journal {
    /// Begins a transaction of the container in `bundle`.
    pub async fn begin(bundle: &Path, begin: Begin) -> Result<Self, JournalError> {
        let (path, dir) = (bundle.join(FILE), bundle.to_owned());
        let at = path.clone();
        let open = move || {
            let mut options = OpenOptions::new();
            let file = options.append(true).create(true).mode(0o600).open(&at)?;
            // Recovery has dealt with an earlier transaction.
            file.set_len(0)?;
            File::open(dir)?.sync_all()?;
            Ok(file)
        };
        let journal = Self::of(path, in_time(open).await)?;
        let line = Line::Begin {
            version: VERSION,
            boot: boot(),
            shim: std::process::id(),
            at: clock::now(),
            origin: recording::current().map_or_else(String::new, |of| of.origin().to_text()),
            begin,
        };
        match journal.write(line).await {
            Ok(()) => Ok(journal),
            Err(error) => {
                // Nothing has begun.
                journal.remove().await;
                Err(error)
            }
        }
    }

    /// Opens the journal of a transaction whose code has panicked, or that has left the container suspended.
    pub async fn resume(bundle: &Path) -> Result<Self, JournalError> {
        let path = bundle.join(FILE);
        let at = path.clone();
        Self::of(
            path,
            in_time(move || OpenOptions::new().append(true).open(at)).await,
        )
    }

    fn of(path: PathBuf, opened: io::Result<File>) -> Result<Self, JournalError> {
        let (hangs, follower) = (AtomicBool::new(false), OnceLock::new());
        match opened {
            Ok(file) => Ok(Self(Arc::new(Open {
                file,
                path,
                hangs,
                follower,
            }))),
            Err(source) => Err(JournalError { path, source }),
        }
    }

    /// Lets the container's follower, if it has one, get the steps from now on.
    pub(crate) fn follow(&self, operation: Operation, follower: Option<&Follower>) {
        if let Some(follower) = follower {
            // A journal is that of one operation.
            let _ = self.0.follower.set((operation, follower.clone()));
        }
    }

    pub(crate) fn step(&self, step: Step<'_>) {
        if let Some((operation, follower)) = self.0.follower.get() {
            follower.step(operation.name(), step);
        }
    }

    /// `phase` is about to begin.
    pub async fn enter(&self, phase: Phase) -> Result<(), JournalError> {
        if let Some(recording) = recording::current() {
            recording.enter(phase);
        }
        let at = clock::now();
        self.write(Line::Enter { phase, at }).await?;
        self.step(Step::Phase(phase));
        #[cfg(debug_assertions)]
        failpoint::trigger(phase).await;
        Ok(())
    }

    /// `phase` is about to begin, which nothing has to recover from.
    pub(crate) fn show(&self, phase: Phase) {
        if let Some(recording) = recording::current() {
            recording.enter(phase);
        }
        self.step(Step::Phase(phase));
    }

    /// The time from now on is that of `phase`, which is a part of the one that was entered, or was shown
    /// already.
    pub(crate) fn measure(&self, phase: Phase) {
        if let Some(recording) = recording::current() {
            recording.enter(phase);
        }
    }

    /// As [`Journal::enter`], for a phase that has to happen also when the journal cannot be written.
    pub async fn enter_anyway(&self, phase: Phase) {
        self.enter(phase).await.or_log();
    }

    /// `phase` has ended, with success or not.
    pub async fn leave(&self, phase: Phase, ok: bool) {
        if !ok && let Some(recording) = recording::current() {
            recording.fail(phase);
        }
        self.note(Line::Leave { phase, ok }).await;
    }

    /// The image directory is about to be written to.
    pub async fn image(&self, was: ImageWas, id: Option<DirId>) -> Result<(), JournalError> {
        self.write(Line::Image { was, id }).await
    }

    /// The complete image is about to be put into a second directory, `dir`.
    pub async fn rescue(&self, dir: &Path) {
        let dir = dir.to_owned();
        self.note(Line::Rescue { dir }).await;
    }

    /// These processes of the container use CUDA and may be locked from now on.
    pub async fn cuda(&self, processes: &[CudaProcess]) -> Result<(), JournalError> {
        let processes = processes.to_vec();
        self.write(Line::Cuda { processes }).await
    }

    /// The memory of each GPU that the processes need when their state is restored.
    pub async fn memory(&self, gpus: &GpuMemory) -> Result<(), JournalError> {
        if let Some(recording) = recording::current() {
            recording.gpu_bytes(gpus.values().sum());
        }
        self.write(Line::Memory { gpus: gpus.clone() }).await
    }

    /// Keeps what processes have inherited for the container's next checkpoint. If that fails, it is refused.
    pub async fn keep_inherited(&self, inherited: Vec<Inherited>) {
        let bundle = self.0.path.parent().unwrap_or(Path::new("/")).to_owned();
        let kept = in_time(move || Inherited::keep(&inherited, &bundle)).await;
        kept.or_warn(format_args!("cannot keep what processes have inherited"));
    }

    /// The driver has refused to checkpoint a process.
    pub async fn keep_refused(&self, pid: i32, answer: &str) {
        let bundle = self.0.path.parent().unwrap_or(Path::new("/")).to_owned();
        let answer = answer.to_owned();
        let kept = in_time(move || RefusedBefore::keep(&bundle, pid, &answer)).await;
        kept.or_warn(format_args!(
            "cannot keep that the driver has refused process {pid}"
        ));
    }

    /// A child works for the transaction.
    pub async fn child(&self, role: Role, pid: i32) {
        // A child that has ended already needs no line.
        if let Some(started) = procfs::started(pid) {
            self.note(Line::Child(ChildProcess { role, pid, started })).await;
        }
    }

    /// The transaction is over.
    pub async fn end(self, outcome: Outcome) {
        self.end_for(outcome, None).await;
    }

    /// As [`Journal::end`], with the reason for which the container is suspended.
    pub async fn end_for(self, outcome: Outcome, reason: Option<String>) {
        self.note(Line::End { outcome, reason }).await;
        // Resume rolls back by this journal.
        if outcome != Outcome::Suspended {
            self.remove().await;
        }
    }

    async fn remove(&self) {
        let path = self.0.path.clone();
        let removed = in_time(move || fs::remove_file(path)).await;
        removed.or_warn(format_args!("cannot remove {}", self.0.path.display()));
    }

    /// Writes a line about what can no longer be refused.
    async fn note(&self, line: Line) {
        self.write(line).await.or_log();
    }

    async fn write(&self, line: Line) -> Result<(), JournalError> {
        let open = self.0.clone();
        let write = move || {
            let mut bytes = serde_json::to_vec(&line)?;
            // Order matters: a write that failed half way has left a line without an end.
            bytes.insert(0, b'\n');
            bytes.push(b'\n');
            (&open.file).write_all(&bytes)?;
            open.file.sync_data()
        };
        let written = if self.0.hangs.load(Ordering::Relaxed) {
            Err(io::ErrorKind::TimedOut.into())
        } else {
            in_time(write).await
        };
        written.map_err(|source| {
            if source.kind() == io::ErrorKind::TimedOut {
                self.0.hangs.store(true, Ordering::Relaxed);
            }
            JournalError {
                path: self.0.path.clone(),
                source,
            }
        })
    }
}

/// Does `work` on the journal's file system. Waits no longer than [`PATIENCE`].
async fn in_time<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    let late = |_| Err(io::ErrorKind::TimedOut.into());
    tokio::time::timeout(PATIENCE, blocking(work))
        .await
        .unwrap_or_else(late)
}

/// The id of this boot of the host. Empty if the kernel does not report it, and then equal to no other boot.
fn boot() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

#[cfg(test)]
mod tests;
