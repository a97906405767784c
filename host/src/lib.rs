//! The host as the kernel shows it: processes in /proc, cgroup mounts, the mount table; and files replaced as
//! a whole.
//!
//! Nothing here knows of containers' specs, GPUs or checkpoints.
#![forbid(unsafe_code)]

mod alone;
pub mod atomic_file;
pub mod bounded;
pub mod cgroup_mounts;
pub mod clock;
mod cpu;
mod deleted_name;
pub mod descriptors;
pub mod durable;
mod file_id;
mod in_root;
mod lexical;
pub mod mountinfo;
pub mod of_root;
mod open_below;
pub mod ordered;
mod problem;
pub mod proc_maps;
mod process_tag;
pub mod procfs;
mod regular_file;
mod rfc3339;
mod unless_absent;

pub use alone::Alone;
pub use cpu::CpuFeatures;
pub use deleted_name::{CriuLinks, DeletedName, is_criu_link};
pub use file_id::FileId;
pub use firn_host_derive::Problem;
pub use in_root::in_root;
pub use lexical::lexical;
pub use open_below::open_below;
pub use problem::{Chain, Problem, ProblemLine, ProblemReport, Remedy, remedy};
pub use process_tag::{NoTag, ProcessTag};
pub use regular_file::{open_regular, reopen_regular};
pub use rfc3339::Rfc3339;
pub use unless_absent::{Absent, UnlessAbsent};
