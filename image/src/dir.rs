//! The image directory, which is hostile: its maker chose what lies there.
//!
//! A file is opened by a name directly in the directory, and only after it is known to be a regular file. So
//! no link is followed, no fifo blocks, and no device is touched: opening alone starts some of them.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::Mode;

use firn_host::reopen_regular;

/// A directory with CRIU's files.
#[derive(Debug)]
pub struct UntrustedDir(OwnedFd);

impl UntrustedDir {
    /// Opens it. The path is the client's and may lead through links.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        Ok(Self(open(path, flags, Mode::empty())?))
    }

    /// Opens a regular file of it for reading.
    pub fn file(&self, name: &str) -> io::Result<File> {
        reopen_regular(self.find(name)?)
    }

    /// The entry of this name, whatever it is.
    pub(crate) fn metadata(&self, name: &str) -> io::Result<Metadata> {
        self.find(name)?.metadata()
    }

    /// Names of all entries. Those that are no text are skipped, as CRIU's names are ASCII.
    pub(crate) fn names(&self) -> io::Result<Vec<String>> {
        let entries = std::fs::read_dir(format!("/proc/self/fd/{}", self.0.as_raw_fd()))?;
        let names = entries.map(|entry| Ok(entry?.file_name().into_string().ok()));
        names.filter_map(io::Result::transpose).collect()
    }

    /// A handle that neither reads nor writes.
    fn find(&self, name: &str) -> io::Result<File> {
        if name.is_empty() || name.contains('/') || matches!(name, "." | "..") {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a file name"));
        }
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        Ok(openat(&self.0, name, flags, Mode::empty())?.into())
    }
}
