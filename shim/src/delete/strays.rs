//! Processes that live in the container's root file system, in whatever cgroup, whether the runtime knows them or not.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::{pidfd, procfs};

/// Pause between two looks at who is left.
const PAUSE: Duration = Duration::from_millis(5);

/// Kills them and waits until they are gone.
pub(super) async fn kill(rootfs: &Path, limit: Duration) {
    let begun = Instant::now();
    loop {
        let Some(own) = root_of_its_own(rootfs) else {
            return;
        };
        let strays = find(&own);
        if strays.is_empty() {
            return;
        }
        if begun.elapsed() >= limit {
            return log::warn!(
                "cannot kill {strays:?} in {}: still there after {limit:?}",
                rootfs.display()
            );
        }
        for pid in strays {
            if let Err(error) = pidfd::signal(pid, libc::SIGKILL, || lives_in(pid, &own)) {
                log::warn!("cannot kill {pid}: {error}");
            }
        }
        sleep(PAUSE).await;
    }
}

/// The directory, when something is mounted there that is not the host's own root: an empty directory, or a container that runs
/// on the host's root, says nothing about who belongs to it.
fn root_of_its_own(rootfs: &Path) -> Option<Metadata> {
    let (own, host) = (fs::metadata(rootfs).ok()?, fs::metadata("/").ok()?);
    let parent = fs::metadata(rootfs.parent()?).ok()?;
    (!is_same(&own, &host) && parent.dev() != own.dev()).then_some(own)
}

/// All processes whose root directory that is.
fn find(own: &Metadata) -> Vec<i32> {
    let mut pids = procfs::all();
    pids.retain(|pid| lives_in(*pid, own));
    pids
}

fn lives_in(pid: i32, own: &Metadata) -> bool {
    fs::metadata(format!("/proc/{pid}/root")).is_ok_and(|root| is_same(&root, own))
}

fn is_same(a: &Metadata, b: &Metadata) -> bool {
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_the_host_are_no_strays() {
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
        let (here, tmp) = (fs::metadata("/").unwrap(), fs::metadata("/proc").unwrap());
        let me = i32::try_from(std::process::id()).unwrap();
        assert!(lives_in(me, &here) && find(&here).contains(&me));
        assert!(!lives_in(me, &tmp) && !find(&tmp).contains(&me));
        assert!(root_of_its_own(Path::new("/proc")).is_some());
    }
}
