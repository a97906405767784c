//! Regular files at places that others have chosen.
//!
//! Opening is not harmless: a fifo makes whoever opens it wait, and some devices are set going by it. So what
//! lies there is held by a handle first, which neither reads nor writes, and opened only when it is known to
//! be a regular file.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use nix::fcntl::{OFlag, open};
use nix::sys::stat::{Mode, SFlag, fstat};

/// Opens the regular file at this path of the host for reading. Links are followed.
pub fn open_regular(path: &Path) -> io::Result<File> {
    reopen_regular(open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?)
}

/// Opens for reading what a handle stands for, if it is a regular file.
pub fn reopen_regular(found: impl AsFd) -> io::Result<File> {
    let found = found.as_fd();
    let kind = SFlag::from_bits_truncate(fstat(found)?.st_mode & SFlag::S_IFMT.bits());
    if kind == SFlag::S_IFREG {
        File::open(format!("/proc/self/fd/{}", found.as_raw_fd()))
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::symlink;

    use nix::sys::stat::{makedev, mknod};
    use nix::unistd::mkfifo;

    use super::*;

    /// A number that no driver has: opening such a node fails with ENXIO.
    fn device(path: &Path) {
        mknod(path, SFlag::S_IFCHR, Mode::S_IRUSR, makedev(60, 250)).unwrap();
        let opened = File::open(path).unwrap_err();
        assert_eq!(opened.raw_os_error(), Some(nix::libc::ENXIO), "needs root");
    }

    #[test]
    fn nothing_but_a_regular_file_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("file"), "text").unwrap();
        symlink("file", at("link")).unwrap();
        for name in ["file", "link"] {
            let mut text = String::new();
            open_regular(&at(name))
                .unwrap()
                .read_to_string(&mut text)
                .unwrap();
            assert_eq!(text, "text");
        }
        device(&at("device"));
        symlink("device", at("to-device")).unwrap();
        // Nobody writes into it.
        mkfifo(&at("fifo"), Mode::S_IRUSR).unwrap();
        for name in ["device", "to-device", "fifo", "."] {
            let error = open_regular(&at(name)).unwrap_err();
            assert_eq!(error.to_string(), "not a regular file", "{name}");
        }
        assert_eq!(
            open_regular(&at("none")).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }
}
