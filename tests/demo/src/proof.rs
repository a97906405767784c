//! The proof that a restored counter continues the checkpointed one.
//!
//! The source runs on after its checkpoint, so it computes the same iterations as the restored counter. Both
//! check all of their GPU memory in every iteration and print its checksum: equal checksums for the same
//! iteration, and no missing iteration, mean that the memory was restored.

use anyhow::{Result, bail, ensure};
use firn_lab::{Line, Lines};
use serde::Serialize;

/// An iteration as the counter printed it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Iteration {
    pub(crate) iteration: u64,
    pub(crate) checksum: String,
}

impl From<&Line> for Iteration {
    fn from(line: &Line) -> Self {
        Self {
            iteration: line.iter,
            checksum: line.checksum.clone(),
        }
    }
}

/// The counter before the checkpoint and after the restore.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Proof {
    /// The last iteration that was read before the checkpoint was requested.
    pub(crate) before: Iteration,
    /// The last iteration before the freeze, by the source's later output.
    pub(crate) frozen_after: Iteration,
    /// The first iteration after the restore.
    pub(crate) after: Iteration,
    /// The same iteration as the source computed it when it ran on.
    pub(crate) source_got: Iteration,
    /// The last iteration that was read after the restore.
    pub(crate) last: Iteration,
    /// Number of iterations since the restore, all of them correct.
    pub(crate) verified: usize,
}

impl Proof {
    /// From the line seen before the checkpoint, all lines of the source, and those since the restore.
    pub(crate) fn of(before: &Line, source: &Lines, restored: &Lines) -> Result<Self> {
        for (lines, whose) in [(source, "source"), (restored, "restored")] {
            if let Some(fault) = lines.fault() {
                bail!("the {whose} counter is wrong: {fault}");
            }
        }
        let (Some(first), Some(last)) = (restored.0.first(), restored.0.last()) else {
            bail!("the restored counter has printed nothing");
        };
        ensure!(
            first.iter > before.iter,
            "the restored counter began at iteration {}, but {} was computed before the checkpoint",
            first.iter,
            before.iter
        );
        let of_source = |iteration| source.0.iter().find(|line| Some(line.iter) == iteration);
        let Some(frozen) = of_source(first.iter.checked_sub(1)) else {
            bail!(
                "the restored counter began at iteration {}, but the source never computed the one before",
                first.iter
            );
        };
        let Some(same) = of_source(Some(first.iter)) else {
            bail!("the source did not continue to iteration {}", first.iter);
        };
        for line in &restored.0 {
            if let Some(other) = of_source(Some(line.iter)) {
                ensure!(
                    line.checksum == other.checksum,
                    "checksum of iteration {}: {} on the source, {} after the restore",
                    line.iter,
                    other.checksum,
                    line.checksum
                );
            }
        }
        Ok(Self {
            before: before.into(),
            frozen_after: frozen.into(),
            after: first.into(),
            source_got: same.into(),
            last: last.into(),
            verified: restored.0.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines of iterations with the checksum `iteration * 10 + salt`.
    fn lines(iterations: &[u64], salt: u64) -> Lines {
        let line = |iteration: &u64| {
            let checksum = iteration * 10 + salt;
            format!("counter pid=1 thread=0 gpu=0 uuid=GPU-1 iter={iteration} checksum={checksum} ok\n")
        };
        Lines::parse(&iterations.iter().map(line).collect::<String>())
    }

    fn refusal(source: &[u64], restored: &Lines) -> String {
        let source = lines(source, 0);
        Proof::of(&source.0[1], &source, restored)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn a_counter_that_continues_is_accepted() {
        let source = lines(&[1, 2, 3, 4, 5], 0);
        let proof = Proof::of(&source.0[1], &source, &lines(&[4, 5, 6], 0)).unwrap();
        assert_eq!((proof.before.iteration, proof.frozen_after.iteration), (2, 3));
        assert_eq!(
            (proof.after.iteration, proof.last.iteration, proof.verified),
            (4, 6, 3)
        );
        assert_eq!(proof.source_got, proof.after);
    }

    #[test]
    fn a_counter_that_began_again_or_jumped_is_refused() {
        let source = [1, 2, 3, 4, 5];
        assert!(refusal(&source, &lines(&[1, 2], 0)).contains("began at iteration 1"));
        assert!(refusal(&source, &lines(&[9, 10], 0)).contains("never computed the one before"));
        assert!(refusal(&source, &lines(&[4, 6], 0)).contains("was followed by 6"));
        assert!(refusal(&source, &lines(&[], 0)).contains("printed nothing"));
    }

    #[test]
    fn another_memory_is_refused() {
        assert!(refusal(&[1, 2, 3, 4, 5], &lines(&[4, 5], 7)).contains("checksum of iteration 4"));
    }

    #[test]
    fn a_source_that_stood_still_is_refused() {
        assert!(refusal(&[1, 2, 3], &lines(&[4, 5], 0)).contains("did not continue"));
    }
}
