//! The cells of the matrix, made by rule: what fails, when, and of which container.

use std::fmt;
use std::sync::OnceLock;

use firn_node::Cgroup;

/// What is going on when the fault happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Flow {
    Checkpoint,
    Restore,
}

/// A phase of a checkpoint or restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Deciding on a restore, in Create.
    Prepare,
    /// Looking for CUDA processes and asking for their state.
    Inspect,
    Lock,
    /// The driver's checkpoint.
    Take,
    /// runc and CRIU, at a checkpoint.
    Dump,
    /// runc and CRIU, at a restore.
    CriuRestore,
    /// Between CRIU and the driver, at a restore.
    DevRepair,
    /// The driver's restore.
    GiveBack,
    Unlock,
    /// The end of a container that was to end with its checkpoint.
    Finish,
    /// Letting the tasks of a restored container run.
    Continue,
    /// The way back of a restore whose driver has failed.
    Abandon,
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
}

/// Who is killed with SIGKILL while the flow is in the phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    Worker,
    Shim,
    Containerd,
    Client,
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
    /// No device node can be made in the container's /dev.
    Mknod,
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
}

/// One cell of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    pub flow: Flow,
    pub phase: Phase,
    pub fault: Fault,
    pub from: From,
    pub exit: bool,
    pub subject: Subject,
}

const SUBJECTS: [Subject; 4] = [
    subject(Cgroup::V1, 1),
    subject(Cgroup::V2, 1),
    subject(Cgroup::V1, 4),
    subject(Cgroup::V2, 4),
];

const fn subject(cgroup: Cgroup, processes: usize) -> Subject {
    Subject { cgroup, processes }
}

/// Why a combination is no cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Why {
    NothingGivenBack,
    NoSuchCall,
    NoRuntime,
    NotItsMoment,
    NoFreezerAtRestore,
    OnlyRead,
    NoDevice,
    NoV1,
    NoWorker,
    NoNode,
    NotEnded,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NothingGivenBack => "a container that ends with its dump gets nothing back",
            Self::NoSuchCall => "the phase calls the driver not at all, or not that call",
            Self::NoRuntime => "runc and CRIU do not run in the phase, and nothing is written",
            Self::NotItsMoment => "CRIU has that moment in the other flow",
            Self::OnlyRead => "a restore writes nothing into the image",
            Self::NoDevice => "without device-mapper nothing makes a file system fail that is in use",
            Self::NoV1 => "this host has no hierarchies of cgroup v1",
            Self::NoWorker => "the driver's worker has ended by then",
            Self::NoNode => "only the repair of /dev makes device nodes",
            Self::NotEnded => "a container that runs on is not ended",
            Self::NoFreezerAtRestore => "a restore begins from nothing and asks for no exit",
        })
    }
}

const PHASES: [(Flow, &[Phase]); 2] = [
    (
        Flow::Checkpoint,
        &[
            Phase::Inspect,
            Phase::Lock,
            Phase::Take,
            Phase::Dump,
            Phase::GiveBack,
            Phase::Unlock,
            Phase::Finish,
        ],
    ),
    (
        Flow::Restore,
        &[
            Phase::Prepare,
            Phase::CriuRestore,
            Phase::DevRepair,
            Phase::GiveBack,
            Phase::Unlock,
            Phase::Continue,
            Phase::Abandon,
        ],
    ),
];

const MOMENTS: [Moment; 6] = [
    Moment::PreDump,
    Moment::NetworkLock,
    Moment::PostDump,
    Moment::PreRestore,
    Moment::PostRestore,
    Moment::PreResume,
];

/// CRIU's numbers, from `enum faults` of its `fault-injection.h`. With CRIU 4.1.1 and 4.2.1 and these workloads 1, 3 and 5
/// break a dump, 2 (of more than one process) and 6 a restore; 4 concerns links that these workloads do not have. Those from
/// 127 on choose other ways, which must work as well; two of them stand for all.
const CRIU_FAULTS: [(u32, Flow); 8] = [
    (1, Flow::Checkpoint),
    (3, Flow::Checkpoint),
    (5, Flow::Checkpoint),
    (136, Flow::Checkpoint),
    (131, Flow::Checkpoint),
    (2, Flow::Restore),
    (6, Flow::Restore),
    (131, Flow::Restore),
];

/// Coprime to the number of cells of each kind, so that [`quick`] goes through all of the other axes.
const TURN: usize = 5;

fn faults() -> Vec<Fault> {
    let mut faults = Vec::new();
    for often in [Often::Once, Often::OnceAfter, Often::Always] {
        faults.extend([
            Fault::DriverError(often),
            Fault::DriverHang(often),
            Fault::WorkerCrash(often),
        ]);
    }
    faults.extend([Victim::Worker, Victim::Shim, Victim::Containerd, Victim::Client].map(Fault::Kill));
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
    faults.extend([Fault::NoSpaceForManifest, Fault::Mknod]);
    faults
}

/// Whether nodes of this host can have cgroup v1.
pub fn has_cgroup_v1() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        // NUMBER:CONTROLLERS:PATH; the unified hierarchy has no controllers, systemd's own is one by name only.
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mut lists = own.lines().filter_map(|line| line.split(':').nth(1));
        lists.any(|list| !list.is_empty() && !list.starts_with("name="))
    })
}

