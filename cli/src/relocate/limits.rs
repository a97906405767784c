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
        let Deadlines { look, criu_dump, .. } = *deadlines;
        let driver =
            deadlines.gpu_lock + deadlines.gpu_checkpoint + deadlines.gpu_restore + deadlines.gpu_unlock;
        let hooks = deadlines.prepare + deadlines.resumed;
        // The dump, its checksums, and the same again for containerd, which copies it.
        let dump = 2 * look + deadlines.freeze + 3 * criu_dump;
        // The image is unpacked, compared and restored.
        let restore = 2 * look + 2 * deadlines.verify + deadlines.criu_restore;
        let there = deadlines.gpu_restore + deadlines.gpu_unlock + deadlines.restored + deadlines.end;
        Self {
            look: deadlines.inventory + look + MARGIN,
            checkpoint: driver + hooks + dump + deadlines.rollback + MARGIN,
            restore: deadlines.inventory + restore + there + MARGIN,
            end: deadlines.end + MARGIN,
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
        assert!(limits.checkpoint > all.gpu_checkpoint + 2 * all.criu_dump + all.rollback);
        assert!(limits.restore > all.verify + all.criu_restore + all.gpu_restore + all.restored);
        assert!(limits.end > all.end);
        assert!(limits.restore < Duration::from_secs(3 * 3600), "for ever");
    }
}
