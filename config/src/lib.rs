//! firn's configuration file, and the names that its parts share.
//!
//! The file is optional: a key that it lacks has a default, and `config/config.toml` as shipped spells all
//! defaults out. What it has must be valid: an unknown key or a value of the wrong shape is an error,
//! never ignored, because the operator believes that it is in force.
//!
//! This crate knows nothing of GPUs, specs or the shim. It never writes.
#![forbid(unsafe_code)]

mod file;
pub mod names;
mod programs;
mod quantity;
mod section;
pub mod text;
mod toolkit;

pub use file::{
    Bulk, Checkpoint, Config, ConfigError, Conversion, Create, Criu, Deadlines, Exec, GpuBusy, Hook,
    HugePages, Images, InlineCopy, JobHooks, Nccl, OpenImageDir, Pause, RemapPolicy, Restore, Tcp, Worker,
};
pub use programs::{
    INSTALL_CRIU_PLUGIN, ProgramError, find_criu_plugin, find_program, find_runtime, in_path, search_path,
};
pub use quantity::parse_quantity;
pub use toolkit::Toolkit;
