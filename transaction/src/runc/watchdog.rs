//! Notices a CRIU that has died under a runtime that does not.
//!
//! runc talks to CRIU over a socket whose other end the tasks of a half-done restore hold too. When CRIU is killed runc
//! waits on, for ever, and does not reap it: a CRIU that stays a zombie is how that shows.

use std::fs;
use std::time::Duration;

use crate::procfs;

/// How often CRIU is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// For how many looks CRIU has to be dead: a runtime that works reaps it at once.
const DEAD: u32 = 5;

/// Ends when the CRIU that `runtime` has started is dead and the runtime does not care.
pub(super) async fn criu_died(runtime: i32) {
    let mut dead = 0;
    while dead < DEAD {
        tokio::time::sleep(LOOK).await;
        dead = if has_dead_criu(runtime) { dead + 1 } else { 0 };
    }
}

fn has_dead_criu(runtime: i32) -> bool {
    // The tasks that CRIU makes are the runtime's children as well, and have its name until they are complete.
    let first = children(runtime)
        .into_iter()
        .filter(|pid| procfs::comm(*pid) == "criu")
        .min_by_key(|pid| procfs::started(*pid));
    first.is_some_and(|pid| procfs::state(pid) == Some('Z'))
}

fn children(pid: i32) -> Vec<i32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten();
    let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
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

    #[test]
    fn a_dead_criu_is_told_from_a_living_one_and_from_its_tasks() {
        let directory = tempfile::tempdir().unwrap();
        let criu = directory.path().join("criu");
        fs::copy("/bin/sleep", &criu).unwrap();
        // A runtime that does not reap, with CRIU and a task of it.
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
        // The reaper of another test may have had it.
        let _ = runtime.wait();
    }
}
