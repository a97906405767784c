//! The ends of a copy: the client's fifos and files, and the pipes to the process. Opening never blocks, and
//! only an output fifo waits, for its client.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::unistd::{Gid, Uid, fchown, pipe2};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep};

use super::{Error, Owner, Stream};

/// A non-blocking descriptor in the reactor. Shared, because a terminal is read and written through the same
/// one.
pub(super) type Watched = Arc<AsyncFd<OwnedFd>>;

/// How long a client may take to open its side of an output fifo.
const CLIENT: Duration = Duration::from_secs(3);

/// Registers a descriptor with the reactor.
pub(super) fn watch(fd: OwnedFd, interest: Interest, stream: Stream) -> Result<Watched, Error> {
    #[expect(
        deprecated,
        reason = "its successor is unsafe for types whose descriptor may change; an OwnedFd's cannot"
    )]
    let watched = set_nonblocking(&fd).and_then(|()| AsyncFd::with_interest(fd, interest));
    watched
        .map(Arc::new)
        .map_err(|source| Error::Watch { stream, source })
}

fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
    fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

/// A pipe that the process's user may reopen through /proc: (read end, write end), both blocking.
pub(super) fn pipe(owner: Owner, stream: Stream) -> Result<(OwnedFd, OwnedFd), Error> {
    let pipe = || {
        let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
        // A pipe is one inode: this sets the owner of both ends.
        fchown(
            &write,
            Some(Uid::from_raw(owner.uid)),
            Some(Gid::from_raw(owner.gid)),
        )?;
        Ok((read, write))
    };
    pipe().map_err(|source: nix::Error| Error::Pipe {
        stream,
        source: source.into(),
    })
}

/// The source of stdin.
#[derive(Debug)]
pub(super) enum Input {
    /// A fifo, copied to the process through a pipe.
    Fifo(Fifo),
    /// Any other file: the process reads it itself, because the reactor can wait for pipes only.
    Direct(OwnedFd),
}

impl Input {
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        let open = || {
            Ok(if std::fs::metadata(path)?.file_type().is_fifo() {
                Self::Fifo(Fifo(path.to_owned()))
            } else {
                Self::Direct(File::open(path)?.into())
            })
        };
        open().map_err(cannot_open(path, Stream::Stdin))
    }
}

/// A client's stdin that is not opened yet.
#[derive(Debug)]
pub(super) struct Fifo(PathBuf);

impl Fifo {
    /// The side that is read, and one that keeps it from ending before the client requests that.
    pub(super) fn open(self) -> Result<(OwnedFd, OwnedFd), Error> {
        open_both_sides(&self.0).map_err(cannot_open(&self.0, Stream::Stdin))
    }
}

/// The target of a copy.
#[derive(Debug)]
pub(super) enum Sink {
    /// A fifo, with a read side so that it never lacks a reader, or another pipe, without one.
    Pipe(Watched, Option<OwnedFd>),
    /// The pty master.
    Terminal(Watched),
    /// A file that is appended to, possibly by several streams.
    File(Arc<File>),
    /// Nowhere: the output is read and dropped, so that the process does not block.
    Discard,
}

impl Sink {
    /// Opens a path that a client gave without a scheme: a fifo, or a file that exists.
    pub(super) async fn open(path: &Path, stream: Stream) -> Result<Self, Error> {
        let failed = cannot_open(path, stream);
        if !std::fs::metadata(path).map_err(failed)?.file_type().is_fifo() {
            let file = File::options().append(true).open(path).map_err(failed)?;
            return Ok(Self::File(Arc::new(file)));
        }
        let (reader, writer) = open_with_client(path).await.map_err(failed)?;
        Ok(Self::Pipe(
            watch(writer, Interest::WRITABLE, stream)?,
            Some(reader),
        ))
    }
}

/// Opens a log file for appending; creates it and its directory.
pub(super) fn log_file(path: &Path) -> Result<Arc<File>, Error> {
    let open = || {
        if let Some(parent) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
        }
        File::options().append(true).create(true).mode(0o644).open(path)
    };
    open().map(Arc::new).map_err(cannot_open(path, Stream::Stdout))
}

fn cannot_open(path: &Path, stream: Stream) -> impl Fn(io::Error) -> Error + Copy {
    move |source| Error::Open {
        stream,
        path: path.to_owned(),
        source,
    }
}

/// Waits until the client has opened its side, as the stock shim does, which has no deadline there: once the
/// shim closes a fifo that nobody else has opened, the output of a short process is gone.
async fn open_with_client(path: &Path) -> io::Result<(OwnedFd, OwnedFd)> {
    let deadline = Instant::now() + CLIENT;
    loop {
        match open_side(path, File::options().write(true)) {
            Err(error) if error.raw_os_error() == Some(Errno::ENXIO as i32) => {}
            writer => return Ok((open_side(path, File::options().read(true))?, writer?)),
        }
        if Instant::now() >= deadline {
            return open_both_sides(path);
        }
        sleep(Duration::from_millis(1)).await;
    }
}

/// Order matters: opening a fifo's write side does not block only once the fifo has a reader.
fn open_both_sides(path: &Path) -> io::Result<(OwnedFd, OwnedFd)> {
    let reader = open_side(path, File::options().read(true))?;
    Ok((reader, open_side(path, File::options().write(true))?))
}

fn open_side(path: &Path, options: &mut OpenOptions) -> io::Result<OwnedFd> {
    let file = options.custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    Ok(file.into())
}
