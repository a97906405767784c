//! Which combinations of phase and fault are cases.

use firn_node::Cgroup;

use super::case::{
    CRIU_FAULTS, Case, Disk, Fault, FaultAt, Flow, From, Moment, Often, Phase, Runc, Victim, Why,
    has_cgroup_v1,
};

/// How a phase is held while somebody is killed in it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Halt {
    /// A call of the driver takes longer.
    Driver,
    /// CRIU's action script waits, before the dump.
    Dump,
    /// It waits before the tasks run.
    Restore,
    /// firn's copy of memory waits.
    Copy,
    /// The worker waits.
    Worker,
    /// The shim waits, in one phase only.
    Shim,
    /// The container stands still by itself.
    None,
}

impl Phase {
    pub(super) fn halt(self) -> Halt {
        match self {
            Self::Inspect
            | Self::GpuLock
            | Self::GpuCheckpoint
            | Self::DevRepair
            | Self::GpuRestore
            | Self::GpuUnlock
            | Self::Repark => Halt::Driver,
            Self::CriuDump => Halt::Dump,
            Self::CriuRestore => Halt::Restore,
            Self::CopyMemory | Self::FillMemory => Halt::Copy,
            Self::Prepare => Halt::Worker,
            Self::Parked => Halt::None,
            Self::PrepareHook
            | Self::ResumedHook
            | Self::RestoredHook
            | Self::Sync
            | Self::Grant
            | Self::End
            | Self::Continue
            | Self::RestoreRollback
            | Self::CheckpointRollback => Halt::Shim,
        }
    }

    /// The driver call that the phase makes, as simgpu's faults name it.
    pub fn call(self) -> Option<&'static str> {
        match self {
            Self::Inspect | Self::DevRepair => Some("tid"),
            Self::GpuLock => Some("lock"),
            Self::GpuCheckpoint | Self::Repark => Some("checkpoint"),
            Self::GpuRestore => Some("restore"),
            Self::GpuUnlock => Some("unlock"),
            Self::CheckpointRollback => Some("state"),
            Self::Prepare
            | Self::PrepareHook
            | Self::ResumedHook
            | Self::RestoredHook
            | Self::CriuDump
            | Self::CopyMemory
            | Self::Sync
            | Self::CriuRestore
            | Self::FillMemory
            | Self::Parked
            | Self::Grant
            | Self::End
            | Self::Continue
            | Self::RestoreRollback => None,
        }
    }

    pub(super) fn is_hook(self) -> bool {
        matches!(self, Self::PrepareHook | Self::ResumedHook | Self::RestoredHook)
    }

    /// Whether firn copies memory in it.
    pub(super) fn copies(self) -> bool {
        matches!(self, Self::CopyMemory | Self::FillMemory)
    }

    /// Whether runc and CRIU run in it.
    pub fn runs_criu(self) -> bool {
        matches!(self, Self::CriuDump | Self::CriuRestore)
    }
}

impl Fault {
    /// Whether it is one of the few that are tried in every run of the tests; hangs take their deadlines'
    /// time.
    fn is_plain(self) -> bool {
        match self {
            Self::DriverError(often) => often != Often::OnceAfter,
            Self::WorkerCrash(often) => often == Often::Once,
            Self::DriverHang(_) | Self::RuncHang(_) | Self::RuncHangAt(_) | Self::CriuErrorAt(_) => false,
            Self::Kill(victim) => !matches!(victim, Victim::Client | Victim::Process | Victim::Task),
            Self::RuncError(when) => when == Runc::After,
            Self::RuncKill(when) => when == Runc::Before,
            Self::CriuHangAt(moment) | Self::RuncKillAt(moment) => {
                matches!(moment, Moment::PreDump | Moment::PreRestore)
            }
            Self::CriuKillAt(moment) => matches!(moment, Moment::PostDump | Moment::PreResume),
            // Panics have a test of their own, in the suite `recovery`.
            Self::Panic | Self::Stall(_) => false,
            Self::CriuError | Self::NoSpaceForManifest | Self::Thawed | Self::Mknod | Self::StoreGone => true,
            Self::CriuFault(number) => matches!(number, 2 | 3),
            Self::NoSpace(disk) => disk != Disk::Work,
            Self::Io(disk) => disk == Disk::Image,
            Self::ReadOnly(_) => false,
            // Those of parked containers are chosen by their phases.
            Self::NoMemory | Self::GpuBusy | Self::GpuOccupied | Self::GpuGone => false,
        }
    }
}

impl Case {
    /// What goes wrong, in order.
    pub(super) fn faults(&self) -> impl Iterator<Item = FaultAt> {
        [Some(self.first), self.second].into_iter().flatten()
    }

