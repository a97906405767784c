//! Pairs of faults: something goes wrong, and something else while firn still works on the same checkpoint or
//! restore.
//!
//! There are tens of thousands, so a sample is drawn; the same seed draws the same. Every pair of phases gets
//! its turn, as otherwise the many faults of CRIU would crowd out what is rare.

use std::collections::BTreeMap;

use super::case::{
    Case, Disk, Fault, FaultAt, Flow, Moment, Often, Phase, Runc, Subject, Victim, all, faults,
};
use super::rules::Halt;
use crate::random::Random;

/// Pairs that have not been drawn yet.
pub struct Pairs {
    /// By the phases of both.
    kinds: Vec<Vec<Case>>,
    random: Random,
}

impl Pairs {
    /// All pairs that `wanted` takes.
    pub fn new(seed: u64, wanted: impl Fn(&Case) -> bool) -> Self {
        let (cases, _) = all();
        let mut candidates: Vec<((Flow, Subject), Vec<FaultAt>)> = Vec::new();
        let mut kinds: BTreeMap<_, Vec<Case>> = BTreeMap::new();
        // Hangs of file systems are rows of their own, and so is what follows a failed resume, or concerns a
        // store.
        let cases: Vec<Case> = cases
            .into_iter()
            .filter(|case| !case.hangs_a_file_system() && !case.flow.parks() && !case.subject.stored)
            .collect();
        for first in &cases {
            let key = (first.flow, first.subject);
            if candidates.last().is_none_or(|(last, _)| *last != key) {
                candidates.push((key, can_go_wrong(&cases, first.flow, first.subject)));
            }
            let seconds = candidates.last().into_iter().flat_map(|(_, seconds)| seconds);
            for second in seconds.filter(|second| first.can_be_followed_by(**second)) {
                let case = Case {
                    second: Some(*second),
                    ..*first
                };
                if wanted(&case) {
                    let kind = (case.flow, first.first.phase, second.phase);
                    kinds.entry(kind).or_default().push(case);
                }
            }
        }
        Self {
            kinds: kinds.into_values().collect(),
            random: Random::new(seed),
        }
    }

    /// How many are left.
    pub fn left(&self) -> usize {
        self.kinds.iter().map(Vec::len).sum()
    }

    /// Draws so many, or all that are left; those of one kind of host stand together.
    pub fn draw(&mut self, count: usize) -> Vec<Case> {
        let mut drawn: Vec<Case> = std::iter::from_fn(|| self.next()).take(count).collect();
        drawn.sort_by_key(|case| case.subject.key());
        drawn
    }

    fn next(&mut self) -> Option<Case> {
        if self.kinds.is_empty() {
            return None;
        }
        let kind = self.random.index(self.kinds.len());
        let cases = &mut self.kinds[kind];
        let case = cases.swap_remove(self.random.index(cases.len()));
        if cases.is_empty() {
            self.kinds.swap_remove(kind);
        }
        Some(case)
    }
}

/// What firn does when something has gone wrong.
enum After {
    /// The flow continues.
    Forward,
    /// It is rolled back; with GPU state to restore, or without.
    Back { taken: bool },
    /// What gives the GPU state back is tried again.
    Again,
    /// Nothing that a second fault could hit.
    Nothing,
}

/// Everything that can go wrong in this flow, the rollback of a checkpoint included.
fn can_go_wrong(cases: &[Case], flow: Flow, subject: Subject) -> Vec<FaultAt> {
    let mut found: Vec<FaultAt> = Vec::new();
    for case in cases {
        if (case.flow, case.subject) == (flow, subject) && !found.contains(&case.first) {
            found.push(case.first);
        }
    }
    if flow == Flow::Checkpoint {
        let in_rollback = |fault: &Fault| {
            // Of a workload that is killed nothing is promised.
            let others = [Victim::Hook, Victim::Process, Victim::Task].map(Fault::Kill);
            let is_firns = matches!(fault, Fault::Kill(_) | Fault::Panic);
            fault.is_the_drivers() || is_firns && !others.contains(fault)
        };
        found.extend(faults().into_iter().filter(in_rollback).map(|fault| FaultAt {
            phase: Phase::CheckpointRollback,
            fault,
        }));
    }
    found
}

