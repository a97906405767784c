//! The shim's end of the driver worker `firn-gpu`.
//!
//! The shim never loads the driver. A transaction creates one [`Driver`], which starts a worker on first use
//! and ends it when dropped. Every call has a deadline that is enforced here: the driver ignores its own lock
//! timeout when the threads of the process cannot run, so a worker that exceeds the deadline is killed, and
//! the next call starts a new one. The effect of an interrupted call on a process is unknown until
//! [`Driver::states`] was called. Without a process there is nothing to call: no worker is started.

mod pieces;

pub(crate) use pieces::Attached;

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use command_fds::{CommandFdExt, FdMapping};
use firn_config::Deadlines;
use firn_gpu::protocol::{DriverError, ENV_TRANSACTION, GpuMemory, OF_LIBRARY, ProcessReply, Reply, Request};
use firn_gpu::{CudaProcess, CudaState, GpuPair, GpuUuid, Inventory};
use firn_host::procfs;
use firn_host::{Problem, Remedy, remedy};
use firn_process::reaper::{Child, Reaper};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use crate::journal::{Journal, Role};
use crate::recording;

/// Longest reply line that is read, in bytes.
const LINE_LIMIT: u64 = 1 << 20;

/// The shortest limit of an attempt to lock; the driver takes 0 for none.
const LEAST: Duration = Duration::from_millis(100);

/// From here on an attempt is the last one.
const LAST_TRY: Duration = Duration::from_secs(1);

/// How long processes run between two attempts to lock all of them.
const PAUSE: Duration = Duration::from_millis(100);

/// The driver's call that restores GPU state.
const RESTORE: &str = "cuCheckpointProcessRestore";

/// The driver's call that lets a process start no more work.
const LOCK: &str = "cuCheckpointProcessLock";

/// The driver's call that copies GPU state into host memory.
const CHECKPOINT: &str = "cuCheckpointProcessCheckpoint";

/// The library's answer to what it cannot do: CUDA_ERROR_NOT_SUPPORTED.
const SHARED: i32 = 801;

/// The library's answer to pieces that it has not got: CUDA_ERROR_INVALID_VALUE.
const INVALID_VALUE: i32 = 1;

/// The library's call that puts GPU memory back.
const ATTACH: &str = "attach of libfirn_cuda.so";

/// The library's call that lends GPU memory.
const LEND: &str = "lend of libfirn_cuda.so";

/// The driver's answer for what it cannot checkpoint or lock.
const NOT_SUPPORTED: &str = "CUDA_ERROR_NOT_SUPPORTED";

/// The driver's answer to a lock whose time limit has passed.
const TIMED_OUT: &str = "CUDA_ERROR_NOT_READY";

/// The driver's answer if a GPU has not enough memory.
const OUT_OF_MEMORY: &str = "CUDA_ERROR_OUT_OF_MEMORY";

/// A call of the driver worker that failed.
#[derive(Debug, thiserror::Error, Problem)]
pub enum WorkerError {
    /// The worker program could not be started.
    #[error("cannot start the driver worker {program}")]
    #[problem(
        "FIRN-WORKER",
        "install firn-gpu in the shim's directory, or name it under [worker] in the configuration"
    )]
    Start { program: PathBuf, source: io::Error },
    /// The socket to the worker failed.
    #[error("cannot talk to the driver worker")]
    #[problem(SAME_VERSION)]
    Socket(#[from] io::Error),
    /// The worker ended in the middle of a call.
    #[error("the driver worker ended during {op}")]
    #[problem(SAME_VERSION)]
    Died { op: &'static str },
    /// The worker exceeded the deadline and was killed.
    #[error("the driver did not finish {op} within {} s", limit.as_secs_f32())]
    #[problem(raise_deadline(op))]
    Deadline { op: &'static str, limit: Duration },
    /// A killed worker still exists: its call into the driver continues, and another one must not begin.
    #[error("the driver worker {pid} does not end by SIGKILL, its last call is still under way")]
    #[problem(
        "FIRN-GPU-TIMEOUT",
        "the driver hangs in the kernel (state D): dmesg may hold the reason; worker-end under [deadlines] \
         bounds the wait"
    )]
    Stuck { pid: i32 },
    /// The worker's reply is not of the protocol.
    #[error("the driver worker answered {op} with a line that is not understood")]
    #[problem(SAME_VERSION)]
    Protocol {
        op: &'static str,
        source: serde_json::Error,
    },
    /// The restore was not begun: the driver damages the state of a process for which it does not find enough
    /// memory.
    #[error(
        "{gpu} has {} MiB of memory free, and {} MiB are needed",
        free >> 20,
        needed.div_ceil(1 << 20)
    )]
    #[problem(
        "FIRN-GPU-OCCUPIED",
        "end or pause what uses that GPU, which `firn ps` and nvidia-smi list; then resume or restore the \
         container again"
    )]
    NoMemory { gpu: GpuUuid, free: u64, needed: u64 },
    /// The worker refused the request as a whole.
    #[error("{message}")]
    #[problem("FIRN-DRIVER-MISSING", hint)]
    Refused { message: String, hint: String },
    /// The shim may not have so many descriptors.
    #[error("the GPU memory of pid {pid} has more than {room} pieces")]
    #[problem(
        "FIRN-WORKER",
        "raise LimitNOFILE of containerd's service: the shim holds two descriptors of each"
    )]
    ManyPieces { pid: i32, room: usize },
    /// The driver refused one process.
    #[error("pid {pid}")]
    #[problem(driver_remedy(source))]
    Process { pid: i32, source: DriverError },
    /// The driver returned success, but the process is not in the expected state.
    #[error("pid {pid} is {state:?} after {op}")]
    #[problem("FIRN-GPU-STATE", "see whether another tool works on the same process")]
    State {
        pid: i32,
        op: &'static str,
        state: Option<CudaState>,
    },
}

