//! The line protocol between the shim and its `firn-gpu` worker.
//!
//! One JSON object per line on a stream socket, requests one way, replies the other. The shim writes one
//! request and reads lines until the [`Reply::Done`] or [`Reply::Failed`] of that request; [`Reply::Process`]
//! lines come before it, each as soon as the call on that process has returned, so that a shim that cuts the
//! worker off knows which processes were finished. The worker works on all processes of a request in parallel
//! and keeps no deadline of its own: the shim does, by killing it.
//!
//! Descriptors of GPU memory pass by a second socket, which keeps the borders of messages, at most 64 in one
//! of them: those of a request before its line, those of its replies before their lines.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{CudaState, GpuPair, GpuUuid, Inventory};

/// Variable of the worker: container and transaction that it works for, as its log lines end with them.
pub const ENV_TRANSACTION: &str = "FIRN_TRANSACTION";

/// How the `call` of an error ends that firn's library in a process has answered.
pub const OF_LIBRARY: &str = " of libfirn_cuda.so";

/// Bytes of GPU memory by GPU.
pub type GpuMemory = BTreeMap<GpuUuid, u64>;

#[cfg(test)]
mod tests;

/// What the shim asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Driver version and GPUs of the node. Needs no cuInit.
    Inventory,
    /// Which of these processes are CUDA processes, with their restore threads. Works while they are frozen.
    Discover { pids: Vec<i32> },
    /// How much GPU memory each process uses, on all GPUs together and on each.
    Memory { pids: Vec<i32> },
    /// State of each process. The driver waits for a process that is frozen or stopped.
    State { pids: Vec<i32> },
    /// Lock all; `timeout_ms` is handed to the driver (which may overrun it).
    Lock { pids: Vec<i32>, timeout_ms: u32 },
    /// Copy the GPU state of all into their own memory and release the GPUs.
    Checkpoint { pids: Vec<i32> },
    /// Bring the GPU state of all back. An empty `pairs` means the same GPUs.
    ///
    /// `needs` is the memory that the processes of `own` had together, where it is known: those of the
    /// container, with `pids`. A GPU that has less left for them is answered with [`Reply::NoMemory`], and
    /// the driver is not called: it spoils the state of a process whose restore fails for want of memory
    /// (docs/evidence/gpu-runs.md).
    Restore {
        pids: Vec<i32>,
        pairs: Vec<GpuPair>,
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        needs: GpuMemory,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        own: Vec<i32>,
    },
    /// Let all call the driver again.
    Unlock { pids: Vec<i32> },
    /// About memory that leaves its processes.
    Pieces(PiecesRequest),
}

/// What the shim asks for about GPU memory that leaves its processes, by firn's library in them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "does", rename_all = "snake_case")]
pub enum PiecesRequest {
    /// Shut the gates of firn's library in all, and wait until their contexts are idle, `wait_ms` for each
    /// step. `library` is the file that they have.
    Shut {
        pids: Vec<i32>,
        library: PathBuf,
        wait_ms: u32,
    },
    /// Descriptors of pieces of a process's memory from this index on: fewer than 64 at the end.
    Lend {
        pid: i32,
        library: PathBuf,
        from: u32,
        wait_ms: u32,
    },
    /// Take the memory that was lent out of all.
    Detach {
        pids: Vec<i32>,
        library: PathBuf,
        wait_ms: u32,
    },
    /// Give a process the pieces of so many descriptors, of which the first has this index.
    Attach {
        pid: i32,
        library: PathBuf,
        from: u32,
        count: usize,
        wait_ms: u32,
    },
    /// Open the gates of all.
    Open { pids: Vec<i32>, library: PathBuf },
    /// Copy pieces of a process's memory, which have so many bytes, onto the new GPUs. Each descriptor is
    /// answered by one: of a piece that stays on its GPU, by one of the same piece.
    Copy {
        pid: i32,
        pairs: Vec<GpuPair>,
        bytes: Vec<u64>,
    },
}

/// A CUresult that is not `CUDA_SUCCESS`, or a failure before the driver was reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{call} answered {name}")]
pub struct DriverError {
    /// Function of the driver that failed, `cuCheckpointProcessLock`.
    pub call: String,
    /// CUresult number.
    pub code: i32,
    /// Name of the CUresult, `CUDA_ERROR_NOT_SUPPORTED`.
    pub name: String,
}

/// Result of a request for one process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessReply {
    /// The process, as the request named it.
    pub pid: i32,
    /// Its state after the call; absent when the driver does not know the process (no CUDA in it), and in
    /// replies to `discover`.
    pub state: Option<CudaState>,
    /// Its restore thread; only in replies to `discover`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore_tid: Option<i32>,
    /// Bytes of GPU memory in use; only in replies to `memory`, empty where the driver does not report them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gpu_memory: GpuMemory,
    /// Whether it has firn's library; only in replies to `shut` and `attach`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub interposed: bool,
    /// Whether a piece counts as one of another process from now on; only in replies to `attach`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub imported: bool,
    /// Sizes of the pieces whose descriptors were sent; only in replies to `lend`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pieces: Vec<u64>,
    /// The call's failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<DriverError>,
}

fn is_false(value: &bool) -> bool {
    !value
}

impl ProcessReply {
    /// An answer that holds nothing yet.
    pub fn of(pid: i32) -> Self {
        Self {
            pid,
            ..Self::default()
        }
    }

    pub fn failed(pid: i32, error: DriverError) -> Self {
        Self {
            error: Some(error),
            ..Self::of(pid)
        }
    }
}

/// What the worker answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Answer to `inventory`, followed by `done`.
    Inventory { inventory: Inventory },
    /// One process is finished.
    Process(ProcessReply),
    /// A restore was not begun: `gpu` has `free` bytes of memory free, and `needed` bytes are needed.
    NoMemory { gpu: GpuUuid, free: u64, needed: u64 },
    /// The request is finished: every process has had its line.
    Done {},
    /// The request as a whole could not be carried out (no driver library, malformed request).
    Failed { message: String, hint: String },
}
