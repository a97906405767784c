//! What firn-hook does as CRIU's action script.
//!
//! CRIU calls the script at several points of a dump and of a restore. firn uses three:
//!
//! - [`MOMENT`]: the container's file systems are mounted and CRIU has opened no file again. firn-hook
//!   corrects the GPU nodes in the container's /dev, because CRIU itself opens the nodes that a process had
//!   open, and AMD's render nodes.
//! - [`MOUNTED`]: everything is restored and no task runs. Mounts get the flags that CRIU has lost.
//! - [`DUMPED`]: the files of a pod's /dev/shm are kept with the links that CRIU has made there.
//!
//! CRIU reports only that a script has failed. firn-hook therefore writes the reason into the bundle, for the
//! shim.

use std::path::Path;

use firn_config::names;

use crate::Spec;
use crate::dev_repair;
use crate::dev_repair::{DevError, DevRepair};
use firn_host::bounded::read_at_most;
use firn_host::{Problem, ProblemReport, atomic_file};

/// File systems are mounted, and no file is open.
pub const MOMENT: &str = "post-setup-namespaces";

/// All mounts exist, no task runs, and a script that fails still ends the restore.
pub const MOUNTED: &str = "post-restore";

/// A dump is complete but for what CRIU has made in the container meanwhile: its links are still there.
pub const DUMPED: &str = "post-dump";

/// Largest reason that is read.
const MAX_BYTES: u64 = 64 << 10;

/// Replaces the GPU nodes in the container's /dev by those of the bundle's spec. `init` is the container's
/// first process. The reason of a failure is written into the bundle.
pub fn run(bundle: &Path, init: i32) -> Result<DevRepair, ProblemReport> {
    let repaired = Spec::load(bundle).map_err(DevError::from).and_then(|spec| {
        if spec.requests_gpu() || spec.has_other_gpus() {
            dev_repair::repair_unassembled(init, &spec)
        } else {
            Ok(DevRepair::default())
        }
    });
    repaired.map_err(|error| leave(bundle, error.report()))
}

/// Writes into the bundle, for the shim, why the script has failed.
pub fn leave(bundle: &Path, problem: ProblemReport) -> ProblemReport {
    let bytes = serde_json::to_vec(&problem).unwrap_or_default();
    // CRIU's log has the reason too.
    let _ = atomic_file::write(bundle, names::BUNDLE_SCRIPT_REFUSAL, &bytes, 0o600);
    problem
}

/// Reads what [`leave`] has written into this bundle, and removes the file.
pub fn take(bundle: &Path) -> Option<ProblemReport> {
    let path = bundle.join(names::BUNDLE_SCRIPT_REFUSAL);
    let text = read_at_most(std::fs::File::open(&path).ok()?, MAX_BYTES).ok()?;
    if let Err(error) = std::fs::remove_file(&path) {
        log::warn!("cannot remove {}: {error}", path.display());
    }
    serde_json::from_slice(&text?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_is_left_for_the_shim_once() {
        let bundle = tempfile::tempdir().unwrap();
        assert_eq!(take(bundle.path()), None);
        let own = i32::try_from(std::process::id()).unwrap();
        let refusal = run(bundle.path(), own).unwrap_err();
        assert_eq!(refusal.code, "FIRN-SPEC-UNREADABLE");
        assert!(refusal.message.contains("config.json: No such file"), "{refusal}");
        assert_eq!(take(bundle.path()), Some(refusal));
        assert_eq!(take(bundle.path()), None);

        std::fs::write(bundle.path().join(names::BUNDLE_SPEC), "{}").unwrap();
        assert_eq!(run(bundle.path(), own), Ok(DevRepair::default()));
        assert_eq!(
            run(bundle.path(), i32::MAX),
            Ok(DevRepair::default()),
            "without a GPU"
        );
        let gpu = r#"{"linux":{"devices":[{"path":"/dev/nvidia0","type":"c","major":195,"minor":0}]}}"#;
        std::fs::write(bundle.path().join(names::BUNDLE_SPEC), gpu).unwrap();
        let gone = run(bundle.path(), i32::MAX).unwrap_err();
        assert_eq!(gone.code, "FIRN-DEV-REPAIR");
        assert!(gone.message.contains("/proc/2147483647/root"), "{gone}");
    }
}
