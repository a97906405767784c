//! CRIU's logs of the last transactions that failed in it.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::Path;

use firn_host::atomic_file;
use firn_process::OrWarn;

use super::Entry;

/// The directory of the logs in that of the history.
pub const LOGS: &str = "criu-logs";

/// How names end.
const END: &str = ".log";

/// How many are kept.
const MOST: usize = 32;

/// Bytes of the begin and of the end that are kept: the cause is in one of them.
const PART: u64 = 512 << 10;

/// The name of an entry's log: names are in the order of their times.
pub(super) fn name(entry: &Entry) -> String {
    format!("{:013}-{}{END}", entry.at, entry.id)
}

/// Copies a log into `place` by this name, and removes the oldest there.
pub(super) fn keep(place: &Path, log: &File, name: &str) -> io::Result<()> {
    let text = shortened(log)?;
    let dir = place.join(LOGS);
    DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
    let lock = File::open(&dir)?;
    lock.lock()?;
    atomic_file::write(&dir, name, &text, 0o600)?;
    let names = fs::read_dir(&dir)?.flatten();
    let names = names.filter_map(|file| file.file_name().into_string().ok());
    let (mut others, rest): (Vec<_>, Vec<_>) = names.partition(|other| other.ends_with(END) && other != name);
    others.sort_unstable();
    others.truncate(others.len().saturating_sub(MOST - 1));
    // Nobody else writes now: a writer was killed.
    others.extend(rest.into_iter().filter(|other| other.ends_with(".tmp")));
    for other in others {
        fs::remove_file(dir.join(other)).or_warn(format_args!("cannot remove an old log of CRIU"));
    }
    Ok(())
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
        let keep = |at| {
            let name = name(&entry(at));
            keep(&place.path().join("history"), source.as_file(), &name).unwrap();
            name
        };
        let kept: Vec<String> = (1..=40).map(keep).collect();
        let dir = place.path().join("history").join(LOGS);
        let mut left: Vec<String> = fs::read_dir(&dir)
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, kept[8..]);
        assert_eq!(fs::read_to_string(dir.join(&left[0])).unwrap(), "Error: no\n");
        // The clock was set back, and another program has a file there.
        fs::write(dir.join("0"), "").unwrap();
        fs::write(dir.join(".left.log.tmp"), "").unwrap();
        assert!(dir.join(keep(0)).exists() && dir.join("0").exists());
        assert!(!dir.join(&left[0]).exists() && !dir.join(".left.log.tmp").exists());
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
