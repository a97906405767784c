//! Which tasks of an image were stopped by a signal when they were dumped: a restore leaves them so.
//!
//! CRIU keeps that in the task's `core-PID.img`: two magic numbers, the length of a protobuf message, and the
//! message, whose field 3 (`tc`) has the state as its field 1. The image is untrusted: a task whose file
//! cannot be read counts as running.

use std::io::Read;
use std::path::Path;

use super::wire::Message;
use crate::dir::UntrustedDir;

/// Both magic numbers of a core image, and the length of what follows.
const HEAD: usize = 12;
const MAGIC: [u32; 2] = [0x5456_4319, 0x5505_3847];

/// Longest message that is read: cores are a few KiB.
const LIMIT: u64 = 1 << 20;

/// Fields of the core and of the message in it.
const TC: u32 = 3;
const TASK_STATE: u32 = 1;

/// CRIU's number for a task that a signal has stopped.
const STOPPED: u32 = 3;

/// Whether the task that has this pid in the container was stopped.
pub fn was_stopped(image: &Path, pid: i32) -> bool {
    let mut bytes = Vec::new();
    let read = UntrustedDir::open(image)
        .and_then(|dir| dir.file(&format!("core-{pid}.img")))
        .and_then(|file| file.take(LIMIT).read_to_end(&mut bytes));
    read.is_ok() && task_state(&bytes) == Some(STOPPED)
}

fn task_state(bytes: &[u8]) -> Option<u32> {
    let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    if [word(0)?, word(4)?] != MAGIC {
        return None;
    }
    let end = HEAD.checked_add(usize::try_from(word(8)?).ok()?)?;
    let core = Message::parse(bytes.get(HEAD..end)?).ok()?;
    let task = core.message(TC).ok()??;
    task.number(TASK_STATE).ok()?
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A core with a field before `tc`, and in that one before the state.
    fn core(state: u8) -> Vec<u8> {
        let task = [8, state, 16, 0];
        let message = [&[8, 1, 18, 2, 1, 1, 26, 4][..], &task, &[34, 0]].concat();
        let length = u32::try_from(message.len()).unwrap();
        let head = [
            MAGIC[0].to_le_bytes(),
            MAGIC[1].to_le_bytes(),
            length.to_le_bytes(),
        ]
        .concat();
        [head, message].concat()
    }

    #[test]
    fn a_stopped_task_differs_from_a_running_one() {
        assert_eq!(task_state(&core(3)), Some(STOPPED));
        assert_eq!(task_state(&core(1)), Some(1));
    }

    #[test]
    fn what_is_no_core_was_not_stopped() {
        let whole = core(3);
        for end in 0..20 {
            assert_ne!(task_state(&whole[..end]), Some(STOPPED), "of {end} bytes");
        }
        let mut other = core(3);
        other[4] ^= 1;
        assert_eq!(task_state(&other), None);
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
