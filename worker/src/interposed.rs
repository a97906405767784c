//! Asks firn's library in processes: it shuts their way to the driver, and takes their GPU memory out.
//!
//! What it answers is the container's, and is taken as input: descriptors that are none of the driver's are
//! refused before the driver sees them.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::fs::MetadataExt;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use firn_gpu::protocol::{DriverError, OF_LIBRARY, ProcessReply};
use firn_host::procfs;
use firn_interposer::abi::{Answer, Request};
use firn_interposer::facts;
use firn_interposer_client::{Lent, Library, Process};
use rustix::process::Pid;

use crate::node::{Node, Refusal};

/// `CUDA_ERROR_NOT_READY`: somebody is in a call of the driver, or work is not done.
const NOT_READY: i32 = 600;

/// `CUDA_ERROR_UNKNOWN`
const UNKNOWN: i32 = 999;

/// The library that processes have, by its file.
pub(super) struct Interposed(Library);

impl Interposed {
    pub(super) fn read(path: &Path) -> Result<Self, Refusal<'static>> {
        let read = Library::read(path).map(Self);
        read.map_err(|source| Refusal::Interposer {
            path: path.to_owned(),
            source,
        })
    }

    /// Shuts the gate, and waits until every context is idle.
    pub(super) fn shut(&self, pid: i32, wait: u32) -> ProcessReply {
        let shut = || {
            let Some(mut process) = self.process(pid)? else {
                return Ok(false);
            };
            demand(&mut process, "shut", Request::Shut { wait })?;
            demand(&mut process, "rehearse", Request::Rehearse { wait })?;
            Ok(true)
        };
        match shut() {
            Ok(interposed) => ProcessReply {
                interposed,
                ..ProcessReply::of(pid)
            },
            Err(error) => ProcessReply::failed(pid, error),
        }
    }

    /// Pieces of its memory, from this index on.
    pub(super) fn lend(&self, node: &Node, pid: i32, from: u32, wait: u32) -> (ProcessReply, Vec<OwnedFd>) {
        match self.try_lend(node, pid, from, wait) {
            Ok(lent) => {
                let (pieces, descriptors) =
                    lent.into_iter().map(|lent| (lent.bytes, lent.descriptor)).unzip();
                let reply = ProcessReply {
                    pieces,
                    ..ProcessReply::of(pid)
                };
                (reply, descriptors)
            }
            Err(error) => (ProcessReply::failed(pid, error), Vec::new()),
        }
    }

    fn try_lend(&self, node: &Node, pid: i32, from: u32, wait: u32) -> Result<Vec<Lent>, DriverError> {
        let call = "lend";
        let mut process = self.expect(pid, call)?;
        let lent = process.lend(from, wait).map_err(|error| failed(call, &error))?;
        let lent = lent.map_err(|answer| refused(call, answer))?;
        if lent.iter().all(|piece| is_of_driver(node, piece)) {
            Ok(lent)
        } else {
            let error = io::Error::other("a descriptor that is none of NVIDIA's driver");
            Err(failed(call, &error))
        }
    }

    /// Takes its memory out.
    pub(super) fn detach(&self, pid: i32, wait: u32) -> ProcessReply {
        let call = "detach";
        let process = self.expect(pid, call);
        reply(
            pid,
            process.and_then(|mut process| demand(&mut process, call, Request::Detach { wait })),
        )
    }

    /// Opens the gate. A process that runs another program by now has none that is shut.
    pub(super) fn open(&self, pid: i32) -> ProcessReply {
        let call = "open";
        let open = || match self.process(pid)? {
            Some(mut process) => demand(&mut process, call, Request::Open),
            None => self.expect_gone(pid, call),
        };
        reply(pid, open())
    }

    /// Gives it pieces, of which the first has this index. A process that runs another program by now has
    /// lost its memory with the old one.
    pub(super) fn attach(&self, pid: i32, from: u32, pieces: &[OwnedFd], wait: u32) -> ProcessReply {
        let call = "attach";
        let attach = || {
            let Some(mut process) = self.process(pid)? else {
                self.expect_gone(pid, call)?;
                return Ok(ProcessReply::of(pid));
            };
            let answer = process.attach(from, pieces, wait);
            let answer = answer.map_err(|error| failed(call, &error))?;
            let imported = matches!(answer, Answer::Imported { .. });
            match answer {
                // Where the gate is open nothing is out.
                Answer::Done | Answer::Idle | Answer::Imported { .. } => Ok(ProcessReply {
                    interposed: true,
                    imported,
                    ..ProcessReply::of(pid)
                }),
                answer => Err(refused(call, answer)),
            }
        };
        attach().unwrap_or_else(|error| ProcessReply::failed(pid, error))
    }

    /// Fails if the process has the library, and only cannot be reached at the moment.
    fn expect_gone(&self, pid: i32, call: &str) -> Result<(), DriverError> {
        let hidden = Pid::from_raw(pid).map(|number| self.0.is_hidden(number));
        match hidden {
            Some(Ok(true)) => Err(failed(call, &io::Error::other("nothing: it cannot be reached"))),
            Some(Err(error)) if procfs::is_alive(pid) => Err(failed("look", &error)),
            _ => Ok(()),
        }
    }

    /// The process, if it has the library. None also if it has ended.
    fn process(&self, pid: i32) -> Result<Option<Process>, DriverError> {
        let Some(number) = Pid::from_raw(pid) else {
            return Ok(None);
        };
        match self.0.process(number) {
            Err(_) if !procfs::is_alive(pid) => Ok(None),
            found => found.map_err(|error| failed("look", &error)),
        }
    }

    fn expect(&self, pid: i32, call: &str) -> Result<Process, DriverError> {
        let found = self.process(pid)?;
        found.ok_or_else(|| failed(call, &io::Error::other("nothing: it does not have it any more")))
    }
}

