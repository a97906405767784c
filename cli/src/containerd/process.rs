//! containerd's own process.

use std::os::fd::AsRawFd;
use std::path::Path;

use firn_host::procfs;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt};

/// The process that listens on containerd's socket. None: nobody does, or it is none of this host's. A name
/// would prove nothing, as every container may call a program containerd.
pub fn of_socket(path: &Path) -> Option<i32> {
    // A connection that would have to wait fails.
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let client = socket(AddressFamily::Unix, SockType::Stream, flags, None).ok()?;
    connect(client.as_raw_fd(), &UnixAddr::new(path).ok()?).ok()?;
    let listener = getsockopt(&client, sockopt::PeerCredentials).ok()?;
    // systemd listens for services that it has not started yet.
    (listener.pid() > 1 && procfs::is_of_host(listener.pid())).then_some(listener.pid())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn the_listener_is_found_and_nobody_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("containerd.sock");
        assert_eq!(of_socket(&path), None);
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(of_socket(&path), i32::try_from(std::process::id()).ok());
        drop(listener);
        assert_eq!(of_socket(&path), None);
    }
}
