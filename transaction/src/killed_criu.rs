//! A container whose CRIU was killed in a dump: its TCP sockets are in repair mode, rules of the packet
//! filter drop what it receives, and links that CRIU has made of files are left. firn-hook ends all that, in
//! a process of its own, because it enters the container's network namespace, runs iptables, and looks at
//! directories of the container.

use std::ops::ControlFlow;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use firn_config::{find_program, names};
use firn_host::{Chain, bounded};
use firn_process::OrWarn;
use firn_process::blocking::stoppable_until;
use firn_process::cancel::CancellationToken;
use firn_process::reaper::Reaper;

use crate::configured::configured;
use crate::container::Container;

/// CRIU's log of a dump in its work directory.
pub(crate) const DUMP_LOG: &str = "dump.log";

/// How long CRIU's log is read.
const READ: Duration = Duration::from_millis(500);

/// How long it may take while the container waits.
const LIMIT: Duration = Duration::from_secs(10);

/// The same once the container is killed: only what others share matters then.
pub const LIMIT_KILLED: Duration = Duration::from_millis(1500);

/// Releases a container whose dump has the log `log`. Does nothing after a CRIU that has released it. May be
/// repeated.
pub(crate) async fn release(container: &Container, log: &Path, cancel: &CancellationToken, reaper: &Reaper) {
    let limit = if cancel.is_cancelled() {
        LIMIT_KILLED
    } else {
        LIMIT
    };
    let init = container.init.pid();
    let mut pids = container
        .cgroup()
        .and_then(|cgroup| cgroup.pids())
        .unwrap_or_default();
    // Init first: its network namespace is the container's.
    if let Some(at) = pids.iter().position(|pid| *pid == init) {
        pids.swap(0, at);
    }
    release_of(&container.bundle, log, &pids, limit, reaper).await;
}

/// The same of the container in `bundle` with these processes, which may have ended.
pub async fn release_of(bundle: &Path, log: &Path, pids: &[i32], limit: Duration, reaper: &Reaper) {
    let log = Log::read_in_time(log).await;
    if log.has_released {
        return;
    }
    let config = configured();
    let Some(hook) = find_program(names::HOOK_PROGRAM, config.hook.path.as_deref()).or_log() else {
        return;
    };
    let mut command = Command::new(hook);
    command
        .arg("release")
        .arg(bundle)
        .arg(log.run.unwrap_or_default());
    command.args(pids.iter().map(ToString::to_string));
    let output = reaper.output(&mut command, limit).await;
    let output = output.map_err(|error| Chain(&error).to_string());
    if let Err(error) = output.and_then(|output| output.printed()) {
        let bundle = bundle.display();
        log::warn!(
            "connections of the container in {bundle} may hang, and files link_remap.N may be left: {error}"
        );
    }
}

/// What CRIU's log shows of a dump.
#[derive(Debug, Default, PartialEq, Eq)]
struct Log {
    /// How CRIU calls this run.
    run: Option<String>,
    /// CRIU has come to an end, and has released the network before.
    has_released: bool,
}

impl Log {
    /// What the log shows if it is read in time: its file system may be what CRIU has waited for. Not in
    /// firn-hook, which could not end before that file system answers.
    async fn read_in_time(path: &Path) -> Self {
        let path = path.to_owned();
        let read = stoppable_until(READ, std::future::pending(), move |_| Self::read(&path));
        read.await.unwrap_or_default()
    }

    /// A log that is not there shows nothing.
    fn read(path: &Path) -> Self {
        let mut log = Self::default();
        let visit = |line: &[u8]| {
            let line = String::from_utf8_lossy(line);
            let message = message(&line);
            if let (None, Some(run)) = (&log.run, message.strip_prefix("CRIU run id = ")) {
                log.run = Some(run.trim().to_owned());
            }
            let state = message.strip_prefix("Unfreezing tasks into ");
            log.has_released |= state.is_some_and(|state| state.trim_end().parse::<u8>().is_ok());
            ControlFlow::Continue(())
        };
        drop(bounded::each(path, b'\n', bounded::LINES, visit));
        log
    }
}

/// What follows the time stamp of a line. CRIU logs names that the container has chosen: they stand further
/// behind.
fn message(line: &str) -> &str {
    let stamped = line.strip_prefix('(').and_then(|line| line.split_once(") "));
    stamped.map_or("", |(_, message)| message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_log_shows_the_run_and_whether_criu_has_come_to_its_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let of = async |text: &str| {
            std::fs::write(file.path(), text).unwrap();
            Log::read_in_time(file.path()).await
        };
        let killed = "(00.000020) CRIU run id = 4a-1\n(00.000100) Seized task\n";
        let expected = Log {
            run: Some("4a-1".to_owned()),
            has_released: false,
        };
        assert_eq!(of(killed).await, expected);
        let ended = format!("{killed}(00.2) Unfreezing tasks into 1\n");
        assert!(of(&ended).await.has_released);
        // Names of files and the like.
        for name in [
            "/Unfreezing tasks into 1",
            "/x CRIU run id = 7",
            "/Unfreezing tasks into",
        ] {
            let named = format!("{killed}(00.2) Dumping path for -3 fd via self 3 [{name}]\n");
            assert_eq!(of(&named).await, expected, "{name}");
        }
        let odd = format!("{killed}(00.2) Unfreezing tasks into /a\nUnfreezing tasks into 1\n");
        assert_eq!(of(&odd).await, expected);
        assert_eq!(Log::read_in_time(Path::new("/nonexistent")).await, Log::default());
    }
}
