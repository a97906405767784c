//! Copies bytes until their source ends. One future per stream; dropping it stops the copy.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SpliceFFlags, fcntl, splice};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd;
use tokio::io::unix::AsyncFd;
use tokio::task::coop::consume_budget;
use tokio::time::sleep;

use super::Stream;
use super::endpoint::{Sink, Watched};

/// Size of a copy through memory: the default capacity of a pipe.
const CHUNK: usize = 64 << 10;

/// Most bytes that one splice moves, for pipes whose owner enlarged them.
const SPLICE: usize = 1 << 20;

/// After so many full pipes in a row the writer is waiting for the shim: bulk output, for which the pipes are
/// enlarged. Each full or empty pipe costs a context switch, which takes long on a busy machine.
const BULK: u32 = 16;

/// Size of an enlarged pipe. All pipes of a user count against a limit (`pipe-user-pages-soft`), so it is not
/// larger, and a process that writes only now and then keeps the default.
const WIDE: i32 = 256 << 10;

/// First and longest time between two looks at how much the client has left to read: no event reports it.
const LOOK: Duration = Duration::from_millis(1);
const LONGEST_LOOK: Duration = Duration::from_millis(50);

/// EOT: a terminal takes it for the end of the input at the start of a line, and for the end of the line
/// elsewhere.
const END_OF_INPUT: u8 = 4;

/// Counts the reads and writes of a process's copies, to distinguish slow copies from stalled ones.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress(Arc<AtomicU64>);

impl Progress {
    /// A number that changes with every read and write.
    pub(super) fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn advance(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// The source of a copy.
pub(super) enum Source {
    /// A fifo or pipe.
    Pipe(Watched),
    /// The pty master.
    Terminal(Watched),
}

/// Copies all of `source` to `sink`. Logs errors, because no caller waits for the result.
pub(super) async fn pump(source: Source, sink: Sink, stream: Stream, progress: Progress) {
    let copied = match (source, sink) {
        (source, Sink::Pipe(writer, held)) => {
            let copied = match &source {
                Source::Pipe(from) => move_pages(from, &writer, &progress).await,
                Source::Terminal(_) => copy(&source, &writer, &progress).await.map(drop),
            };
            // The process sees that nobody reads any more, however long the client takes.
            drop(source);
            if let Some(held) = held {
                wait_for_client(&writer, held, &progress).await;
            }
            copied
        }
        (source, Sink::Terminal(master)) => type_in(&source, &master, &progress).await,
        (source, Sink::File(file)) => append(&source, &file, stream, &progress).await,
        (source, Sink::Discard) => discard(&source).await,
    };
    match copied {
        Ok(()) => {}
        // The other side has closed: the process does not read stdin, or the logging binary has ended.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            log::debug!("{stream}: nobody reads any more")
        }
        Err(error) => log::warn!("copying {stream} stopped: {error}"),
    }
}

impl Source {
    /// Reads once; 0 at the end.
    pub(super) async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let (Self::Pipe(from) | Self::Terminal(from)) = self;
        loop {
            let mut ready = from.readable().await?;
            match ready.try_io(|fd| Ok(unistd::read(fd, buffer)?)) {
                Err(_not_ready) => {}
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                // EIO: all slaves of the pty master are closed.
                Ok(Err(error)) if error.raw_os_error() == Some(libc::EIO) && self.is_terminal() => {
                    return Ok(0);
                }
                Ok(read) => return read,
            }
        }
    }

    fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }
}

async fn write_all(to: &AsyncFd<OwnedFd>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let mut ready = to.writable().await?;
        match ready.try_io(|fd| Ok(unistd::write(fd, bytes)?)) {
            Err(_not_ready) => {}
            Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(written) => bytes = &bytes[written?..],
        }
    }
    Ok(())
}

/// Returns the last byte.
async fn copy(from: &Source, to: &AsyncFd<OwnedFd>, progress: &Progress) -> io::Result<Option<u8>> {
    let mut buffer = vec![0; CHUNK];
    let mut last = None;
    loop {
        let count = from.read(&mut buffer).await?;
        if count == 0 {
            return Ok(last);
        }
        write_all(to, &buffer[..count]).await?;
        last = Some(buffer[count - 1]);
        progress.advance();
        consume_budget().await;
    }
}

/// A terminal does not end with its input: the process gets the character that a user would type.
async fn type_in(from: &Source, to: &AsyncFd<OwnedFd>, progress: &Progress) -> io::Result<()> {
    let last = copy(from, to, progress).await?;
    let begins = last.is_none_or(|byte| byte == b'\n');
    write_all(to, &[END_OF_INPUT; 2][usize::from(begins)..]).await
}

async fn discard(from: &Source) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    while from.read(&mut buffer).await? > 0 {
        consume_budget().await;
    }
    Ok(())
}

/// A file that cannot be written (a full disk) loses lines; the logging process is neither blocked nor
/// killed.
async fn append(from: &Source, file: &Arc<File>, stream: Stream, progress: &Progress) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    let mut failing = false;
    loop {
        let count = from.read(&mut buffer).await?;
        if count == 0 {
            return Ok(());
        }
        let file = Arc::clone(file);
        let write = move || {
            let written = (&*file).write_all(&buffer[..count]);
            (written, buffer)
        };
        let written;
        (written, buffer) = tokio::task::spawn_blocking(write)
            .await
            .map_err(io::Error::other)?;
        if let Err(error) = &written
            && !failing
        {
            log::warn!("cannot append to the log file, output of {stream} is lost: {error}");
        }
        failing = written.is_err();
        progress.advance();
    }
}

