//! /run/firn in a container: the tmpfs with the files of its hooks.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use firn_config::names;
use firn_host::bounded::read_at_most;
use firn_host::{open_below, reopen_regular};
use nix::errno::Errno;
use nix::fcntl::{OFlag, ResolveFlag, open, openat, renameat};
use nix::sys::stat::{Mode, fstat};
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use nix::unistd::{Gid, Uid, UnlinkatFlags, setfsgid, setfsuid, unlinkat};

use super::init::Init;

/// Name of a file before the rename.
const TEMPORARY: &str = ".firn.tmp";

/// Longest answer of a job.
const ANSWER: u64 = 4 << 10;

/// The directory, held open.
pub struct JobDir(OwnedFd);

impl JobDir {
    /// Opens the directory in the container of this process. From now on the calling thread has the
    /// directory's owner as its user for files: in a user namespace root of the host owns nothing there, and
    /// outside of one the job may remove what firn writes.
    pub fn open(init: &Init) -> Result<Self> {
        let root = format!("/proc/{}/root", init.pid());
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let opened = || open(&*root, flags, Mode::empty()).with_context(|| format!("cannot open {root}"));
        let root = init.look(opened)?;
        let resolve = ResolveFlag::RESOLVE_IN_ROOT
            | ResolveFlag::RESOLVE_NO_MAGICLINKS
            | ResolveFlag::RESOLVE_NO_SYMLINKS;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let dir = open_below(root, Path::new(names::JOB_DIR), flags, resolve)
            .with_context(|| format!("cannot open {} of the container", names::JOB_DIR))?;
        // A bind mount of a directory of the host, which the container has made there, is not written to.
        let kind = fstatfs(&dir).map(|found| found.filesystem_type());
        ensure!(
            kind == Ok(TMPFS_MAGIC),
            "{} of the container is no tmpfs",
            names::JOB_DIR
        );
        let owner = fstat(&dir)?;
        setfsgid(Gid::from_raw(owner.st_gid));
        setfsuid(Uid::from_raw(owner.st_uid));
        Ok(Self(dir))
    }

    /// Replaces or creates a file in the directory.
    pub fn write(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let name = path.file_name().context("no file name")?;
        let shown = || format!("cannot write {} of the container", path.display());
        self.remove(TEMPORARY)?;
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        let file = openat(&self.0, TEMPORARY, flags, Mode::from_bits_truncate(0o644)).with_context(shown)?;
        File::from(file).write_all(bytes).with_context(shown)?;
        renameat(&self.0, TEMPORARY, &self.0, name).with_context(shown)
    }

    /// Removes the answer to an earlier signal.
    pub fn forget_answer(&self) -> Result<()> {
        self.remove(answer_name())
    }

    /// The job's answer; none if there is no complete line yet.
    pub fn answer(&self) -> Result<Option<String>> {
        let shown = || format!("cannot read {} of the container", names::JOB_ANSWER_FILE);
        let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
        let file = match open_below(&self.0, Path::new(answer_name()), flags, resolve) {
            Err(Errno::ENOENT) => return Ok(None),
            found => found.with_context(shown)?,
        };
        let bytes = read_at_most(reopen_regular(file).with_context(shown)?, ANSWER).with_context(shown)?;
        let bytes = bytes.with_context(|| format!("the answer is larger than {ANSWER} bytes"))?;
        let text = String::from_utf8_lossy(&bytes);
        Ok(text.split_once('\n').map(|(line, _)| line.trim().to_owned()))
    }

    fn remove(&self, name: &str) -> Result<()> {
        match unlinkat(&self.0, name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            failed => failed.with_context(|| format!("cannot remove {}/{name}", names::JOB_DIR)),
        }
    }
}

fn answer_name() -> &'static str {
    names::JOB_ANSWER_FILE.rsplit('/').next().unwrap_or_default()
}
