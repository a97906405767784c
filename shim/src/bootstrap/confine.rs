//! What the server process is put into from outside: a cgroup, and its place in the OOM killer's order.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use firn_host::cgroup_mounts::{Hierarchies, UNIFIED};
use firn_host::mountinfo;
use nix::unistd::getppid;

use crate::error::{ActionError, failed, failed_at};

/// Highest value of `oom_score_adj`.
const MAX_SCORE: i32 = 1000;

/// Makes the kernel prefer the shim over containerd, our parent, when memory runs out.
pub(super) fn adjust_oom_score(pid: u32) -> Result<(), ActionError> {
    let parent = PathBuf::from(format!("/proc/{}/oom_score_adj", getppid()));
    let parse = |text: String| text.trim().parse().map_err(|_| io::ErrorKind::InvalidData.into());
    let score = fs::read_to_string(&parent).and_then(parse);
    let score: i32 = score.map_err(failed_at("read", &parent))?;
    let own = PathBuf::from(format!("/proc/{pid}/oom_score_adj"));
    match fs::write(&own, (score + 1).min(MAX_SCORE).to_string()) {
        // In a user namespace the score cannot go below what it was.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        written => written.map_err(failed_at("write", &own)),
    }
}

/// Moves the process into the cgroup `path`, in the unified hierarchy or in every controller that has it.
pub(super) fn join_cgroup(pid: u32, path: &str) -> Result<(), ActionError> {
    let mounts = mountinfo::mounted().map_err(failed("list the mounts"))?;
    let places = Hierarchies::from_mounts(&mounts, Path::new(UNIFIED))
        .map(|hierarchies| hierarchies.of_path(Path::new(path)))
        .unwrap_or_default();
    join(places.into_values().map(|place| place.dir()), pid, path)
}

fn join(cgroups: impl IntoIterator<Item = PathBuf>, pid: u32, path: &str) -> Result<(), ActionError> {
    let mut joined = false;
    for cgroup in cgroups {
        let procs = cgroup.join("cgroup.procs");
        if procs.exists() {
            fs::write(&procs, pid.to_string()).map_err(failed_at("write", &procs))?;
            joined = true;
        }
    }
    let missing = || ActionError::NoCgroup(path.to_owned());
    joined.then_some(()).ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    use super::*;

    #[test]
    fn the_process_joins_every_controller_that_has_the_cgroup() {
        let root = tempfile::tempdir().unwrap();
        for dir in ["memory/shims", "pids/shims", "cpu"] {
            fs::create_dir_all(root.path().join(dir)).unwrap();
            fs::write(root.path().join(dir).join("cgroup.procs"), "").unwrap();
        }
        let cgroups = |name: &str| ["memory", "pids", "cpu"].map(|dir| root.path().join(dir).join(name));
        join(cgroups("shims"), 42, "/shims").unwrap();
        let read = |file: &str| fs::read_to_string(root.path().join(file)).unwrap();
        assert_eq!(
            (read("memory/shims/cgroup.procs"), read("pids/shims/cgroup.procs")),
            ("42".into(), "42".into())
        );
        assert_eq!(
            read("cpu/cgroup.procs"),
            "",
            "the root cgroup is none of our business"
        );
        let error = join(cgroups("other"), 42, "/other").unwrap_err();
        assert!(
            error.to_string().starts_with("no cgroup \"/other\" for the shim"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn the_score_is_one_more_than_the_parents() {
        let read = |pid: i32| {
            let score = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
            score.trim().parse::<i32>().unwrap()
        };
        let reaper = firn_process::reaper::Reaper::start().unwrap();
        let mut command = std::process::Command::new("/bin/sh");
        let command = command
            .args(["-c", "echo $$; read x"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = reaper.spawn(command).unwrap();
        let mut pid = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut pid)
            .unwrap();
        let pid: i32 = pid.trim().parse().unwrap();
        adjust_oom_score(u32::try_from(pid).unwrap()).unwrap();
        assert_eq!(read(pid), (read(getppid().as_raw()) + 1).min(MAX_SCORE));
    }
}