const SAME_VERSION: Remedy<'static> = remedy(
    "FIRN-WORKER",
    "see whether firn-gpu is of the same version as the shim; `firn doctor` checks it",
);
/// Names the key of the deadline.
fn raise_deadline(op: &str) -> Remedy<'static> {
    let hint = match op {
        "inventory" | "memory" => "raise inventory under [deadlines] in /etc/firn/config.toml",
        "discover" => "raise discover under [deadlines] in /etc/firn/config.toml",
        "lock" => "raise gpu-lock under [deadlines] in /etc/firn/config.toml",
        "checkpoint" => "raise gpu-checkpoint under [deadlines] in /etc/firn/config.toml",
        "restore" => "raise gpu-restore under [deadlines] in /etc/firn/config.toml",
        "shut" => "raise gpu-lock under [deadlines] in /etc/firn/config.toml",
        "lend" | "detach" => "raise gpu-checkpoint under [deadlines] in /etc/firn/config.toml",
        "copy" | "attach" => "raise gpu-restore under [deadlines] in /etc/firn/config.toml",
        "unlock" | "open" => "raise gpu-unlock under [deadlines] in /etc/firn/config.toml",
        _ => "raise the phase's time under [deadlines] in /etc/firn/config.toml",
    };
    remedy("FIRN-GPU-TIMEOUT", hint)
}

fn driver_remedy(error: &DriverError) -> Remedy<'static> {
    if error.call == LEND && error.code == SHARED {
        return remedy(
            "FIRN-IPC",
            "it shares GPU memory with another process, which a move cannot take out of both: stop using it \
             together, or start the container without firn.dev/cuda and see what the driver can move",
        );
    }
    if error.call.ends_with(OF_LIBRARY) {
        return remedy(
            "FIRN-CUDA-LIBRARY",
            "see in containerd's log what firn's library in the process has answered, and try again: a \
             stopped process answers nothing",
        );
    }
    match &*error.name {
        NOT_SUPPORTED if error.call == LOCK => remedy(
            "FIRN-GPU-UNSUPPORTED",
            "a profiler may be attached, also one that was stopped (torch.profiler, Nsight; libcupti or \
             libnvperf in /proc/PID/maps): start the process again without it",
        ),
        NOT_SUPPORTED => remedy(
            "FIRN-GPU-UNSUPPORTED",
            "the process uses what this driver cannot checkpoint or restore: managed memory, or memory \
             shared with others",
        ),
        OUT_OF_MEMORY => remedy(
            "FIRN-GPU-OCCUPIED",
            "end or pause what uses that GPU, which `firn ps` and nvidia-smi list",
        ),
        TIMED_OUT => raise_deadline("lock"),
        _ => remedy(
            "FIRN-GPU-DRIVER",
            "the kernel log (dmesg) may hold the driver's reason",
        ),
    }
}

impl WorkerError {
    /// Whether a call took too long: killed here, or timed out in the driver.
    fn is_late(&self) -> bool {
        match self {
            Self::Deadline { .. } => true,
            Self::Process { source, .. } => source.name == TIMED_OUT,
            _ => false,
        }
    }