impl Case {
    fn can_be_followed_by(&self, second: FaultAt) -> bool {
        let first = self.first;
        let after = self.after();
        if second.fault.is_of_a_disk() {
            // It stands there from the beginning, or begins to fail when runc is called.
            let other = first.fault.disk() != second.fault.disk();
            return other && first.phase.runs_criu() && !matches!(after, After::Nothing);
        }
        if self.flow == Flow::Restore && first.fault.is_of_a_disk() {
            return second.phase == Phase::RestoreRollback || second.place() > first.place();
        }
        // The shim waits in one phase only.
        if first.is_held() && second.is_held() {
            return false;
        }
        match after {
            After::Nothing => false,
            After::Forward => {
                let happens = match second.phase {
                    Phase::CheckpointRollback | Phase::RestoreRollback => false,
                    Phase::GpuRestore | Phase::GpuUnlock => !self.exit,
                    Phase::Sync | Phase::End => self.exit,
                    _ => true,
                };
                happens && second.place() > first.place() && first.fault != second.fault
            }
            After::Back { .. } if self.flow == Flow::Restore => second.phase == Phase::RestoreRollback,
            After::Back { taken } => match second.phase {
                // Disks fail from the beginning: nothing shows when a call of the driver belongs to the
                // rollback.
                Phase::CheckpointRollback => !first.fault.is_of_a_disk() || !second.fault.is_the_drivers(),
                Phase::GpuRestore => taken && second.fault != Fault::Panic,
                Phase::GpuUnlock => true,
                _ => false,
            },
            After::Again => match second.phase {
                Phase::CheckpointRollback => second.fault.is_the_drivers(),
                Phase::GpuRestore | Phase::GpuUnlock => {
                    // What was carried out is not asked for again.
                    let done = first.fault.often() == Some(Often::OnceAfter) && self.subject.processes == 1;
                    let asked = second.phase > first.phase || (second.phase == first.phase && !done);
                    asked && second.fault != Fault::Panic
                }
                _ => false,
            },
        }
    }

    fn hangs_a_file_system(&self) -> bool {
        matches!(self.first.fault, Fault::Stall(_))
    }

    fn after(&self) -> After {
        let FaultAt { phase, fault } = self.first;
        match fault {
            Fault::Kill(Victim::Shim) => After::Nothing,
            // Create is given up with its client.
            Fault::Kill(_) if phase == Phase::Prepare => After::Nothing,
            Fault::Kill(Victim::Client | Victim::Containerd) | Fault::CriuFault(127..) => After::Forward,
            // It has nothing to do while CRIU writes, and another takes its place.
            Fault::Kill(Victim::Worker) if phase == Phase::CriuDump => After::Forward,
            _ => match phase {
                Phase::PrepareHook
                | Phase::Inspect
                | Phase::Prepare
                | Phase::ResumedHook
                | Phase::End
                | Phase::RestoreRollback => After::Nothing,
                _ if self.flow == Flow::Restore => After::Back { taken: true },
                Phase::GpuRestore | Phase::GpuUnlock => After::Again,
                Phase::CriuDump | Phase::Sync => After::Back { taken: true },
                Phase::GpuCheckpoint => After::Back {
                    taken: fault.is_the_drivers()
                        && (fault.often() == Some(Often::OnceAfter) || self.subject.processes > 1),
                },
                Phase::GpuLock
                | Phase::CopyMemory
                | Phase::Parked
                | Phase::Grant
                | Phase::Repark
                | Phase::CriuRestore
                | Phase::DevRepair
                | Phase::FillMemory
                | Phase::Continue
                | Phase::RestoredHook
                | Phase::CheckpointRollback => After::Back { taken: false },
            },
        }
    }
}

