//! Ends the processes of a hook that was not waited for: they must not work for a hook that has failed while
//! the next one is called.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use firn_host::{bounded, procfs};
use firn_oci::job_hook::Call;
use nix::unistd::getppid;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::exec::{PID, PROCESS};

/// How long all of them may take to end.
const LIMIT: Duration = Duration::from_secs(2);
/// How long runc may take to start the program in a process, or to end without its parent. The init of a
/// container that was not started looks the same.
const STARTS: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_millis(5);

/// What a process is to a call of a hook.
#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Other,
    /// runc has not started the program in it yet. Without its parent it ends by itself.
    Starting,
    OfHook,
}

/// Ends the OCI runtime that starts the program of this call, the program, and what that has started. They
/// are descendants of the shim, which is the parent of this process.
pub fn end(call: &Call) -> Result<()> {
    let (begun, shim) = (Instant::now(), getppid().as_raw());
    let program = bounded::read(&call.bundle.join(PID)).ok();
    let program = program.and_then(|pid| String::from_utf8(pid).ok()?.trim().parse().ok());
    loop {
        let descendants = procfs::tree(shim, &procfs::all());
        let kinds = descendants.into_iter().map(|pid| (pid, ends(call, program, pid)));
        let left: Vec<(i32, Kind)> = kinds.filter(|(_, kind)| *kind != Kind::Other).collect();
        let took = begun.elapsed();
        let ours: Vec<i32> = left
            .iter()
            .filter(|(_, kind)| *kind == Kind::OfHook)
            .map(|(pid, _)| *pid)
            .collect();
        if left.is_empty() || ours.is_empty() && took >= STARTS {
            break;
        }
        if took >= LIMIT {
            bail!("processes {ours:?} of the hook do not end");
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// Kills a process of the hook. `program` is the leader of its session, if that was started.
fn ends(call: &Call, program: Option<i32>, pid: i32) -> Kind {
    let Some(process) = Pid::from_raw(pid) else {
        return Kind::Other;
    };
    // Order matters: a look that follows the opening is at the process that gets the signal.
    let opened = pidfd_open(process, PidfdFlags::empty());
    let kind = match program {
        Some(leader) if procfs::group(pid) == Some(leader) && procfs::is_alive(pid) => Kind::OfHook,
        _ => kind_of(call, pid),
    };
    if let (Ok(process), Kind::OfHook) = (opened, &kind) {
        // One that has ended is not found again.
        let _sent = pidfd_send_signal(process, Signal::KILL);
    }
    kind
}

fn kind_of(call: &Call, pid: i32) -> Kind {
    if procfs::comm(pid).starts_with("runc:[") {
        return if procfs::is_alive(pid) {
            Kind::Starting
        } else {
            Kind::Other
        };
    }
    // Neither can be read of a process that has ended.
    let words = |name: &str| {
        let text = bounded::read(Path::new(&format!("/proc/{pid}/{name}"))).unwrap_or_default();
        text.split(|byte| *byte == 0)
            .map(<[u8]>::to_vec)
            .collect::<Vec<_>>()
    };
    let process = call.bundle.join(PROCESS);
    if words("cmdline")
        .iter()
        .any(|word| word == process.as_os_str().as_encoded_bytes())
    {
        return Kind::OfHook;
    }
    let environment = words("environ");
    let has = |name: &str, value: &str| {
        let variable = format!("{name}={value}");
        environment.iter().any(|word| word == variable.as_bytes())
    };
    let facts = &call.facts;
    if has("FIRN_HOOK", facts.hook.name()) && has("FIRN_CHECKPOINT", &facts.checkpoint) {
        Kind::OfHook
    } else {
        Kind::Other
    }
}
