//! Which tasks of an image were stopped by a signal when they were dumped: a restore leaves them so.
//!
//! CRIU keeps that in the task's `core-PID.img`. The image is untrusted: a task whose file cannot be read
//! counts as running.

use std::path::Path;

use super::Image;
use super::tasks::{CORE_MAGIC, STOPPED};
use crate::dir::UntrustedDir;

/// Fields of the core and of the message in it.
const TC: u32 = 3;
const TASK_STATE: u32 = 1;

/// Whether the task that has this pid in the container was stopped.
pub fn was_stopped(image: &Path, pid: i32) -> bool {
    task_state(image, pid) == Some(STOPPED)
}

fn task_state(image: &Path, pid: i32) -> Option<u32> {
    let dir = UntrustedDir::open(image).ok()?;
    let state = Image { dir }.read_one(&format!("core-{pid}.img"), CORE_MAGIC, |core| {
        let task = core.message(TC)?;
        task.map_or(Ok(None), |task| task.number(TASK_STATE))
    });
    state.ok()??
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

    /// The state of the task that has this core.
    fn state_by(core: &[u8]) -> Option<u32> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("core-1.img"), core).unwrap();
        task_state(dir.path(), 1)
    }

    #[test]
    fn a_stopped_task_differs_from_a_running_one() {
        assert_eq!(state_by(&core(3)), Some(STOPPED));
        assert_eq!(state_by(&core(1)), Some(1));
    }

    #[test]
    fn what_is_no_core_was_not_stopped() {
        let whole = core(3);
        for end in 0..20 {
            assert_ne!(state_by(&whole[..end]), Some(STOPPED), "of {end} bytes");
        }
        let mut other = core(3);
        other[4] ^= 1;
        assert_eq!(state_by(&other), None);
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
