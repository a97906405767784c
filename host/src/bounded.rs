//! Bounded reads of files in /proc whose length a process decides: environ is as long as
//! `prctl(PR_SET_MM_MAP)` has set, maps has a line for every mapping. A longer file is an error of the kind
//! [`io::ErrorKind::FileTooLarge`].

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::ControlFlow;
use std::path::Path;

/// Longest file that is read as a whole, and longest environment, in bytes. The kernel itself starts no
/// program with more than 6 MiB of arguments and environment.
pub const WHOLE: u64 = 8 << 20;

/// Longest file that is read line by line and of which nothing is kept.
pub const LINES: u64 = 256 << 20;

/// How much of a line is looked at. Paths of the kernel are shorter.
const LINE: usize = 64 << 10;

const CHUNK: usize = 64 << 10;

/// All of a file.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_at_most(File::open(path)?, WHOLE)?.ok_or_else(|| too_long(WHOLE))
}

/// All of a file of any kind, or nothing if it has more than `most` bytes.
pub fn read_at_most(file: impl Read, most: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    Ok(Some(bytes).filter(|bytes| bytes.len() as u64 <= most))
}

/// The end of a file behind its first `from` bytes: at most `most` bytes of it.
pub fn tail(path: &Path, from: u64, most: u64) -> io::Result<Vec<u8>> {
    let (mut file, mut bytes) = (File::open(path)?, Vec::new());
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(from.max(length.saturating_sub(most))))?;
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Visits the parts of a file between `delimiter`s, of at most `most` bytes, until `visit` breaks.
pub fn each(
    path: &Path,
    delimiter: u8,
    most: u64,
    visit: impl FnMut(&[u8]) -> ControlFlow<()>,
) -> io::Result<()> {
    each_of(File::open(path)?, delimiter, most, visit)
}

fn each_of(
    mut file: impl Read,
    delimiter: u8,
    most: u64,
    mut visit: impl FnMut(&[u8]) -> ControlFlow<()>,
) -> io::Result<()> {
    let (mut chunk, mut part, mut total) = (vec![0; CHUNK], Vec::new(), 0_u64);
    loop {
        let count = match file.read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        total = total.saturating_add(u64::try_from(count).unwrap_or(u64::MAX));
        if total > most {
            return Err(too_long(most));
        }
        let mut rest = &chunk[..count];
        while let Some(at) = rest.iter().position(|byte| *byte == delimiter) {
            keep(&mut part, &rest[..at]);
            if visit(&part).is_break() {
                return Ok(());
            }
            part.clear();
            rest = &rest[at + 1..];
        }
        keep(&mut part, rest);
    }
    if !part.is_empty() {
        let _last = visit(&part);
    }
    Ok(())
}

fn keep(part: &mut Vec<u8>, more: &[u8]) {
    let room = LINE - part.len();
    part.extend_from_slice(&more[..more.len().min(room)]);
}

fn too_long(most: u64) -> io::Error {
    let text = format!("it is longer than {} MiB", most >> 20);
    io::Error::new(io::ErrorKind::FileTooLarge, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(file: impl Read, most: u64) -> io::Result<Vec<Vec<u8>>> {
        let mut parts = Vec::new();
        each_of(file, b'\n', most, |part| {
            parts.push(part.to_vec());
            ControlFlow::Continue(())
        })
        .map(|()| parts)
    }

    #[test]
    fn parts_across_chunks_are_whole_and_a_long_one_is_cut() {
        let line = vec![b'x'; CHUNK - 10];
        let text = [&b"a\n\n"[..], &line, b"\n", &line, &line, b"\nend"].concat();
        let found = parts(&text[..], LINES).unwrap();
        let lengths: Vec<_> = found.iter().map(Vec::len).collect();
        assert_eq!(lengths, [1, 0, line.len(), LINE, 3]);
        assert_eq!(found[4], b"end");
        assert!(parts(&b""[..], LINES).unwrap().is_empty());
    }

    #[test]
    fn a_file_without_end_is_given_up_and_one_at_the_bound_is_read() {
        assert_eq!(
            parts(io::repeat(b'x'), LINES).unwrap_err().kind(),
            io::ErrorKind::FileTooLarge
        );
        assert_eq!(parts(io::repeat(b'x').take(9), 9).unwrap().len(), 1);
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(WHOLE).unwrap();
        assert!(read(file.path()).is_ok());
        // As /proc/PID/environ after prctl(PR_SET_MM_MAP): as long as the process chose.
        file.as_file().set_len(3 << 30).unwrap();
        let error = read(file.path()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(error.to_string(), "it is longer than 8 MiB");
    }

    #[test]
    fn who_has_seen_enough_reads_no_further() {
        let mut seen = 0;
        each_of(io::repeat(b'\n'), b'\n', LINES, |_| {
            seen += 1;
            ControlFlow::Break(())
        })
        .unwrap();
        assert_eq!(seen, 1);
    }
}