/// All cells, and how many combinations are none, by reason.
pub fn all() -> (Vec<Cell>, Vec<(Why, usize)>) {
    let (mut cells, mut left_out) = (Vec::new(), std::collections::BTreeMap::new());
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
                        let cell = Cell {
                            flow,
                            phase,
                            fault,
                            from,
                            exit,
                            subject,
                        };
                        match cell.why_not() {
                            None => cells.push(cell),
                            Some(why) => *left_out.entry(why).or_insert(0) += 1,
                        }
                    }
                }
            }
        }
    }
    (cells, left_out.into_iter().collect())
}

/// The cells of a few minutes: the plain faults of every phase once, the other axes taken in turn.
pub fn quick() -> Vec<Cell> {
    let (all, _) = all();
    let mut turn = 0;
    let mut chosen: Vec<Cell> = Vec::new();
    for cell in all.iter().filter(|cell| cell.is_plain()) {
        let alike =
            |other: &&Cell| (other.flow, other.phase, other.fault) == (cell.flow, cell.phase, cell.fault);
        if chosen.iter().any(|chosen| alike(&chosen)) {
            continue;
        }
        let kind: Vec<&Cell> = all.iter().filter(alike).collect();
        chosen.push(*kind[turn % kind.len()]);
        turn += TURN;
    }
    chosen.sort_by_key(|cell| (cell.subject.processes, cell.subject.cgroup == Cgroup::V2));
    chosen
}

impl Moment {
    /// As CRIU tells it to its action scripts.
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

    fn flow(self) -> Flow {
        match self {
            Self::PreDump | Self::NetworkLock | Self::PostDump => Flow::Checkpoint,
            Self::PreRestore | Self::PostRestore | Self::PreResume => Flow::Restore,
        }
    }
}

impl Phase {
    /// The driver call that the phase makes, as simgpu's faults name it.
    pub fn call(self) -> Option<&'static str> {
        match self {
            Self::Inspect | Self::DevRepair => Some("tid"),
            Self::Lock => Some("lock"),
            Self::Take => Some("checkpoint"),
            Self::GiveBack => Some("restore"),
            Self::Unlock => Some("unlock"),
            Self::Prepare
            | Self::Dump
            | Self::CriuRestore
            | Self::Finish
            | Self::Continue
            | Self::Abandon => None,
        }
    }

    /// Whether runc and CRIU run in it.
    pub fn runs_criu(self) -> bool {
        matches!(self, Self::Dump | Self::CriuRestore)
    }
}

impl Fault {
    /// Whether it is one of the few that are tried in every run of the tests; hangs take their deadlines' time.
    fn is_plain(self) -> bool {
        match self {
            Self::DriverError(often) => often != Often::OnceAfter,
            Self::WorkerCrash(often) => often == Often::Once,
            Self::DriverHang(_) | Self::RuncHang(_) | Self::RuncHangAt(_) | Self::CriuErrorAt(_) => false,
            Self::Kill(victim) => victim != Victim::Client,
            Self::RuncError(when) => when == Runc::After,
            Self::RuncKill(when) => when == Runc::Before,
            Self::CriuHangAt(moment) | Self::RuncKillAt(moment) => {
                matches!(moment, Moment::PreDump | Moment::PreRestore)
            }
            Self::CriuKillAt(moment) => matches!(moment, Moment::PostDump | Moment::PreResume),
            Self::CriuError | Self::NoSpaceForManifest | Self::Mknod => true,
            Self::CriuFault(number) => matches!(number, 2 | 3),
            Self::NoSpace(disk) => disk != Disk::Work,
            Self::Io(disk) => disk == Disk::Image,
            Self::ReadOnly(_) => false,
        }
    }
}

impl Cell {
    fn is_plain(&self) -> bool {
        // Of these phases one victim each.
        let victim = match self.phase {
            Phase::Prepare => Victim::Worker,
            Phase::Finish | Phase::Continue | Phase::Abandon => Victim::Shim,
            _ => return self.fault.is_plain(),
        };
        self.fault == Fault::Kill(victim)
    }

