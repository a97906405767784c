//! A hook by program: the OCI runtime runs it in the container.

use std::io::{PipeReader, Read};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use firn_host::{atomic_file, bounded};
use firn_oci::Spec;
use firn_oci::job_hook::Call;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::{Output, POLL, remains};

/// The OCI process of the hook, and the file with its pid, in the bundle.
pub(super) const PROCESS: &str = "firn-hook-process.json";
pub(super) const PID: &str = "firn-hook.pid";

/// Runs the program and waits for its end. It is killed at the deadline, with what it has started.
pub fn run(call: &Call, spec: &Spec, argv: &[String], deadline: Instant, output: &mut Output) -> Result<()> {
    let done = run_with(call, spec, argv, deadline, output);
    forget(call);
    done
}

/// Removes the files of a call.
pub(super) fn forget(call: &Call) {
    for file in [PROCESS, PID] {
        // Files that are not there, or that stay, harm nobody.
        let _ = std::fs::remove_file(call.bundle.join(file));
    }
}

fn run_with(call: &Call, spec: &Spec, argv: &[String], deadline: Instant, output: &mut Output) -> Result<()> {
    let process = process_of(spec, call, argv)?.to_string();
    atomic_file::write(&call.bundle, PROCESS, process.as_bytes(), 0o600)
        .context("cannot write the process")?;
    let [process, pid_file] = [PROCESS, PID].map(|name| call.bundle.join(name));
    let [runtime, arguments @ ..] = &call.exec[..] else {
        bail!("the call has no OCI runtime");
    };
    // What the runtime starts becomes a child of this process when the runtime ends.
    set_child_subreaper(true).context("cannot become a subreaper")?;
    let (mut reader, writer) = std::io::pipe().context("cannot make a pipe")?;
    let mut command = Command::new(runtime);
    command.args(arguments).arg("--process").arg(process);
    command
        .arg("--detach")
        .arg("--pid-file")
        .arg(&pid_file)
        .arg(&call.id);
    command
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer);
    let started = command.spawn().with_context(|| format!("cannot run {runtime}"))?;
    // The command holds the pipe's other end.
    drop(command);
    let of_runtime = Pid::from_raw(i32::try_from(started.id())?);
    let status = wait(of_runtime, &mut reader, deadline, output)?;
    match status {
        Some(WaitStatus::Exited(_, 0)) => (),
        Some(_) => bail!("the OCI runtime has not started {}", argv[0]),
        None => {
            let _ = kill(of_runtime, Signal::SIGKILL);
            end(call);
            bail!("the OCI runtime has not started {} in time", argv[0]);
        }
    }
    let pid = String::from_utf8(bounded::read(&pid_file).context("cannot read the pid")?)?;
    let pid = Pid::from_raw(pid.trim().parse().context("the runtime wrote no pid")?);
    let status = wait(pid, &mut reader, deadline, output)?;
    match status {
        Some(WaitStatus::Exited(_, 0)) => Ok(()),
        Some(WaitStatus::Exited(_, code)) => bail!("{} ended with exit status {code}", argv[0]),
        Some(WaitStatus::Signaled(_, signal, _)) => bail!("{} was ended by {signal}", argv[0]),
        _ => {
            // The runtime has made it the leader of a session.
            let _ = kill(Pid::from_raw(-pid.as_raw()), Signal::SIGKILL);
            let _ = kill(pid, Signal::SIGKILL);
            end(call);
            let _ = waitpid(pid, Some(WaitPidFlag::WNOHANG));
            bail!("{} has not ended in time and was killed", argv[0])
        }
    }
}

/// Ends what has left the program's session.
fn end(call: &Call) {
    if let Err(error) = remains::end(call) {
        report!("firn-hook: {error:#}");
    }
}

/// Waits for the end of a child, and reads what comes out of the pipe meanwhile. None at the deadline.
fn wait(
    pid: Pid,
    reader: &mut PipeReader,
    deadline: Instant,
    output: &mut Output,
) -> Result<Option<WaitStatus>> {
    let mut buffer = [0; 4096];
    let (mut is_open, mut ended) = (true, None);
    loop {
        if ended.is_none() {
            let status = waitpid(pid, Some(WaitPidFlag::WNOHANG)).context("cannot wait for the hook")?;
            ended = (status != WaitStatus::StillAlive).then_some(status);
        }
        // All that it wrote is in the pipe once it has ended. A process that it has left may hold the pipe.
        let patience = match ended {
            Some(_) => PollTimeout::ZERO,
            None => PollTimeout::try_from(POLL)?,
        };
        let mut at = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
        let is_ready = is_open && poll(&mut at, patience).is_ok_and(|ready| ready > 0);
        if is_ready {
            let length = reader.read(&mut buffer).context("cannot read its output")?;
            output.add(&buffer[..length]);
            is_open = length > 0;
        }
        if ended.is_some() && !is_ready || Instant::now() >= deadline {
            return Ok(ended);
        }
        if !is_open && ended.is_none() {
            std::thread::sleep(POLL);
        }
    }
}

/// The process of the container's init with another command, the facts in its environment, and no terminal.
fn process_of(spec: &Spec, call: &Call, argv: &[String]) -> Result<Value> {
    let process = spec.value().get("process").and_then(Value::as_object);
    let mut process = process.context("the spec has no process")?.clone();
    process.insert("args".to_owned(), json!(argv));
    process.insert("terminal".to_owned(), json!(false));
    process.remove("consoleSize");
    let mut environment = spec.array("/process/env").to_vec();
    let variables = call.facts.variables();
    environment.extend(
        variables
            .iter()
            .map(|(name, value)| json!(format!("{name}={value}"))),
    );
    process.insert("env".to_owned(), Value::Array(environment));
    Ok(Value::Object(process))
}
