//! The directory that receives an image, and CRIU's log beside it.

use std::fs;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use firn_oci::manifest::{ImageFile, describe_images};

use super::DumpError;
use super::error::EffectError;
use crate::blocking::blocking;
use crate::container::Cut;
use crate::journal::ImageWas;

/// Files without which an image cannot be restored; CRIU writes both at the end of a dump.
const LAST: [&str; 2] = ["inventory.img", "pstree.img"];

/// How many of CRIU's last errors are quoted.
const QUOTED: usize = 3;

/// How much of the end of a log is searched for them.
const TAIL: u64 = 256 << 10;

/// An image directory and what it was before the dump.
pub(crate) struct ImageDir {
    path: PathBuf,
    was: ImageWas,
}

impl ImageDir {
    /// What is there now. Nothing is made yet.
    pub(super) fn find(path: &Path) -> Result<Self, DumpError> {
        let was = match fs::read_dir(path) {
            Ok(mut entries) => match entries.next() {
                None => ImageWas::Empty,
                Some(_) => ImageWas::Filled,
            },
            Err(error) if error.kind() == ErrorKind::NotFound => ImageWas::Absent,
            Err(source) => {
                return Err(DumpError::ImageDir {
                    image: path.to_owned(),
                    source,
                });
            }
        };
        Ok(Self::known(path, was))
    }

    /// One that was found before.
    pub(crate) fn known(path: &Path, was: ImageWas) -> Self {
        Self {
            path: path.to_owned(),
            was,
        }
    }

    pub(super) fn was(&self) -> ImageWas {
        self.was
    }

    /// Makes the directory when there is none.
    pub(super) fn make(&self) -> Result<(), DumpError> {
        fs::create_dir_all(&self.path).map_err(|source| DumpError::ImageDir {
            image: self.path.clone(),
            source,
        })
    }

    /// Whether CRIU got to the end.
    pub(super) fn check_complete(&self) -> Result<(), DumpError> {
        match LAST.into_iter().find(|name| !self.path.join(name).is_file()) {
            None => Ok(()),
            Some(missing) => Err(DumpError::Incomplete {
                image: self.path.clone(),
                missing,
            }),
        }
    }

    /// Removes what a failed dump left, unless others had put something there before.
    pub(crate) fn clear(&self) {
        let cleared = match self.was {
            ImageWas::Filled => return,
            ImageWas::Absent => fs::remove_dir_all(&self.path),
            ImageWas::Empty => self.remove_entries(),
        };
        if let Err(error) = cleared
            && error.kind() != ErrorKind::NotFound
        {
            log::warn!("cannot clear {}: {error}", self.path.display());
        }
    }

    fn remove_entries(&self) -> std::io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                fs::remove_dir_all(entry.path())?;
            } else {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

/// CRIU's files with their checksums. Every byte of them is read while the container stands still, so that nobody waits
/// for it longer than `limit`, or once the container is to end.
pub(super) async fn describe(
    image: &Path,
    limit: Duration,
    cut: &Cut,
) -> Result<Vec<ImageFile>, EffectError> {
    let stop = Arc::new(AtomicBool::new(false));
    let (of, heeded) = (image.to_owned(), stop.clone());
    let described = blocking(move || describe_images(&of, &heeded));
    let result = tokio::select! {
        biased;
        () = cut.asked() => Err(EffectError::Killed),
        described = described => described.map_err(Into::into),
        () = tokio::time::sleep(limit) => Err(DumpError::Checksums { limit }.into()),
    };
    stop.store(true, Ordering::Relaxed);
    result
}

/// The last errors of a CRIU log, without their time stamps.
pub(crate) fn error_lines(log: &Path) -> Vec<String> {
    let mut text = Vec::new();
    let read = fs::File::open(log).and_then(|mut file| {
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
        file.take(TAIL).read_to_end(&mut text)
    });
    if read.is_err() {
        return Vec::new();
    }
    let text = String::from_utf8_lossy(&text);
    let mut lines: Vec<String> = text
        .lines()
        .filter_map(|line| line.split_once("Error ").map(|(_, said)| said.trim().to_owned()))
        .collect();
    lines.split_off(lines.len().saturating_sub(QUOTED))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(path: &Path) -> ImageDir {
        let image = ImageDir::find(path).unwrap();
        image.make().unwrap();
        image
    }

    #[test]
    fn a_directory_that_was_there_is_emptied_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let image = open(dir.path());
        fs::write(dir.path().join("core-1.img"), "x").unwrap();
        fs::create_dir(dir.path().join("sub")).unwrap();
        image.clear();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_that_was_made_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        let image = open(&path);
        fs::write(path.join("core-1.img"), "x").unwrap();
        image.clear();
        assert!(!path.exists());
    }

    #[test]
    fn files_of_others_are_never_removed() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("theirs"), "x").unwrap();
        let image = open(dir.path());
        fs::write(dir.path().join("core-1.img"), "x").unwrap();
        image.clear();
        assert!(dir.path().join("theirs").exists());
    }

    #[test]
    fn an_image_without_its_last_files_is_incomplete() {
        let dir = tempfile::tempdir().unwrap();
        let image = open(dir.path());
        fs::write(dir.path().join("inventory.img"), "x").unwrap();
        assert!(matches!(
            image.check_complete(),
            Err(DumpError::Incomplete {
                missing: "pstree.img",
                ..
            })
        ));
        fs::write(dir.path().join("pstree.img"), "x").unwrap();
        assert!(image.check_complete().is_ok());
    }

    #[tokio::test]
    async fn checksums_that_take_too_long_are_left_and_nobody_reads_on() {
        let dir = tempfile::tempdir().unwrap();
        let pages = fs::File::create(dir.path().join("pages-1.img")).unwrap();
        // The test would not end before a thread that reads all of it.
        pages.set_len(1 << 40).unwrap();
        let limit = Duration::from_millis(50);
        let late = describe(dir.path(), limit, &Cut::default()).await.unwrap_err();
        assert!(
            matches!(late, EffectError::Dump(DumpError::Checksums { .. })),
            "{late}"
        );
        let cut = Cut::default();
        let kill = async {
            tokio::task::yield_now().await;
            cut.ask();
        };
        let (killed, ()) = tokio::join!(describe(dir.path(), Duration::MAX, &cut), kill);
        assert!(matches!(killed, Err(EffectError::Killed)), "{killed:?}");
    }

    #[test]
    fn the_last_errors_of_a_log_are_quoted() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let log = "(00.1) Error (a.c:1): one\n(00.2) fine\n(00.3) Error (b.c:2): two\n(00.4) Error (c.c:3): three\n\
                   (00.5) Error (d.c:4): four\n";
        fs::write(file.path(), log).unwrap();
        assert_eq!(
            error_lines(file.path()),
            ["(b.c:2): two", "(c.c:3): three", "(d.c:4): four"]
        );
        assert!(error_lines(Path::new("/nonexistent")).is_empty());
    }
}
