//! Removes a node from its record, whatever state it is in. Safe to repeat, and to run on a node half made.

use std::fs;
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

/// Ends the node's processes, then removes its cgroups, its loop devices, and its run directory with the record.
pub(crate) fn remove(record: &Record) -> Result<()> {
    let removing = || format!("remove node {}", record.name);
    // After a reboot only files are left.
    if record.of_this_boot() {
        kill_all(record).with_context(removing)?;
        // Order matters: a loop device that is in use would only be marked.
        detach_loops(record).with_context(removing)?;
        remove_cgroups(record).with_context(removing)?;
    }
    fs::remove_dir_all(&record.dir).with_context(removing)
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
    let list = host::output(Command::new("losetup").args([
        "--list",
        "--json",
        "-O",
        "NAME,BACK-MAJ:MIN,BACK-FILE",
    ]))?;
    for name in simgpu_loops(&list, init.run_device)? {
        host::run(Command::new("losetup").args(["--detach", &name]))?;
    }
    Ok(())
}

#[derive(Deserialize)]
struct LoopList {
    loopdevices: Vec<LoopDevice>,
}

#[derive(Deserialize)]
struct LoopDevice {
    name: String,
    #[serde(rename = "back-maj:min")]
    device: String,
    #[serde(rename = "back-file")]
    file: Option<String>,
}

/// Loop devices whose file lies on the file system `run_device` in a directory `simgpu`.
///
/// The device number decides: the path is that of another mount namespace, and every node has the same.
fn simgpu_loops(list: &str, run_device: u64) -> Result<Vec<String>> {
    if list.trim().is_empty() {
        return Ok(Vec::new());
    }
    let list: LoopList = serde_json::from_str(list).context("read losetup's list")?;
    let ours = |device: &LoopDevice| {
        parse_device(&device.device) == Some(run_device)
            && device
                .file
                .as_deref()
                .is_some_and(|file| file.contains("/simgpu/"))
    };
    Ok(list
        .loopdevices
        .into_iter()
        .filter(ours)
        .map(|device| device.name)
        .collect())
}

/// `major:minor` as `stat` counts it.
fn parse_device(text: &str) -> Option<u64> {
    let (major, minor) = text.trim().split_once(':')?;
    let (major, minor): (u64, u64) = (major.parse().ok()?, minor.parse().ok()?);
    Some((minor & 0xff) | ((major & 0xfff) << 8) | ((minor & !0xff) << 12) | ((major & !0xfff) << 32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_only_the_nodes_own_loop_devices() {
        let list = r#"{"loopdevices": [
            {"name":"/dev/loop0", "back-maj:min":"  0:46", "back-file":"/run/simgpu/gpu0"},
            {"name":"/dev/loop1", "back-maj:min":"  0:47", "back-file":"/run/simgpu/gpu0"},
            {"name":"/dev/loop2", "back-maj:min":"  0:46", "back-file":"/disk.img"},
            {"name":"/dev/loop3", "back-maj:min":"  0:46", "back-file":"/simgpu/gpu1 (deleted)"},
            {"name":"/dev/loop4", "back-maj:min":"  0:46", "back-file":null}
        ]}"#;
        assert_eq!(simgpu_loops(list, 46).unwrap(), ["/dev/loop0", "/dev/loop3"]);
        assert!(simgpu_loops("", 46).unwrap().is_empty());
        assert!(simgpu_loops("{", 46).is_err());
    }

    #[test]
    fn device_numbers_are_those_of_stat() {
        assert_eq!(parse_device("0:46"), Some(46));
        assert_eq!(parse_device("0:300"), Some(0x10002c));
        assert_eq!(parse_device("254:1"), Some(0xfe01));
        assert_eq!(parse_device("x"), None);
    }
}
