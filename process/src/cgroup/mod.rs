//! A container's cgroup: its location, processes, resource usage and freezer.
//!
//! A cgroup is one directory on a unified host and one per hierarchy on a v1 host. As in containerd and runc,
//! a host is unified only if `/sys/fs/cgroup` itself is cgroup2; anything else ("hybrid") is v1.
//!
//! Invariants: nothing here creates a cgroup. No call that freezes, kills or removes acts on the root of a
//! hierarchy, on a cgroup that this process is in, or on a hierarchy in which the container has no cgroup of
//! its own.

mod clean;
mod device_program;
mod device_unit;
mod devices;
mod freezer;
#[cfg(any(test, fuzzing, feature = "testing"))]
#[doc(hidden)]
pub mod fuzz;
mod locate;
mod oom;
pub mod read;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
#[allow(
    clippy::unwrap_used,
    reason = "a test that cannot be set up is a test that fails"
)]
pub mod testing;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_host::Absent;
use firn_host::cgroup_mounts::{CgroupDir, Version};
use firn_host::proc_maps::is_gone;

use crate::reaper::OutputError;

pub use freezer::FreezerState;
pub use freezer::Still;
pub use oom::OomWatch;

/// Exists where systemd runs the host: sd_booted(3).
const SYSTEMD: &str = "/run/systemd/system";

/// Lists the processes of a cgroup.
const PROCS: &str = "cgroup.procs";

/// v1 hierarchies that show where the container's own cgroup is, best first.
const PRIMARY: [&str; 5] = ["freezer", "devices", "memory", "pids", "cpu"];

/// A container's cgroup. It may not exist (any more).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    version: Version,
    /// By controller; the unified hierarchy has an empty name.
    places: BTreeMap<String, CgroupDir>,
}

