//! Which transactions of firn-runc are open.
//!
//! Each has a file, `/run/firn/runc/ROOT/ID`, with the container's bundle. The process of the transaction
//! holds its lock, so a file that can be locked is that of a process that was killed. The file of a suspended
//! container stays, too.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use firn_config::names;
use firn_host::{FileId, UnlessAbsent};

use crate::command_line::CommandLine;

/// Longest path of a bundle.
const LIMIT: u64 = 4096;

/// The open transaction of a container, locked by this process.
#[derive(Debug)]
pub struct Open {
    path: PathBuf,
    file: File,
}

/// What was found of a container.
#[derive(Debug)]
pub enum OpenState {
    /// No transaction is open.
    Nothing,
    /// Another process is at it.
    Busy,
    /// Its process was killed, or the container is suspended.
    Left(Open),
}

/// The container that a command line names, if it has an open transaction.
pub fn named(line: &CommandLine) -> Option<&str> {
    let dir = dir(line);
    let mut words = line.words().iter().map(String::as_str);
    words.find(|word| is_id(word) && dir.join(word).exists())
}

fn dir(line: &CommandLine) -> PathBuf {
    let root = line.root();
    Path::new(names::RUNC_TRANSACTIONS).join(root.strip_prefix("/").unwrap_or(root))
}

/// Whether it can be an id. runc refuses the others.
pub fn is_id(word: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "_+-.".contains(c);
    !word.is_empty() && word != "." && word != ".." && word.chars().all(fits)
}

impl Open {
    /// Looks whether a transaction of the container is open, and takes one that is left.
    pub fn find(line: &CommandLine, id: &str) -> io::Result<OpenState> {
        let path = dir(line).join(id);
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        let Some(file) = opened.if_present()? else {
            return Ok(OpenState::Nothing);
        };
        match Self::lock(path, file) {
            Ok(open) => Ok(open.map_or(OpenState::Nothing, OpenState::Left)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(OpenState::Busy),
            Err(error) => Err(error),
        }
    }

    /// Begins a transaction. None if one is open.
    pub fn begin(line: &CommandLine, id: &str, bundle: &Path) -> io::Result<Option<Self>> {
        let dir = dir(line);
        DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        let mut options = OpenOptions::new();
        let options = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600);
        let path = dir.join(id);
        let file = options.open(&path)?;
        match Self::lock(path, file) {
            Ok(Some(mut open)) => {
                open.file.set_len(0)?;
                open.file.write_all(bundle.as_os_str().as_encoded_bytes())?;
                Ok(Some(open))
            }
            // Another process has just ended its own, or is at it.
            Ok(None) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Locks the file, unless it was removed meanwhile.
    fn lock(path: PathBuf, file: File) -> io::Result<Option<Self>> {
        file.try_lock()?;
        let (now, mine) = (fs::metadata(&path).if_present()?, file.metadata()?);
        let is_same = now.is_some_and(|now| FileId::of(&now) == FileId::of(&mine));
        Ok(is_same.then_some(Self { path, file }))
    }

    /// The container's bundle. None: the process was killed before it had noted it, and has done nothing.
    pub fn bundle(&mut self) -> io::Result<Option<PathBuf>> {
        let mut bundle = String::new();
        (&self.file).take(LIMIT).read_to_string(&mut bundle)?;
        Ok(Some(PathBuf::from(bundle)).filter(|bundle| bundle.is_absolute()))
    }

    /// The transaction is over.
    pub fn end(self) -> io::Result<()> {
        // Order matters: whoever gets the lock afterwards sees that the file is gone.
        fs::remove_file(&self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(root: &Path) -> CommandLine {
        let words = ["--root", root.to_str().unwrap(), "state", "--x", "job"];
        CommandLine::parse(&words.map(Into::into)).unwrap()
    }

    #[test]
    fn a_transaction_is_left_once_its_process_has_gone() {
        let root = tempfile::tempdir().unwrap();
        let line = line(root.path());
        assert!(matches!(Open::find(&line, "job").unwrap(), OpenState::Nothing));
        assert_eq!(named(&line), None);
        let open = Open::begin(&line, "job", Path::new("/bundle")).unwrap().unwrap();
        assert!(matches!(Open::find(&line, "job").unwrap(), OpenState::Busy));
        assert!(Open::begin(&line, "job", Path::new("/bundle")).unwrap().is_none());
        assert_eq!(named(&line), Some("job"));
        drop(open);
        let OpenState::Left(mut left) = Open::find(&line, "job").unwrap() else {
            panic!("it is not left");
        };
        assert_eq!(left.bundle().unwrap().as_deref(), Some(Path::new("/bundle")));
        left.end().unwrap();
        assert!(matches!(Open::find(&line, "job").unwrap(), OpenState::Nothing));
        fs::write(dir(&line).join("job"), "").unwrap();
        let OpenState::Left(mut left) = Open::find(&line, "job").unwrap() else {
            panic!("an empty note is not left");
        };
        assert_eq!(left.bundle().unwrap(), None);
        left.end().unwrap();
        assert!(matches!(Open::find(&line, "job").unwrap(), OpenState::Nothing));
        fs::remove_dir(dir(&line)).unwrap();
    }

    #[test]
    fn no_id_leads_elsewhere() {
        for word in ["", ".", "..", "a/b", "../x", "--all", "é"] {
            assert!(!is_id(word) || word == "--all", "{word:?}");
        }
        assert!(is_id("0444f5c99da1") && is_id("a_b+c.d-e"));
    }
}
