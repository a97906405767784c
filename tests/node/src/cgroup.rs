//! The node's cgroups on the host: where they lie, how they are made, emptied and removed.
//!
//! A node gets one directory in every hierarchy that the host has mounted, whichever mode it runs in, and its
//! cgroup namespace has them as roots: what happens in the node stays below them. In v1 hierarchies the
//! directory lies below the maker's own cgroup, so that the maker's limits hold for its nodes; in v2 at the
//! mount's root, because a cgroup that has processes cannot hand controllers to its children.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// Which cgroup version a node is asked to have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cgroup {
    /// The version under which the host's kernel offers the resource controllers.
    #[default]
    Auto,
    /// v1 hierarchies, as the host has them mounted.
    V1,
    /// The unified hierarchy alone. Where v1 hierarchies hold a controller, the node cannot have it:
    /// containers must then ask for no limit of that kind (`ctr run --cpu-shares 0`).
    V2,
}

/// Which cgroup version a node has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CgroupMode {
    /// v1 hierarchies, and the unified one too if the host has it.
    V1,
    /// The unified hierarchy alone.
    V2,
}

impl CgroupMode {
    /// `v1` or `v2`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
        }
    }
}

/// One mounted hierarchy of the host.
#[derive(Debug, PartialEq, Eq)]
struct Hierarchy {
    /// v1 controllers; empty for the unified hierarchy.
    controllers: Vec<String>,
    /// Where nodes get their directories.
    parent: PathBuf,
}

/// The mounted hierarchies of the host, as this process sees them.
#[derive(Debug)]
pub(crate) struct Hierarchies(Vec<Hierarchy>);

impl Hierarchies {
    /// Reads those of the running kernel.
    pub(crate) fn read() -> Result<Self> {
        let cgroup = fs::read_to_string("/proc/self/cgroup").context("read /proc/self/cgroup")?;
        let mounts = fs::read_to_string("/proc/self/mountinfo").context("read /proc/self/mountinfo")?;
        Self::parse(&cgroup, &mounts)
    }

    fn parse(cgroup: &str, mountinfo: &str) -> Result<Self> {
        let mut found = Vec::new();
        for line in cgroup.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(own)) = (fields.next(), fields.next()) else {
                bail!("unexpected line in /proc/self/cgroup: {line:?}");
            };
            let controllers: Vec<String> = controllers
                .split(',')
                .filter(|c| !c.is_empty())
                .map(String::from)
                .collect();
            let Some((root, mount)) = mountinfo
                .lines()
                .find_map(|line| cgroup_mount(line, &controllers))
            else {
                continue;
            };
            let parent = if controllers.is_empty() {
                mount.into()
            } else {
                let below = Path::new(own).strip_prefix(root).with_context(|| {
                    format!("own cgroup {own} lies outside of what {mount} shows ({root})")
                })?;
                Path::new(mount).join(below)
            };
            found.push(Hierarchy { controllers, parent });
        }
        Ok(Self(found))
    }

    /// The mode for a request, or why this host cannot serve it.
    pub(crate) fn select(&self, wanted: Cgroup) -> Result<CgroupMode> {
        let v1 = ["freezer", "devices"]
            .iter()
            .all(|needed| self.0.iter().any(|h| h.controllers.iter().any(|c| c == needed)));
        let v2 = self.0.iter().any(|h| h.controllers.is_empty());
        match wanted {
            Cgroup::V1 | Cgroup::Auto if v1 => Ok(CgroupMode::V1),
            Cgroup::V2 | Cgroup::Auto if v2 => Ok(CgroupMode::V2),
            Cgroup::V1 => bail!(
                "no cgroup v1 on this host: it mounts no freezer and devices hierarchies\nhint: ask for v2"
            ),
            Cgroup::V2 => bail!("no cgroup v2 on this host: it mounts no cgroup2\nhint: ask for v1"),
            Cgroup::Auto => bail!(
                "this host mounts neither cgroup2 nor the v1 freezer and devices hierarchies below \
                 /sys/fs/cgroup"
            ),
        }
    }

    /// The directories of a node called `name`. Makes nothing.
    pub(crate) fn plan(&self, name: &str, mode: CgroupMode) -> Cgroups {
        let dirs = self
            .0
            .iter()
            .map(|h| h.parent.join(format!("firn-node-{name}")))
            .collect();
        let unified = self.0.iter().find(|h| h.controllers.is_empty());
        // Named as systemd names it, which takes the cgroup above it for its own, as it does on any host.
        let leaf = match (mode, unified) {
            (CgroupMode::V2, Some(h)) => Some(h.parent.join(format!("firn-node-{name}/init.scope"))),
            _ => None,
        };
        Cgroups { dirs, leaf }
    }
}

