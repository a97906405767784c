//! Stdio that is open on the client's side and whose process does not exist yet.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use tokio::io::Interest;
use tokio::time::Instant;

use super::binary::Logger;
use super::console::ConsoleSocket;
use super::copier::Copier;
use super::endpoint::{Input, Sink, log_file, pipe, watch};
use super::pump::Source;
use super::uri::Target;
use super::{Error, StdioConfig, Stream};
use crate::reaper::Reaper;

/// Owner of the pipes, so that the process may reopen /dev/stdout: `io_uid` and `io_gid` of the runc options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// The process's ends.
#[derive(Debug, Default)]
struct ProcessEnds {
    stdin: Option<OwnedFd>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
}

/// The shim's ends: pipes that exist, or a terminal that the runtime will send.
#[derive(Debug)]
enum Wiring {
    Pipes {
        stdin: Option<OwnedFd>,
        outputs: Vec<(Stream, OwnedFd, Sink)>,
    },
    Terminal {
        socket: ConsoleSocket,
        output: Sink,
    },
}

/// Stdio before its process exists. Nothing is copied until [`Prepared::start`].
#[derive(Debug)]
pub struct Prepared {
    ends: ProcessEnds,
    wiring: Wiring,
    input: Option<(OwnedFd, OwnedFd)>,
    logger: Option<Logger>,
}

impl StdioConfig {
    /// Opens the client's side and creates the process's side. A logging binary is running and ready
    /// afterwards.
    pub async fn prepare(&self, owner: Owner, reaper: &Reaper) -> Result<Prepared, Error> {
        let stdin = self.stdin.as_deref().map(Input::open).transpose()?;
        let mut prepared = if self.terminal {
            self.terminal(owner, reaper).await?
        } else {
            self.pipes(owner, reaper).await?
        };
        match (stdin, &mut prepared.wiring) {
            (None, _) => {}
            (Some(Input::Fifo { reader, hold }), Wiring::Terminal { .. }) => {
                prepared.input = Some((reader, hold))
            }
            (Some(Input::Fifo { reader, hold }), Wiring::Pipes { stdin, .. }) => {
                let (read, write) = pipe(owner, Stream::Stdin)?;
                prepared.ends.stdin = Some(read);
                *stdin = Some(write);
                prepared.input = Some((reader, hold));
            }
            (Some(Input::Direct(file)), _) => prepared.ends.stdin = Some(file),
        }
        Ok(prepared)
    }

    async fn pipes(&self, owner: Owner, reaper: &Reaper) -> Result<Prepared, Error> {
        let mut ends = ProcessEnds::default();
        let mut outputs = Vec::new();
        let mut logger = None;
        let mut connect = |stream, output| {
            let (read, write) = pipe(owner, stream)?;
            outputs.push((stream, read, output));
            Ok::<_, Error>(Some(write))
        };
        match &self.target {
            Target::Fifos { stdout, stderr } => {
                if let Some(path) = stdout {
                    ends.stdout = connect(Stream::Stdout, Sink::open(path, Stream::Stdout)?)?;
                }
                if let Some(path) = stderr {
                    ends.stderr = connect(Stream::Stderr, Sink::open(path, Stream::Stderr)?)?;
                }
            }
            Target::File { path, stderr } => {
                let file = log_file(path)?;
                ends.stdout = connect(Stream::Stdout, Sink::File(Arc::clone(&file)))?;
                if *stderr {
                    ends.stderr = connect(Stream::Stderr, Sink::File(file))?;
                }
            }
            Target::Binary(binary) => {
                let (running, pipes) =
                    Logger::start(binary, &self.id, &self.namespace, owner, reaper).await?;
                ends.stdout = Some(pipes.stdout);
                ends.stderr = Some(pipes.stderr);
                logger = Some(running);
            }
        }
        Ok(Prepared {
            ends,
            wiring: Wiring::Pipes { stdin: None, outputs },
            input: None,
            logger,
        })
    }

