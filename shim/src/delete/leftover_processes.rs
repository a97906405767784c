//! Processes that live in the container's root file system, in whatever cgroup, whether the runtime knows
//! them or not.

use std::path::Path;
use std::time::Duration;

use firn_process::pidfd::{self, Signal};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use tokio::time::{Instant, sleep};

use crate::procfs;

/// Pause between two looks at who is left.
const PAUSE: Duration = Duration::from_millis(5);

/// Kills them and waits until they are gone.
pub(super) async fn kill(rootfs: &Path, limit: Duration) {
    let begun = Instant::now();
    loop {
        let Some(own) = root_of_its_own(rootfs) else {
            return;
        };
        let left = find(own);
        if left.is_empty() {
            return;
        }
        if begun.elapsed() >= limit {
            return log::warn!(
                "cannot kill {left:?} in {}: still there after {limit:?}",
                rootfs.display()
            );
        }
        for pid in left {
            if let Err(error) = pidfd::signal(pid, Signal::KILL, || lives_in(pid, own)) {
                log::warn!("cannot kill {pid}: {error}");
            }
        }
        sleep(PAUSE).await;
    }
}

/// The directory, when something is mounted there that is not the host's own root: an empty directory, or a
/// container that runs on the host's root, does not show which processes belong to it.
fn root_of_its_own(rootfs: &Path) -> Option<Identity> {
    let (own, host) = (identity(rootfs)?, identity(Path::new("/"))?);
    let (parent_device, _) = identity(rootfs.parent()?)?;
    (own != host && parent_device != own.0).then_some(own)
}

/// All processes whose root directory that is.
fn find(own: Identity) -> Vec<i32> {
    let mut pids = procfs::all();
    pids.retain(|pid| lives_in(*pid, own));
    pids
}

fn lives_in(pid: i32, own: Identity) -> bool {
    identity(Path::new(&format!("/proc/{pid}/root"))) == Some(own)
}

/// Which directory it is: its device, major and minor number, and its inode.
type Identity = ((u32, u32), u64);

/// Asks no file server: the root of any container on the host may be on one that does not answer.
fn identity(path: &Path) -> Option<Identity> {
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    Some(((found.stx_dev_major, found.stx_dev_minor), found.stx_ino))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Child, Command, Stdio};

    use firn_process::testing::mounts::private_dir;

    use super::*;

    /// Of the processes that the tests run: it lives in the directory of its argument.
    #[test]
    #[ignore = "no test: others run it"]
    fn who_lives_elsewhere() {
        let mut lines = std::io::stdin().lines();
        nix::unistd::chroot(lines.next().unwrap().unwrap().as_str()).unwrap();
        println!("there");
        let _ = lines.next();
    }

    #[tokio::test]
    async fn who_lives_there_is_killed_and_nobody_else() {
        let Some(rootfs) = private_dir() else { return };
        let [mut left, mut other] = [rootfs.path(), Path::new("/")].map(|root| {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args([
                    "--exact",
                    "delete::leftover_processes::tests::who_lives_elsewhere",
                    "--ignored",
                    "--nocapture",
                ])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            writeln!(child.stdin.as_ref().unwrap(), "{}", root.display()).unwrap();
            let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
            assert!(lines.any(|line| line.unwrap().ends_with("there")));
            child
        });
        let pid = |child: &Child| i32::try_from(child.id()).unwrap();
        kill(rootfs.path(), Duration::from_secs(5)).await;
        assert!(!procfs::is_alive(pid(&left)) && procfs::is_alive(pid(&other)));
        let _ = other.kill();
        // The reaper of another test may have had them.
        let _ = (left.wait(), other.wait());
    }

    #[test]
    fn processes_of_the_host_are_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        for (rootfs, why) in [
            (Path::new("/"), "the host's root"),
            (Path::new("/proc/self/root"), "the host's root by another name"),
            (directory.path(), "nothing is mounted"),
            (Path::new("/nonexistent/rootfs"), "there is none"),
        ] {
            assert!(root_of_its_own(rootfs).is_none(), "{why}");
        }
    }

    #[test]
    fn who_lives_there_is_found_and_nobody_else() {
        let [here, proc] = ["/", "/proc"].map(|path| identity(Path::new(path)).unwrap());
        let me = i32::try_from(std::process::id()).unwrap();
        assert!(lives_in(me, here) && find(here).contains(&me));
        assert!(!lives_in(me, proc) && !find(proc).contains(&me));
        assert!(root_of_its_own(Path::new("/proc")).is_some());
    }
}
