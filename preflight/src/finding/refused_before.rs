//! Processes whose checkpoint the driver has refused.
//!
//! From then on the driver refuses every checkpoint of such a process with CUDA_ERROR_UNKNOWN, also when what
//! it could not checkpoint is gone: so seen of managed memory on driver 580. The container's bundle keeps
//! them, so that a later checkpoint is refused by its reason, and before anything is touched.

use std::io;
use std::path::Path;

use firn_config::names;
use firn_host::{atomic_file, bounded, open_regular, proc_maps, procfs};
use serde::{Deserialize, Serialize};

use crate::Refusal;

/// A process, and what the driver answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedBefore {
    pub pid: i32,
    /// When it was started, in clock ticks since boot: another process may get its pid.
    pub started: u64,
    pub answer: String,
}

impl RefusedBefore {
    /// Longest file that is read, in bytes.
    const MAX_BYTES: u64 = 1 << 20;

    /// Keeps in `bundle` that the driver has refused a process, and syncs it. A process that has ended needs
    /// no record.
    pub fn keep(bundle: &Path, pid: i32, answer: &str) -> io::Result<()> {
        let Some(started) = procfs::started(pid) else {
            return Ok(());
        };
        let mut all = Self::read(&bundle.join(names::BUNDLE_REFUSED))?;
        all.retain(|one| procfs::started(one.pid) == Some(one.started) && one.pid != pid);
        let answer = answer.to_owned();
        all.push(Self { pid, started, answer });
        let bytes = serde_json::to_vec(&all)?;
        atomic_file::write(bundle, names::BUNDLE_REFUSED, &bytes, 0o600)
    }

    fn read(path: &Path) -> io::Result<Vec<Self>> {
        let file = match open_regular(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            file => file?,
        };
        let bytes = bounded::read_at_most(file, Self::MAX_BYTES)?.ok_or(io::ErrorKind::FileTooLarge)?;
        Ok(serde_json::from_slice(&bytes)?)
    }

    /// The first of these processes that the driver has refused before. A file that cannot be read refuses
    /// nothing: the driver refuses without harm.
    pub(crate) fn first_of(path: &Path, cuda: &[i32]) -> Option<Refusal> {
        let is_known = |one: &Self| cuda.contains(&one.pid) && procfs::started(one.pid) == Some(one.started);
        let found = Self::read(path).ok()?.into_iter().find(is_known)?;
        Some(Refusal::RefusedBefore {
            pid: found.pid,
            comm: proc_maps::comm(Path::new("/proc"), found.pid),
            answer: found.answer,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_pid_and_start_until_it_ends() {
        let bundle = tempfile::tempdir().unwrap();
        let path = bundle.path().join(names::BUNDLE_REFUSED);
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(RefusedBefore::first_of(&path, &[own]).is_none(), "no file");
        RefusedBefore::keep(bundle.path(), own, "CUDA_ERROR_NOT_SUPPORTED").unwrap();
        RefusedBefore::keep(bundle.path(), own, "CUDA_ERROR_NOT_SUPPORTED").unwrap();
        assert_eq!(RefusedBefore::read(&path).unwrap().len(), 1);
        let found = RefusedBefore::first_of(&path, &[1, own]).unwrap();
        assert!(found.to_string().contains("CUDA_ERROR_NOT_SUPPORTED"), "{found}");
        assert!(RefusedBefore::first_of(&path, &[1]).is_none(), "another process");
        // A process that has the pid of one that ended.
        let mut other = RefusedBefore::read(&path).unwrap();
        other[0].started += 1;
        std::fs::write(&path, serde_json::to_vec(&other).unwrap()).unwrap();
        assert!(RefusedBefore::first_of(&path, &[own]).is_none());
        std::fs::write(&path, "x").unwrap();
        assert!(RefusedBefore::first_of(&path, &[own]).is_none());
    }
}
