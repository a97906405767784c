//! What the host knows of a node: the record in its run directory.
//!
//! `node.json` is written before the first side effect and names everything that a crash can leave; `init` is
//! written by the node's first process about itself. A pid counts only together with its start time and the
//! boot, so that nothing is ever done to a process that merely got a dead one's number.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use nix::unistd::getpid;
use serde::{Deserialize, Serialize};

use crate::cgroup::{CgroupMode, Cgroups};
use crate::suite::Suite;

const RECORD: &str = "node.json";
const INIT: &str = "init";

/// A process of this boot that cannot be taken for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Pid on the host.
    pub pid: i32,
    /// Start time in clock ticks since boot.
    pub start: u64,
}

impl ProcessId {
    /// The calling process.
    pub(crate) fn current() -> Result<Self> {
        let pid = getpid().as_raw();
        let Some((start, _)) = stat(pid) else {
            bail!("read /proc/{pid}/stat: no start time in it")
        };
        Ok(Self { pid, start })
    }

    /// Whether it runs; a zombie does not.
    pub fn is_alive(self) -> bool {
        stat(self.pid).is_some_and(|(start, state)| start == self.start && !matches!(state, 'Z' | 'X'))
    }
}

/// Start time and state letter of a process.
fn stat(pid: i32) -> Option<(u64, char)> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse_stat(line: &str) -> Option<(u64, char)> {
    // The command may hold spaces and brackets; fields are counted from its last bracket.
    let (_, fields) = line.rsplit_once(") ")?;
    let state = fields.chars().next()?;
    Some((fields.split(' ').nth(19)?.trim_end().parse().ok()?, state))
}

/// How a node stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Its init runs and so does its maker, or it was left running on purpose.
    Running,
    /// Its maker runs, its init does not (yet, or no more). The maker will remove it.
    Held,
    /// Nobody will remove it.
    Crashed,
}

/// A node as recorded on the host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// Name, also its hostname.
    pub name: String,
    /// What it is made of.
    pub suite: Suite,
    /// Its cgroup version.
    pub cgroup: CgroupMode,
    /// Process that made it.
    pub maker: ProcessId,
    /// Whether it outlives its maker.
    pub left: bool,
    pub(crate) cgroups: Cgroups,
    pub(crate) boot: String,
    #[serde(skip)]
    pub(crate) dir: PathBuf,
    #[serde(skip)]
    pub(crate) init: Option<Init>,
}

/// What a node's first process writes about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Init {
    pub(crate) process: ProcessId,
    /// Inode of its mount namespace, by which the memory behind simulated GPUs is named.
    pub(crate) mount_namespace: u64,
}

impl Init {
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.strip_suffix('\n')?.split(' ');
        let init = Self {
            process: ProcessId {
                pid: fields.next()?.parse().ok()?,
                start: fields.next()?.parse().ok()?,
            },
            mount_namespace: fields.next()?.parse().ok()?,
        };
        fields.next().is_none().then_some(init)
    }
}

impl Record {
    /// Reads the record in a run directory; `None` if there is none.
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join(RECORD);
        let text = match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            text => text.with_context(|| format!("read {}", path.display()))?,
        };
        let mut record: Self =
            serde_json::from_slice(&text).with_context(|| format!("read {}", path.display()))?;
        record.dir = dir.to_path_buf();
        record.read_init();
        Ok(Some(record))
    }

    /// Reads what the first process has written by now.
    pub(crate) fn read_init(&mut self) {
        self.init = fs::read_to_string(self.dir.join(INIT))
            .ok()
            .and_then(|line| Init::parse(&line));
    }

    /// Writes the record, whole or not at all.
    pub(crate) fn write(&self) -> Result<()> {
        let (path, new) = (self.dir.join(RECORD), self.dir.join("node.json.new"));
        fs::write(&new, serde_json::to_vec_pretty(self)?)
            .with_context(|| format!("write {}", new.display()))?;
        fs::rename(&new, &path).with_context(|| format!("rename to {}", path.display()))
    }

    /// Pid of the node's init on the host while it runs.
    pub fn pid(&self) -> Option<i32> {
        self.init
            .map(|init| init.process)
            .filter(|init| self.of_this_boot() && init.is_alive())
            .map(|init| init.pid)
    }

    /// How the node stands now.
    pub fn status(&self) -> Status {
        let maker = self.of_this_boot() && self.maker.is_alive();
        match (self.pid().is_some(), maker) {
            (true, _) if self.left => Status::Running,
            (true, true) => Status::Running,
            (false, true) if !self.left => Status::Held,
            _ => Status::Crashed,
        }
    }

    pub(crate) fn of_this_boot(&self) -> bool {
        boot_id().is_ok_and(|boot| boot == self.boot)
    }
}

