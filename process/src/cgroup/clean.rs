//! Removes a cgroup: first its processes, then its directories. Only ever the container's own.

use std::io;
use std::path::Path;
use std::time::Duration;

use firn_host::{Absent, UnlessAbsent};
use tokio::time::{Instant, sleep};

use super::{Cgroup, CgroupError, Version, read};
use crate::OrWarn;
use crate::pidfd::{self, Signal};

/// Pause between two reads of the process list.
const PAUSE: Duration = Duration::from_millis(5);

/// Kills a whole v2 cgroup, including forks in progress.
const KILL: &str = "cgroup.kill";

impl Cgroup {
    /// Kills every process and waits until none is left. A missing or empty cgroup is no error.
    pub async fn kill_all(&self, limit: Duration) -> Result<(), CgroupError> {
        let begun = Instant::now();
        let dir = self.own()?.dir();
        while let pids = self.pids()?
            && !pids.is_empty()
        {
            self.kill_once(&dir, &pids).await?;
            if begun.elapsed() >= limit {
                return Err(CgroupError::KillTimeout {
                    path: dir,
                    pids,
                    limit,
                });
            }
            sleep(PAUSE).await;
        }
        Ok(())
    }

    async fn kill_once(&self, dir: &Path, pids: &[i32]) -> Result<(), CgroupError> {
        let whole = match self.version {
            Version::V1 => false,
            Version::V2 => match read::write(&dir.join(KILL), "1") {
                Ok(()) => true,
                // Kernels before 5.14.
                Err(error) if error.is_absent() => false,
                Err(error) => return Err(error),
            },
        };
        for pid in pids.iter().filter(|_| !whole) {
            let killed = pidfd::signal(*pid, Signal::KILL, || self.holds(*pid));
            killed.or_warn(format_args!("cannot kill process {pid} of {}", dir.display()));
        }
        // Order matters: signals sent to a frozen v1 cgroup are delivered before its processes can fork
        // again. Processes of a v2 cgroup die frozen, and the runtime then considers the container paused and
        // does not delete it.
        if self.version == Version::V2 || self.dir("freezer").is_some() {
            match self.thaw(PAUSE).await {
                Err(error @ CgroupError::ThawTimeout { .. }) => log::debug!("{error}"),
                Err(error) if error.is_absent() => {}
                thawed => return thawed,
            }
        }
        Ok(())
    }

    /// Removes the directories of the cgroup and of those below it. A missing cgroup is no error.
    pub async fn remove(&self, limit: Duration) -> Result<(), CgroupError> {
        let begun = Instant::now();
        for dir in self.own_dirs()? {
            loop {
                match remove_tree(&dir) {
                    Ok(()) => break,
                    // Killed processes leave the cgroup a moment after they have disappeared from its list.
                    Err(CgroupError::Remove { source, .. })
                        if source.kind() == io::ErrorKind::ResourceBusy && begun.elapsed() < limit =>
                    {
                        sleep(PAUSE).await;
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

fn remove_tree(dir: &Path) -> Result<(), CgroupError> {
    for child in read::children(dir)? {
        remove_tree(&child)?;
    }
    let removed = std::fs::remove_dir(dir).unless_absent();
    removed.map_err(|source| CgroupError::Remove {
        path: dir.to_owned(),
        source,
    })
}
