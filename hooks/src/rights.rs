//! Rights that firn-hook gives up before it reads what others have written.

use anyhow::{Context, Result};
use caps::{CapSet, Capability, CapsHashSet};

/// Drops all capabilities of this thread except those with which root reads files and looks up the namespaces
/// of other processes.
pub fn keep_reading() -> Result<()> {
    keep(&[Capability::CAP_DAC_READ_SEARCH, Capability::CAP_SYS_PTRACE])
}

/// Drops all capabilities of this thread except those with which root writes files of any owner.
pub fn keep_writing() -> Result<()> {
    keep(&[
        Capability::CAP_CHOWN,
        Capability::CAP_DAC_OVERRIDE,
        Capability::CAP_FOWNER,
        Capability::CAP_FSETID,
        Capability::CAP_SETFCAP,
    ])
}

/// Drops all capabilities of this thread except those with which root reads files, and makes some in
/// directories of any owner, also in those that another process has open.
pub fn keep_archiving() -> Result<()> {
    keep(&[
        Capability::CAP_DAC_OVERRIDE,
        Capability::CAP_DAC_READ_SEARCH,
        Capability::CAP_SYS_PTRACE,
    ])
}

/// Drops all capabilities of this thread except those with which root writes files of any owner, and looks
/// which files other processes have open.
pub fn keep_filling() -> Result<()> {
    keep(&[
        Capability::CAP_CHOWN,
        Capability::CAP_DAC_OVERRIDE,
        Capability::CAP_DAC_READ_SEARCH,
        Capability::CAP_FOWNER,
        Capability::CAP_FSETID,
        Capability::CAP_SYS_PTRACE,
    ])
}

fn keep(capabilities: &[Capability]) -> Result<()> {
    let needed = capabilities.iter().copied().collect::<CapsHashSet>();
    let drop_others = || {
        let kept = &caps::read(None, CapSet::Permitted)? & &needed;
        caps::clear(None, CapSet::Inheritable)?;
        caps::set(None, CapSet::Effective, &kept)?;
        caps::set(None, CapSet::Permitted, &kept)
    };
    drop_others().context("cannot drop capabilities")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_still_reads_everything_and_writes_nothing_of_others() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "x").unwrap();
        std::os::unix::fs::chown(&file, Some(1000), Some(1000)).unwrap();
        // Capabilities are those of one thread: other tests keep theirs.
        let thread = std::thread::spawn(move || {
            for _ in 0..2 {
                keep_reading().unwrap();
            }
            let held = caps::read(None, CapSet::Permitted).unwrap();
            assert!(!held.contains(&Capability::CAP_SYS_ADMIN), "{held:?}");
            assert_eq!(std::fs::read(&file).unwrap(), b"x");
            let error = std::fs::write(&file, "y").unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
        });
        thread.join().unwrap();
    }
}
