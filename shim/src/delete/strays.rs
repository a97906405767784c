//! Processes that live in the container's root file system, in whatever cgroup, whether the runtime knows them or not.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::{procfs, sys};

/// Pause between two looks at who is left.
const PAUSE: Duration = Duration::from_millis(5);

/// Kills them and waits until they are gone.
pub(super) async fn kill(rootfs: &Path, limit: Duration) {
    let begun = Instant::now();
    loop {
        let strays = find(rootfs);
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
            if let Err(errno) = sys::kill(pid, libc::SIGKILL.unsigned_abs())
                && errno != nix::errno::Errno::ESRCH
            {
                log::warn!("cannot kill {pid}: {errno}");
            }
        }
        sleep(PAUSE).await;
    }
}

/// All processes whose root directory is `rootfs`. None unless something is mounted there that is not the host's own
/// root: an empty directory, or a container that runs on the host's root, says nothing about who belongs to it.
fn find(rootfs: &Path) -> Vec<i32> {
    let (Ok(own), Ok(host)) = (fs::metadata(rootfs), fs::metadata("/")) else {
        return Vec::new();
    };
    let parent = rootfs.parent().and_then(|bundle| fs::metadata(bundle).ok());
    if is_same(&own, &host) || parent.is_none_or(|bundle| bundle.dev() == own.dev()) {
        return Vec::new();
    }
    let mut pids = procfs::all();
    pids.retain(|pid| fs::metadata(format!("/proc/{pid}/root")).is_ok_and(|root| is_same(&root, &own)));
    pids
}

fn is_same(a: &Metadata, b: &Metadata) -> bool {
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_the_host_are_no_strays() {
        assert_eq!(find(Path::new("/")), Vec::<i32>::new());
        assert_eq!(
            find(Path::new("/proc/self/root")),
            Vec::<i32>::new(),
            "the host's root by another name"
        );
        assert_eq!(
            find(tempfile::tempdir().unwrap().path()),
            Vec::<i32>::new(),
            "nothing is mounted"
        );
        assert_eq!(find(Path::new("/nonexistent/rootfs")), Vec::<i32>::new());
    }
}
