//! Copies the stdio of one process.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, timeout_at};

use super::binary::Logger;
use super::endpoint::{Sink, Watched};
use super::pump::{Progress, Source, pump};
use super::{Stream, console};

/// How long [`Copier::drain`] waits.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Longest time without progress.
    pub idle: Duration,
    /// Longest time in all.
    pub limit: Duration,
}

/// Running copies. Dropping it stops them at once; end with [`Copier::drain`] to lose nothing.
#[derive(Debug)]
pub struct Copier {
    outputs: JoinSet<()>,
    inputs: JoinSet<()>,
    stdin_hold: Option<OwnedFd>,
    terminal: Option<Watched>,
    logger: Option<Logger>,
    progress: Progress,
}

impl Copier {
    pub(super) fn new(logger: Option<Logger>) -> Self {
        Self {
            outputs: JoinSet::new(),
            inputs: JoinSet::new(),
            stdin_hold: None,
            terminal: None,
            logger,
            progress: Progress::default(),
        }
    }

    pub(super) fn output(&mut self, stream: Stream, from: Source, to: Sink) {
        self.outputs.spawn(pump(from, to, stream, self.progress.clone()));
    }

    pub(super) fn input(&mut self, from: Source, to: Sink, hold: OwnedFd) {
        self.stdin_hold = Some(hold);
        self.inputs
            .spawn(pump(from, to, Stream::Stdin, Progress::default()));
    }

    pub(super) fn terminal(&mut self, master: Watched) {
        self.terminal = Some(master);
    }

    /// Lets stdin end once the client has closed its side too. The process reads pending input first, then
    /// end of file.
    pub fn close_stdin(&mut self) {
        self.stdin_hold = None;
    }

    /// Sets the size of the terminal; does nothing for a process without one.
    pub fn resize(&self, width: u16, height: u16) -> io::Result<()> {
        self.terminal
            .as_ref()
            .map_or(Ok(()), |master| console::resize(master, width, height))
    }

    /// Waits until the process and its children have closed their outputs and everything is written, then
    /// closes everything. Returns false if nothing was copied for the idle time, or the limit has passed: a
    /// process still holds a stream open, or the client does not read.
    pub async fn drain(mut self, patience: Patience) -> bool {
        let deadline = Instant::now() + patience.limit;
        let copied = self.wait_for_copies(patience.idle, deadline).await;
        self.outputs.shutdown().await;
        self.inputs.shutdown().await;
        // Order matters: the logging binary reads the end of its input once the terminal's copy has ended.
        let logged = match self.logger.take() {
            Some(logger) => logger.stop(deadline.min(Instant::now() + patience.idle)).await,
            None => true,
        };
        copied && logged
    }

    /// Whether all copies have ended.
    async fn wait_for_copies(&mut self, idle: Duration, deadline: Instant) -> bool {
        while !self.outputs.is_empty() {
            let before = self.progress.now();
            let pause = deadline.min(Instant::now() + idle);
            let ended = async { while self.outputs.join_next().await.is_some() {} };
            if timeout_at(pause, ended).await.is_err() {
                // A shim that did not run for a while (the machine was suspended or is overloaded) finds the
                // deadline passed and data to copy at the same time: the copies come first.
                yield_now().await;
                if self.progress.now() == before || Instant::now() >= deadline {
                    return false;
                }
            }
        }
        true
    }
}
