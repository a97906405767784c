//! Requests about GPU memory that leaves its processes and comes back.

use std::io::ErrorKind;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use firn_gpu::GpuPair;
use firn_gpu::protocol::{PiecesRequest, ProcessReply, Request};
use firn_host::descriptors;

use super::{Driver, WorkerError};

/// How much longer than its steps a request may take.
const SLACK: Duration = Duration::from_secs(5);

/// What has become of pieces that a process was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attached {
    /// They are the process's own.
    Own,
    /// One of them counts as another process's.
    Imported,
    /// The process runs another program, which has no use for them.
    Gone,
}

impl Driver {
    /// Shuts the gates of firn's library in these processes, and waits until their GPUs are idle, so long for
    /// each of the two. Returns those that have this file of the library. After an error gates may be shut.
    pub(crate) async fn shut(
        &mut self,
        pids: &[i32],
        library: &Path,
        wait: Duration,
    ) -> Result<Vec<i32>, WorkerError> {
        let request = PiecesRequest::Shut {
            pids: pids.to_vec(),
            library: library.to_owned(),
            wait_ms: millis(wait),
        };
        let replies = self
            .each("shut", pids, &Request::Pieces(request), 2 * wait + SLACK)
            .await?;
        let interposed = replies.into_iter().filter(|reply| reply.interposed);
        Ok(interposed.map(|reply| reply.pid).collect())
    }

    /// Descriptors of all pieces of a process's memory, at most `room`, with their sizes in bytes.
    pub(crate) async fn lend(
        &mut self,
        pid: i32,
        library: &Path,
        room: usize,
        until: Instant,
    ) -> Result<Vec<(u64, OwnedFd)>, WorkerError> {
        let mut pieces = Vec::new();
        loop {
            let limit = left(until);
            let request = PiecesRequest::Lend {
                pid,
                library: library.to_owned(),
                from: u32::try_from(pieces.len()).unwrap_or(u32::MAX),
                wait_ms: millis(limit / 4),
            };
            let mut replies = self
                .each("lend", &[pid], &Request::Pieces(request), limit)
                .await?;
            let sizes = replies.pop().map(|reply| reply.pieces).unwrap_or_default();
            let lent = self.take_received(sizes.len())?;
            let is_last = sizes.len() < descriptors::MOST;
            pieces.extend(sizes.into_iter().zip(lent));
            if pieces.len() > room {
                return Err(WorkerError::ManyPieces { pid, room });
            }
            if is_last {
                return Ok(pieces);
            }
        }
    }

    /// Takes the memory that was lent out of these processes.
    pub(crate) async fn detach(&mut self, pids: &[i32], library: &Path) -> Result<(), WorkerError> {
        let limit = self.deadlines.gpu_checkpoint;
        let request = PiecesRequest::Detach {
            pids: pids.to_vec(),
            library: library.to_owned(),
            wait_ms: millis(limit / 4),
        };
        self.each("detach", pids, &Request::Pieces(request), limit)
            .await
            .map(drop)
    }

    /// Gives a process pieces, of which the first has this index.
    pub(crate) async fn attach(
        &mut self,
        pid: i32,
        library: &Path,
        from: u32,
        pieces: &[BorrowedFd<'_>],
        until: Instant,
    ) -> Result<Attached, WorkerError> {
        let limit = left(until);
        let request = PiecesRequest::Attach {
            pid,
            library: library.to_owned(),
            from,
            count: pieces.len(),
            wait_ms: millis(limit / 4),
        };
        self.send(pieces).await?;
        let replies = self
            .each("attach", &[pid], &Request::Pieces(request), limit)
            .await?;
        let reply = replies.first();
        Ok(match reply.map(|reply| (reply.interposed, reply.imported)) {
            Some((true, false)) => Attached::Own,
            Some((true, true)) => Attached::Imported,
            _ => Attached::Gone,
        })
    }

    /// Opens the gates of firn's library in these processes.
    pub(crate) async fn open(&mut self, pids: &[i32], library: &Path) -> Result<(), WorkerError> {
        let request = PiecesRequest::Open {
            pids: pids.to_vec(),
            library: library.to_owned(),
        };
        let limit = self.deadlines.gpu_unlock;
        self.each("open", pids, &Request::Pieces(request), limit)
            .await
            .map(drop)
    }

    /// Copies pieces of a process, with their sizes in bytes, onto the GPUs that theirs are paired with.
    /// Returns a descriptor for each. Without pieces the worker makes itself ready for that.
    pub(crate) async fn copy(
        &mut self,
        pid: i32,
        pairs: &[GpuPair],
        pieces: &[(u64, BorrowedFd<'_>)],
        until: Instant,
    ) -> Result<Vec<OwnedFd>, WorkerError> {
        let (bytes, lent): (Vec<u64>, Vec<BorrowedFd<'_>>) = pieces.iter().copied().unzip();
        let request = PiecesRequest::Copy {
            pid,
            pairs: pairs.to_vec(),
            bytes,
        };
        self.send(&lent).await?;
        self.each("copy", &[pid], &Request::Pieces(request), left(until))
            .await?;
        self.take_received(lent.len())
    }

    /// Sends descriptors to the worker, for the request that follows.
    async fn send(&mut self, pieces: &[BorrowedFd<'_>]) -> Result<(), WorkerError> {
        if !pieces.is_empty() {
            // The call would wait for it too, and leave them to another worker.
            self.wait_until_gone(self.deadlines.worker_end).await?;
            descriptors::send(&self.worker()?.descriptors, b"pieces", pieces)?;
        }
        Ok(())
    }

    /// The descriptors that the worker has sent before its answer.
    fn take_received(&mut self, count: usize) -> Result<Vec<OwnedFd>, WorkerError> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let message = descriptors::receive(&self.worker()?.descriptors, &mut [0; 8])?;
        let received = message.map(|(_, descriptors)| descriptors);
        let all = received.filter(|descriptors| descriptors.len() == count);
        all.ok_or_else(|| WorkerError::Socket(ErrorKind::InvalidData.into()))
    }

    /// The answers for all of these processes, none of which is a failure.
    pub(super) async fn each(
        &mut self,
        op: &'static str,
        pids: &[i32],
        request: &Request,
        limit: Duration,
    ) -> Result<Vec<ProcessReply>, WorkerError> {
        let (_, replies) = self.call(op, request, limit).await?;
        let is_answered = |pid: &&i32| replies.iter().any(|reply| reply.pid == **pid);
        if let Some(&pid) = pids.iter().find(|pid| !is_answered(pid)) {
            return Err(WorkerError::State { pid, op, state: None });
        }
        // The driver's own answer comes first: where one process is not locked, the others are let go.
        let refused = |reply: &ProcessReply| Some((reply.pid, reply.error.clone()?));
        match replies.iter().find_map(refused) {
            Some((pid, source)) => Err(WorkerError::Process { pid, source }),
            None => Ok(replies),
        }
    }
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}
