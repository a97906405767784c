//! The session with the shim.
//!
//! Two kinds of threads next to the main one, which only reads: one that carries out requests in their order,
//! and, while a request on processes is in flight, one per process. Replies are whole lines under one lock.

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};
use std::thread;

use super::discover::{self, Sign};
use super::interposed::Interposed;
use super::node::{Node, Refusal};
use super::ranks;
use crate::cuda::{Checkpointer, Copier, Driver, INIT, NOT_INITIALIZED, OPERATING_SYSTEM};
use firn_gpu::GpuPair;
use firn_gpu::protocol::{DriverError, GpuMemory, PiecesRequest, ProcessReply, Reply, Request};
use firn_host::{Chain, descriptors};

/// Longest request in bytes; a pid takes 8 at most, a pair 100.
const LINE_LIMIT: usize = 1 << 20;

/// What a process takes of a GPU beyond the bytes that NVML reports for it: 6 MiB on an H100 with driver 580.
const OVERHEAD: u64 = 16 << 20;

/// A line that was read.
enum Line {
    Whole(Vec<u8>),
    /// Longer than the limit; the rest of the stream cannot be trusted.
    TooLong,
}

/// Serves `socket` until its other end is closed, and does not wait for calls that are still in the driver
/// then.
pub(super) fn serve(socket: UnixStream, descriptors: Option<OwnedFd>, node: Node) -> io::Result<()> {
    let replies = Mutex::new(socket.try_clone()?);
    let (queue, requests) = mpsc::channel();
    thread::Builder::new().name("requests".into()).spawn(move || {
        let session = Session {
            node,
            replies,
            descriptors,
            copier: OnceLock::new(),
        };
        for line in requests {
            session.answer(line);
        }
    })?;

    let mut reader = BufReader::new(socket);
    while let Some(line) = read_line(&mut reader)? {
        let last = matches!(line, Line::TooLong);
        // The receiver lives as long as the process: see the rule about panics in the module head of
        // `worker`.
        if queue.send(line).is_err() || last {
            break;
        }
    }
    // After a line that was too long the answer to it is still due; nothing else is read.
    io::copy(&mut reader, &mut io::sink())?;
    Ok(())
}

fn read_line(reader: &mut impl BufRead) -> io::Result<Option<Line>> {
    let mut line = Vec::new();
    let limit = u64::try_from(LINE_LIMIT).unwrap_or(u64::MAX);
    if reader.take(limit + 1).read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    if line.len() > LINE_LIMIT {
        return Ok(Some(Line::TooLong));
    }
    // A line without its end was cut off with the shim that wrote it.
    Ok(line.ends_with(b"\n").then_some(Line::Whole(line)))
}

struct Session {
    node: Node,
    /// Takes the replies to the shim.
    replies: Mutex<UnixStream>,
    /// By which descriptors of GPU memory pass.
    descriptors: Option<OwnedFd>,
    copier: OnceLock<Copier>,
}

impl Session {
    fn send(&self, replies: &[Reply]) {
        let mut text = Vec::new();
        for reply in replies {
            // Writing plain data to memory does not fail; a line lost here would show as a missing answer.
            if serde_json::to_writer(&mut text, reply).is_ok() {
                text.push(b'\n');
            }
        }
        let mut socket = self.replies.lock().unwrap_or_else(PoisonError::into_inner);
        if socket.write_all(&text).is_err() {
            // Nobody listens any more: let the main thread see the end of the stream.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn answer(&self, line: Line) {
        let last = match self.carry_out(&line) {
            Ok(()) => Reply::Done {},
            Err(Refusal::NoMemory { gpu, free, needed }) => Reply::NoMemory { gpu, free, needed },
            Err(refusal) => Reply::Failed {
                message: Chain(&refusal).to_string(),
                hint: refusal.hint().to_owned(),
            },
        };
        self.send(&[last]);
    }

    fn carry_out(&self, line: &Line) -> Result<(), Refusal<'_>> {
        let request = match line {
            Line::Whole(line) => serde_json::from_slice(line).map_err(Refusal::Malformed)?,
            Line::TooLong => return Err(Refusal::TooLong { limit: LINE_LIMIT }),
        };
        match request {
            Request::Inventory => {
                let inventory = self.node.inventory()?;
                self.send(&[Reply::Inventory { inventory }]);
                Ok(())
            }
            Request::Discover { pids } => self.discover(&distinct(pids)?),
            Request::Memory { pids } => self.memory(&distinct(pids)?),
            Request::State { pids } => self.each(&distinct(pids)?, |ask, pid| ask.state(pid)),
            Request::Lock { pids, timeout_ms } => self.lock(&distinct(pids)?, timeout_ms),
            Request::Checkpoint { pids } => self.each(&distinct(pids)?, |ask, pid| {
                ask.change(pid, |c| c.checkpoint(pid))
            }),
            Request::Restore {
                pids,
                pairs,
                needs,
                own,
            } => {
                let pids = distinct(pids)?;
                self.expect_memory(&pids, &own, &needs)?;
                self.ready_for_restore(&pairs)?;
                self.each(&pids, |ask, pid| ask.change(pid, |c| c.restore(pid, &pairs)))
            }
            Request::Unlock { pids } => {
                self.each(&distinct(pids)?, |ask, pid| ask.change(pid, |c| c.unlock(pid)))
            }
            Request::Pieces(request) => self.carry_out_pieces(request),
        }
    }

