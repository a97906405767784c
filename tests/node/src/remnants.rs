//! What runs in a node, and what a container has left behind in it.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::node::Node;

/// Directories of the node in which runtimes keep directories named after containers.
const STATE_DIRS: &[&str] = &["/run/containerd", "/run/runc", "/run/firn"];
const STATE_DEPTH: usize = 4;

/// Bytes of a process's arguments that are read.
const LONGEST: usize = 64 << 10;

/// A process in a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Pid in the node.
    pub pid: i32,
    /// Name of its program as the kernel has it, 15 bytes at most.
    pub command: String,
    /// Its arguments; empty for a zombie.
    pub args: Vec<String>,
}

impl Process {
    /// Whether it belongs to the machinery that runs containers: a shim, runc, CRIU or firn's helpers.
    fn is_runtime(&self) -> bool {
        let program = self
            .args
            .first()
            .and_then(|path| path.rsplit('/').next())
            .unwrap_or(&self.command);
        program.starts_with("containerd-shim")
            || program.starts_with("firn-")
            || matches!(program, "runc" | "criu")
    }

    /// Whether it works for the container. CRIU's arguments do not show it: CRIU always counts.
    fn serves(&self, container: &str) -> bool {
        self.command == "criu"
            || self
                .args
                .iter()
                .any(|arg| arg.split('/').any(|part| part == container))
    }
}

/// What is left of a container. Empty after a clean end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remnants {
    /// Shims, runc, CRIU and helpers that still work for it.
    pub processes: Vec<Process>,
    /// Mount points in the node: its root file system, CRIU's working mounts.
    pub mounts: Vec<String>,
    /// Its cgroups, as paths of the host.
    pub cgroups: Vec<PathBuf>,
    /// Its directories below containerd's and the runtimes' state directories, as paths in the node.
    pub state: Vec<PathBuf>,
}

impl Remnants {
    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Remnants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("nothing is left");
        }
        for process in &self.processes {
            writeln!(f, "process {}: {}", process.pid, process.args.join(" "))?;
        }
        for mount in &self.mounts {
            writeln!(f, "mount {mount}")?;
        }
        for path in self.cgroups.iter().chain(&self.state) {
            writeln!(f, "directory {}", path.display())?;
        }
        Ok(())
    }
}

impl Node {
    /// Every process in the node, those in containers included.
    pub fn processes(&self) -> Vec<Process> {
        let Ok(entries) = fs::read_dir(self.path("/proc")) else {
            return Vec::new();
        };
        entries
            .flatten()
            .filter_map(|entry| {
                let pid = entry.file_name().to_str()?.parse().ok()?;
                let command = fs::read_to_string(entry.path().join("comm")).ok()?;
                let args = arguments(&entry.path().join("cmdline")).ok()?;
                Some(Process {
                    pid,
                    command: command.trim_end().into(),
                    args: split_args(&args),
                })
            })
            .collect()
    }

    /// What is left of a container. Right after its end the runtime may still be at work: ask until it is
    /// empty.
    pub fn remnants(&self, container: &str) -> Result<Remnants> {
        let mounts = format!("/proc/{}/mountinfo", self.pid());
        let mounts = fs::read_to_string(&mounts).with_context(|| format!("read {mounts}"))?;
        let mut state = Vec::new();
        for dir in STATE_DIRS {
            find_named(&self.root(), Path::new(dir), container, STATE_DEPTH, &mut state);
        }
        let processes = self
            .processes()
            .into_iter()
            .filter(|p| p.is_runtime() && p.serves(container));
        Ok(Remnants {
            processes: processes.collect(),
            mounts: left_mounts(&mounts, container),
            cgroups: self.record().cgroups.named(container),
            state,
        })
    }
}

/// In one read: of a process that executes its next program between two, one would have parts of both.
fn arguments(cmdline: &Path) -> io::Result<Vec<u8>> {
    let mut args = vec![0; LONGEST];
    let read = File::open(cmdline)?.read(&mut args)?;
    args.truncate(read);
    Ok(args)
}

