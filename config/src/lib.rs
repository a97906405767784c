//! firn's configuration file, and the names that its parts share.
//!
//! The file is optional: a key that it lacks has a default, and `config/config.toml` as shipped spells all
//! defaults out. An unknown key or a value of the wrong shape fails the operations that go by it, because the
//! operator believes that it is in force. Others continue, and so does the start of a container: that is
//! logged.
//!
//! This crate knows nothing of GPUs, specs or the shim. It never writes.
#![forbid(unsafe_code)]

mod file;
mod load;
mod mistake;
pub mod names;
mod programs;
mod quantity;
mod section;
pub mod text;
mod toolkit;

/// The commit from which these programs were built, if `cargo xtask dist` has built them.
pub const COMMIT: Option<&str> = option_env!("FIRN_COMMIT");

pub use file::{
    Bulk, Checkpoint, Config, Conversion, Create, Criu, Cuda, Deadlines, Exec, GpuBusy, Hook, HugePages,
    Images, InlineCopy, Interpose, JobHooks, Nccl, OpenImageDir, Pause, RemapPolicy, Restore, Tcp, Worker,
};
pub use load::{ConfigError, Reading};
pub use mistake::{Keys, Mistake, MistakeKind};
pub use programs::{
    INSTALL_CRIU_PLUGIN, INSTALL_CUDA_LIBRARY, ProgramError, find_criu_plugin, find_cuda_library,
    find_program, find_runtime, in_path, search_path,
};
pub use quantity::parse_quantity;
pub use toolkit::Toolkit;
