//! A container that does not end with its checkpoint.

use firn_host::Chain;
use firn_process::cgroup::CgroupError;

use crate::runc::RuncError;

/// Why a container that should end with its dump has not ended.
#[derive(Debug, thiserror::Error)]
pub enum EndError {
    #[error("cannot kill its processes")]
    Cgroup(#[from] CgroupError),
    #[error("cannot delete it")]
    Runtime(#[from] RuncError),
    #[error("init has not ended")]
    InitAlive,
}

impl EndError {
    /// In one line, for the journal.
    pub(in crate::checkpoint) fn line(&self) -> String {
        format!("FIRN-NOT-ENDED: {}", Chain(self))
    }
}
