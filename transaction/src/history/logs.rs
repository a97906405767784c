//! CRIU's logs of the last transactions that failed in it.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::Path;

use firn_host::atomic_file;

use super::Entry;

/// The directory of the logs in that of the history.
pub const LOGS: &str = "criu-logs";

/// How many are kept.
const MOST: usize = 32;

/// Bytes of the begin and of the end that are kept: the cause is in one of them.
const PART: u64 = 512 << 10;

/// Copies a log into `place`, and removes the oldest there. Returns its name.
pub(super) fn keep(place: &Path, log: &File, entry: &Entry) -> io::Result<String> {
    let dir = place.join(LOGS);
    DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
    // In the order of their times.
    let name = format!("{:013}-{}.log", entry.at, entry.id);
    atomic_file::write(&dir, &name, &shortened(log)?, 0o600)?;
    let mut names: Vec<_> = fs::read_dir(&dir)?
        .flatten()
        .map(|file| file.file_name())
        .collect();
    names.sort_unstable();
    for oldest in names.iter().take(names.len().saturating_sub(MOST)) {
        fs::remove_file(dir.join(oldest))?;
    }
    Ok(name)
}

/// The log without its middle, if it is long.
fn shortened(log: &File) -> io::Result<Vec<u8>> {
    let length = log.metadata()?.len();
    let part = |from: u64, bytes: u64| {
        let mut part = vec![0; usize::try_from(bytes).unwrap_or(0)];
        log.read_exact_at(&mut part, from).map(|()| part)
    };
    if length <= 2 * PART {
        return part(0, length);
    }
    let mut text = part(0, PART)?;
    write!(text, "\n... {} bytes left out ...\n", length - 2 * PART)?;
    text.extend(part(length - PART, PART)?);
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(at: u64) -> Entry {
        Entry {
            at,
            id: "x".to_owned(),
            ..Entry::default()
        }
    }

    #[test]
    fn the_last_logs_are_kept() {
        let place = tempfile::tempdir().unwrap();
        let source = tempfile::NamedTempFile::new().unwrap();
        fs::write(source.path(), "Error: no\n").unwrap();
        let keep = |at| keep(&place.path().join("history"), source.as_file(), &entry(at)).unwrap();
        let kept: Vec<String> = (1..=40).map(keep).collect();
        let dir = place.path().join("history").join(LOGS);
        let mut left: Vec<String> = fs::read_dir(&dir)
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, kept[8..]);
        assert_eq!(fs::read_to_string(dir.join(&left[0])).unwrap(), "Error: no\n");
    }

    #[test]
    fn a_long_log_loses_its_middle() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let whole = vec![b'a'; 2 * usize::try_from(PART).unwrap()];
        fs::write(file.path(), &whole).unwrap();
        assert_eq!(shortened(file.as_file()).unwrap(), whole);
        let long = [&b"begin"[..], &whole, b"end"].concat();
        fs::write(file.path(), long).unwrap();
        let text = String::from_utf8(shortened(file.as_file()).unwrap()).unwrap();
        assert!(text.starts_with("begin") && text.ends_with("end"));
        assert!(text.contains("\n... 8 bytes left out ...\n"));
    }
}
