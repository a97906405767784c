//! `objects`: has an object that a process can hold, and looks at it again and again. It writes the next
//! number into a file as long as the object is as it was made, and what has become of it otherwise.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, Flock, FlockArg, fcntl};
use nix::libc;

/// Time between two looks.
const PACE: Duration = Duration::from_millis(50);

#[derive(Parser)]
#[command(name = "objects", version)]
struct Options {
    kind: Kind,
    /// The file that the object is about; made if it is not there
    path: PathBuf,
    /// The file to write to
    out: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// A lock of a file by flock(2)
    Flock,
    /// A lock of a file by fcntl(2), of the process
    RecordLock,
    /// A lock of a file by fcntl(2), of the open file
    OpenFileLock,
}

fn main() -> io::Result<()> {
    let Options { kind, path, out } = Options::parse();
    let mut out = File::options().create(true).append(true).open(out)?;
    // Both stay open: with any descriptor of a file its process loses the locks by fcntl(2).
    let (file, other) = (open(&path)?, open(&path)?);
    match kind {
        Kind::Flock => {
            let _lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| error)?;
            watch(&mut out, || by_flock(&other))
        }
        Kind::RecordLock => {
            fcntl(&file, FcntlArg::F_SETLK(&whole()))?;
            watch(&mut out, || by_fcntl(&other))
        }
        Kind::OpenFileLock => {
            fcntl(&file, FcntlArg::F_OFD_SETLK(&whole()))?;
            watch(&mut out, || by_fcntl(&other))
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(path)
}

/// Writes down what `is_held` finds, for ever.
fn watch(out: &mut File, is_held: impl Fn() -> io::Result<bool>) -> io::Result<()> {
    let mut number = 0_u64;
    loop {
        if is_held()? {
            number += 1;
            writeln!(out, "{number}")?;
        } else {
            writeln!(out, "the lock is free")?;
        }
        thread::sleep(PACE);
    }
}

/// Whether who has opened the file again could not lock it.
fn by_flock(other: &File) -> io::Result<bool> {
    match Flock::lock(other.try_clone()?, FlockArg::LockExclusiveNonblock) {
        Ok(_) => Ok(false),
        Err((_, Errno::EWOULDBLOCK)) => Ok(true),
        Err((_, error)) => Err(error.into()),
    }
}

/// The same for locks by fcntl(2): one of an open file is in the way of all others.
fn by_fcntl(other: &File) -> io::Result<bool> {
    let mut found = whole();
    fcntl(other, FcntlArg::F_OFD_GETLK(&mut found))?;
    Ok(i32::from(found.l_type) != libc::F_UNLCK)
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