fn split_args(cmdline: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(cmdline);
    text.split_terminator('\0').map(String::from).collect()
}

/// Mount points that belong to the container, or to a CRIU that should be gone.
fn left_mounts(mountinfo: &str, container: &str) -> Vec<String> {
    let ours = |point: &str| {
        let mut parts = point.split('/');
        parts.any(|part| part == container || part == "criu-root" || part.starts_with(".criu"))
    };
    mountinfo
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .filter(|point| ours(point))
        .map(String::from)
        .collect()
}

/// Collects directories called `name` below `dir`, which is a path in the node; does not look inside those
/// found.
fn find_named(root: &Path, dir: &Path, name: &str, depth: usize, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(root.join(dir.strip_prefix("/").unwrap_or(dir))) else {
        return;
    };
    for entry in entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
    {
        let path = dir.join(entry.file_name());
        if entry.file_name() == name {
            found.push(path);
        } else if depth > 0 {
            find_named(root, &path, name, depth - 1, found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(command: &str, args: &[&str]) -> Process {
        Process {
            pid: 7,
            command: command.into(),
            args: args.iter().map(|arg| (*arg).to_string()).collect(),
        }
    }

    #[test]
    fn shims_and_runtimes_of_the_container_are_distinguished_from_others() {
        let shim = process(
            "containerd-shim",
            &[
                "/usr/bin/containerd-shim-runc-v2",
                "-namespace",
                "default",
                "-id",
                "c1",
            ],
        );
        assert!(shim.is_runtime() && shim.serves("c1") && !shim.serves("c"));
        let runc = process(
            "runc",
            &[
                "runc",
                "--log",
                "/run/containerd/x/default/c1/log.json",
                "checkpoint",
                "c1",
            ],
        );
        assert!(runc.is_runtime() && runc.serves("c1"));
        assert!(process("criu", &["criu", "swrk", "7"]).serves("c1"));
        assert!(!process("containerd", &["containerd"]).is_runtime());
        assert!(!process("sh", &["sh", "-c", "c1"]).is_runtime());
    }

    #[test]
    fn mounts_of_the_container_and_of_criu_are_found() {
        let info = "68 42 0:41 / / rw - overlay o rw\n\
                    90 68 0:50 / /run/containerd/io.containerd.runtime.v2.task/default/c1/rootfs \
                    rw - overlay o rw\n\
                    91 68 0:51 / /run/containerd/io.containerd.runtime.v2.task/default/c11/rootfs \
                    rw - overlay o rw\n\
                    92 68 0:52 / /run/containerd/runc/default/x/criu-root rw - overlay o rw\n\
                    93 68 0:53 / /tmp/criu-work/.criu.cgyard.Qx1/cpu rw - cgroup c rw\n";
        let left = left_mounts(info, "c1");
        assert_eq!(left.len(), 3, "{left:?}");
        assert!(left[0].ends_with("default/c1/rootfs") && left[2].contains("cgyard"));
    }

    #[test]
    fn state_directories_are_found_at_any_depth_and_not_entered() {
        let root = tempfile::tempdir().unwrap();
        for dir in [
            "run/containerd/runc/default/c1/c1",
            "run/containerd/task/default/c2",
        ] {
            fs::create_dir_all(root.path().join(dir)).unwrap();
        }
        let mut found = Vec::new();
        find_named(
            root.path(),
            Path::new("/run/containerd"),
            "c1",
            STATE_DEPTH,
            &mut found,
        );
        assert_eq!(found, [Path::new("/run/containerd/runc/default/c1")]);
    }

    #[test]
    fn display_names_each_remnant() {
        assert_eq!(Remnants::default().to_string(), "nothing is left");
        let left = Remnants {
            processes: vec![process("criu", &["criu", "swrk"])],
            ..Remnants::default()
        };
        assert_eq!(left.to_string(), "process 7: criu swrk\n");
    }
}
