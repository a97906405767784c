//! One command of firn at a time for a container: a second one would resume it under the first. The shim sees
//! that a command works on its container.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::FileId;

/// More than [`Alone::is_taken`] takes.
const A_LOOK: Duration = Duration::from_millis(100);

/// Its file is locked while this lives, and removed with it. If the command is killed, the kernel unlocks it.
#[derive(Debug)]
pub struct Alone {
    path: PathBuf,
    _file: File,
}

impl Alone {
    /// None if another command works on the container. `dir` is made if it is not there.
    pub fn take(dir: &Path, namespace: &str, id: &str) -> io::Result<Option<Self>> {
        let dir = dir.join(namespace);
        DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        let path = dir.join(id);
        let begun = Instant::now();
        loop {
            let mut options = OpenOptions::new();
            let file = options.create(true).append(true).mode(0o600).open(&path)?;
            match file.try_lock() {
                Ok(()) => {}
                // A shim that looks has it for a moment.
                Err(TryLockError::WouldBlock) if begun.elapsed() < A_LOOK => {
                    sleep(A_LOOK / 10);
                    continue;
                }
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(error),
            }
            // The command before may have removed it since it was opened.
            if fs::metadata(&path).is_ok_and(|there| {
                file.metadata()
                    .is_ok_and(|own| FileId::of(&own) == FileId::of(&there))
            }) {
                return Ok(Some(Self { path, _file: file }));
            }
        }
    }

    /// Whether a command works on the container. Never waits.
    ///
    /// # Errors
    ///
    /// The file is there and cannot be opened or locked.
    pub fn is_taken(dir: &Path, namespace: &str, id: &str) -> io::Result<bool> {
        let file = match File::open(dir.join(namespace).join(id)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        match file.try_lock_shared() {
            // It is unlocked when it is closed.
            Ok(()) => Ok(false),
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        // Order matters: nobody else has it while it is removed.
        let _removed = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_is_one_commands_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let take = |id| Alone::take(dir.path(), "default", id).unwrap();
        let is_taken = |id| Alone::is_taken(dir.path(), "default", id).unwrap();
        assert!(!is_taken("job"));
        let first = take("job").unwrap();
        assert!(is_taken("job") && !is_taken("other"));
        assert!(take("job").is_none());
        // A shim that looks is no other command.
        let look = File::create(dir.path().join("default/looked")).unwrap();
        look.try_lock_shared().unwrap();
        std::thread::scope(|scope| {
            let taken = scope.spawn(|| take("looked").is_some());
            sleep(A_LOOK / 4);
            drop(look);
            assert!(taken.join().unwrap());
        });
        assert!(take("other").is_some());
        drop(first);
        assert!(!dir.path().join("default/job").exists());
        // As a command leaves it that was killed.
        fs::write(dir.path().join("default/job"), "").unwrap();
        assert!(!is_taken("job"));
        assert!(take("job").is_some());
        // An error is no "no".
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(Alone::is_taken(dir.path(), "file", "job").is_err());
    }
}
