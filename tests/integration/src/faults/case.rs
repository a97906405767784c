//! The cases of the matrix, made by rule: what fails, when, and of which container.

use std::sync::OnceLock;

use firn_node::Cgroup;

pub(super) use super::phases::PHASES;
pub use super::phases::Phase;
use super::stalls::Stall;

/// What is in progress when the fault happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Flow {
    Checkpoint,
    Restore,
    /// A pause that gives the GPU free.
    Pause,
    /// Of a parked container, onto its own GPU.
    Resume,
    /// The same, onto another one.
    ResumeElsewhere,
    /// Of a running container to another GPU.
    Move,
}

impl Flow {
    /// Whether GPU state is parked in host memory, and nothing is written to disk.
    pub(super) fn parks(self) -> bool {
        !matches!(self, Self::Checkpoint | Self::Restore)
    }

    /// Whether it begins with a parked container.
    pub(super) fn resumes(self) -> bool {
        matches!(self, Self::Resume | Self::ResumeElsewhere)
    }
}

/// When in the life of a runc the fault happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runc {
    Before,
    After,
}

/// One of CRIU's moments, by the names of its action scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    PreDump,
    NetworkLock,
    PostDump,
    PreRestore,
    PostRestore,
    PreResume,
}

/// A file system that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disk {
    Image,
    Work,
    Bundle,
    Store,
}

/// Who is killed with SIGKILL while the flow is in the phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    Worker,
    /// firn-hook, while it copies memory.
    Hook,
    Shim,
    Containerd,
    Client,
    /// A process that uses the GPU.
    Process,
    /// The container, by its client.
    Task,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The phase's driver call answers an error: once, after it was carried out, or for ever.
    DriverError(Often),
    /// It does not return: once, after it was carried out, or for ever.
    DriverHang(Often),
    /// It takes the worker along.
    WorkerCrash(Often),
    Kill(Victim),
    /// runc ends with an error; after its work is done, if so.
    RuncError(Runc),
    RuncHang(Runc),
    RuncKill(Runc),
    /// runc dies, or stands still, while CRIU is at a moment.
    RuncKillAt(Moment),
    RuncHangAt(Moment),
    /// CRIU cannot be started properly.
    CriuError,
    CriuErrorAt(Moment),
    CriuHangAt(Moment),
    CriuKillAt(Moment),
    /// CRIU's own fault injection.
    CriuFault(u32),
    NoSpace(Disk),
    /// Files can be written, and the manifest not.
    NoSpaceForManifest,
    Io(Disk),
    ReadOnly(Disk),
    /// The store is not mounted any more.
    StoreGone,
    /// No device node can be made in the container's /dev.
    Mknod,
    /// firn's own code fails when it enters the phase.
    Panic,
    /// Somebody else thaws the container when it was dumped.
    Thawed,
    /// A file system hangs.
    Stall(Stall),
    /// The container's memory limit leaves no room for its GPU state.
    NoMemory,
    /// Another container has the GPU that is wanted.
    GpuBusy,
    /// A process that firn knows nothing of has its memory.
    GpuOccupied,
    /// It has vanished from the node.
    GpuGone,
}

/// What goes wrong, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultAt {
    pub phase: Phase,
    pub fault: Fault,
}

/// How often a fault of the driver happens, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Often {
    Once,
    OnceAfter,
    Always,
}

/// State of the container when it is checkpointed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    Running,
    Paused,
}

/// The container and its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subject {
    pub cgroup: Cgroup,
    pub processes: usize,
    /// It has large memory, and that goes into a store.
    pub stored: bool,
}

impl Subject {
    /// Whether the container names hooks: so each fault meets a container with hooks and one without.
    pub(super) fn has_hooks(self) -> bool {
        self.processes > 1
    }

    /// Groups and sorts by it.
    pub(super) fn key(self) -> (bool, usize, bool) {
        (self.stored, self.processes, self.cgroup == Cgroup::V2)
    }
}

/// One case of the matrix, or a pair of two that differ in their fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub flow: Flow,
    pub first: FaultAt,
    /// What goes wrong after that, in the same operation.
    pub second: Option<FaultAt>,
    pub from: From,
    pub exit: bool,
    pub subject: Subject,
}

const SUBJECTS: [Subject; 6] = [
    subject(Cgroup::V1, 1),
    subject(Cgroup::V2, 1),
    subject(Cgroup::V1, 4),
    subject(Cgroup::V2, 4),
    stored(subject(Cgroup::V2, 1)),
    stored(subject(Cgroup::V2, 4)),
];

const fn subject(cgroup: Cgroup, processes: usize) -> Subject {
    Subject {
        cgroup,
        processes,
        stored: false,
    }
}

const fn stored(subject: Subject) -> Subject {
    Subject {
        stored: true,
        ..subject
    }
}

/// Why a combination is no case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Why {
    NothingRestored,
    NoSuchCall,
    NoRuntime,
    NotItsMoment,
    NoFreezerAtRestore,
    OnlyRead,
    NoDevice,
    NoV1,
    NoWorker,
    NoNode,
    NoPhase,
    NoHook,
    LeftToResume,
    OnceIsEnough,
    NotEnded,
    OtherFlow,
    NothingParkedAgain,
    NoController,
    FromTheBeginning,
    NoStore,
    StoreAside,
}

const MOMENTS: [Moment; 6] = [
    Moment::PreDump,
    Moment::NetworkLock,
    Moment::PostDump,
    Moment::PreRestore,
    Moment::PostRestore,
    Moment::PreResume,
];