    /// The process that the driver refuses to checkpoint for what it has, and its answer.
    pub(crate) fn refusal(&self) -> Option<(i32, &str)> {
        match self {
            Self::Process { pid, source } if source.call == CHECKPOINT && source.name == NOT_SUPPORTED => {
                Some((*pid, &source.name))
            }
            _ => None,
        }
    }

    /// Whether a process shares its GPU memory with another one: neither the driver nor firn can move it.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self, Self::Process { source, .. } if source.call == LEND && source.code == SHARED)
    }

    /// Whether a process could not take as many descriptors as it was given.
    pub(crate) fn lacks_descriptors(&self) -> bool {
        matches!(self, Self::Process { source, .. } if source.call == ATTACH && source.code == INVALID_VALUE)
    }

    /// Whether the driver will never restore this GPU state. This was seen after a restore that found too
    /// little memory: it fails, and so does every later one, with the error for a process that has ended
    /// (docs/evidence/gpu-runs.md).
    pub(crate) fn is_final(&self) -> bool {
        match self {
            Self::State { state, .. } => *state == Some(CudaState::Failed),
            Self::Process { source, .. } => {
                let spoilt = ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_OPERATING_SYSTEM"];
                source.call == RESTORE && spoilt.contains(&&*source.name)
            }
            _ => false,
        }
    }
}

/// The driver, accessed through a worker process.
pub struct Driver {
    program: PathBuf,
    reaper: Reaper,
    worker: Option<Worker>,
    /// Killed, and possibly not ended yet.
    dying: Option<Child>,
    deadlines: Deadlines,
    /// Records the worker's pid.
    journal: Option<Journal>,
}

struct Worker {
    child: Child,
    stream: BufReader<UnixStream>,
    /// By which descriptors of GPU memory pass.
    descriptors: OwnedFd,
    is_noted: bool,
}

impl Driver {
    /// A driver whose worker is `program`; nothing is started yet.
    pub fn new(program: PathBuf, reaper: Reaper, deadlines: Deadlines) -> Self {
        Self {
            program,
            reaper,
            worker: None,
            dying: None,
            deadlines,
            journal: None,
        }
    }

    /// Records the pids of its workers in a transaction's journal.
    pub(crate) fn with_journal(self, journal: Journal) -> Self {
        Self {
            journal: Some(journal),
            ..self
        }
    }

    /// Starts the worker, so that its start overlaps with other work.
    pub(crate) fn warm_up(&mut self) -> Result<(), WorkerError> {
        self.worker().map(drop)
    }

    /// Driver version and GPUs of this node.
    pub async fn inventory(&mut self) -> Result<Inventory, WorkerError> {
        let limit = self.deadlines.inventory;
        let (inventory, _) = self.call("inventory", &Request::Inventory, limit).await?;
        inventory.ok_or(WorkerError::Died { op: "inventory" })
    }

    /// Those of `pids` that use CUDA.
    pub async fn discover(&mut self, pids: Vec<i32>) -> Result<Vec<CudaProcess>, WorkerError> {
        let (request, limit) = (Request::Discover { pids }, self.deadlines.discover);
        let (_, replies) = self.call("discover", &request, limit).await?;
        let mut found = Vec::new();
        for reply in replies {
            let pid = reply.pid;
            match (reply.error, reply.restore_tid) {
                (Some(source), _) => return Err(WorkerError::Process { pid, source }),
                (None, Some(restore_tid)) => found.push(CudaProcess { pid, restore_tid }),
                (None, None) => {}
            }
        }
        Ok(found)
    }

    /// GPU memory that these processes use together on each GPU; empty when NVML reports it for none of them.
    pub async fn memory(&mut self, pids: &[i32]) -> Result<GpuMemory, WorkerError> {
        if pids.is_empty() {
            return Ok(GpuMemory::new());
        }
        let request = Request::Memory { pids: pids.to_vec() };
        let (_, replies) = self.call("memory", &request, self.deadlines.inventory).await?;
        let mut together = GpuMemory::new();
        for (gpu, bytes) in replies.into_iter().flat_map(|reply| reply.gpu_memory) {
            let sum = together.entry(gpu).or_default();
            *sum = sum.saturating_add(bytes);
        }
        Ok(together)
    }

