//! containerd's process: whether it has read its configuration, and its restart.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use firn_config::in_path;
use firn_host::procfs;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{SysconfVar, sysconf};

use super::error::InstallError;
use super::{running, search_path};
use crate::program;

const PROGRAM: &str = "containerd";

/// Whether containerd runs since before the file was written. Not if it does not run.
pub fn is_older_than(path: &Path) -> bool {
    let written = path.metadata().and_then(|meta| meta.modified());
    match (started(), written) {
        (Some(started), Ok(written)) => started.is_before(written),
        _ => false,
    }
}

/// When a process was started: at this time or up to a clock tick later, because /proc shows whole ticks.
#[derive(Debug)]
struct Started {
    at: SystemTime,
    tick: Duration,
}

impl Started {
    /// Surely before this time.
    fn is_before(&self, time: SystemTime) -> bool {
        self.at + self.tick <= time
    }
}

/// When containerd was started.
fn started() -> Option<Started> {
    let is_containerd = |pid: &i32| {
        let program = fs::read_link(format!("/proc/{pid}/exe"));
        program.is_ok_and(|program| running::name_of(&program) == Some(PROGRAM))
    };
    let started = procfs::all()
        .into_iter()
        .filter(is_containerd)
        .filter_map(procfs::started);
    let per_second = u64::try_from(sysconf(SysconfVar::CLK_TCK).ok()??).ok()?;
    let started = Duration::from_millis(started.max()? * 1000 / per_second);
    let now = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?);
    Some(Started {
        at: SystemTime::now() - now.checked_sub(started)?,
        tick: Duration::from_millis(1000 / per_second),
    })
}

/// Restarts it by systemd, also from within a root directory that is not systemd's.
pub fn restart() -> Result<(), InstallError> {
    const LIMIT: Duration = Duration::from_secs(120);
    let failed = |message: String| InstallError::Restart { message };
    let program =
        |name: &str| in_path(name, &search_path()).ok_or_else(|| failed(format!("no {name} in PATH")));
    let (env, systemctl) = (program("env")?, program("systemctl")?);
    let systemctl = systemctl.to_string_lossy();
    let restart = ["SYSTEMD_IGNORE_CHROOT=1", &*systemctl, "restart", PROGRAM];
    let output = program::run(&env, &restart, LIMIT).map_err(|error| failed(format!("{error:#}")))?;
    if output.success {
        Ok(())
    } else {
        Err(failed(output.stderr.trim().to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_written_in_the_tick_of_the_start_is_no_newer_one() {
        let started = Started {
            at: SystemTime::UNIX_EPOCH + Duration::from_millis(1000),
            tick: Duration::from_millis(10),
        };
        let at = |millis| SystemTime::UNIX_EPOCH + Duration::from_millis(millis);
        // The configuration was written at 1004, and the process started at 1008: /proc shows 1000.
        assert!(!started.is_before(at(1004)));
        assert!(!started.is_before(at(999)));
        assert!(started.is_before(at(1010)));
    }
}
