//! GPU memory leaves its processes by firn's library in them, before the driver is called, and comes back.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use firn_gpu::protocol::GpuMemory;
use firn_gpu::{CudaProcess, GpuPair, GpuUuid};
use firn_host::{Chain, descriptors};
use firn_process::OrWarn;
use firn_process::blocking::blocking;
use firn_process::pidfd::Life;
use rustix::process::{Resource, getrlimit};
use tokio::time::timeout;

use super::{ContainerEffects, unless_cancelled};
use crate::checkpoint::error::EffectError;
use crate::driver::{Attached, WorkerError};
use crate::interposer;
use crate::journal::Operation;
use crate::phase::Phase;
use crate::pieces::{Lent, Pieces};

/// How long processes that may wait for each other stand still for each step: a thread that is in the driver
/// may wait for a process whose gate is shut.
const TOGETHER: Duration = Duration::from_secs(1);

/// The largest piece that firn's library makes: what comes back is there twice for a moment.
const LARGEST: u64 = 1 << 30;

/// Memory of a process on a GPU that is left when all pieces are out: its context. Another allocation of the
/// driver's own that it loses where GPUs reach each other's memory has 512 MiB or more
/// (docs/evidence/gpu-runs.md).
const CONTEXT: u64 = 900 << 20;

/// Descriptors that the shim needs for all else.
const RESERVED: u64 = 256;

/// What is kept of a process whose memory has come back as if it were another one's.
const NO_ROOM: &str = "no room on its GPU at its last move";