    fn why_not(&self) -> Option<Why> {
        let restores = self.flow == Flow::Restore;
        if self.subject.cgroup == Cgroup::V1 && !has_cgroup_v1() {
            return Some(Why::NoV1);
        }
        if restores && (self.exit || self.from == From::Paused) {
            return Some(Why::NoFreezerAtRestore);
        }
        if self.exit && matches!(self.phase, Phase::GiveBack | Phase::Unlock) {
            return Some(Why::NothingGivenBack);
        }
        if self.phase == Phase::Finish && !self.exit {
            return Some(Why::NotEnded);
        }
        match self.fault {
            Fault::DriverError(often) | Fault::DriverHang(often) | Fault::WorkerCrash(often) => {
                // For ever only where there is a second try; a restore has none.
                let retried = !restores && !matches!(self.phase, Phase::Lock | Phase::Take);
                (self.phase.call().is_none() || (often == Often::Always && !retried))
                    .then_some(Why::NoSuchCall)
            }
            Fault::Kill(Victim::Worker) if self.phase == Phase::Abandon => Some(Why::NoWorker),
            Fault::Kill(_) => None,
            Fault::Mknod => (self.phase != Phase::DevRepair).then_some(Why::NoNode),
            Fault::RuncError(_) | Fault::RuncHang(_) | Fault::RuncKill(_) | Fault::CriuError => {
                (!self.phase.runs_criu()).then_some(Why::NoRuntime)
            }
            // The journal is open in it.
            Fault::ReadOnly(Disk::Bundle) if restores && self.phase.runs_criu() => Some(Why::NoDevice),
            Fault::NoSpace(disk) | Fault::ReadOnly(disk) => match self.phase.runs_criu() {
                false => Some(Why::NoRuntime),
                true => (restores && disk == Disk::Image).then_some(Why::OnlyRead),
            },
            Fault::Io(disk) => match self.phase.runs_criu() {
                false => Some(Why::NoRuntime),
                true => {
                    let other = disk == Disk::Bundle || (restores && disk == Disk::Work);
                    other.then_some(Why::NoDevice)
                }
            },
            Fault::NoSpaceForManifest => (self.phase != Phase::Dump).then_some(Why::NoRuntime),
            Fault::CriuErrorAt(moment)
            | Fault::CriuHangAt(moment)
            | Fault::CriuKillAt(moment)
            | Fault::RuncKillAt(moment)
            | Fault::RuncHangAt(moment) => match self.phase.runs_criu() {
                false => Some(Why::NoRuntime),
                true => (moment.flow() != self.flow).then_some(Why::NotItsMoment),
            },
            Fault::CriuFault(number) => match self.phase.runs_criu() {
                false => Some(Why::NoRuntime),
                true => (!CRIU_FAULTS.contains(&(number, self.flow))).then_some(Why::NotItsMoment),
            },
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cgroup = match self.cgroup {
            Cgroup::V2 => "v2",
            Cgroup::V1 | Cgroup::Auto => "v1",
        };
        write!(f, "{cgroup}/{}", self.processes)
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flow = match self.flow {
            Flow::Checkpoint => "checkpoint",
            Flow::Restore => "restore",
        };
        write!(f, "{flow}/{}/{}/", self.phase, self.fault)?;
        if self.flow == Flow::Checkpoint {
            let from = match self.from {
                From::Running => "running",
                From::Paused => "paused",
            };
            let end = if self.exit { "exit" } else { "stay" };
            write!(f, "{from}/{end}/")?;
        }
        self.subject.fmt(f)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prepare => "prepare",
            Self::Finish => "finish",
            Self::Continue => "continue",
            Self::Abandon => "abandon",
            Self::Inspect => "inspect",
            Self::Lock => "lock",
            Self::Take => "take",
            Self::Dump => "dump",
            Self::CriuRestore => "criu",
            Self::DevRepair => "dev-repair",
            Self::GiveBack => "give-back",
            Self::Unlock => "unlock",
        })
    }
}

impl fmt::Display for Often {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Once => "",
            Self::OnceAfter => "-after",
            Self::Always => "-always",
        })
    }
}

impl fmt::Display for Runc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Before => "",
            Self::After => "-after",
        })
    }
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Image => "image",
            Self::Work => "work",
            Self::Bundle => "bundle",
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DriverError(often) => write!(f, "driver-error{often}"),
            Self::DriverHang(often) => write!(f, "driver-hang{often}"),
            Self::WorkerCrash(often) => write!(f, "worker-crash{often}"),
            Self::Kill(Victim::Worker) => f.write_str("kill-worker"),
            Self::Kill(Victim::Shim) => f.write_str("kill-shim"),
            Self::Kill(Victim::Containerd) => f.write_str("kill-containerd"),
            Self::Kill(Victim::Client) => f.write_str("kill-client"),
            Self::RuncError(when) => write!(f, "runc-error{when}"),
            Self::RuncHang(when) => write!(f, "runc-hang{when}"),
            Self::RuncKill(when) => write!(f, "runc-kill{when}"),
            Self::RuncKillAt(moment) => write!(f, "runc-kill-at-{}", moment.name()),
            Self::RuncHangAt(moment) => write!(f, "runc-hang-at-{}", moment.name()),
            Self::CriuError => f.write_str("criu-error"),
            Self::CriuErrorAt(moment) => write!(f, "criu-error-at-{}", moment.name()),
            Self::CriuHangAt(moment) => write!(f, "criu-hang-at-{}", moment.name()),
            Self::CriuKillAt(moment) => write!(f, "criu-kill-at-{}", moment.name()),
            Self::CriuFault(number) => write!(f, "criu-fault-{number}"),
            Self::NoSpace(disk) => write!(f, "enospc-{disk}"),
            Self::NoSpaceForManifest => f.write_str("enospc-manifest"),
            Self::Io(disk) => write!(f, "eio-{disk}"),
            Self::ReadOnly(disk) => write!(f, "erofs-{disk}"),
            Self::Mknod => f.write_str("mknod"),
        }
    }
}
