//! A hook by signal: the container's init gets it and answers with a file.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use firn_host::bounded;
use nix::libc::pid_t;
use nix::sys::signal::Signal;

use super::POLL;
use super::init::Init;
use super::job_dir::JobDir;

/// The answer of a hook that succeeded.
const OK: &str = "ok";

/// Sends the signal and waits for the answer.
pub fn send(init: &Init, signal: Signal, dir: &JobDir, deadline: Instant) -> Result<()> {
    let pid = init.pid();
    if !init.look(|| is_handled(pid, signal))? {
        bail!("process {pid} has no handler for {signal}, which would end it or do nothing");
    }
    dir.forget_answer()?;
    init.signal(signal)?;
    loop {
        match dir.answer()?.as_deref() {
            Some(OK) => return Ok(()),
            Some(answer) => bail!("the job answered: {answer}"),
            None if init.has_ended()? => bail!("process {pid} has ended"),
            None if Instant::now() >= deadline => bail!("the job has not answered in time"),
            None => std::thread::sleep(POLL),
        }
    }
}

/// Whether a process has a handler for a signal.
fn is_handled(pid: pid_t, signal: Signal) -> Result<bool> {
    let path = format!("/proc/{pid}/status");
    let status = bounded::read(path.as_ref()).with_context(|| format!("cannot read {path}"))?;
    let status = String::from_utf8_lossy(&status);
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let bit = signal as i32 - 1;
    Ok(caught.with_context(|| format!("{path} has no SigCgt"))? & 1 << bit != 0)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn only_a_signal_with_a_handler_is_handled() {
        let mut shell = Command::new("sh")
            .args(["-c", "trap : USR1; echo; read line"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Read::read_exact(shell.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        let pid = pid_t::try_from(shell.id()).unwrap();
        let handled = [Signal::SIGUSR1, Signal::SIGUSR2].map(|signal| is_handled(pid, signal).unwrap());
        shell.kill().unwrap();
        shell.wait().unwrap();
        assert_eq!(handled, [true, false]);
    }
}