/// CRIU's numbers, from `enum faults` of its `fault-injection.h`. With CRIU 4.1.1 and 4.2.1 and these
/// workloads 1, 3 and 5 break a dump, 2 (of more than one process) and 6 a restore; 4 concerns links that
/// these workloads do not have. Those from 127 on choose other ways, which must work as well; two of them
/// stand for all.
pub(super) const CRIU_FAULTS: [(u32, Flow); 8] = [
    (1, Flow::Checkpoint),
    (3, Flow::Checkpoint),
    (5, Flow::Checkpoint),
    (136, Flow::Checkpoint),
    (131, Flow::Checkpoint),
    (2, Flow::Restore),
    (6, Flow::Restore),
    (131, Flow::Restore),
];

/// Coprime to the number of cases of each kind, so that [`quick`] goes through all of the other axes.
const TURN: usize = 5;

pub(super) fn faults() -> Vec<Fault> {
    let mut faults = Vec::new();
    for often in [Often::Once, Often::OnceAfter, Often::Always] {
        faults.extend([
            Fault::DriverError(often),
            Fault::DriverHang(often),
            Fault::WorkerCrash(often),
        ]);
    }
    let victims = [
        Victim::Worker,
        Victim::Hook,
        Victim::Shim,
        Victim::Containerd,
        Victim::Client,
        Victim::Process,
        Victim::Task,
    ];
    faults.extend(victims.map(Fault::Kill));
    for when in [Runc::Before, Runc::After] {
        faults.extend([
            Fault::RuncError(when),
            Fault::RuncHang(when),
            Fault::RuncKill(when),
        ]);
    }
    faults.push(Fault::CriuError);
    for moment in MOMENTS {
        faults.extend([
            Fault::CriuErrorAt(moment),
            Fault::CriuHangAt(moment),
            Fault::CriuKillAt(moment),
            Fault::RuncKillAt(moment),
            Fault::RuncHangAt(moment),
        ]);
    }
    let mut numbers: Vec<u32> = CRIU_FAULTS.iter().map(|(number, _)| *number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    faults.extend(numbers.into_iter().map(Fault::CriuFault));
    for disk in [Disk::Image, Disk::Work, Disk::Bundle] {
        faults.extend([Fault::NoSpace(disk), Fault::Io(disk), Fault::ReadOnly(disk)]);
    }
    faults.extend([Fault::NoSpace(Disk::Store), Fault::StoreGone]);
    faults.extend([
        Fault::NoSpaceForManifest,
        Fault::Thawed,
        Fault::Mknod,
        Fault::Panic,
    ]);
    faults.extend(Stall::all().map(Fault::Stall));
    faults.extend([
        Fault::NoMemory,
        Fault::GpuBusy,
        Fault::GpuOccupied,
        Fault::GpuGone,
    ]);
    faults
}

/// Whether nodes of this host can have cgroup v1.
pub fn has_cgroup_v1() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        // NUMBER:CONTROLLERS:PATH; the unified hierarchy has no controllers, systemd's own is one by name
        // only.
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mut lists = own.lines().filter_map(|line| line.split(':').nth(1));
        lists.any(|list| !list.is_empty() && !list.starts_with("name="))
    })
}

/// All cases, and how many combinations are none, by reason.
pub fn all() -> (Vec<Case>, Vec<(Why, usize)>) {
    let (mut cases, mut left_out) = (Vec::new(), std::collections::BTreeMap::new());
    for subject in SUBJECTS {
        for (flow, phases) in PHASES {
            for &phase in phases {
                for fault in faults() {
                    for (from, exit) in [
                        (From::Running, false),
                        (From::Running, true),
                        (From::Paused, false),
                        (From::Paused, true),
                    ] {
                        let case = Case {
                            flow,
                            first: FaultAt { phase, fault },
                            second: None,
                            from,
                            exit,
                            subject,
                        };
                        match case.why_not() {
                            None => cases.push(case),
                            Some(why) => *left_out.entry(why).or_insert(0) += 1,
                        }
                    }
                }
            }
        }
    }
    (cases, left_out.into_iter().collect())
}

/// The cases of a few minutes: the plain faults of every phase once, the other axes taken in turn.
pub fn quick() -> Vec<Case> {
    let (all, _) = all();
    let mut turn = 0;
    let mut chosen: Vec<Case> = Vec::new();
    for case in all.iter().filter(|case| case.is_plain()) {
        let alike = |other: &&Case| (other.flow, other.first) == (case.flow, case.first);
        if chosen.iter().any(|chosen| alike(&chosen)) {
            continue;
        }
        let kind: Vec<&Case> = all.iter().filter(alike).collect();
        chosen.push(*kind[turn % kind.len()]);
        turn += TURN;
    }
    chosen.sort_by_key(|case| case.subject.key());
    chosen
}

impl Moment {
    /// As CRIU names it to its action scripts.
    pub fn name(self) -> &'static str {
        match self {
            Self::PreDump => "pre-dump",
            Self::NetworkLock => "network-lock",
            Self::PostDump => "post-dump",
            Self::PreRestore => "pre-restore",
            Self::PostRestore => "post-restore",
            Self::PreResume => "pre-resume",
        }
    }

    pub(super) fn flow(self) -> Flow {
        match self {
            Self::PreDump | Self::NetworkLock | Self::PostDump => Flow::Checkpoint,
            Self::PreRestore | Self::PostRestore | Self::PreResume => Flow::Restore,
        }
    }
}
