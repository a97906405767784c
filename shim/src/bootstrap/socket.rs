//! The shim's socket: its name, which containerd and Go's shim compute in the same way, and who gets to own
//! it.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use firn_host::{UnlessAbsent, lexical};
use sha2::{Digest, Sha256};

use crate::daemon::connect_now;
use crate::error::{ActionError, failed_at};

/// Longest socket path that containerd uses; the kernel takes 107.
const MAX_PATH: usize = 106;

/// Who serves the socket.
#[derive(Debug)]
pub(super) enum Socket {
    /// Nobody yet: here is the listener.
    Ours(UnixListener),
    /// A shim that answers.
    Taken,
}

/// Path of the socket for a group of containers.
pub(super) fn path(dir: &Path, grpc_address: &str, namespace: &str, group: &str) -> PathBuf {
    // As the other side writes it before hashing.
    let name = lexical(Path::new(&[grpc_address, namespace, group].join("/")));
    let hash = Sha256::digest(name.as_os_str().as_bytes());
    let file: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    dir.join(file)
}

/// Makes the socket, or finds that a living shim has it. One left by a dead shim is replaced.
pub(super) fn claim(path: &Path) -> Result<Socket, ActionError> {
    if path.as_os_str().len() > MAX_PATH {
        return Err(ActionError::SocketPath {
            path: path.to_owned(),
            limit: MAX_PATH,
        });
    }
    let dir = path.parent().unwrap_or(Path::new("/"));
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(failed_at("make", dir))?;
    // Held until the end of this function: of two that find a dead socket, the second must see the first
    // one's.
    let _lock = lock(dir)?;

    let listener = match UnixListener::bind(path) {
        Ok(listener) => listener,
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if is_alive(path) {
                return Ok(Socket::Taken);
            }
            fs::remove_file(path).map_err(failed_at("remove the dead socket", path))?;
            UnixListener::bind(path).map_err(failed_at("listen on", path))?
        }
        Err(error) => return Err(failed_at("listen on", path)(error)),
    };
    if let Err(error) = fs::set_permissions(path, Permissions::from_mode(0o600)) {
        // A socket with other permissions must not stay.
        let _gone = fs::remove_file(path);
        return Err(failed_at("protect", path)(error));
    }
    Ok(Socket::Ours(listener))
}

/// Removes the socket of a shim that was killed. One that answers is left alone.
pub(crate) fn remove_dead(path: &Path) -> Result<(), ActionError> {
    let _lock = lock(path.parent().unwrap_or(Path::new("/")))?;
    if is_alive(path) {
        return Ok(());
    }
    let removed = fs::remove_file(path).unless_absent();
    removed.map_err(failed_at("remove the dead socket", path))
}

fn lock(dir: &Path) -> Result<File, ActionError> {
    let lock = File::open(dir).map_err(failed_at("open", dir))?;
    lock.lock().map_err(failed_at("lock", dir))?;
    Ok(lock)
}

/// Whether a process listens.
fn is_alive(path: &Path) -> bool {
    match connect_now(path) {
        Ok(_) => true,
        // A full backlog has an owner.
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, socket};

    use super::*;

    #[test]
    fn the_name_is_what_containerd_computes() {
        // printf %s /run/containerd/containerd.sock/k8s.io/pod1 | sha256sum
        let expected = "/run/containerd/s/8e264b1ad347c80aee5f3dea6e4bb53d72026989222058782273d5db043c7723";
        let path = path(
            Path::new("/run/containerd/s"),
            "/run/containerd/containerd.sock",
            "k8s.io",
            "pod1",
        );
        assert_eq!(path.to_str().unwrap(), expected);
    }

    #[test]
    fn one_of_several_owns_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s/sock");
        let Socket::Ours(listener) = claim(&path).unwrap() else {
            panic!("nobody else is there")
        };
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        assert!(matches!(claim(&path).unwrap(), Socket::Taken));
        drop(listener);
        is_dead(&path);
        assert!(
            matches!(claim(&path).unwrap(), Socket::Ours(_)),
            "a dead socket is replaced"
        );
    }

    /// Waits until nobody listens: a program that another test just starts has our descriptors until it runs.
    fn is_dead(path: &Path) {
        let begun = std::time::Instant::now();
        while is_alive(path) {
            assert!(begun.elapsed().as_secs() < 20, "somebody listens");
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }

    #[test]
    fn a_busy_owner_is_an_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sock");
        let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::empty(), None).unwrap();
        nix::sys::socket::bind(fd.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        nix::sys::socket::listen(&fd, nix::sys::socket::Backlog::new(0).unwrap()).unwrap();
        let mut waiting = Vec::new();
        while let Ok(stream) = connect_now(&path) {
            waiting.push(stream);
        }
        assert!(matches!(claim(&path).unwrap(), Socket::Taken));
    }

    #[test]
    fn parallel_claims_of_a_dead_socket_have_one_winner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sock");
        drop(UnixListener::bind(&path).unwrap());
        is_dead(&path);
        let claims: Vec<_> = (0..8)
            .map(|_| {
                std::thread::spawn({
                    let path = path.clone();
                    move || claim(&path).unwrap()
                })
            })
            .collect();
        let claims: Vec<_> = claims.into_iter().map(|claim| claim.join().unwrap()).collect();
        assert_eq!(
            claims
                .iter()
                .filter(|socket| matches!(socket, Socket::Ours(_)))
                .count(),
            1
        );
        assert!(is_alive(&path));
    }

    #[test]
    fn long_paths_are_refused() {
        let dir = PathBuf::from("/tmp").join("x".repeat(60));
        let error = claim(&path(&dir, "a", "b", "c")).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("hint: configure a shorter socket directory"),
            "{error}"
        );
    }
}
