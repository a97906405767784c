//! A command that starts test nodes runs in a child process of itself. The parent removes what is left of the
//! nodes, however the child ends.
//!
//! A node ends when the process that made it dies (its guard kills it), but its cgroups and loop devices stay
//! until the next clean. The parent ignores Ctrl-C, which the child and its children get from the terminal
//! too, forwards signals that were sent to it alone, waits, and cleans.

use std::env;
use std::process::{Child, Command, ExitCode};
use std::thread;

use anyhow::{Context, Result};
use firn_node::Store;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::{Pid, geteuid};

use crate::tools::exit_as;

/// Set for the child.
const CHILD: &str = "FIRN_XTASK_SUPERVISED";

const SIGNALS: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];

/// In the child: runs `work`. Else starts the child, waits, and cleans.
pub fn supervised(work: impl FnOnce() -> Result<ExitCode>) -> Result<ExitCode> {
    let signals: SigSet = SIGNALS.into_iter().collect();
    if env::var_os(CHILD).is_some() {
        // The mask was inherited, and children would inherit it.
        signals.thread_unblock()?;
        return work();
    }
    signals.thread_block()?;
    let mut child = Command::new(env::current_exe().context("find this program")?)
        .args(env::args_os().skip(1))
        .env(CHILD, "1")
        .spawn()
        .context("start this program again")?;
    forward(signals, &child)?;
    let ended = child.wait().context("wait for the command")?;
    if geteuid().is_root() {
        for node in Store::open()?.clean(false)? {
            eprintln!("removed node {node}");
        }
    }
    Ok(exit_as(ended))
}

/// Forwards signals to the child, except Ctrl-C, which it gets from the terminal.
fn forward(signals: SigSet, child: &Child) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(child.id()).context("a pid")?);
    thread::spawn(move || {
        while let Ok(signal) = signals.wait() {
            if signal != Signal::SIGINT {
                // It may have ended already.
                let _ = kill(pid, signal);
            }
        }
    });
    Ok(())
}
