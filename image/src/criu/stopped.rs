//! Which tasks of an image were stopped by a signal when they were dumped: a restore leaves them so.
//!
//! CRIU keeps that in the task's `core-PID.img`. The image is untrusted: a task whose file cannot be read
//! counts as running.

use std::path::Path;

use super::Image;
use super::tasks::{CORE_MAGIC, Core, STOPPED};
use firn_store::UntrustedDir;

/// Whether the task that has this pid in the container was stopped.
pub fn was_stopped(image: &Path, pid: i32) -> bool {
    let name = format!("core-{pid}.img");
    let core = UntrustedDir::open(image)
        .ok()
        .and_then(|dir| Image { dir }.required(&name, CORE_MAGIC, Core::read).ok());
    core.is_some_and(|core| core.state == Some(STOPPED))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::criu::COMMON_MAGIC;

    /// A core with a field before `tc`, and in that one before the state.
    fn core(state: u8) -> Vec<u8> {
        let task = [8, state, 16, 0];
        let message = [&[8, 1, 18, 2, 1, 1, 26, 4][..], &task, &[34, 0]].concat();
        let length = u32::try_from(message.len()).unwrap();
        let head = [COMMON_MAGIC, CORE_MAGIC, length].map(u32::to_le_bytes).concat();
        [head, message].concat()
    }

    /// Whether a task that has this core was stopped.
    fn was_stopped_by(core: &[u8]) -> bool {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("core-1.img"), core).unwrap();
        was_stopped(dir.path(), 1)
    }

    #[test]
    fn a_stopped_task_differs_from_a_running_one() {
        assert!(was_stopped_by(&core(3)));
        assert!(!was_stopped_by(&core(1)));
    }

    #[test]
    fn what_is_no_core_was_not_stopped() {
        let whole = core(3);
        for end in 0..20 {
            assert!(!was_stopped_by(&whole[..end]), "of {end} bytes");
        }
        let mut other = core(3);
        other[4] ^= 1;
        assert!(!was_stopped_by(&other));
    }

    #[test]
    fn each_task_is_read_from_its_own_file() {
        let dir = tempfile::tempdir().unwrap();
        for (pid, state) in [(1, 1), (7, 3)] {
            std::fs::write(dir.path().join(format!("core-{pid}.img")), core(state)).unwrap();
        }
        for (pid, stopped) in [(1, false), (7, true), (8, false)] {
            assert_eq!(was_stopped(dir.path(), pid), stopped, "{pid}");
        }
    }
}