/// Moves the pages of one pipe into another.
async fn move_pages(from: &AsyncFd<OwnedFd>, to: &AsyncFd<OwnedFd>, progress: &Progress) -> io::Result<()> {
    let mut full = 0;
    loop {
        let mut readable = from.readable().await?;
        let mut writable = to.writable().await?;
        match splice(
            from,
            None,
            to,
            None,
            SPLICE,
            SpliceFFlags::SPLICE_F_MOVE | SpliceFFlags::SPLICE_F_NONBLOCK,
        ) {
            Ok(0) => return Ok(()),
            Ok(moved) => {
                full = if moved >= CHUNK { full + 1 } else { 0 };
                if full == BULK {
                    widen(from);
                    widen(to);
                }
                progress.advance();
                consume_budget().await;
            }
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => {
                // The call does not report which of the two pipes it would have waited for.
                let (more_to_read, room_to_write) = ready_now(from, to)?;
                if !more_to_read {
                    readable.clear_ready();
                }
                if !room_to_write {
                    writable.clear_ready();
                }
            }
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Waits until the client has read what is in its fifo, or has closed its side. A client closes it as soon as
/// its delete is answered (containerd's `cio`, whose reader may not have run since), with what is in it.
async fn wait_for_client(fifo: &AsyncFd<OwnedFd>, own_reader: OwnedFd, progress: &Progress) {
    // Order matters: as long as it is open nothing shows that the client has none.
    drop(own_reader);
    let (mut before, mut pause) = (u64::MAX, LOOK);
    while let Some(unread) = unread(fifo) {
        if unread < before {
            (before, pause) = (unread, LOOK);
            progress.advance();
        }
        sleep(pause).await;
        pause = (2 * pause).min(LONGEST_LOOK);
    }
}

/// Bytes in a fifo that somebody is going to read; none if it is empty or has no reader.
fn unread(fifo: &AsyncFd<OwnedFd>) -> Option<u64> {
    let mut end = [PollFd::new(fifo.as_fd(), PollFlags::empty())];
    let has_reader = poll(&mut end, PollTimeout::ZERO) == Ok(0);
    let bytes = rustix::io::ioctl_fionread(fifo).ok()?;
    (has_reader && bytes > 0).then_some(bytes)
}

/// Enlarges a pipe. One that may not be enlarged (a limit of its user) is left as it is.
fn widen(pipe: &AsyncFd<OwnedFd>) {
    if let Err(error) = fcntl(pipe, FcntlArg::F_SETPIPE_SZ(WIDE)) {
        log::debug!("cannot widen a pipe: {error}");
    }
}

fn ready_now(from: impl AsFd, to: impl AsFd) -> io::Result<(bool, bool)> {
    let mut fds = [
        PollFd::new(from.as_fd(), PollFlags::POLLIN),
        PollFd::new(to.as_fd(), PollFlags::POLLOUT),
    ];
    poll(&mut fds, PollTimeout::ZERO)?;
    // Errors and hang-ups count as ready: the next splice reports them.
    Ok((fds[0].any().unwrap_or(true), fds[1].any().unwrap_or(true)))
}

#[cfg(test)]
mod tests {
    use tokio::io::Interest;

    use super::*;
    use crate::stdio::endpoint::{pipe, watch};
    use crate::stdio::prepare::Owner;

    /// Capacities of both pipes after so many chunks, each of which is read before the next is written.
    fn sizes_after(chunks: u32, length: usize) -> (i32, i32) {
        let owner = Owner {
            uid: nix::unistd::geteuid().as_raw(),
            gid: nix::unistd::getegid().as_raw(),
        };
        let (from, source) = pipe(owner, Stream::Stdout).unwrap();
        let (sink, to) = pipe(owner, Stream::Stdout).unwrap();
        let (kept_from, kept_to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
        let feed = std::thread::spawn(move || {
            let mut chunk = vec![7; length];
            for _ in 0..chunks {
                File::from(source.try_clone().unwrap()).write_all(&chunk).unwrap();
                io::Read::read_exact(&mut File::from(sink.try_clone().unwrap()), &mut chunk).unwrap();
            }
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(async {
            let from = watch(from, Interest::READABLE, Stream::Stdout).unwrap();
            let to = watch(to, Interest::WRITABLE, Stream::Stdout).unwrap();
            pump(
                Source::Pipe(from),
                Sink::Pipe(to, None),
                Stream::Stdout,
                Progress::default(),
            )
            .await;
        });
        feed.join().unwrap();
        let size = |pipe: &OwnedFd| fcntl(pipe, FcntlArg::F_GETPIPE_SZ).unwrap();
        (size(&kept_from), size(&kept_to))
    }

    #[test]
    fn only_bulk_output_widens_the_pipes() {
        let usual = sizes_after(1, 1);
        assert!(usual.0 < WIDE && usual.1 < WIDE, "{usual:?}");
        assert_eq!(sizes_after(4 * BULK, CHUNK / 2), usual);
        assert_eq!(sizes_after(4 * BULK, CHUNK), (WIDE, WIDE));
    }
}
