//! Detects a CRIU that has died although the runtime still waits for it.
//!
//! runc talks to CRIU over a socket. In a restore the tasks that exist so far hold the other end of this
//! socket too. When CRIU is killed, runc keeps waiting on the socket and does not reap CRIU: a CRIU that
//! remains a zombie is the symptom.

use std::fs;
use std::time::Duration;

use firn_host::procfs;
use firn_process::blocking::blocking;
use firn_process::cancel::CancellationToken;

/// How often the state of CRIU is read.
const LOOK: Duration = Duration::from_secs(1);

/// How many times in a row CRIU has to be a zombie: a working runtime reaps it at once.
const DEAD: u32 = 5;

/// Resolves when the CRIU that `runtime` has started is dead and `runtime` does not reap it.
pub(super) async fn criu_died(runtime: i32) {
    let mut dead = 0;
    while dead < DEAD {
        tokio::time::sleep(LOOK).await;
        dead = if has_dead_criu(runtime) { dead + 1 } else { 0 };
    }
}

fn has_dead_criu(runtime: i32) -> bool {
    // The tasks that CRIU creates are children of the runtime too, and are named `criu` until they are
    // complete.
    let first = children(runtime)
        .into_iter()
        .filter(|pid| procfs::comm(*pid) == "criu")
        .min_by_key(|pid| procfs::started(*pid));
    first.is_some_and(|pid| procfs::state(pid) == Some('Z'))
}

/// Waits until a checkpoint is withdrawn and CRIU has not begun yet. One that has begun ends by itself: a
/// task that runs CRIU's code when CRIU is killed may die of it.
pub(super) async fn withdrawn(cancel: &CancellationToken, runtime: i32) {
    cancel.stopped().await;
    let has_criu = move || {
        children(runtime)
            .into_iter()
            .any(|pid| procfs::comm(pid) == "criu")
    };
    if blocking(has_criu).await {
        std::future::pending().await
    }
}

fn children(pid: i32) -> Vec<i32> {
    let threads = procfs::threads(pid).unwrap_or_default().into_iter();
    let lists = threads.filter_map(|tid| fs::read_to_string(format!("/proc/{pid}/task/{tid}/children")).ok());
    lists
        .flat_map(|list| {
            list.split_whitespace()
                .filter_map(|pid| pid.parse().ok())
                .collect::<Vec<_>>()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Instant;

    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    use super::*;

    fn until(what: &str, condition: impl Fn() -> bool) {
        let begun = Instant::now();
        while !condition() {
            assert!(begun.elapsed() < Duration::from_secs(10), "never: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[tokio::test]
    async fn a_checkpoint_is_withdrawn_at_once_unless_criu_has_begun() {
        let slot = firn_process::cancel::Slot::default();
        let guard = slot.begin();
        slot.withdraw();
        let directory = tempfile::tempdir().unwrap();
        let criu = directory.path().join("criu");
        std::os::unix::fs::symlink("/bin/sleep", &criu).unwrap();
        let mut without = Command::new("sleep").arg("1000").spawn().unwrap();
        let mut with = Command::new("sh");
        let mut with = with
            .args(["-c", "\"$0\" 1000 & exec sleep 1000"])
            .arg(&criu)
            .spawn()
            .unwrap();
        let pid = |child: &std::process::Child| i32::try_from(child.id()).unwrap();
        until("criu", || {
            children(pid(&with))
                .into_iter()
                .any(|pid| procfs::comm(pid) == "criu")
        });
        withdrawn(&guard.cancel, pid(&without)).await;
        let waits = tokio::time::timeout(Duration::from_millis(200), withdrawn(&guard.cancel, pid(&with)));
        assert!(waits.await.is_err(), "CRIU would be killed");
        let criu = children(pid(&with))[0];
        kill(Pid::from_raw(criu), Signal::SIGKILL).unwrap();
        for child in [&mut without, &mut with] {
            child.kill().unwrap();
            // The reaper of another test may have reaped it.
            let _ = child.wait();
        }
    }

    #[test]
    fn only_a_dead_criu_counts_as_dead() {
        let directory = tempfile::tempdir().unwrap();
        let criu = directory.path().join("criu");
        std::os::unix::fs::symlink("/bin/sleep", &criu).unwrap();
        // A runtime that does not reap, with CRIU and one of its tasks.
        let script = "\"$0\" 1000 & \"$0\" 1000 & exec sleep 1000";
        let mut command = Command::new("sh");
        let mut runtime = command.args(["-c", script]).arg(&criu).spawn().unwrap();
        let pid = i32::try_from(runtime.id()).unwrap();
        let named = || {
            let pids = children(pid).into_iter();
            pids.filter(|pid| procfs::comm(*pid) == "criu")
                .collect::<Vec<_>>()
        };
        until("both", || procfs::comm(pid) == "sleep" && named().len() == 2);
        let [first, task] = named()[..] else {
            unreachable!()
        };
        assert!(!has_dead_criu(pid));
        kill(Pid::from_raw(first), Signal::SIGKILL).unwrap();
        until("dead", || has_dead_criu(pid));
        runtime.kill().unwrap();
        kill(Pid::from_raw(task), Signal::SIGKILL).unwrap();
        // The reaper of another test may have reaped it.
        let _ = runtime.wait();
    }
}
