//! How cases, phases and faults are called.

use std::fmt;

use firn_node::Cgroup;

use super::case::{Case, Disk, Fault, FaultAt, Flow, From, Often, Phase, Runc, Subject, Victim, Why};
use super::stalls::{Operation, Place, Since, Stall, Then};

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cgroup = match self.cgroup {
            Cgroup::V2 => "v2",
            Cgroup::V1 | Cgroup::Auto => "v1",
        };
        write!(f, "{cgroup}/{}", self.processes)?;
        f.write_str(if self.stored { "/store" } else { "" })
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flow = match self.flow {
            Flow::Checkpoint => "checkpoint",
            Flow::Restore => "restore",
            Flow::Pause => "pause",
            Flow::Resume => "resume",
            Flow::ResumeElsewhere => "resume-elsewhere",
            Flow::Move => "move",
        };
        write!(f, "{flow}/{}", self.first)?;
        if let Some(second) = self.second {
            write!(f, "+{second}")?;
        }
        f.write_str("/")?;
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

impl fmt::Display for FaultAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.phase, self.fault)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prepare | Self::PrepareHook => "prepare",
            Self::ResumedHook => "resumed",
            Self::RestoredHook => "restored",
            Self::End => "end",
            Self::Continue => "continue",
            Self::RestoreRollback | Self::CheckpointRollback => "rollback",
            Self::Inspect => "inspect",
            Self::GpuLock => "gpu-lock",
            Self::GpuCheckpoint => "gpu-checkpoint",
            Self::CriuDump => "criu-dump",
            Self::CopyMemory => "copy-memory",
            Self::Sync => "sync",
            Self::CriuRestore => "criu-restore",
            Self::DevRepair => "dev-repair",
            Self::FillMemory => "fill-memory",
            Self::Parked => "parked",
            Self::Grant => "grant",
            Self::GpuRestore => "gpu-restore",
            Self::Repark => "repark",
            Self::GpuUnlock => "gpu-unlock",
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
            Self::Store => "store",
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
            Self::Kill(Victim::Hook) => f.write_str("kill-hook"),
            Self::Kill(Victim::Shim) => f.write_str("kill-shim"),
            Self::Kill(Victim::Containerd) => f.write_str("kill-containerd"),
            Self::Kill(Victim::Client) => f.write_str("kill-client"),
            Self::Kill(Victim::Process) => f.write_str("kill-process"),
            Self::Kill(Victim::Task) => f.write_str("kill-task"),
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
            Self::StoreGone => f.write_str("store-gone"),
            Self::Thawed => f.write_str("thawed"),
            Self::Mknod => f.write_str("mknod"),
            Self::Panic => f.write_str("panic"),
            Self::Stall(stall) => stall.fmt(f),
            Self::NoMemory => f.write_str("no-memory"),
            Self::GpuBusy => f.write_str("gpu-busy"),
            Self::GpuOccupied => f.write_str("gpu-occupied"),
            Self::GpuGone => f.write_str("gpu-gone"),
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NothingRestored => "a container that ends with its dump gets nothing back",
            Self::NoSuchCall => "the phase calls the driver not at all, or not that call",
            Self::NoRuntime => "runc and CRIU do not run in the phase, and nothing is written",
            Self::NotItsMoment => "CRIU has that moment in the other flow",
            Self::OnlyRead => "a restore writes nothing into the image",
            Self::NoDevice => "without device-mapper nothing makes a file system fail that is in use",
            Self::NoV1 => "this host has no hierarchies of cgroup v1",
            Self::NoWorker => "the driver's worker has ended by then",
            Self::NoNode => "only the repair of /dev makes device nodes",
            Self::NoPhase => "no code of firn's runs that has a phase of its own",
            Self::NoHook => "the container names no hook, or the fault does not concern its call",
            Self::LeftToResume => "the hook of a paused container is called when its client resumes it",
            Self::OnceIsEnough => "a file system that hangs is tried with one process that runs on",
            Self::NotEnded => "a container that runs on is not ended",
            Self::NoFreezerAtRestore => "only a checkpoint begins from a paused container or asks for exit",
            Self::OtherFlow => "the fault is one of pauses, resumes and moves alone",
            Self::NothingParkedAgain => "one process alone has nothing on a GPU when its restore has failed",
            Self::NoController => "this host's hierarchies of cgroup v1 have the memory controller",
            Self::NoStore => "no memory goes into a store",
            Self::StoreAside => "nothing is copied, and the store is of no concern",
            Self::FromTheBeginning => "it fails from the beginning, and is tried with the first phase",
        })
    }
}

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let operation = match self.operation {
            Operation::Stat => "stat",
            Operation::Statfs => "statfs",
            Operation::Open => "open",
            Operation::Create => "create",
            Operation::Write => "write",
            Operation::Unlink => "unlink",
        };
        let place = match self.place {
            Place::Image => "image",
            Place::Work => "work",
            Place::Bind => "bind",
        };
        let since = match self.since {
            Since::Begin | Since::Dump => "",
            Since::Manifest => "-manifest",
            Since::Cleanup => "-cleanup",
        };
        let then = match self.then {
            Then::GoesOn => "",
            Then::Ended => "-then-end",
            Then::Killed => "-and-kill",
        };
        write!(f, "stall-{operation}-{place}{since}{then}")
    }
}