impl ContainerEffects<'_> {
    /// Whether GPU memory leaves the processes before the driver is called.
    fn detaches(&self) -> bool {
        let transaction = self.transaction;
        transaction.operation == Operation::Move
            && transaction.container.traits.interposed
            && !transaction.was_frozen
            && !self.progress.is_detach_tried
    }

    /// The processes whose GPU memory is out of them, or is to leave them.
    pub(super) fn taken_out(&self, cuda: &[CudaProcess]) -> Vec<i32> {
        if self.detaches() {
            cuda.iter().map(|process| process.pid).collect()
        } else if self.progress.is_context_left {
            self.transaction.container.without_memory()
        } else {
            Vec::new()
        }
    }

    /// Takes the memory out of the processes that have the library. What it cannot take the driver copies, if
    /// it can.
    pub(super) async fn detach(&mut self, pids: &[i32]) -> Result<(), EffectError> {
        if !self.detaches() || pids.is_empty() {
            return Ok(());
        }
        self.transaction.journal.show(Phase::GpuDetach);
        let taken_out = self.take_out(pids).await;
        self.progress.is_detach_tried = true;
        match taken_out {
            Err(EffectError::Gpu(error)) if !error.is_shared() || pids.len() == 1 => {
                let id = &self.transaction.container.id;
                log::warn!("the driver copies the GPU memory of {id}: {}", Chain(&error));
                // Nothing is out, unless the library has failed half way.
                self.attach().await?;
            }
            taken_out => taken_out?,
        }
        self.progress.is_context_left = self.is_context_left(pids).await?;
        if !self.progress.is_context_left {
            let (all, cuda) = (self.cgroup.pids()?, self.progress.cuda.clone());
            self.refuse_by_process(&all, &cuda, self.may_run()).await?;
            self.refuse_by_environment(all, &cuda).await?;
        }
        Ok(())
    }

    /// Whether all processes have next to nothing left but their contexts. False also where NVML does not
    /// report it.
    async fn is_context_left(&mut self, pids: &[i32]) -> Result<bool, EffectError> {
        if self.transaction.container.without_memory().len() < pids.len() {
            return Ok(false);
        }
        let left = unless_cancelled(self.transaction.cancel(), self.gpu.memory(pids)).await?;
        Ok(!left.is_empty() && left.values().all(|bytes| *bytes <= CONTEXT))
    }

    async fn take_out(&mut self, pids: &[i32]) -> Result<(), EffectError> {
        let container = self.transaction.container;
        if container.has_pieces() {
            return Err(EffectError::Split);
        }
        let library = interposer::copy_of(&container.bundle);
        let processes = match self.lend(pids, &library).await {
            Ok(processes) => processes,
            Err(error) => {
                self.open(pids, &library).await;
                return Err(error);
            }
        };
        if processes.is_empty() {
            return Ok(());
        }
        let gpus = self.source().gpus.iter();
        let pieces = Pieces {
            library: library.clone(),
            home: gpus.map(|gpu| gpu.uuid.clone()).collect(),
            copied_to: Vec::new(),
            processes,
        };
        let pids = pieces.pids();
        // Order matters: nobody else keeps the memory once it is out.
        container.put_pieces(pieces);
        unless_cancelled(self.transaction.cancel(), self.gpu.detach(&pids, &library)).await
    }

    /// Shuts the gates of these processes. Returns those that have the library, with descriptors of their
    /// memory.
    async fn lend(&mut self, pids: &[i32], library: &Path) -> Result<Vec<Lent>, EffectError> {
        let (cancel, deadlines) = (self.transaction.cancel(), &self.transaction.config.deadlines);
        let wait = match pids {
            [_] => deadlines.gpu_lock,
            _ => TOGETHER.min(deadlines.gpu_lock),
        };
        let shut = unless_cancelled(cancel, self.gpu.shut(pids, library, wait)).await?;
        let until = Instant::now() + deadlines.gpu_checkpoint;
        let mut room = room_for_pieces();
        let mut processes = Vec::new();
        for pid in shut {
            let life = Life::of(pid).map_err(WorkerError::from)?;
            let lent = self.gpu.lend(pid, library, room, until);
            let lent = unless_cancelled(cancel, lent).await?;
            room = room.saturating_sub(lent.len());
            processes.push(Lent::new(pid, life, lent));
        }
        Ok(processes)
    }

    /// Opens gates that were shut. Those of which firn asks nothing more open by themselves.
    async fn open(&mut self, pids: &[i32], library: &Path) {
        let opened = unless_cancelled(self.transaction.cancel(), self.gpu.open(pids, library)).await;
        opened.or_warn(format_args!("a process may wait some seconds for the driver"));
    }

    /// Puts memory back that was taken out, if there is any, and lets the processes call the driver again.
    pub(super) async fn attach(&mut self) -> Result<(), EffectError> {
        let Some(mut held) = self.transaction.container.hold_pieces() else {
            return Ok(());
        };
        self.transaction.journal.show(Phase::GpuAttach);
        let deadlines = &self.transaction.config.deadlines;
        let (until, limit) = (Instant::now() + deadlines.gpu_restore, deadlines.gpu_unlock);
        let pieces = held.pieces();
        pieces.processes.retain(|lent| !lent.life.is_over());
        for lent in &mut pieces.processes {
            let mut most = descriptors::MOST;
            while !lent.pieces.is_empty() {
                let count = lent.next(most);
                let first = lent.first(count);
                let attached = self
                    .gpu
                    .attach(lent.pid, &pieces.library, lent.from, &first, until);
                match unless_cancelled(self.transaction.cancel(), attached).await {
                    Ok(Attached::Gone) => free(lent.take_first(usize::MAX), limit).await,
                    Ok(attached) => {
                        if attached == Attached::Imported {
                            // Its memory cannot leave it again, and the driver would lose it.
                            let journal = &self.transaction.journal;
                            journal.keep_refused(lent.pid, NO_ROOM).await;
                        }
                        free(lent.take_first(count), limit).await;
                    }
                    // It has not so many descriptors free.
                    Err(EffectError::Gpu(error)) if count > 1 && error.lacks_descriptors() => {
                        most = count / 2
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        pieces.processes.retain(|lent| !lent.life.is_over());
        let pids = pieces.pids();
        let opened = self.gpu.open(&pids, &pieces.library);
        unless_cancelled(self.transaction.cancel(), opened).await?;
        held.forget();
        Ok(())
    }

    /// Makes the worker ready to copy memory onto these GPUs, if they have room for it: both take their time.
    /// The driver copies where they do not, and where the container has not had them.
    pub(in crate::checkpoint) async fn prepare_copies(
        &mut self,
        pairs: &[GpuPair],
    ) -> Result<(), EffectError> {
        if !self.detaches() {
            return Ok(());
        }
        // A process imports no memory of a GPU that it has only by a restore: seen of driver 580.
        if !is_exchange(pairs) || self.transaction.container.has_other_gpus() {
            self.progress.is_detach_tried = true;
            return Ok(());
        }
        match self.try_prepare_copies(pairs).await {
            Ok(()) => Ok(()),
            Err(EffectError::Killed) => Err(EffectError::Killed),
            Err(error) => {
                let id = &self.transaction.container.id;
                log::warn!("the driver copies the GPU memory of {id}: {}", Chain(&error));
                self.progress.is_detach_tried = true;
                Ok(())
            }
        }
    }

    async fn try_prepare_copies(&mut self, pairs: &[GpuPair]) -> Result<(), EffectError> {
        let pids = self.cgroup.pids()?;
        let memory = unless_cancelled(self.transaction.cancel(), self.gpu.memory(&pids)).await?;
        let inventory = unless_cancelled(self.transaction.cancel(), self.gpu.inventory()).await?;
        for (gpu, needed) in needed_on(pairs, &memory) {
            let found = inventory.gpus.iter().find(|found| found.uuid == gpu);
            if let Some(free) = found.map(|gpu| gpu.memory_free).filter(|free| *free < needed) {
                return Err(WorkerError::NoMemory { gpu, free, needed }.into());
            }
        }
        let init = self.transaction.container.init.pid();
        let until = Instant::now() + self.transaction.config.deadlines.gpu_restore;
        unless_cancelled(self.transaction.cancel(), self.gpu.copy(init, pairs, &[], until)).await?;
        Ok(())
    }

    /// Copies memory that is out of the processes onto the container's GPUs of now, if they are others.
    pub(in crate::checkpoint) async fn copy_pieces(&mut self) -> Result<(), EffectError> {
        let held = self.transaction.container.hold_pieces();
        let Some((mut held, parked)) = held.zip(self.progress.parked.as_ref()) else {
            return Ok(());
        };
        let pieces = held.pieces();
        let gpus: Vec<GpuUuid> = parked.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        if pieces.copied_to == gpus {
            return Ok(());
        }
        free(pieces.take_copies(), self.transaction.config.deadlines.gpu_unlock).await;
        let pairs = parked.pairs_from(&pieces.home);
        if pairs.is_empty() {
            return Ok(());
        }
        let until = Instant::now() + self.transaction.config.deadlines.gpu_restore;
        for lent in &mut pieces.processes {
            let mut from = 0;
            while from < lent.pieces.len() {
                let next = lent.pieces.iter().skip(from).take(descriptors::MOST);
                let next: Vec<_> = next.map(|piece| (piece.bytes, piece.lent.as_fd())).collect();
                let copied = self.gpu.copy(lent.pid, &pairs, &next, until);
                let copies = unless_cancelled(self.transaction.cancel(), copied).await?;
                let count = next.len();
                lent.put_copies(from, copies);
                from += count;
            }
        }
        pieces.copied_to = gpus;
        Ok(())
    }
}

/// Whether no GPU is new.
pub(in crate::checkpoint) fn is_exchange(pairs: &[GpuPair]) -> bool {
    let had = |new: &GpuUuid| pairs.iter().any(|pair| pair.old == *new);
    pairs.iter().all(|pair| had(&pair.new))
}

/// How many pieces the shim may hold, with a copy of each.
fn room_for_pieces() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit.saturating_sub(RESERVED) / 2).unwrap_or(usize::MAX)
}

/// The bytes that each new GPU needs for the memory of the old one.
fn needed_on(pairs: &[GpuPair], memory: &GpuMemory) -> Vec<(GpuUuid, u64)> {
    let moved = pairs.iter().filter(|pair| pair.old != pair.new);
    let needed = |pair: &GpuPair| {
        let bytes = *memory.get(&pair.old)?;
        Some((pair.new.clone(), bytes.saturating_add(bytes.min(LARGEST))))
    };
    moved.filter_map(needed).collect()
}

/// Drops descriptors, which may free GPU memory. What the driver frees later than this is not waited for.
async fn free<T: Send + 'static>(descriptors: T, limit: Duration) {
    let freed = timeout(limit, blocking(move || drop(descriptors))).await;
    freed.or_warn(format_args!("the driver takes its time to free GPU memory"));
}