    pub(super) fn is_plain(&self) -> bool {
        let FaultAt { phase, fault } = self.first;
        if self.flow.parks() {
            return self.is_plain_parking();
        }
        // Of these phases one victim each.
        let victim = match phase.halt() {
            Halt::Worker => Victim::Worker,
            Halt::Shim => Victim::Shim,
            // With a store, what happens while memory is copied.
            _ if self.subject.stored => {
                return phase.copies() && fault.is_plain() && fault != Fault::Kill(Victim::Containerd);
            }
            _ => return fault.is_plain(),
        };
        fault == Fault::Kill(victim)
    }

    /// As [`Case::why_not`], of a hook. How hooks themselves fail is in the suite `job_hooks`.
    fn why_not_at_hook(&self) -> Option<Why> {
        let FaultAt { phase, fault } = self.first;
        let by_client = self.from == From::Paused || self.needs_client();
        match fault {
            _ if !self.subject.has_hooks() => Some(Why::NoHook),
            Fault::Kill(Victim::Worker) => Some(Why::NoWorker),
            Fault::Kill(Victim::Process | Victim::Task) => Some(Why::OtherFlow),
            Fault::Kill(_) | Fault::Panic if phase == Phase::ResumedHook && by_client => {
                Some(Why::LeftToResume)
            }
            Fault::Kill(_) | Fault::Panic => None,
            _ => Some(Why::NoHook),
        }
    }

    /// As [`Case::why_not`], of a pause, resume or move.
    fn why_not_parking(&self) -> Option<Why> {
        let FaultAt { phase, fault } = self.first;
        if phase.is_hook() && !self.subject.has_hooks() {
            return Some(Why::NoHook);
        }
        if phase == Phase::Repark && self.subject.processes == 1 {
            return Some(Why::NothingParkedAgain);
        }
        let first = match self.flow {
            Flow::Resume => Phase::GpuRestore,
            Flow::ResumeElsewhere => Phase::Grant,
            _ => Phase::Inspect,
        };
        let at = |wanted: Phase| (phase != wanted).then_some(Why::FromTheBeginning);
        match fault {
            Fault::DriverError(often) | Fault::DriverHang(often) | Fault::WorkerCrash(often) => {
                // For ever only where there is a second try.
                let retried = matches!(phase, Phase::GpuRestore | Phase::GpuUnlock);
                (phase.call().is_none() || (often == Often::Always && !retried)).then_some(Why::NoSuchCall)
            }
            Fault::Kill(Victim::Worker) => phase.call().is_none().then_some(Why::NoWorker),
            Fault::Kill(Victim::Client) => (phase == Phase::Parked).then_some(Why::NoPhase),
            Fault::Kill(_) => None,
            Fault::Panic => {
                let nameless = matches!(phase, Phase::GpuUnlock | Phase::Parked | Phase::Repark);
                nameless.then_some(Why::NoPhase)
            }
            Fault::NoSpace(Disk::Bundle) | Fault::ReadOnly(Disk::Bundle) => at(first),
            Fault::NoMemory if self.flow.resumes() => Some(Why::NoSuchCall),
            Fault::NoMemory if self.subject.cgroup == Cgroup::V2 && has_cgroup_v1() => {
                Some(Why::NoController)
            }
            Fault::NoMemory => at(first),
            Fault::GpuBusy | Fault::GpuOccupied | Fault::GpuGone => match self.flow {
                Flow::Pause => Some(Why::NoSuchCall),
                Flow::Resume => at(Phase::GpuRestore),
                _ => at(Phase::Grant),
            },
            Fault::Mknod => Some(Why::NoNode),
            _ => Some(Why::NoRuntime),
        }
    }

    /// The few pauses, resumes and moves of every run of the tests.
    fn is_plain_parking(&self) -> bool {
        let FaultAt { phase, fault } = self.first;
        match (self.flow, phase) {
            (Flow::Pause, Phase::GpuCheckpoint) => fault == Fault::DriverError(Often::Once),
            (Flow::Pause, Phase::Parked) => fault == Fault::Kill(Victim::Containerd),
            (Flow::Resume, Phase::GpuRestore) => {
                matches!(
                    fault,
                    Fault::DriverError(Often::Always) | Fault::GpuBusy | Fault::Kill(Victim::Task)
                )
            }
            (Flow::Resume, Phase::ResumedHook)
            | (Flow::ResumeElsewhere, Phase::GpuRestore)
            | (Flow::Move, Phase::Inspect) => fault == Fault::Panic,
            (Flow::Move, Phase::Grant) => matches!(fault, Fault::GpuOccupied | Fault::Kill(Victim::Shim)),
            (Flow::Move, Phase::GpuRestore) => fault == Fault::DriverError(Often::Always),
            (Flow::Move, Phase::GpuUnlock) => fault == Fault::DriverError(Often::Once),
            _ => false,
        }
    }

