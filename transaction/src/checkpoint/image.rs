//! The directory that receives an image, and CRIU's log beside it.

mod dir;
pub mod rescue;

use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::time::Duration;

use firn_image::manifest::{ImageFile, describe_images_by};

pub use dir::{ImageDir, is_containerds};

use super::DumpError;
use super::error::EffectError;
use crate::blocking::{Left, stoppable};
use crate::container::Cut;

/// How many of CRIU's last errors are quoted.
const QUOTED: usize = 3;

/// How much of the end of a log is searched for them.
const TAIL: u64 = 256 << 10;

/// CRIU's files with their checksums. Every byte of them is read while the container stands still, so that nobody waits
/// for it longer than `limit`, or once the container is to end.
pub(super) async fn describe(
    image: &ImageDir,
    limit: Duration,
    cut: &Cut,
) -> Result<Vec<ImageFile>, EffectError> {
    let image = image.clone();
    let described = stoppable(limit, cut, move |stop| {
        describe_images_by(&image.inside(), image.path(), stop)
    });
    match described.await {
        Ok(described) => Ok(described?),
        Err(Left::Cut) => Err(EffectError::Killed),
        Err(Left::Late) => Err(DumpError::Checksums { limit }.into()),
    }
}

/// The last errors of a CRIU log, without their time stamps.
pub fn error_lines(log: &Path) -> Vec<String> {
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

    #[tokio::test]
    async fn checksums_that_take_too_long_are_left_and_nobody_reads_on() {
        let dir = tempfile::tempdir().unwrap();
        let pages = fs::File::create(dir.path().join("pages-1.img")).unwrap();
        // The test would not end before a thread that reads all of it.
        pages.set_len(1 << 40).unwrap();
        let limit = Duration::from_millis(50);
        let image = ImageDir::find(dir.path(), false).await.unwrap();
        let late = describe(&image, limit, &Cut::default()).await.unwrap_err();
        assert!(
            matches!(late, EffectError::Dump(DumpError::Checksums { .. })),
            "{late}"
        );
        let cut = Cut::default();
        let kill = async {
            tokio::task::yield_now().await;
            cut.ask();
        };
        let (killed, ()) = tokio::join!(describe(&image, Duration::MAX, &cut), kill);
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