    /// State of each process, within a deadline of the caller's; a process that has ended is omitted.
    pub async fn states(
        &mut self,
        pids: &[i32],
        deadline: Duration,
    ) -> Result<Vec<(i32, CudaState)>, WorkerError> {
        if pids.is_empty() {
            return Ok(Vec::new());
        }
        let (op, request) = ("state", Request::State { pids: pids.to_vec() });
        let (_, replies) = self.call(op, &request, deadline).await?;
        let mut states = Vec::new();
        for reply in replies {
            let pid = reply.pid;
            match (reply.state, reply.error) {
                (Some(state), None) => states.push((pid, state)),
                // For a process that has ended the driver returns an error too.
                _ if !procfs::is_alive(pid) => {}
                (_, Some(source)) => return Err(WorkerError::Process { pid, source }),
                (None, None) => return Err(WorkerError::State { pid, op, state: None }),
            }
        }
        Ok(states)
    }

    /// Locks all; afterwards none of them calls into the driver.
    ///
    /// Ranks that wait for each other are locked by the worker, which lets those that are behind run for
    /// moments (`worker/src/ranks/turns.rs`). What it does not lock within most of the deadline is let go, so
    /// that also what a rank waits for outside the GPU comes, and is tried once more.
    pub async fn lock(&mut self, pids: &[i32]) -> Result<(), WorkerError> {
        let deadline = self.deadlines.gpu_lock;
        let end = Instant::now() + deadline;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let is_last = pids.len() < 2 || left <= LAST_TRY;
            let limit = if is_last { left.max(LEAST) } else { left * 3 / 4 };
            match self.try_lock(pids, limit).await {
                Err(error) if !is_last && error.is_late() => {
                    log::debug!("trying the lock again: {error}");
                }
                done => return done,
            }
            let states = self.states(pids, deadline).await?;
            let locked = states.iter().filter(|(_, state)| *state == CudaState::Locked);
            let locked: Vec<i32> = locked.map(|(pid, _)| *pid).collect();
            if !locked.is_empty() {
                self.unlock_within(&locked, deadline).await?;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn try_lock(&mut self, pids: &[i32], deadline: Duration) -> Result<(), WorkerError> {
        let request = Request::Lock {
            pids: pids.to_vec(),
            timeout_ms: u32::try_from(deadline.as_millis()).unwrap_or(u32::MAX),
        };
        // The driver gets the whole deadline; if it exceeds that, the worker is killed a little later.
        let limit = deadline + Duration::from_secs(1);
        self.all("lock", pids, &request, limit, CudaState::Locked).await
    }

    /// Moves the GPU state of all processes into their host memory.
    pub async fn checkpoint(&mut self, pids: &[i32]) -> Result<(), WorkerError> {
        let request = Request::Checkpoint { pids: pids.to_vec() };
        let limit = self.deadlines.gpu_checkpoint;
        self.all("checkpoint", pids, &request, limit, CudaState::Checkpointed)
            .await
    }

    /// Restores the GPU state of all processes, onto other GPUs when `pairs` is not empty. They stay locked.
    ///
    /// Fails before it begins when a GPU has less memory left than the processes of `own`, which are the
    /// container's, had together.
    pub async fn restore(
        &mut self,
        pids: &[i32],
        pairs: &[GpuPair],
        needs: GpuMemory,
        own: Vec<i32>,
    ) -> Result<(), WorkerError> {
        let request = Request::Restore {
            pids: pids.to_vec(),
            pairs: pairs.to_vec(),
            needs,
            own,
        };
        let limit = self.deadlines.gpu_restore;
        self.all("restore", pids, &request, limit, CudaState::Locked)
            .await
    }

    /// Lets all processes call into the driver again.
    pub async fn unlock(&mut self, pids: &[i32]) -> Result<(), WorkerError> {
        self.unlock_within(pids, self.deadlines.gpu_unlock).await
    }

    async fn unlock_within(&mut self, pids: &[i32], limit: Duration) -> Result<(), WorkerError> {
        let request = Request::Unlock { pids: pids.to_vec() };
        self.all("unlock", pids, &request, limit, CudaState::Running)
            .await
    }

    async fn all(
        &mut self,
        op: &'static str,
        pids: &[i32],
        request: &Request,
        deadline: Duration,
        expected: CudaState,
    ) -> Result<(), WorkerError> {
        if pids.is_empty() {
            return Ok(());
        }
        let replies = self.each(op, pids, request, deadline).await?;
        match replies.iter().find(|reply| reply.state != Some(expected)) {
            Some(reply) => Err(WorkerError::State {
                pid: reply.pid,
                op,
                state: reply.state,
            }),
            None => Ok(()),
        }
    }

    async fn call(
        &mut self,
        op: &'static str,
        request: &Request,
        limit: Duration,
    ) -> Result<(Option<Inventory>, Vec<ProcessReply>), WorkerError> {
        let began = Instant::now();
        self.wait_until_gone(self.deadlines.worker_end).await?;
        let journal = self.journal.clone();
        let worker = self.worker()?;
        if let Some(journal) = journal.filter(|_| !worker.is_noted) {
            journal.child(Role::Worker, worker.child.pid()).await;
            worker.is_noted = true;
        }
        let late = |_| Err(WorkerError::Deadline { op, limit });
        let replies = tokio::time::timeout(limit, worker.exchange(op, request)).await;
        let result = replies.unwrap_or_else(late);
        let (ms, ok) = (began.elapsed().as_millis(), result.is_ok());
        log::debug!("driver {op}: {ms} ms, {ok}");
        match result {
            Ok(_) | Err(WorkerError::Refused { .. } | WorkerError::NoMemory { .. }) => {}
            Err(_) => self.end().await,
        }
        result
    }

    fn worker(&mut self) -> Result<&mut Worker, WorkerError> {
        let worker = match self.worker.take() {
            Some(worker) => worker,
            None => Worker::start(&self.program, &self.reaper)?,
        };
        Ok(self.worker.insert(worker))
    }

    /// Kills the worker and waits until it has ended, so that no call of it is in progress any more.
    pub async fn end(&mut self) {
        if let Some(Worker { child, .. }) = self.worker.take() {
            child.kill();
            self.dying = Some(child);
        }
        if let Err(error) = self.wait_until_gone(self.deadlines.worker_end).await {
            log::error!("{error}");
        }
    }

    /// Waits until the worker that was killed last has ended.
    pub async fn wait_until_gone(&mut self, limit: Duration) -> Result<(), WorkerError> {
        let Some(child) = &self.dying else { return Ok(()) };
        let pid = child.pid();
        tokio::time::timeout(limit, child.wait())
            .await
            .map_err(|_| WorkerError::Stuck { pid })?;
        self.dying = None;
        Ok(())
    }
}

impl Worker {
    fn start(program: &Path, reaper: &Reaper) -> Result<Self, WorkerError> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (descriptors, given) =
            socketpair(AddressFamily::UNIX, kind, flags, None).map_err(io::Error::from)?;
        let mut command = Command::new(program);
        // A clean environment: the caller's CUDA_VISIBLE_DEVICES and the like must not hide GPUs.
        command
            .args(["serve", "--fd", "3", "--descriptors", "4"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .env_clear();
        for name in ["PATH", "LD_LIBRARY_PATH"] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        if let Some(recording) = recording::current() {
            command.env(ENV_TRANSACTION, recording.fields());
        }
        let mapping = |parent_fd, child_fd| FdMapping { parent_fd, child_fd };
        let mappings = vec![mapping(OwnedFd::from(theirs), 3), mapping(given, 4)];
        command.fd_mappings(mappings).expect("two numbers");
        let child = reaper.spawn(&mut command).map_err(|source| WorkerError::Start {
            program: program.to_owned(),
            source,
        })?;
        Ok(Self {
            child,
            stream: BufReader::new(UnixStream::from_std(ours)?),
            descriptors,
            is_noted: false,
        })
    }

    async fn exchange(
        &mut self,
        op: &'static str,
        request: &Request,
    ) -> Result<(Option<Inventory>, Vec<ProcessReply>), WorkerError> {
        let protocol = |source| WorkerError::Protocol { op, source };
        let mut line = serde_json::to_vec(request).map_err(protocol)?;
        line.push(b'\n');
        let written = self.stream.get_mut().write_all(&line).await;
        written.map_err(|_| WorkerError::Died { op })?;
        let (mut inventory, mut processes) = (None, Vec::new());
        loop {
            line.clear();
            let mut limited = tokio::io::AsyncReadExt::take(&mut self.stream, LINE_LIMIT);
            if limited.read_until(b'\n', &mut line).await? == 0 {
                return Err(WorkerError::Died { op });
            }
            match serde_json::from_slice(&line).map_err(protocol)? {
                Reply::Inventory { inventory: found } => inventory = Some(found),
                Reply::Process(reply) => processes.push(reply),
                Reply::Done { .. } => return Ok((inventory, processes)),
                Reply::NoMemory { gpu, free, needed } => {
                    return Err(WorkerError::NoMemory { gpu, free, needed });
                }
                Reply::Failed { message, hint } => return Err(WorkerError::Refused { message, hint }),
            }
        }
    }
}

#[cfg(test)]
mod tests;
