//! How long the parts of a move may take.

use std::time::Duration;

use firn_config::{Config, Deadlines, Keys};

/// For what has no deadline of its own: ssh, containerd, and the way of an answer.
const MARGIN: Duration = Duration::from_secs(30);

/// The other node's deadlines are not known here: this node's stand for them.
#[derive(Debug, PartialEq, Eq)]
pub struct Limits {
    /// Of a look at the other node.
    pub look: Duration,
    /// Of the checkpoint, with what containerd writes.
    pub checkpoint: Duration,
    /// Of a pause of the stream, and of the restore.
    pub restore: Duration,
    /// Of the end of the source.
    pub end: Duration,
}

impl Limits {
    /// By the node's configuration, or the defaults if it cannot be used.
    pub fn here() -> Self {
        let config = Config::load(Keys::CRIU);
        Self::of(&config.map(|config| config.deadlines).unwrap_or_default())
    }

    fn of(deadlines: &Deadlines) -> Self {
        // Every field by its name, so that none is forgotten.
        let Deadlines {
            inventory,
            discover,
            look,
            verify,
            freeze,
            gpu_lock,
            gpu_checkpoint,
            hold,
            criu_dump,
            prepare,
            resumed,
            restored,
            failed,
            gpu_wait: _, // Of a resume.
            criu_restore,
            gpu_restore,
            gpu_unlock,
            rollback,
            end,
            worker_end,
        } = *deadlines;
        let driver = discover + gpu_lock + hold + gpu_checkpoint;
        let back = rollback + gpu_restore + gpu_unlock + worker_end;
        // The dump, its checksums, and the same again for containerd, which copies it.
        let dump = 2 * look + freeze + 3 * criu_dump;
        let there = hold + gpu_restore + gpu_unlock + restored + end + worker_end;
        Self {
            look: inventory + look + MARGIN,
            checkpoint: prepare + driver + dump + back + resumed + failed + MARGIN,
            // The image is unpacked, compared and restored.
            restore: inventory + 2 * look + 2 * verify + criu_restore + there + MARGIN,
            end: end + MARGIN,
        }
    }
}

#[cfg(test)]
impl Default for Limits {
    fn default() -> Self {
        Self::of(&Deadlines::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_has_more_than_its_deadlines() {
        let all = Deadlines::default();
        let limits = Limits::of(&all);
        assert!(limits.look > all.inventory);
        assert!(limits.checkpoint > all.discover + all.gpu_checkpoint + 3 * all.criu_dump + all.rollback);
        assert!(limits.restore > all.verify + all.criu_restore + all.gpu_restore + all.restored);
        assert!(limits.end > all.end);
        assert!(limits.restore < Duration::from_secs(3 * 3600), "for ever");
    }
}
