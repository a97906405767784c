//! What shows that a restored counter is the frozen one that goes on.
//!
//! The source goes on after its checkpoint, so it prints the same iterations as the restored counter. Both check all of
//! their GPU memory in every iteration and print its sum: equal sums for the same iteration, with none left out, mean
//! that the memory came along.

use anyhow::{Result, bail, ensure};
use firn_lab::{Line, Lines};
use serde::Serialize;

/// An iteration as the counter printed it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Iteration {
    pub(super) iteration: u64,
    pub(super) checksum: String,
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
pub(super) struct Proof {
    /// The last that was seen before the checkpoint was asked for.
    pub(super) before: Iteration,
    /// The last that was computed before the freeze, as the source tells afterwards.
    pub(super) frozen_after: Iteration,
    /// The first after the restore.
    pub(super) after: Iteration,
    /// What the source, going on, got for that iteration.
    pub(super) source_got: Iteration,
    /// The last that was seen after the restore.
    pub(super) last: Iteration,
    /// Iterations since the restore, all of them right.
    pub(super) verified: usize,
}

impl Proof {
    /// From the line seen before the checkpoint, all lines of the source, and those since the restore.
    pub(super) fn of(before: &Line, source: &Lines, restored: &Lines) -> Result<Self> {
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
            bail!("the source did not go on to iteration {}", first.iter);
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
    fn a_counter_that_goes_on_is_proven() {
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
    fn one_that_began_again_or_jumped_is_not() {
        let source = [1, 2, 3, 4, 5];
        assert!(refusal(&source, &lines(&[1, 2], 0)).contains("began at iteration 1"));
        assert!(refusal(&source, &lines(&[9, 10], 0)).contains("never computed the one before"));
        assert!(refusal(&source, &lines(&[4, 6], 0)).contains("was followed by 6"));
        assert!(refusal(&source, &lines(&[], 0)).contains("printed nothing"));
    }

    #[test]
    fn another_memory_is_not() {
        assert!(refusal(&[1, 2, 3, 4, 5], &lines(&[4, 5], 7)).contains("checksum of iteration 4"));
    }

    #[test]
    fn a_source_that_stood_still_is_not() {
        assert!(refusal(&[1, 2, 3], &lines(&[4, 5], 0)).contains("did not go on"));
    }
}
