//! The socket on which the OCI runtime sends the pty master of a process with a terminal.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::termios::{Winsize, tcsetwinsize};
use tempfile::TempDir;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};

use super::Error;
use super::endpoint::Watched;

/// Directory for the user's sockets, if the shim's environment has one.
const XDG_RUNTIME_DIR: &str = "XDG_RUNTIME_DIR";

/// Directory for sockets otherwise.
const FALLBACK_DIR: &str = "/run";

/// Longest path that fits a socket address on every kernel and in the languages of the runtimes.
const PATH_LIMIT: usize = 106;

/// How long the runtime may take to send the terminal after its call has succeeded.
const RECEIVE_LIMIT: Duration = Duration::from_secs(30);

/// A listening console socket in a directory that only its owner can enter. Dropping it removes both.
#[derive(Debug)]
pub(super) struct ConsoleSocket {
    _dir: TempDir,
    path: PathBuf,
    listener: UnixListener,
}

impl ConsoleSocket {
    pub(super) fn bind() -> Result<Self, Error> {
        let base = std::env::var_os(XDG_RUNTIME_DIR).filter(|dir| !dir.is_empty());
        Self::bind_below(&base.map_or_else(|| PathBuf::from(FALLBACK_DIR), PathBuf::from))
    }

    pub(super) fn bind_below(base: &Path) -> Result<Self, Error> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::ConsoleSocket { path, source }
        };
        let dir = tempfile::Builder::new()
            .prefix("firn-pty-")
            .tempdir_in(base)
            .map_err(failed(base))?;
        let path = dir.path().join("s");
        if path.as_os_str().len() > PATH_LIMIT {
            return Err(Error::ConsolePathTooLong {
                path,
                limit: PATH_LIMIT,
            });
        }
        let listener = UnixListener::bind(&path).map_err(failed(&path))?;
        Ok(Self {
            _dir: dir,
            path,
            listener,
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The pty master that the runtime sends.
    pub(super) async fn receive(self) -> Result<OwnedFd, Error> {
        self.receive_within(RECEIVE_LIMIT).await
    }

    pub(super) async fn receive_within(self, limit: Duration) -> Result<OwnedFd, Error> {
        let received = tokio::time::timeout(limit, async {
            let (stream, _) = self.listener.accept().await?;
            receive_fd(&stream).await
        });
        match received.await {
            Err(_elapsed) => Err(Error::ConsoleTimeout { limit }),
            Ok(Err(source)) => Err(Error::ConsoleReceive { source }),
            Ok(Ok(master)) => master.ok_or(Error::ConsoleEmpty),
        }
    }
}

/// The first descriptor in a message. The text of the message is the terminal's name, which is ignored.
async fn receive_fd(stream: &UnixStream) -> io::Result<Option<OwnedFd>> {
    loop {
        stream.readable().await?;
        let received = stream.try_io(Interest::READABLE, || {
            let mut text = [0; 4096];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let message = recvmsg(
                stream,
                &mut [IoSliceMut::new(&mut text)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            )?;
            let fd = control.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
                _ => None,
            });
            Ok((fd, message.bytes))
        });
        match received {
            Ok((Some(fd), _)) => return Ok(Some(fd)),
            Ok((None, 0)) => return Ok(None),
            Ok((None, _)) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

/// Sets the size of the terminal; the kernel sends SIGWINCH to its foreground processes.
pub(super) fn resize(master: &Watched, width: u16, height: u16) -> io::Result<()> {
    Ok(tcsetwinsize(
        master.get_ref(),
        Winsize {
            ws_row: height,
            ws_col: width,
            ws_xpixel: 0,
            ws_ypixel: 0,
        },
    )?)
}
