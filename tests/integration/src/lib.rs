//! The lab: test nodes with firn and simulated GPUs in them, and what a user does with containers there.
//!
//! Shared by the suites of this crate, by `cargo xtask demo` and by `cargo xtask bench`. Flows go through
//! `ctr`, as a user's would, and a workload's own lines show what it did; [`Task`] calls a shim as containerd
//! does.
#![forbid(unsafe_code)]

mod archive;
mod blow;
mod build;
mod census;
mod claims;
mod client;
mod container;
mod counter;
mod events;
mod exec;
pub mod faults;
mod gpu;
mod host;
mod huge_pages;
mod imported;
pub mod matrix;
mod output;
mod pods;
mod random;
mod reader;
mod stall;
mod task;
mod tier;

pub use archive::Archive;
pub use build::{Built, PROGRAMS, Profile, build_cuda_library};
pub use census::{Census, ShimUse};
pub use claims::{Claims, Outcome, saw_object};
pub use client::{COUNT, Client, DAY, START, numbers};
pub use container::{BUNDLES, Container, Move, nothing_left, nothing_left_but_metadata};
pub use counter::{Line, Lines};
pub use events::{Event, Events};
pub use firn_node::Platform;
pub use gpu::SimGpu;
pub use host::{DRIVER, GpuHost};
pub use huge_pages::{FREE as FREE_HUGE_PAGES, HugePages};
pub use matrix::{Case, Skip, on};
pub use output::{CommandOutput, answer, failure};
pub use pods::{KUBERNETES, configure_pods, import_pod_images, install_network_plugin};
pub use random::Random;
pub use stall::StallFs;
pub use task::{Pending, Task, any, describe};
pub use tier::{TIER, Tier};

/// Removes all memory from the store that no checkpoint needs.
pub const GC: [&str; 7] = [
    "firn",
    "store",
    "gc",
    "--grace",
    "0s",
    "--unreferenced-since",
    "0s",
];

/// containerd's runtime name for firn.
pub const FIRN: &str = "io.containerd.firn.v2";
/// containerd's own runtime.
pub const STOCK: &str = "io.containerd.runc.v2";
/// The image that [`GpuHost::start`] imports: busybox and the test workloads.
pub const IMAGE: &str = "localhost/firn-test:latest";
/// Where gpu-counter writes its lines in a container.
pub const LOG: &str = "/counter.log";
/// Starts a gpu-counter that writes to [`LOG`].
pub const COUNTER: &str = "/bin/gpu-counter --out /counter.log --interval-ms 50 --mib 8";
/// Options of `ctr run` for a container of several CUDA processes that share no GPU memory.
pub const SHARES_NOTHING: [&str; 2] = ["--annotation", "firn.dev/ipc=none"];
/// Options for a container with all hooks of the job; they do nothing.
pub const NAMES_HOOKS: [&str; 8] = [
    "--annotation",
    "firn.dev/hook-prepare=exec: true",
    "--annotation",
    "firn.dev/hook-resumed=exec: true",
    "--annotation",
    "firn.dev/hook-restored=exec: true",
    "--annotation",
    "firn.dev/hook-failed=exec: true",
];
