//! firn-gpu, the only program that opens the GPU driver: it serves the shim for one transaction, or prints
//! JSON about the node and its processes.
//!
//! Rules that the shim relies on:
//! - `serve --fd N` answers the lines of [`protocol`](firn_gpu::protocol) on a socket that the shim left open
//!   as descriptor N, one request after the other, all processes of a request in parallel.
//! - The worker keeps no deadline. It ends at once when the other end of the socket is closed, also while
//!   driver calls are in flight: the main thread does nothing but read, and the process leaves without the
//!   driver's exit handlers, which would wait for those calls.
//! - A panic ends the process, so that the shim sees the end of the stream instead of silence.
//! - Variables that hide GPUs from libcuda or change how it works (`CUDA_VISIBLE_DEVICES`, `CUDA_MPS_...`, in
//!   short `CUDA_*`) are not for this process: when there are any it runs itself again without them.
//! - cuInit is not called to ask, lock, checkpoint or unlock: the driver does these without it. It is called
//!   before a restore, when a GPU that it may go to has persistence mode off or NVML does not report it (the
//!   driver's restore demands one or the other), and whenever a call answers `CUDA_ERROR_NOT_INITIALIZED`,
//!   which is then repeated.

#![deny(unsafe_code)]

mod command;
#[allow(unsafe_code, reason = "calls libcuda through C function pointers")]
mod cuda;
mod discover;
mod interposed;
mod inventory;
mod node;
#[allow(unsafe_code, reason = "calls libnvidia-ml through C function pointers")]
mod nvml;
mod ranks;
mod session;
#[allow(
    unsafe_code,
    reason = "dlopen and dlsym, an inherited descriptor, leaving without exit handlers"
)]
mod sys;
#[cfg(test)]
mod tests;

use std::fmt::Display;
use std::io::{self, Write};

use firn_gpu::protocol::ENV_TRANSACTION;

/// A line on standard error, which is the log of whoever started the worker. It may be gone: that is no
/// reason to end.
fn complain(line: impl Display) {
    let of = std::env::var(ENV_TRANSACTION).unwrap_or_default();
    let _ = writeln!(io::stderr(), "{}", format!("firn-gpu: {line} {of}").trim_end());
}

fn main() {
    std::panic::set_hook(Box::new(|panic| complain(panic)));
    command::main()
}
