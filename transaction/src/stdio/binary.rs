//! Logging binaries: a program of the host that reads the process's output from its descriptors 3 and 4.
//!
//! Its environment consists of CONTAINER_ID and CONTAINER_NAMESPACE. It reports on descriptor 5 that it is
//! ready, by a byte or by closing it. The shim keeps no write end, so the program reads the end of the output
//! when the last process that can write has ended, even after a crash of the shim.

use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::time::Duration;

use command_fds::{CommandFdExt as _, FdMapping};
use firn_process::reaper::{Child, Reaper};
use nix::sys::signal::Signal;
use tokio::io::Interest;
use tokio::time::{Instant, timeout, timeout_at};

use super::endpoint::{pipe, watch};
use super::pump::Source;
use super::uri::Binary;
use super::{Error, Owner, Stream};

/// How long the program may take to report that it is ready.
const READY_LIMIT: Duration = Duration::from_secs(30);

/// How long the program may run after SIGTERM.
const TERM_GRACE: Duration = Duration::from_secs(12);

/// A running logging binary.
#[derive(Debug)]
pub(super) struct Logger {
    child: Child,
}

/// Write ends of the pipes that the program reads.
pub(super) struct LoggerPipes {
    pub(super) stdout: OwnedFd,
    pub(super) stderr: OwnedFd,
}

impl Logger {
    pub(super) async fn start(
        binary: &Binary,
        id: &str,
        namespace: &str,
        owner: Owner,
        reaper: &Reaper,
    ) -> Result<(Self, LoggerPipes), Error> {
        let (stdout_read, stdout) = pipe(owner, Stream::Stdout)?;
        let (stderr_read, stderr) = pipe(owner, Stream::Stderr)?;
        let (ready, ready_write) = pipe(owner, Stream::Stdout)?;
        let ready = watch(ready, Interest::READABLE, Stream::Stdout)?;

        let mut command = Command::new(&binary.program);
        command
            .args(&binary.args)
            .env_clear()
            .env("CONTAINER_ID", id)
            .env("CONTAINER_NAMESPACE", namespace)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mapping = |parent_fd, child_fd| FdMapping { parent_fd, child_fd };
        command
            .fd_mappings(vec![
                mapping(stdout_read, 3),
                mapping(stderr_read, 4),
                mapping(ready_write, 5),
            ])
            .expect("three different numbers");
        let program = binary.program.clone();
        let failed = |source| Error::LoggerSpawn { program, source };
        // The program outlives the shim; otherwise its last lines would be lost with the shim.
        let child = reaper.spawn_surviving(&mut command).map_err(failed)?;
        // Order matters: the command holds this process's copy of the ready pipe's write end, so the pipe
        // would never be seen closed.
        drop(command);

        let logger = Self { child };
        let mut byte = [0];
        let answer = timeout(READY_LIMIT, Source::Pipe(ready).read(&mut byte)).await;
        let (program, limit) = (binary.program.clone(), READY_LIMIT);
        let refused = match answer {
            Ok(Ok(0)) if binary.ready_byte => Error::LoggerNotReady { program },
            Ok(Ok(_)) => return Ok((logger, LoggerPipes { stdout, stderr })),
            Ok(Err(source)) => Error::LoggerSpawn { program, source },
            Err(_elapsed) => Error::LoggerTimeout { program, limit },
        };
        logger.child.kill();
        Err(refused)
    }

    /// Lets the program write its pending output until `deadline`, then ends it. The end is awaited in the
    /// background.
    pub(super) async fn stop(self, deadline: Instant) -> bool {
        let ended = timeout_at(deadline, self.child.wait()).await.is_ok();
        if !ended {
            self.child.signal(Signal::SIGTERM);
            tokio::spawn(async move {
                if timeout(TERM_GRACE, self.child.wait()).await.is_err() {
                    self.child.kill();
                }
            });
        }
        ended
    }
}
