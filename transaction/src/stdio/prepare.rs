//! Stdio that is open on the client's side and whose process does not exist yet.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use firn_process::reaper::Reaper;
use tokio::io::Interest;
use tokio::time::Instant;

use super::binary::Logger;
use super::console::ConsoleSocket;
use super::copier::Copier;
use super::endpoint::{Fifo, Input, Sink, log_file, pipe, watch};
use super::pump::Source;
use super::uri::Target;
use super::{Error, StdioConfig, Stream};

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

/// Stdio before its process exists. Nothing is copied until [`Prepared::start`].
#[derive(Debug, Default)]
pub struct Prepared {
    ends: ProcessEnds,
    /// The shim's end of the process's stdin.
    stdin: Option<Sink>,
    /// The shim's ends of the process's outputs.
    outputs: Vec<(Stream, OwnedFd, Sink)>,
    /// Receives the terminal that the runtime will send, and the target of its output.
    terminal: Option<(ConsoleSocket, Sink)>,
    /// The client's stdin.
    input: Option<Fifo>,
    logger: Option<Logger>,
}

impl StdioConfig {
    /// Opens the client's side, but for stdin, and creates the process's side. A logging binary is running
    /// and ready afterwards.
    pub async fn prepare(&self, owner: Owner, reaper: &Reaper) -> Result<Prepared, Error> {
        let stdin = self.stdin.as_deref().map(Input::open).transpose()?;
        let mut prepared = Prepared::default();
        if self.terminal {
            let output = self.terminal_output(&mut prepared, owner, reaper).await?;
            prepared.terminal = Some((ConsoleSocket::bind()?, output));
        } else {
            self.pipes(&mut prepared, owner, reaper).await?;
        }
        match stdin {
            None => {}
            Some(Input::Direct(file)) => prepared.ends.stdin = Some(file),
            Some(Input::Fifo(fifo)) => {
                if !self.terminal {
                    let (read, write) = pipe(owner, Stream::Stdin)?;
                    prepared.ends.stdin = Some(read);
                    let write = watch(write, Interest::WRITABLE, Stream::Stdin)?;
                    prepared.stdin = Some(Sink::Pipe(write, None));
                }
                prepared.input = Some(fifo);
            }
        }
        Ok(prepared)
    }

    async fn pipes(&self, prepared: &mut Prepared, owner: Owner, reaper: &Reaper) -> Result<(), Error> {
        match &self.target {
            Target::Fifos { stdout, stderr } => {
                let open = async |path: &Option<PathBuf>, stream| match path {
                    Some(path) => Sink::open(path, stream).await.map(Some),
                    None => Ok(None),
                };
                // Together: each waits for its client.
                let (stdout, stderr) =
                    tokio::try_join!(open(stdout, Stream::Stdout), open(stderr, Stream::Stderr))?;
                for (sink, stream) in [(stdout, Stream::Stdout), (stderr, Stream::Stderr)] {
                    if let Some(sink) = sink {
                        prepared.connect(owner, stream, sink)?;
                    }
                }
            }
            Target::File { path, stderr } => {
                let file = log_file(path)?;
                prepared.connect(owner, Stream::Stdout, Sink::File(Arc::clone(&file)))?;
                if *stderr {
                    prepared.connect(owner, Stream::Stderr, Sink::File(file))?;
                }
            }
            Target::Binary(binary) => {
                let (logger, pipes) = Logger::start(binary, &self.id, &self.namespace, owner, reaper).await?;
                prepared.ends.stdout = Some(pipes.stdout);
                prepared.ends.stderr = Some(pipes.stderr);
                prepared.logger = Some(logger);
            }
        }
        Ok(())
    }

    /// A terminal has one output: stderr is not used.
    async fn terminal_output(
        &self,
        prepared: &mut Prepared,
        owner: Owner,
        reaper: &Reaper,
    ) -> Result<Sink, Error> {
        match &self.target {
            Target::Fifos { stdout: None, .. } => Ok(Sink::Discard),
            Target::Fifos {
                stdout: Some(path), ..
            } => Sink::open(path, Stream::Stdout).await,
            Target::File { path, .. } => Ok(Sink::File(log_file(path)?)),
            Target::Binary(binary) => {
                let (logger, pipes) = Logger::start(binary, &self.id, &self.namespace, owner, reaper).await?;
                prepared.logger = Some(logger);
                let writer = watch(pipes.stdout, Interest::WRITABLE, Stream::Stdout)?;
                Ok(Sink::Pipe(writer, None))
            }
        }
    }
}

impl Prepared {
    /// Makes a pipe from the process's stdout or stderr.
    fn connect(&mut self, owner: Owner, stream: Stream, to: Sink) -> Result<(), Error> {
        let (read, write) = pipe(owner, stream)?;
        self.outputs.push((stream, read, to));
        match stream {
            Stream::Stderr => self.ends.stderr = Some(write),
            _ => self.ends.stdout = Some(write),
        }
        Ok(())
    }

    /// Creates pipes for streams that the client does not use. For such a stream the runtime opens /dev/null
    /// inside the container at create, but the host's /dev/null at restore; CRIU could not dump that a second
    /// time.
    pub fn avoid_null(&mut self, owner: Owner) -> Result<(), Error> {
        if self.terminal.is_some() {
            return Ok(());
        }
        if self.ends.stdin.is_none() {
            // The pipe has no writer: reading it yields end of file, as with /dev/null.
            self.ends.stdin = Some(pipe(owner, Stream::Stdin)?.0);
        }
        if self.ends.stdout.is_none() {
            self.connect(owner, Stream::Stdout, Sink::Discard)?;
        }
        if self.ends.stderr.is_none() {
            self.connect(owner, Stream::Stderr, Sink::Discard)?;
        }
        Ok(())
    }

    /// The socket for the runtime's `--console-socket`, for a process with a terminal.
    pub fn console_socket(&self) -> Option<&Path> {
        self.terminal.as_ref().map(|(socket, _)| socket.path())
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
        for (stream, from, to) in self.outputs {
            let from = watch(from, Interest::READABLE, stream)?;
            copier.output(stream, Source::Pipe(from), to);
        }
        let mut stdin = self.stdin;
        if let Some((socket, output)) = self.terminal {
            let master = socket.receive().await?;
            let master = watch(master, Interest::READABLE | Interest::WRITABLE, Stream::Terminal)?;
            copier.output(Stream::Terminal, Source::Terminal(Arc::clone(&master)), output);
            copier.terminal(Arc::clone(&master));
            stdin = Some(Sink::Terminal(master));
        }
        if let (Some(input), Some(sink)) = (self.input, stdin) {
            // Not before: a client that has written all looks for the process, to close its stdin.
            let (reader, hold) = input.open()?;
            let reader = watch(reader, Interest::READABLE, Stream::Stdin)?;
            copier.input(Source::Pipe(reader), sink, hold);
        }
        Ok(copier)
    }

    /// Closes everything and ends a logging binary, after the runtime's call has failed.
    pub async fn abort(mut self) {
        let logger = self.logger.take();
        drop(self);
        if let Some(logger) = logger {
            logger.stop(Instant::now()).await;
        }
    }
}