/// A failed cgroup operation.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The mounted hierarchies cannot be listed.
    #[error("cannot list the mounted cgroup hierarchies")]
    Mounts { source: io::Error },
    /// There is no hierarchy in which containers could be distinguished.
    #[error("no cgroup hierarchy is mounted. hint: mount cgroup2 or the v1 controllers below /sys/fs/cgroup")]
    NoHierarchy,
    /// The process does not exist (any more).
    #[error("cannot read the cgroup of process {pid}")]
    Process { pid: i32, source: io::Error },
    /// The spec's `cgroupsPath` is not of the form that the systemd cgroup driver needs.
    #[error("cgroups path {path} is not of the form slice:prefix:name")]
    SystemdPath { path: String },
    /// The cgroup does not exist (any more).
    #[error("cgroup {path} does not exist")]
    Gone { path: PathBuf },
    /// A file of the cgroup could not be read.
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    /// A file of the cgroup could not be written.
    #[error("cannot write {path}")]
    Write { path: PathBuf, source: io::Error },
    /// A file of the cgroup does not have the form that the kernel documents.
    #[error("cannot understand {path}")]
    Malformed { path: PathBuf },
    /// The request would affect processes that are not the container's.
    #[error("cgroup {path} is not the container's own")]
    NotOwn { path: PathBuf },
    /// The host has no freezer.
    #[error("cgroup freezer is not available. hint: mount the v1 freezer controller or use cgroup v2")]
    NoFreezer,
    /// The cgroup did not freeze in time.
    #[error("cgroup {path} did not freeze within {limit:?}")]
    FreezeTimeout { path: PathBuf, limit: Duration },
    /// The cgroup did not thaw in time.
    #[error("cgroup {path} did not thaw within {limit:?}. hint: see whether a parent of it is frozen")]
    ThawTimeout { path: PathBuf, limit: Duration },
    /// Killed processes still exist.
    #[error("processes {pids:?} of cgroup {path} did not end within {limit:?} of SIGKILL")]
    KillTimeout {
        path: PathBuf,
        pids: Vec<i32>,
        limit: Duration,
    },
    /// The directory could not be removed.
    #[error("cannot remove cgroup {path}")]
    Remove { path: PathBuf, source: io::Error },
    /// Out-of-memory events cannot be watched.
    #[error("cannot watch {path} for out-of-memory events")]
    OomWatch { path: PathBuf, source: io::Error },
    /// Rules for more than one device at once differ.
    #[error("rules for several devices at once cannot be replaced in a running container")]
    DeviceRanges,
    /// There are no rules in force that could be replaced.
    #[error("cgroup {path} does not restrict devices")]
    AnyDevice { path: PathBuf },
    /// The rules are not the requested ones after they were replaced.
    #[error("device rules of cgroup {path} were changed by another program. hint: look for what manages it")]
    DeviceRules { path: PathBuf },
    /// The kernel refused to read, load or attach a program that enforces device rules.
    #[error("cannot {action} device program of cgroup {path}")]
    DeviceProgram {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// systemd did not change a unit's rules.
    #[error("systemd does not allow unit {unit} more devices: {complaint}")]
    Unit { unit: String, complaint: String },
    /// systemd's program did not run.
    #[error("cannot allow a systemd unit more devices")]
    Systemctl(#[from] OutputError),
    /// A unit's rules cannot be made those of the container alone.
    #[error("unit {unit} is in cgroup v1. hint: use cgroup v2")]
    UnitOfV1 { unit: String },
    /// The host does not account memory per cgroup.
    #[error("cgroup memory controller is not available")]
    NoMemory,
}

impl Absent for CgroupError {
    /// Whether the error means that there is no such cgroup or process.
    fn is_absent(&self) -> bool {
        match self {
            Self::Gone { .. } => true,
            Self::Process { source, .. } | Self::Read { source, .. } | Self::Write { source, .. } => {
                is_gone(source)
            }
            _ => false,
        }
    }
}

impl Cgroup {
    /// The kind of its hierarchies.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The cgroup of a process.
    pub fn of_pid(pid: i32) -> Result<Self, CgroupError> {
        locate::of_pid(locate::host()?, pid)
    }

    /// The cgroup that a spec's `cgroupsPath` names, whether it exists or not: the one that a restore will
    /// use.
    pub fn by_spec(cgroups_path: &str, id: &str, systemd: bool) -> Result<Self, CgroupError> {
        locate::by_spec(locate::host()?, cgroups_path, id, systemd)
    }

    /// Whether systemd is to make the cgroup of a `cgroupsPath` that comes without options: the path has the
    /// form of its driver, and systemd runs the host.
    pub fn is_for_systemd(cgroups_path: &str) -> bool {
        locate::is_of_systemd(cgroups_path) && Path::new(SYSTEMD).is_dir()
    }

    /// v2: enables in the parent cgroups every controller that they have themselves, as far as the kernel
    /// allows.
    pub fn enable_controllers(&self) {
        let Some(place) = self.places.get("").filter(|_| self.version == Version::V2) else {
            return;
        };
        let controllers = read::text(&place.mount_point.join("cgroup.controllers"));
        let controllers = controllers.ok().flatten().unwrap_or_default();
        let above = place.path.ancestors().skip(1).collect::<Vec<_>>();
        for dir in above.into_iter().rev().map(|path| place.mount_point.join(path)) {
            for controller in controllers.split_whitespace() {
                // One write per controller: one that fails must not prevent the others.
                if let Err(error) =
                    read::write(&dir.join("cgroup.subtree_control"), &format!("+{controller}"))
                {
                    log::debug!("{error}");
                }
            }
        }
    }

    /// Whether the freezer is that of cgroup v1.
    pub fn is_v1(&self) -> bool {
        self.version == Version::V1
    }

    /// Whether the container's own directory exists.
    pub fn exists(&self) -> bool {
        self.primary().is_some_and(|place| place.dir().is_dir())
    }

    /// All processes in the cgroup and below, as this process's pid namespace numbers them. None when the
    /// cgroup does not exist any more.
    pub fn pids(&self) -> Result<Vec<i32>, CgroupError> {
        let mut pids = BTreeSet::new();
        if let Some(place) = self.primary() {
            collect_pids(&place.dir(), &mut pids)?;
        }
        Ok(pids.into_iter().collect())
    }

    /// The directory that the cgroup is in: that of its pod, with those of the pod's other containers.
    pub fn dir_of_pod(&self) -> PathBuf {
        self.primary_dir()
            .parent()
            .map(Path::to_owned)
            .unwrap_or_default()
    }

    /// Whether a process is in the cgroup, or below.
    pub fn holds(&self, pid: i32) -> bool {
        match (self.primary(), Self::of_pid(pid)) {
            (Some(own), Ok(its)) => its.is_in(own),
            _ => false,
        }
    }

    fn is_in(&self, other: &CgroupDir) -> bool {
        let is_in =
            |own: &CgroupDir| own.mount_point == other.mount_point && own.path.starts_with(&other.path);
        self.places.values().any(is_in)
    }

    /// The directory for messages: that of the hierarchy which shows the container's own cgroup.
    pub fn primary_dir(&self) -> PathBuf {
        self.primary().map(CgroupDir::dir).unwrap_or_default()
    }

    fn primary(&self) -> Option<&CgroupDir> {
        match self.version {
            Version::V2 => self.places.get(""),
            Version::V1 => PRIMARY
                .iter()
                .find_map(|name| self.places.get(*name))
                .or_else(|| self.places.values().next()),
        }
    }

    /// Directories of the container's own cgroup: one per hierarchy in which it has the same place as in the
    /// primary one.
    fn own_dirs(&self) -> Result<BTreeSet<PathBuf>, CgroupError> {
        let primary = self.own()?;
        let places = self.places.values().filter(|place| place.path == primary.path);
        Ok(firn_host::ordered::set_of(places.map(CgroupDir::dir)))
    }

    /// The primary place, if it can belong to one container: not a root, and no cgroup of this process.
    fn own(&self) -> Result<&CgroupDir, CgroupError> {
        let ours = Self::of_pid(locate::own_pid())?;
        match self.primary() {
            Some(place) if !place.is_root() && !ours.is_in(place) => Ok(place),
            _ => Err(CgroupError::NotOwn {
                path: self.primary_dir(),
            }),
        }
    }

    /// This directory, if it is the container's own.
    fn own_dir(&self, dir: PathBuf) -> Result<PathBuf, CgroupError> {
        if self.own_dirs()?.contains(&dir) {
            Ok(dir)
        } else {
            Err(CgroupError::NotOwn { path: dir })
        }
    }

    /// The directory of a v1 controller, or the unified one.
    pub fn dir(&self, controller: &str) -> Option<PathBuf> {
        let name = match self.version {
            Version::V1 => controller,
            Version::V2 => "",
        };
        self.places.get(name).map(CgroupDir::dir)
    }

    pub fn gone(&self) -> CgroupError {
        CgroupError::Gone {
            path: self.primary_dir(),
        }
    }
}

fn collect_pids(dir: &Path, pids: &mut BTreeSet<i32>) -> Result<(), CgroupError> {
    let procs = read::text(&dir.join(PROCS))?.unwrap_or_default();
    // A process of a pid namespace that this process cannot see is listed as 0.
    pids.extend(
        procs
            .lines()
            .filter_map(|line| line.parse::<i32>().ok())
            .filter(|pid| *pid > 0),
    );
    for child in read::children(dir)? {
        collect_pids(&child, pids)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