    /// A terminal has one output: stderr is not used.
    async fn terminal(&self, owner: Owner, reaper: &Reaper) -> Result<Prepared, Error> {
        let mut logger = None;
        let output = match &self.target {
            Target::Fifos { stdout: None, .. } => Sink::Discard,
            Target::Fifos {
                stdout: Some(path), ..
            } => Sink::open(path, Stream::Stdout)?,
            Target::File { path, .. } => Sink::File(log_file(path)?),
            Target::Binary(binary) => {
                let (running, pipes) =
                    Logger::start(binary, &self.id, &self.namespace, owner, reaper).await?;
                logger = Some(running);
                Sink::Pipe(watch(pipes.stdout, Interest::WRITABLE, Stream::Stdout)?, None)
            }
        };
        let wiring = Wiring::Terminal {
            socket: ConsoleSocket::bind()?,
            output,
        };
        Ok(Prepared {
            ends: ProcessEnds::default(),
            wiring,
            input: None,
            logger,
        })
    }
}

impl Prepared {
    /// Creates pipes for streams that the client does not use. For such a stream the runtime opens /dev/null
    /// inside the container at create, but the host's /dev/null at restore; CRIU could not dump that a second
    /// time.
    pub fn avoid_null(&mut self, owner: Owner) -> Result<(), Error> {
        let Wiring::Pipes { outputs, .. } = &mut self.wiring else {
            return Ok(());
        };
        if self.ends.stdin.is_none() {
            // The pipe has no writer: reading it yields end of file, as with /dev/null.
            self.ends.stdin = Some(pipe(owner, Stream::Stdin)?.0);
        }
        let streams = [
            (Stream::Stdout, &mut self.ends.stdout),
            (Stream::Stderr, &mut self.ends.stderr),
        ];
        for (stream, end) in streams {
            if end.is_none() {
                let (read, write) = pipe(owner, stream)?;
                outputs.push((stream, read, Sink::Discard));
                *end = Some(write);
            }
        }
        Ok(())
    }

    /// The socket for the runtime's `--console-socket`, for a process with a terminal.
    pub fn console_socket(&self) -> Option<&Path> {
        match &self.wiring {
            Wiring::Pipes { .. } => None,
            Wiring::Terminal { socket, .. } => Some(socket.path()),
        }
    }

    /// Attaches the process's ends to the runtime's command. Drop the command before [`Prepared::start`]: it
    /// holds the ends open, and the streams would not end.
    pub fn attach(&mut self, command: &mut Command) {
        let end = |fd: &mut Option<OwnedFd>| fd.take().map_or_else(Stdio::null, Stdio::from);
        command.stdin(end(&mut self.ends.stdin));
        command.stdout(end(&mut self.ends.stdout));
        command.stderr(end(&mut self.ends.stderr));
    }

    /// Starts copying. Call it when the runtime's create, restore or exec has succeeded.
    pub async fn start(self) -> Result<Copier, Error> {
        drop(self.ends);
        let mut copier = Copier::new(self.logger);
        let stdin = match self.wiring {
            Wiring::Pipes { stdin, outputs } => {
                for (stream, from, output) in outputs {
                    let from = watch(from, Interest::READABLE, stream)?;
                    copier.output(stream, Source::Pipe(from), output);
                }
                stdin
                    .map(|fd| watch(fd, Interest::WRITABLE, Stream::Stdin))
                    .transpose()?
                    .map(|writer| Sink::Pipe(writer, None))
            }
            Wiring::Terminal { socket, output } => {
                let master = socket.receive().await?;
                let master = watch(master, Interest::READABLE | Interest::WRITABLE, Stream::Terminal)?;
                copier.output(Stream::Terminal, Source::Terminal(Arc::clone(&master)), output);
                copier.terminal(Arc::clone(&master));
                Some(Sink::Terminal(master))
            }
        };
        if let (Some((reader, hold)), Some(sink)) = (self.input, stdin) {
            copier.input(
                Source::Pipe(watch(reader, Interest::READABLE, Stream::Stdin)?),
                sink,
                hold,
            );
        }
        Ok(copier)
    }

    /// Closes everything and ends a logging binary, after the runtime's call has failed.
    pub async fn abort(self) {
        drop((self.ends, self.wiring, self.input));
        if let Some(logger) = self.logger {
            logger.stop(Instant::now()).await;
        }
    }
}