    /// As [`Case::why_not`], where memory goes into a store, or the fault is one of the store.
    fn why_not_by_store(&self) -> Option<Why> {
        let FaultAt { phase, fault } = self.first;
        let is_of_store = matches!(
            fault,
            Fault::Kill(Victim::Hook) | Fault::NoSpace(Disk::Store) | Fault::StoreGone
        );
        match (self.subject.stored, phase.copies()) {
            (false, copies) => (copies || is_of_store).then_some(Why::NoStore),
            (true, false) => (is_of_store || !phase.runs_criu()).then_some(Why::StoreAside),
            (true, true) => match fault {
                Fault::Kill(Victim::Hook | Victim::Shim | Victim::Containerd | Victim::Client) => None,
                Fault::NoSpace(Disk::Store) => (phase == Phase::FillMemory).then_some(Why::OnlyRead),
                // At a checkpoint the empty directory in its place becomes a store.
                Fault::StoreGone => (phase == Phase::CopyMemory).then_some(Why::NoDevice),
                _ => Some(Why::NoRuntime),
            },
        }
    }

    /// As [`Case::why_not`], whatever the fault.
    fn why_not_any(&self) -> Option<Why> {
        let phase = self.first.phase;
        let restores_gpu = matches!(phase, Phase::GpuRestore | Phase::GpuUnlock | Phase::ResumedHook);
        if self.subject.cgroup == Cgroup::V1 && !has_cgroup_v1() {
            Some(Why::NoV1)
        } else if self.flow != Flow::Checkpoint && (self.exit || self.from == From::Paused) {
            Some(Why::NoFreezerAtRestore)
        } else if self.exit && restores_gpu {
            Some(Why::NothingRestored)
        } else {
            (matches!(phase, Phase::Sync | Phase::End) && !self.exit).then_some(Why::NotEnded)
        }
    }

    pub(super) fn why_not(&self) -> Option<Why> {
        let FaultAt { phase, fault } = self.first;
        let why = self.why_not_any().or_else(|| self.why_not_by_store());
        if why.is_some() || phase.copies() {
            return why;
        }
        if self.flow.parks() {
            return self.why_not_parking();
        }
        if phase.is_hook() {
            return self.why_not_at_hook();
        }
        let restores = self.flow == Flow::Restore;
        let in_criu = |why: Option<Why>| {
            if phase.runs_criu() {
                why
            } else {
                Some(Why::NoRuntime)
            }
        };
        match fault {
            Fault::DriverError(often) | Fault::DriverHang(often) | Fault::WorkerCrash(often) => {
                // For ever only where there is a second try; a restore has none.
                let retried = !restores && !matches!(phase, Phase::GpuLock | Phase::GpuCheckpoint);
                (phase.call().is_none() || (often == Often::Always && !retried)).then_some(Why::NoSuchCall)
            }
            Fault::Kill(Victim::Worker) if phase == Phase::RestoreRollback => Some(Why::NoWorker),
            Fault::Kill(Victim::Process | Victim::Task)
            | Fault::NoMemory
            | Fault::StoreGone
            | Fault::GpuBusy
            | Fault::GpuOccupied
            | Fault::GpuGone => Some(Why::OtherFlow),
            Fault::Kill(_) => None,
            // The shim's journal knows no such phase.
            Fault::Panic => matches!(phase, Phase::Prepare | Phase::GpuUnlock).then_some(Why::NoPhase),
            Fault::Stall(stall) if restores || phase != stall.phase() => Some(Why::NoRuntime),
            Fault::Stall(_) => {
                let other = self.exit || self.from == From::Paused || self.subject.processes > 1;
                other.then_some(Why::OnceIsEnough)
            }
            Fault::Mknod => (phase != Phase::DevRepair).then_some(Why::NoNode),
            Fault::RuncError(_) | Fault::RuncHang(_) | Fault::RuncKill(_) | Fault::CriuError => in_criu(None),
            // The journal is open in it.
            Fault::ReadOnly(Disk::Bundle) if restores && phase.runs_criu() => Some(Why::NoDevice),
            Fault::NoSpace(disk) | Fault::ReadOnly(disk) => {
                in_criu((restores && disk == Disk::Image).then_some(Why::OnlyRead))
            }
            Fault::Io(disk) => {
                let has_none = disk == Disk::Bundle || (restores && disk == Disk::Work);
                in_criu(has_none.then_some(Why::NoDevice))
            }
            Fault::NoSpaceForManifest | Fault::Thawed => (phase != Phase::CriuDump).then_some(Why::NoRuntime),
            Fault::CriuErrorAt(moment)
            | Fault::CriuHangAt(moment)
            | Fault::CriuKillAt(moment)
            | Fault::RuncKillAt(moment)
            | Fault::RuncHangAt(moment) => in_criu((moment.flow() != self.flow).then_some(Why::NotItsMoment)),
            Fault::CriuFault(number) => {
                in_criu((!CRIU_FAULTS.contains(&(number, self.flow))).then_some(Why::NotItsMoment))
            }
        }
    }
}
