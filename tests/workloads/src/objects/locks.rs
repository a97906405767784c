//! Locks of files.

use std::fs::File;
use std::io;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, Flock, FlockArg, fcntl};
use nix::libc;

use super::{Look, kernel};

pub(super) fn open(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(path)
}

/// Of all locks: whether who has opened the file again could not lock it. Both stay open: with any descriptor
/// of a file its process loses the locks by fcntl(2).
pub(super) fn by_flock(path: &Path) -> io::Result<Look> {
    let (file, other) = (open(path)?, open(path)?);
    let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| error)?;
    Ok(Box::new(move || {
        let _held = &lock;
        match Flock::lock(other.try_clone()?, FlockArg::LockExclusiveNonblock) {
            Ok(_) => Ok(false),
            Err((_, Errno::EWOULDBLOCK)) => Ok(true),
            Err((_, error)) => Err(error.into()),
        }
    }))
}

pub(super) fn of_process(path: &Path) -> io::Result<Look> {
    let (file, other) = (open(path)?, open(path)?);
    fcntl(&file, FcntlArg::F_SETLK(&whole()))?;
    by_fcntl(file, other)
}

pub(super) fn of_open_file(path: &Path) -> io::Result<Look> {
    let (file, other) = (open(path)?, open(path)?);
    fcntl(&file, FcntlArg::F_OFD_SETLK(&whole()))?;
    by_fcntl(file, other)
}

/// Of a file that nobody writes to.
pub(super) fn lease(path: &Path) -> io::Result<Look> {
    open(path)?;
    let file = File::open(path)?;
    kernel::lease(&file)?;
    Ok(Box::new(move || kernel::has_lease(&file)))
}

/// A lock of an open file is in the way of all others.
fn by_fcntl(file: File, other: File) -> io::Result<Look> {
    Ok(Box::new(move || {
        let _locked = &file;
        let mut found = whole();
        fcntl(&other, FcntlArg::F_OFD_GETLK(&mut found))?;
        Ok(i32::from(found.l_type) != libc::F_UNLCK)
    }))
}

/// A lock for writing, of all of the file.
#[expect(clippy::cast_possible_truncation, reason = "the kernel's numbers are small")]
fn whole() -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}