/// Names the running boot.
pub(crate) fn boot_id() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    Ok(fs::read_to_string(path)
        .with_context(|| format!("read {path}"))?
        .trim_end()
        .into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::Hierarchies;

    fn record(dir: &Path) -> Record {
        Record {
            name: "a".into(),
            suite: Suite::Forky,
            cgroup: CgroupMode::V1,
            maker: ProcessId::current().unwrap(),
            left: false,
            cgroups: Hierarchies::read().unwrap().plan("a", CgroupMode::V1),
            boot: boot_id().unwrap(),
            dir: dir.into(),
            init: None,
        }
    }

    /// A process that has ended, under a pid that may be taken again.
    fn gone() -> ProcessId {
        ProcessId {
            start: ProcessId::current().unwrap().start + 1,
            ..ProcessId::current().unwrap()
        }
    }

    #[test]
    fn reads_stat_of_processes_with_odd_names() {
        let tail = "S 1 1 1 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 156637 1 1";
        assert_eq!(parse_stat(&format!("7 (a) b) {tail}")), Some((156637, 'S')));
        assert_eq!(parse_stat("7 (sh) S 1"), None);
        assert_eq!(parse_stat(""), None);
    }

    #[test]
    fn init_line_counts_only_when_whole() {
        let init = Init::parse("28220 156637 4026532500\n").unwrap();
        assert_eq!(
            init,
            Init {
                process: ProcessId {
                    pid: 28220,
                    start: 156637
                },
                mount_namespace: 4026532500
            }
        );
        for bad in [
            "",
            "28220 156637 4026532500",
            "28220 156637\n",
            "28220 156637 4 6\n",
            "x 1 2\n",
        ] {
            assert_eq!(Init::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn own_process_is_alive_and_its_pid_with_another_start_is_not() {
        assert!(ProcessId::current().unwrap().is_alive());
        assert!(!gone().is_alive());
    }

    #[test]
    fn record_round_trips_and_takes_up_init() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Record::read(dir.path()).unwrap().is_none());
        record(dir.path()).write().unwrap();
        let me = ProcessId::current().unwrap();
        assert_eq!(Record::read(dir.path()).unwrap().unwrap().pid(), None);
        fs::write(dir.path().join(INIT), format!("{} {} 9\n", me.pid, me.start)).unwrap();
        let read = Record::read(dir.path()).unwrap().unwrap();
        assert_eq!(
            (read.pid(), read.name.as_str(), read.maker),
            (Some(me.pid), "a", me)
        );
    }

    #[test]
    fn only_nodes_that_nobody_will_remove_count_as_crashed() {
        let alive = Some(Init {
            process: ProcessId::current().unwrap(),
            mount_namespace: 0,
        });
        let dead = Some(Init {
            process: gone(),
            mount_namespace: 0,
        });
        let (us, them) = (ProcessId::current().unwrap(), gone());
        let cases = [
            (alive, us, false, Status::Running),
            (alive, us, true, Status::Running),
            (alive, them, true, Status::Running),
            (alive, them, false, Status::Crashed),
            (dead, us, false, Status::Held),
            (None, us, false, Status::Held),
            (dead, us, true, Status::Crashed),
            (dead, them, true, Status::Crashed),
            (None, them, false, Status::Crashed),
        ];
        for (init, maker, left, expected) in cases {
            let record = Record {
                init,
                maker,
                left,
                ..record(Path::new("/nowhere"))
            };
            assert_eq!(record.status(), expected, "{init:?} {maker:?} {left}");
        }
    }

    #[test]
    fn nothing_survives_a_reboot() {
        let me = ProcessId::current().unwrap();
        let record = Record {
            boot: "another".into(),
            init: Some(Init {
                process: me,
                mount_namespace: 0,
            }),
            left: true,
            ..record(Path::new("/nowhere"))
        };
        assert_eq!(record.pid(), None);
        assert_eq!(record.status(), Status::Crashed);
    }
}