    /// As [`Session::carry_out`], about memory that leaves its processes.
    fn carry_out_pieces(&self, request: PiecesRequest) -> Result<(), Refusal<'_>> {
        match request {
            PiecesRequest::Shut {
                pids,
                library,
                wait_ms,
            } => {
                let library = Interposed::read(&library)?;
                self.each(&distinct(pids)?, |_, pid| library.shut(pid, wait_ms))
            }
            PiecesRequest::Lend {
                pid,
                library,
                from,
                wait_ms,
            } => {
                let (reply, pieces) = Interposed::read(&library)?.lend(&self.node, pid, from, wait_ms);
                self.pass(&pieces)?;
                self.send(&[Reply::Process(reply)]);
                Ok(())
            }
            PiecesRequest::Detach {
                pids,
                library,
                wait_ms,
            } => {
                let library = Interposed::read(&library)?;
                self.each(&distinct(pids)?, |_, pid| library.detach(pid, wait_ms))
            }
            PiecesRequest::Attach {
                pid,
                library,
                from,
                count,
                wait_ms,
            } => {
                let pieces = self.passed(count)?;
                let reply = Interposed::read(&library)?.attach(pid, from, &pieces, wait_ms);
                self.send(&[Reply::Process(reply)]);
                Ok(())
            }
            PiecesRequest::Open { pids, library } => {
                let library = Interposed::read(&library)?;
                self.each(&distinct(pids)?, |_, pid| library.open(pid))
            }
            PiecesRequest::Copy { pid, pairs, bytes } => {
                let pieces = self.passed(bytes.len())?;
                self.copy(pid, &pairs, pieces.into_iter().zip(bytes))
            }
        }
    }

    /// Copies pieces that have so many bytes; with none of them all is made ready for that.
    fn copy(
        &self,
        pid: i32,
        pairs: &[GpuPair],
        pieces: impl Iterator<Item = (OwnedFd, u64)>,
    ) -> Result<(), Refusal<'_>> {
        let copier = match self.copier.get() {
            Some(copier) => copier,
            None => {
                let (driver, _) = self.node.checkpointer()?;
                self.node.init(driver).map_err(Refusal::Init)?;
                let copier = Copier::open().map_err(Refusal::Copier)?;
                self.copier.get_or_init(|| copier)
            }
        };
        let copied = copier.warm_up(pairs).and_then(|()| {
            pieces
                .map(|(piece, bytes)| copier.copy(piece, bytes, pairs))
                .collect::<Result<Vec<OwnedFd>, DriverError>>()
        });
        let reply = match copied {
            Ok(copies) => {
                self.pass(&copies)?;
                ProcessReply::of(pid)
            }
            Err(error) => ProcessReply::failed(pid, error),
        };
        self.send(&[Reply::Process(reply)]);
        Ok(())
    }

    /// Sends descriptors to the shim; nothing if there are none.
    fn pass(&self, pieces: &[OwnedFd]) -> Result<(), Refusal<'_>> {
        if pieces.is_empty() {
            return Ok(());
        }
        let socket = self.descriptors.as_ref().ok_or(Refusal::NoSocket)?;
        descriptors::send(socket, b"pieces", pieces).map_err(Refusal::Descriptors)
    }

    /// The descriptors that came before the request, which is for so many.
    fn passed(&self, count: usize) -> Result<Vec<OwnedFd>, Refusal<'_>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let socket = self.descriptors.as_ref().ok_or(Refusal::NoSocket)?;
        let message = descriptors::receive(socket, &mut [0; 8]).map_err(Refusal::Descriptors)?;
        let passed = message.map(|(_, descriptors)| descriptors).unwrap_or_default();
        if passed.len() == count {
            Ok(passed)
        } else {
            Err(Refusal::Descriptors(io::ErrorKind::InvalidData.into()))
        }
    }

    /// Asks the driver about those processes that may use CUDA; the others are answered for without it.
    fn discover(&self, pids: &[i32]) -> Result<(), Refusal<'_>> {
        let sign = |pid: &i32| discover::sign(&self.node.proc_root, *pid);
        let signs: Vec<Sign> = pids.iter().map(sign).collect();
        let uses_gpu = signs.contains(&Sign::Device);
        // A process may have libcuda loaded on a node without GPUs; it is no error as long as none is used.
        let is_asked = uses_gpu || signs.contains(&Sign::Library) && self.node.checkpointer().is_ok();
        let (mut candidates, mut plain) = (Vec::new(), Vec::new());
        for (&pid, sign) in pids.iter().zip(signs) {
            if is_asked && sign != Sign::None {
                candidates.push(pid)
            } else {
                plain.push(Reply::Process(ProcessReply::of(pid)))
            }
        }
        self.send(&plain);
        if candidates.is_empty() {
            return Ok(());
        }
        self.each(&candidates, |ask, pid| ask.discover(pid))
    }

    /// What NVML reports about these processes.
    fn memory(&self, pids: &[i32]) -> Result<(), Refusal<'_>> {
        let used = self.node.libraries.nvml().and_then(|nvml| nvml.memory_in_use());
        let mut used = used.map_err(Refusal::Nvml)?;
        let reply = |&pid: &i32| {
            Reply::Process(ProcessReply {
                gpu_memory: used.remove(&pid).unwrap_or_default(),
                ..ProcessReply::of(pid)
            })
        };
        let replies: Vec<Reply> = pids.iter().map(reply).collect();
        self.send(&replies);
        Ok(())
    }

    /// Refuses a restore onto a GPU without room for it. What NVML does not report is no reason to refuse.
    fn expect_memory(&self, pids: &[i32], own: &[i32], needs: &GpuMemory) -> Result<(), Refusal<'static>> {
        if needs.is_empty() {
            return Ok(());
        }
        let Ok(nvml) = self.node.libraries.nvml() else {
            return Ok(());
        };
        let (Ok(gpus), Ok(used)) = (nvml.gpus(), nvml.memory_in_use()) else {
            return Ok(());
        };
        for gpu in gpus.into_iter().flatten() {
            let Some(&bytes) = needs.get(&gpu.uuid) else {
                continue;
            };
            let mut has_others = false;
            // Of the memory that is needed, what processes of the container have still, or have again.
            let mut held = 0u64;
            for (pid, memory) in &used {
                let Some(&bytes) = memory.get(&gpu.uuid) else {
                    continue;
                };
                if own.contains(pid) || pids.contains(pid) {
                    held = held.saturating_add(bytes)
                } else {
                    has_others = true
                }
            }
            // What others leave must do for all of it; a GPU that nobody else uses had room for it before.
            let margin = if has_others { OVERHEAD } else { 0 };
            let needed = bytes.saturating_sub(held).saturating_add(margin);
            if gpu.memory_free < needed {
                return Err(Refusal::NoMemory {
                    gpu: gpu.uuid,
                    free: gpu.memory_free,
                    needed,
                });
            }
        }
        Ok(())
    }

    /// cuInit where the driver's restore demands it.
    fn ready_for_restore(&self, pairs: &[GpuPair]) -> Result<(), Refusal<'_>> {
        if self.is_persistent(pairs) {
            return Ok(());
        }
        let (driver, _) = self.node.checkpointer()?;
        self.node.init(driver).map_err(Refusal::Init)
    }

    /// Whether every GPU that a restore with `pairs` may go to is known to have persistence mode on.
    fn is_persistent(&self, pairs: &[GpuPair]) -> bool {
        let Ok(gpus) = self.node.libraries.nvml().and_then(|nvml| nvml.gpus()) else {
            return false;
        };
        gpus.iter().all(|gpu| match gpu {
            Ok(gpu) => {
                gpu.persistence || !(pairs.is_empty() || pairs.iter().any(|pair| pair.new == gpu.uuid))
            }
            Err(_) => false,
        })
    }

    /// Locks all of `pids`, which may wait for each other; answers for all of them when every lock has
    /// returned, as any of them may be unlocked before.
    fn lock(&self, pids: &[i32], timeout_ms: u32) -> Result<(), Refusal<'_>> {
        let ask = self.ask()?;
        let left = ranks::lock(pids, timeout_ms, &|pid, call| ask.call(|c| call(c, pid)));
        self.each(pids, |ask, pid| ask.left_by(pid, left.get(&pid).cloned()))
    }

    fn ask(&self) -> Result<Ask<'_>, Refusal<'_>> {
        let (driver, checkpointer) = self.node.checkpointer()?;
        Ok(Ask {
            node: &self.node,
            driver,
            checkpointer,
        })
    }

    /// Does `work` on all of `pids` and sends each result as soon as it is there.
    fn each(
        &self,
        pids: &[i32],
        work: impl Fn(&Ask<'_>, i32) -> ProcessReply + Sync,
    ) -> Result<(), Refusal<'_>> {
        let ask = self.ask()?;
        thread::scope(|scope| {
            for &pid in pids {
                let (ask, work) = (&ask, &work);
                let run = move || self.send(&[Reply::Process(work(ask, pid))]);
                if let Err(error) = thread::Builder::new().spawn_scoped(scope, run) {
                    self.send(&[Reply::Process(ProcessReply::failed(pid, no_thread(&error)))]);
                }
            }
        });
        Ok(())
    }
}