fn reply(pid: i32, done: Result<(), DriverError>) -> ProcessReply {
    match done {
        Ok(()) => ProcessReply::of(pid),
        Err(error) => ProcessReply::failed(pid, error),
    }
}

fn demand(process: &mut Process, call: &str, request: Request) -> Result<(), DriverError> {
    let answer = process.ask(request).map_err(|error| failed(call, &error))?;
    expect_done(call, answer)
}

fn expect_done(call: &str, answer: Answer) -> Result<(), DriverError> {
    match answer {
        Answer::Done => Ok(()),
        answer => Err(refused(call, answer)),
    }
}

fn refused(call: &str, answer: Answer) -> DriverError {
    let (code, name) = match answer {
        Answer::Refused { status } => {
            let code = status.cast_signed();
            (code, format!("CUresult {code}"))
        }
        Answer::Busy { tid, row } => {
            let function = usize::try_from(row).ok().and_then(|row| facts::ROWS.get(row));
            let function = function.map_or("a function", |row| row.symbol);
            (
                NOT_READY,
                format!("that its thread {tid} is in {function} of the driver"),
            )
        }
        Answer::Working => (NOT_READY, "that the driver has not done it yet".to_owned()),
        Answer::Failed { errno } => (UNKNOWN, format!("errno {errno}")),
        Answer::Done | Answer::Imported { .. } | Answer::Away | Answer::Idle | Answer::Unknown => {
            (UNKNOWN, format!("{answer:?}"))
        }
    };
    error(call, code, name)
}

fn failed(call: &str, cause: &io::Error) -> DriverError {
    error(call, UNKNOWN, cause.to_string())
}

fn error(call: &str, code: i32, name: String) -> DriverError {
    DriverError {
        call: format!("{call}{OF_LIBRARY}"),
        code,
        name,
    }
}

/// Whether a descriptor is one of NVIDIA's driver, as far as the node shows it: the driver makes them with
/// its control device. Simulated GPUs have none.
fn is_of_driver(node: &Node, piece: &Lent) -> bool {
    let control = match fs::metadata(node.dev_root.join("nvidiactl")) {
        Ok(control) => control,
        Err(error) => return error.kind() == io::ErrorKind::NotFound,
    };
    let control = control.file_type().is_char_device().then(|| control.st_rdev());
    let found = rustix::fs::fstat(piece.as_fd()).map(|stat| stat.st_rdev);
    control.is_none_or(|control| found == Ok(control))
}