impl FaultAt {
    /// Whether the shim waits for it.
    fn is_held(self) -> bool {
        self.phase.halt() == Halt::Shim && matches!(self.fault, Fault::Kill(_))
    }

    /// When it happens, in the course of a flow in which nothing fails.
    fn place(self) -> (Phase, usize) {
        let moment = |moment: Moment| match moment {
            Moment::PreDump | Moment::PreRestore => 2,
            Moment::NetworkLock | Moment::PostRestore => 3,
            Moment::PostDump | Moment::PreResume => 4,
        };
        let within = match self.fault {
            Fault::RuncError(when) | Fault::RuncHang(when) | Fault::RuncKill(when) => match when {
                Runc::Before => 0,
                Runc::After => 5,
            },
            Fault::CriuError | Fault::CriuFault(_) => 1,
            Fault::CriuErrorAt(at)
            | Fault::CriuHangAt(at)
            | Fault::CriuKillAt(at)
            | Fault::RuncKillAt(at)
            | Fault::RuncHangAt(at) => moment(at),
            Fault::Kill(_) => match self.phase {
                Phase::CriuDump => moment(Moment::PreDump),
                Phase::CriuRestore => moment(Moment::PreResume),
                _ => 0,
            },
            Fault::NoSpaceForManifest | Fault::Thawed => 6,
            _ => 0,
        };
        (self.phase, within)
    }
}

impl Fault {
    pub(super) fn is_the_drivers(self) -> bool {
        self.often().is_some()
    }

    fn often(self) -> Option<Often> {
        match self {
            Self::DriverError(often) | Self::DriverHang(often) | Self::WorkerCrash(often) => Some(often),
            _ => None,
        }
    }

    fn is_of_a_disk(self) -> bool {
        self.disk().is_some()
    }

    /// The disk that fails.
    fn disk(self) -> Option<Disk> {
        match self {
            Self::NoSpace(disk) | Self::Io(disk) | Self::ReadOnly(disk) => Some(disk),
            Self::NoSpaceForManifest => Some(Disk::Image),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::case::{Case, Phase};
    use super::Pairs;

    fn names(cases: &[Case]) -> Vec<String> {
        cases.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_seed_always_draws_the_same_and_no_pair_twice() {
        let draw = |seed| names(&Pairs::new(seed, |_| true).draw(400));
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        assert_eq!(draw(7).into_iter().collect::<BTreeSet<_>>().len(), 400);
    }

    #[test]
    fn all_that_are_wanted_are_drawn_in_the_end() {
        let wanted = |case: &Case| {
            case.to_string()
                .starts_with("checkpoint/gpu-checkpoint/driver-hang-after+rollback/")
        };
        let mut pairs = Pairs::new(1, wanted);
        let count = pairs.left();
        assert!(count > 0);
        assert_eq!(pairs.draw(count + 1).len(), count);
        assert_eq!(pairs.left(), 0);
    }

    #[test]
    fn faults_that_end_a_flow_are_followed_by_those_of_its_rollback_alone() {
        let of = |start: &str| -> BTreeSet<Phase> {
            let mut pairs = Pairs::new(1, |case| case.to_string().starts_with(start));
            let all = pairs.draw(usize::MAX);
            all.iter().filter_map(|case| Some(case.second?.phase)).collect()
        };
        assert!(of("checkpoint/inspect/driver-error+").is_empty());
        assert!(of("checkpoint/criu-dump/kill-shim+").is_empty());
        assert_eq!(
            of("checkpoint/gpu-lock/driver-error+"),
            [Phase::GpuUnlock, Phase::CheckpointRollback].into()
        );
        assert_eq!(
            of("restore/criu-restore/criu-error+"),
            [Phase::CriuRestore, Phase::RestoreRollback].into()
        );
        assert!(of("checkpoint/gpu-lock/kill-client+").contains(&Phase::CriuDump));
        for victim in ["process", "task"] {
            let kills = |case: &Case| case.to_string().contains(&format!("+rollback/kill-{victim}/"));
            assert_eq!(Pairs::new(1, kills).left(), 0, "{victim}");
        }
    }
}
