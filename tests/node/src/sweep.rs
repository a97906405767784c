//! Removes a node from its record, whatever state it is in. Safe to repeat, and to run on a node half made.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Deserialize;

use crate::host;
use crate::record::Record;
use crate::wait::wait_for;

const DEADLINE: Duration = Duration::from_secs(20);

/// Ends the node's processes, then removes its cgroups, its loop devices, and its run directory with the
/// record.
pub(crate) fn remove(record: &Record) -> Result<()> {
    let removing = || format!("remove node {}", record.name);
    // After a reboot only files are left.
    if record.of_this_boot() {
        kill_all(record).with_context(removing)?;
        // Order matters: a loop device that is in use would only be marked.
        detach_loops(record).with_context(removing)?;
        remove_cgroups(record).with_context(removing)?;
    }
    remove_dir(&record.dir).with_context(removing)
}

/// Removes a run directory, which another process may be doing at the same time.
pub(crate) fn remove_dir(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

fn kill_all(record: &Record) -> Result<()> {
    wait_for("its processes to end", DEADLINE, || {
        let init = record.pid();
        if let Some(pid) = init {
            // Takes every process of the node's pid namespace along.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        // Repeated, because a runc or CRIU at work may freeze a cgroup between two looks.
        record.cgroups.kill();
        Ok((init.is_none() && record.cgroups.pids().is_empty()).then_some(()))
    })
}

fn remove_cgroups(record: &Record) -> Result<()> {
    // The kernel lets go of a cgroup a moment after its last process is gone.
    let mut last = Ok(());
    wait_for("its cgroups to be free", DEADLINE, || {
        last = record.cgroups.remove();
        Ok(last.is_ok().then_some(()))
    })
    .or_else(|late| last.with_context(|| late.to_string()))
}

/// Detaches the loop devices behind the node's simulated GPUs.
fn detach_loops(record: &Record) -> Result<()> {
    let Some(init) = record.init else { return Ok(()) };
    if mount_namespace_lives(init.mount_namespace) {
        // The node's processes are gone: its number has been given to another namespace, and so may the
        // devices.
        return Ok(());
    }
    let list = host::output(Command::new("losetup").args(["--list", "--json", "-O", "NAME,BACK-FILE"]))?;
    for name in simgpu_loops(&list, init.mount_namespace)? {
        host::run(Command::new("losetup").args(["--detach", &name]))?;
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "all namespaces are on one device")]
fn mount_namespace_lives(inode: u64) -> bool {
    let Ok(processes) = fs::read_dir("/proc") else {
        return true;
    };
    processes
        .flatten()
        .filter_map(|process| fs::metadata(process.path().join("ns/mnt")).ok())
        .any(|namespace| namespace.ino() == inode)
}

#[derive(Deserialize)]
struct LoopList {
    loopdevices: Vec<LoopDevice>,
}

#[derive(Deserialize)]
struct LoopDevice {
    name: String,
    #[serde(rename = "back-file")]
    file: Option<String>,
}

/// Loop devices whose memory is named after the mount namespace: `memfd:simgpu:NAMESPACE:NODE`.
fn simgpu_loops(list: &str, mount_namespace: u64) -> Result<Vec<String>> {
    if list.trim().is_empty() {
        return Ok(Vec::new());
    }
    let list: LoopList = serde_json::from_str(list).context("read losetup's list")?;
    let memory = format!("memfd:simgpu:{mount_namespace}:");
    let ours = |device: &LoopDevice| device.file.as_deref().is_some_and(|file| file.contains(&memory));
    Ok(list
        .loopdevices
        .into_iter()
        .filter(ours)
        .map(|device| device.name)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_only_the_nodes_own_loop_devices() {
        let list = r#"{"loopdevices": [
            {"name":"/dev/loop0", "back-file":"/memfd:simgpu:4026532500:nvidia0 (deleted)"},
            {"name":"/dev/loop1", "back-file":"/memfd:simgpu:4026532501:nvidia0 (deleted)"},
            {"name":"/dev/loop2", "back-file":"/disk.img"},
            {"name":"/dev/loop3", "back-file":"/memfd:simgpu:4026532500:nvidiactl (deleted)"},
            {"name":"/dev/loop4", "back-file":null}
        ]}"#;
        assert_eq!(
            simgpu_loops(list, 4026532500).unwrap(),
            ["/dev/loop0", "/dev/loop3"]
        );
        assert!(simgpu_loops(list, 402653250).unwrap().is_empty());
        assert!(simgpu_loops("", 4026532500).unwrap().is_empty());
        assert!(simgpu_loops("{", 4026532500).is_err());
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "all namespaces are on one device")]
    fn own_mount_namespace_lives() {
        let own = fs::metadata("/proc/self/ns/mnt").unwrap().ino();
        assert!(mount_namespace_lives(own));
        assert!(!mount_namespace_lives(1));
    }
}