/// Root and mount point of a mountinfo line, if it mounts the hierarchy of these controllers.
fn cgroup_mount<'a>(line: &'a str, controllers: &[String]) -> Option<(&'a str, &'a str)> {
    let (mount, fs) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let (root, point) = (mount.next()?, mount.next()?);
    let mut fs = fs.split(' ');
    let (kind, options) = (fs.next()?, fs.nth(1)?);
    let ours = match kind {
        "cgroup2" => controllers.is_empty(),
        "cgroup" => {
            !controllers.is_empty()
                && controllers
                    .iter()
                    .all(|wanted| options.split(',').any(|o| o == wanted))
        }
        _ => false,
    };
    ours.then_some((root, point))
}

/// The cgroup directories of one node, on the host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Cgroups {
    /// One per hierarchy; each is the root of the node's cgroup namespace there.
    dirs: Vec<PathBuf>,
    /// For a v2 node: the cgroup of its own processes, below its unified directory.
    leaf: Option<PathBuf>,
}

impl Cgroups {
    /// Root of the node's cgroup namespace in every hierarchy.
    pub(crate) fn dirs(&self) -> &[PathBuf] {
        &self.dirs
    }

    /// Where a v2 node's own processes go.
    pub(crate) fn leaf(&self) -> Option<&Path> {
        self.leaf.as_deref()
    }

    /// What a process joins to be in the node.
    pub(crate) fn to_join(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.dirs.iter().map(|dir| match &self.leaf {
            Some(leaf) if leaf.starts_with(dir) => leaf.as_path(),
            _ => dir.as_path(),
        })
    }

