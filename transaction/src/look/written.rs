//! Files that processes have open and that were written after a moment.

use std::collections::HashSet;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use firn_host::mountinfo::{self, MountEntry};
use firn_host::procfs;
use nix::fcntl::OFlag;
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// How often the clock is read.
const LOOK: Duration = Duration::from_millis(1);

/// How long the file system's clock may take to get to a moment: two of its ticks are up to 20 ms. It is
/// waited for no longer, for somebody may have set it back.
const TICKS: Duration = Duration::from_secs(1);

/// A moment since 1970 for [`written`]: what was written before this is called is not later, and what is
/// written once it has returned is.
///
/// A file gets the time of the last tick of the file system's clock, or since Linux 6.13 an exact one if
/// somebody has looked at it since.
pub async fn moment() -> Duration {
    let time = |clock| clock_gettime(clock).map_or(Duration::ZERO, Duration::from);
    let (moment, begun) = (time(ClockId::CLOCK_REALTIME), Instant::now());
    while time(ClockId::CLOCK_REALTIME_COARSE) <= moment && begun.elapsed() < TICKS {
        tokio::time::sleep(LOOK).await;
    }
    moment
}

/// A file in the container's root that a process has open.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    pub pid: i32,
    pub comm: String,
    /// As it is shown.
    pub path: String,
}

/// The first regular file on the root file system of `init` that one of `pids` has open and that has changed
/// after `since`, in the time of the file system's clock since 1970. Two kinds of files do not count: CRIU's
/// image has those without a name, and CRIU opens those that are only appended to whatever their length.
pub(super) fn written(init: i32, pids: &[i32], since: Duration) -> Option<Written> {
    let mounts = mountinfo::of_process(init).ok()?;
    let root = mounts
        .iter()
        .rev()
        .find(|mount| mount.mount_point == Path::new("/"))?;
    pids.iter().find_map(|&pid| {
        let own = mountinfo::of_process(pid).ok()?;
        // A process in a chroot does not see the mount that it is in.
        let seen: HashSet<u32> = [&mounts, &own]
            .iter()
            .flat_map(|mounts| inside(mounts, root))
            .collect();
        let fds = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten();
        let fds = fds.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
        fds.filter_map(|fd| of_descriptor(pid, fd, &seen, since)).next()
    })
}

/// Those of `mounts` that show a part of the root. A volume may be on the same file system.
fn inside(mounts: &[MountEntry], root: &MountEntry) -> impl Iterator<Item = u32> {
    mounts
        .iter()
        .filter(|mount| mount.device == root.device && mount.root.starts_with(&root.root))
        .map(|mount| mount.id)
}

/// Order matters: a file server may not answer, so a file is looked at only where its mount is the root's.
fn of_descriptor(pid: i32, fd: i32, inside: &HashSet<u32>, since: Duration) -> Option<Written> {
    let link = PathBuf::from(format!("/proc/{pid}/fd/{fd}"));
    let is_in_root = inside.contains(&procfs::mount_of(pid, fd)?);
    let appends = OFlag::O_APPEND | OFlag::O_WRONLY;
    let is_log = OFlag::from_bits_truncate(procfs::flags_of(pid, fd)?).contains(appends);
    let is_written = is_in_root && !is_log && changed(&fs::metadata(&link).ok()?, since);
    is_written.then(|| Written {
        pid,
        comm: procfs::comm(pid),
        path: fs::read_link(&link).unwrap_or(link).display().to_string(),
    })
}

fn changed(file: &Metadata, since: Duration) -> bool {
    let seconds = u64::try_from(file.ctime()).unwrap_or_default();
    let nanoseconds = u32::try_from(file.ctime_nsec()).unwrap_or_default();
    file.is_file() && file.nlink() > 0 && Duration::new(seconds, nanoseconds) > since
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsRawFd;

    use super::*;

    /// Where the kernel gives a file that somebody looks at a time between two ticks, too.
    #[tokio::test]
    async fn what_was_written_before_a_moment_is_not_later_than_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = File::create(dir.path().join("file")).unwrap();
        for round in 0..50 {
            // A change after a look gets a finer time.
            file.write_all(b"more").unwrap();
            file.metadata().unwrap();
            file.write_all(b"more").unwrap();
            let since = moment().await;
            assert!(
                !changed(&file.metadata().unwrap(), since),
                "written before, round {round}"
            );
            file.write_all(b"more").unwrap();
            assert!(
                changed(&file.metadata().unwrap(), since),
                "written since, round {round}"
            );
        }
    }

    #[tokio::test]
    async fn a_file_that_was_written_since_is_named() {
        let me = i32::try_from(std::process::id()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let open = |name: &str| File::create(dir.path().join(name)).unwrap();
        let (mut grows, mut nameless, _old) = (open("grows"), open("nameless"), open("old"));
        let log = dir.path().join("log");
        let mut log = File::options().append(true).create(true).open(log).unwrap();
        fs::remove_file(dir.path().join("nameless")).unwrap();
        let mount = procfs::mount_of(me, grows.as_raw_fd()).unwrap();
        let mounts = mountinfo::of_process(me).unwrap();
        let entry = mounts.iter().find(|entry| entry.id == mount);
        let mut root = entry.unwrap().clone();
        let all = inside(&mounts, &root).collect();
        let since = moment().await;
        let seen = || {
            let fds = fs::read_dir("/proc/self/fd").unwrap();
            let fds = fds.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap());
            let written = fds.filter_map(|fd| of_descriptor(me, fd, &all, since));
            let here = written.filter(|written| Path::new(&written.path).starts_with(dir.path()));
            here.map(|written| written.path).collect::<Vec<_>>()
        };
        nameless.write_all(b"more").unwrap();
        log.write_all(b"more").unwrap();
        assert_eq!(seen(), Vec::<String>::new());
        grows.write_all(b"more").unwrap();
        assert_eq!(seen(), [dir.path().join("grows").display().to_string()]);
        let later = moment().await;
        assert!(!changed(&grows.metadata().unwrap(), later), "written since");
        assert_eq!(written(me, &[i32::MAX], since), None);
        // A volume on the file system that the root is on.
        root.root = "/the/root".into();
        assert!(inside(&mounts, &root).all(|id| id != mount));
    }
}
