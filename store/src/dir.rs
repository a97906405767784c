//! The image directory, which is hostile: its maker chose what lies there. So may have a store's.
//!
//! A file is opened by a name directly in the directory, and only after it is known to be a regular file. So
//! no link is followed, no fifo blocks, and no device is touched: opening alone starts some of them.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};

use firn_host::reopen_regular;

/// A directory that is no link.
const ITSELF: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);

/// A directory with CRIU's files.
#[derive(Debug)]
pub struct UntrustedDir(OwnedFd);

impl UntrustedDir {
    /// Opens it. The path is the client's and may lead through links.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        Ok(Self(open(path, flags, Mode::empty())?))
    }

    /// Opens the directory at this path, unless the last part of the path is a link.
    pub fn open_itself(path: &Path) -> io::Result<Self> {
        Ok(Self(open(path, ITSELF, Mode::empty())?))
    }

    /// Opens a directory in it.
    pub fn inside(&self, name: &str) -> io::Result<Self> {
        Ok(Self(openat(&self.0, file_name(name)?, ITSELF, Mode::empty())?))
    }

    /// Opens a regular file of it for reading.
    pub fn file(&self, name: &str) -> io::Result<File> {
        reopen_regular(self.find(name)?)
    }

    /// The entry of this name, whatever it is.
    pub fn metadata(&self, name: &str) -> io::Result<Metadata> {
        self.find(name)?.metadata()
    }

    /// Names of all entries. Those that are no text are skipped, as CRIU's names are ASCII.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let entries = std::fs::read_dir(self.path())?;
        let names = entries.map(|entry| Ok(entry?.file_name().into_string().ok()));
        names.filter_map(io::Result::transpose).collect()
    }

    /// Names of all entries, also of those that no checkpoint has.
    pub fn entries(&self) -> io::Result<Vec<OsString>> {
        let entries = std::fs::read_dir(self.path())?;
        entries.map(|entry| Ok(entry?.file_name())).collect()
    }

    /// The directory's own metadata.
    pub fn itself(&self) -> io::Result<Metadata> {
        self.handle()?.metadata()
    }

    /// Removes the entry of this name, which is no directory. A link goes, and not what it leads to.
    pub fn remove_file(&self, name: &str) -> io::Result<()> {
        Ok(unlinkat(&self.0, file_name(name)?, UnlinkatFlags::NoRemoveDir)?)
    }

    /// Removes the empty directory of this name.
    pub fn remove_dir(&self, name: &str) -> io::Result<()> {
        Ok(unlinkat(&self.0, file_name(name)?, UnlinkatFlags::RemoveDir)?)
    }

    /// A handle that neither reads nor writes.
    fn find(&self, name: &str) -> io::Result<File> {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        Ok(openat(&self.0, file_name(name)?, flags, Mode::empty())?.into())
    }

    /// The directory as a file, for what only a file can do.
    pub fn handle(&self) -> io::Result<File> {
        Ok(self.0.try_clone()?.into())
    }

    /// A path to it that leads there whatever is renamed, for this process.
    pub fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}

impl AsFd for UntrustedDir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The name of an entry: it does not lead elsewhere.
fn file_name(name: &str) -> io::Result<&str> {
    if name.is_empty() || name.contains('/') || matches!(name, "." | "..") {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "not a file name"))
    } else {
        Ok(name)
    }
}
