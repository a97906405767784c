//! Refusals by what the processes of a container are and show, before anything is touched.
//!
//! What signs mean is decided in [`firn_preflight::process`], which `firn audit` asks too.

use std::path::Path;

use firn_config::{Config, Exec};
use firn_oci::{Spec, nccl};
use firn_preflight::environment::exec_policy;
use firn_preflight::process as preflight;
use firn_preflight::process::{Owner, Subject};
use serde::{Deserialize, Serialize};

use super::error::EffectError;

/// What the container's owner has said about it, and for what he has not the node's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    shares_nothing: bool,
    /// Its CUDA processes are ranks of NCCL that talk over sockets.
    sockets: bool,
    /// What becomes of processes that CRIU leaves out.
    pub exec: Exec,
}

impl Policy {
    pub(super) fn of(spec: &Spec, config: &Config) -> Self {
        Self {
            shares_nothing: preflight::shares_nothing(spec),
            sockets: nccl::is_requested(spec),
            exec: exec_policy(Some(spec), config),
        }
    }
}

/// Refusals by what the processes that are dumped show from outside. Not in the shim's own process: see [`crate::look`].
pub fn by_signs(dumped: &[i32], cuda: &[i32], policy: Policy) -> Result<(), EffectError> {
    let proc_root = Path::new("/proc");
    let subject = Subject {
        dumped,
        cuda,
        ranks: policy.sockets,
    };
    let findings = preflight::inspect(proc_root, &subject)?;
    let owner = Owner {
        shares_nothing: policy.shares_nothing,
    };
    match preflight::judge(proc_root, &findings, owner).into_iter().next() {
        None => Ok(()),
        Some(refusal) => Err(refusal.into()),
    }
}