    /// Makes the directories.
    pub(crate) fn create(&self) -> Result<()> {
        for dir in &self.dirs {
            fs::create_dir(dir).with_context(|| format!("make cgroup {}", dir.display()))?;
            // A v1 cpuset has no CPUs at first and takes no process until it has.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let parent = dir.with_file_name(file);
                if parent.exists() {
                    let value = fs::read(&parent).with_context(|| format!("read {}", parent.display()))?;
                    fs::write(dir.join(file), value)
                        .with_context(|| format!("write {file} of {}", dir.display()))?;
                }
            }
        }
        if let Some(leaf) = &self.leaf {
            fs::create_dir(leaf).with_context(|| format!("make cgroup {}", leaf.display()))?;
        }
        Ok(())
    }

    /// Pids (of the host) in the node's cgroups.
    pub(crate) fn pids(&self) -> Vec<i32> {
        let mut pids: Vec<i32> = self
            .dirs
            .iter()
            .flat_map(|dir| walk(dir))
            .filter_map(|dir| fs::read_to_string(dir.join("cgroup.procs")).ok())
            .flat_map(|procs| {
                procs
                    .lines()
                    .filter_map(|pid| pid.parse().ok())
                    .collect::<Vec<i32>>()
            })
            .collect();
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// Kills what runs in them once. What the v1 freezer holds is thawed, or it would not die.
    pub(crate) fn kill(&self) {
        for dir in self.dirs.iter().flat_map(|dir| walk(dir)) {
            let freezer = dir.join("freezer.state");
            if freezer.exists() {
                // Fails if the cgroup goes at this moment, which is as good.
                let _ = fs::write(freezer, "THAWED");
            }
        }
        for pid in self.pids() {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }

    /// Removes the directories, deepest first; those that are gone already do not matter.
    pub(crate) fn remove(&self) -> io::Result<()> {
        for dir in self.dirs.iter().flat_map(|dir| walk(dir)) {
            match fs::remove_dir(&dir) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Directories below the node's whose last component is `name`.
    pub(crate) fn named(&self, name: &str) -> Vec<PathBuf> {
        self.dirs
            .iter()
            .flat_map(|dir| walk(dir))
            .filter(|dir| dir.ends_with(name))
            .collect()
    }
}

/// `dir` and every directory below it, deepest first. Empty when there is none.
fn walk(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let Ok(entries) = fs::read_dir(dir) else {
        return found;
    };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(walk(&entry.path()));
        }
    }
    found.push(dir.to_path_buf());
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: (&str, &str) = (
        "3:name=systemd:/\n2:cpu,cpuacct:/\n6:freezer:/\n5:devices:/\n4:memory:/job/7\n0::/\n",
        "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
         32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:3 - cgroup cgroup rw,cpu,cpuacct\n\
         35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
         36 31 0:33 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n\
         37 31 0:34 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n\
         40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n\
         41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    );
    const UNIFIED: (&str, &str) = (
        "0::/user.slice/session-1.scope\n",
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
    );

    fn parse((cgroup, mounts): (&str, &str)) -> Hierarchies {
        Hierarchies::parse(cgroup, mounts).unwrap()
    }

    #[test]
    fn hybrid_host_offers_both_and_prefers_v1() {
        let host = parse(HYBRID);
        assert_eq!(host.select(Cgroup::Auto).unwrap(), CgroupMode::V1);
        assert_eq!(host.select(Cgroup::V1).unwrap(), CgroupMode::V1);
        assert_eq!(host.select(Cgroup::V2).unwrap(), CgroupMode::V2);
    }

    #[test]
    fn unified_host_offers_v2_only() {
        let host = parse(UNIFIED);
        assert_eq!(host.select(Cgroup::Auto).unwrap(), CgroupMode::V2);
        let refusal = host.select(Cgroup::V1).unwrap_err().to_string();
        assert!(refusal.contains("hint: ask for v2"), "{refusal}");
    }

    #[test]
    fn v1_nodes_stay_below_the_makers_cgroups() {
        let node = parse(HYBRID).plan("a", CgroupMode::V1);
        let dirs: Vec<_> = node.dirs().iter().filter_map(|dir| dir.to_str()).collect();
        assert!(
            dirs.contains(&"/sys/fs/cgroup/memory/job/7/firn-node-a"),
            "{dirs:?}"
        );
        assert!(
            dirs.contains(&"/sys/fs/cgroup/cpu,cpuacct/firn-node-a"),
            "{dirs:?}"
        );
        assert!(dirs.contains(&"/sys/fs/cgroup/unified/firn-node-a"), "{dirs:?}");
        assert_eq!(dirs.len(), 6);
        assert_eq!(node.leaf(), None);
        assert!(node.to_join().eq(node.dirs().iter()));
    }

    #[test]
    fn v2_nodes_keep_processes_out_of_their_root() {
        let node = parse(UNIFIED).plan("a", CgroupMode::V2);
        assert_eq!(node.dirs(), [Path::new("/sys/fs/cgroup/firn-node-a")]);
        let joined: Vec<_> = node.to_join().collect();
        assert_eq!(joined, [Path::new("/sys/fs/cgroup/firn-node-a/init.scope")]);
    }

    #[test]
    fn bind_mounted_v1_hierarchy_is_entered_at_its_root() {
        let host = parse((
            "6:freezer:/docker/f00\n5:devices:/docker/f00/x\n",
            "37 31 0:34 /docker/f00 /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n\
             36 31 0:33 /docker/f00 /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n",
        ));
        let node = host.plan("a", CgroupMode::V1);
        assert_eq!(
            node.dirs(),
            [
                Path::new("/sys/fs/cgroup/freezer/firn-node-a"),
                Path::new("/sys/fs/cgroup/devices/x/firn-node-a")
            ]
        );
    }

    #[test]
    fn no_cgroups_is_an_error_that_names_them() {
        let host = parse(("", ""));
        assert!(host.select(Cgroup::Auto).is_err());
        assert!(Hierarchies::parse("nonsense", "").is_err());
    }
}