/// Calls of the driver on one process, with cuInit where the driver asks for it.
struct Ask<'a> {
    node: &'a Node,
    driver: &'a dyn Driver,
    checkpointer: &'a dyn Checkpointer,
}

impl Ask<'_> {
    fn discover(&self, pid: i32) -> ProcessReply {
        // The state is not asked for: unlike this call it waits until the process can run.
        match self.call(|c| c.restore_tid(pid)) {
            Ok(tid) => ProcessReply {
                restore_tid: Some(tid),
                ..ProcessReply::of(pid)
            },
            Err(error) if self.has_no_cuda(pid, &error) => ProcessReply::of(pid),
            Err(error) => ProcessReply::failed(pid, error),
        }
    }

    /// Whether this is the driver's answer for a process without CUDA, or the process has ended since it was
    /// looked at. No other answer of the driver decides it, and a process whose GPU state is passed over
    /// is lost with it.
    fn has_no_cuda(&self, pid: i32, error: &DriverError) -> bool {
        let is_without = error.call != INIT && matches!(error.code, NOT_INITIALIZED | OPERATING_SYSTEM);
        is_without || discover::sign(&self.node.proc_root, pid) == Sign::None
    }

    fn state(&self, pid: i32) -> ProcessReply {
        match self.call(|c| c.state(pid)) {
            Ok(state) => ProcessReply {
                state: Some(state),
                ..ProcessReply::of(pid)
            },
            Err(error) => ProcessReply::failed(pid, error),
        }
    }

    /// The call's own error, or else that of asking for the state it left.
    fn change(&self, pid: i32, call: impl Fn(&dyn Checkpointer) -> Result<(), DriverError>) -> ProcessReply {
        let error = self.call(call).err();
        self.left_by(pid, error)
    }

    /// The answer after a call that ended in `error` or well.
    fn left_by(&self, pid: i32, error: Option<DriverError>) -> ProcessReply {
        let left = self.state(pid);
        ProcessReply {
            error: error.or(left.error),
            ..left
        }
    }

    fn call<T>(&self, call: impl Fn(&dyn Checkpointer) -> Result<T, DriverError>) -> Result<T, DriverError> {
        match call(self.checkpointer) {
            Err(error) if error.code == NOT_INITIALIZED => {
                self.node.init(self.driver)?;
                call(self.checkpointer)
            }
            result => result,
        }
    }
}

/// The system has no thread for a call.
pub(crate) fn no_thread(error: &io::Error) -> DriverError {
    DriverError {
        call: "pthread_create".to_owned(),
        code: error.raw_os_error().unwrap_or_default(),
        name: error.to_string(),
    }
}

/// Each pid once, in the order of the request.
fn distinct(mut pids: Vec<i32>) -> Result<Vec<i32>, Refusal<'static>> {
    if let Some(&bad) = pids.iter().find(|pid| **pid <= 0) {
        return Err(Refusal::BadPid(bad));
    }
    let mut seen = BTreeSet::new();
    pids.retain(|pid| seen.insert(*pid));
    Ok(pids)
}
