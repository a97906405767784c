//! Finds a file in a tar archive of which parts can be read, without reading the rest: a checkpoint's archive
//! may hold all of its memory.

/// Size of a header, and what entries are padded to.
const BLOCK: u64 = 512;

/// Most entries that are looked at.
const MOST: usize = 100_000;

/// Longest extended header that is read.
const MAX_EXTENDED: u64 = 64 << 10;

/// A file of an archive: where its content begins, and its length.
#[derive(Debug, PartialEq, Eq)]
pub struct FileSpan {
    pub from: u64,
    pub length: u64,
}

/// An entry of an archive.
#[derive(Debug)]
pub struct Entry {
    /// Without a `./` before it.
    pub name: String,
    pub is_file: bool,
    pub place: FileSpan,
}

/// The regular file of this name directly in an archive of `size` bytes. `read` returns that many bytes from
/// that offset, or fewer at the end.
pub async fn find<E>(
    name: &str,
    size: u64,
    read: impl AsyncFnMut(u64, u64) -> Result<Vec<u8>, E>,
) -> Result<Option<FileSpan>, E> {
    let mut found = None;
    each(size, read, |entry| {
        if entry.is_file && entry.name == name {
            found = Some(entry.place);
        }
        found.is_none()
    })
    .await?;
    Ok(found)
}

/// All entries. None if the archive ends early, or is none.
pub async fn list<E>(
    size: u64,
    read: impl AsyncFnMut(u64, u64) -> Result<Vec<u8>, E>,
) -> Result<Option<Vec<Entry>>, E> {
    let mut all = Vec::new();
    let is_whole = each(size, read, |entry| {
        all.push(entry);
        true
    })
    .await?;
    Ok(is_whole.then_some(all))
}

/// Calls `visit` with each entry as long as it returns true. Returns whether the archive continues to its
/// end.
async fn each<E>(
    size: u64,
    mut read: impl AsyncFnMut(u64, u64) -> Result<Vec<u8>, E>,
    mut visit: impl FnMut(Entry) -> bool,
) -> Result<bool, E> {
    let (mut at, mut long_size) = (0, None);
    for _ in 0..MOST {
        if at + BLOCK > size {
            return Ok(false);
        }
        let bytes = read(at, BLOCK).await?;
        let Some(header) = Header::of(&bytes) else {
            return Ok(at > 0 && bytes.iter().all(|byte| *byte == 0));
        };
        let length = match header.kind {
            b'x' | b'g' => header.length,
            _ => long_size.take().unwrap_or(header.length),
        };
        let from = at + BLOCK;
        if header.kind == b'x' && length <= MAX_EXTENDED {
            long_size = extended_size(&read(from, length).await?);
        }
        let next = length
            .checked_next_multiple_of(BLOCK)
            .and_then(|length| from.checked_add(length));
        let Some(next) = next.filter(|next| *next <= size) else {
            return Ok(false);
        };
        let is_file = matches!(header.kind, b'0' | 0);
        let is_listed = !matches!(header.kind, b'x' | b'g');
        let name = header.name.strip_prefix("./").unwrap_or(&header.name).to_owned();
        let place = FileSpan { from, length };
        if is_listed && !visit(Entry { name, is_file, place }) {
            return Ok(true);
        }
        at = next;
    }
    Ok(false)
}

struct Header {
    name: String,
    length: u64,
    kind: u8,
}

impl Header {
    /// None at the end of the archive, and where there is no header.
    fn of(bytes: &[u8]) -> Option<Self> {
        let (name, size) = (bytes.get(..100)?, bytes.get(124..136)?);
        let kind = *bytes.get(156)?;
        if name[0] == 0 && size[0] == 0 {
            return None;
        }
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        Some(Self {
            name: String::from_utf8_lossy(&name[..end]).into_owned(),
            length: number(size)?,
            kind,
        })
    }
}

/// Octal digits, or from the second bit on a number of that many bytes.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        let (high, low) = field.split_at(field.len() - 8);
        let is_small = high[0] == 0x80 && high[1..].iter().all(|byte| *byte == 0);
        return is_small.then(|| low.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)));
    }
    let text = std::str::from_utf8(field).ok()?;
    let digits = text.trim_matches(['\0', ' ']);
    u64::from_str_radix(digits, 8).ok()
}

/// `size` of an extended header, whose lines are `LENGTH KEY=VALUE`.
fn extended_size(bytes: &[u8]) -> Option<u64> {
    let text = String::from_utf8_lossy(bytes);
    let mut sizes = text
        .lines()
        .filter_map(|line| line.split_once(' ')?.1.strip_prefix("size="));
    sizes.next_back()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::process::Command;

    use super::*;

    fn find_in(archive: &[u8], name: &str) -> (Option<FileSpan>, u64) {
        let mut total = 0;
        let read = async |from: u64, size: u64| {
            total += size;
            let from = usize::try_from(from).unwrap().min(archive.len());
            let to = (from + usize::try_from(size).unwrap()).min(archive.len());
            Ok::<_, Infallible>(archive[from..to].to_vec())
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let Ok(found) = runtime.block_on(find(name, archive.len() as u64, read));
        (found, total)
    }

    /// As tar of this system writes it.
    fn archive(format: &str) -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.img"), vec![1; 300_000]).unwrap();
        std::fs::create_dir(dir.path().join("firn")).unwrap();
        std::fs::write(dir.path().join("firn/firn.json"), "not this one").unwrap();
        std::fs::write(dir.path().join("firn.json"), "{\"body\":{}}").unwrap();
        let mut tar = Command::new("tar");
        tar.args([
            "--create",
            "--sort=name",
            format!("--format={format}").as_str(),
            ".",
        ]);
        tar.current_dir(dir.path()).output().unwrap().stdout
    }

    #[test]
    fn a_file_is_found_without_reading_those_before_it() {
        for format in ["gnu", "pax", "ustar"] {
            let archive = archive(format);
            let (place, total) = find_in(&archive, "firn.json");
            let place = place.unwrap();
            let from = usize::try_from(place.from).unwrap();
            assert_eq!(
                &archive[from..from + usize::try_from(place.length).unwrap()],
                b"{\"body\":{}}"
            );
            assert!(total < 10_000, "{total} bytes were read");
            assert_eq!(find_in(&archive, "none").0, None);
        }
    }

    #[test]
    fn sizes_have_three_forms() {
        assert_eq!(number(b"00000000017\0"), Some(15));
        assert_eq!(number(b"\x80\0\0\0\0\0\0\x04\0\0\0\0"), Some(1 << 34));
        assert_eq!(number(b"\xff\0\0\0\0\0\0\0\0\0\0\0"), None);
        assert_eq!(number(b"00000000019\0"), None);
        assert_eq!(
            extended_size(b"30 mtime=1350244992.023960108\n20 size=8589934592\n"),
            Some(1 << 33)
        );
        assert_eq!(extended_size(b"\xff size"), None);
    }

    #[test]
    fn what_is_no_archive_ends_the_search() {
        let archive = archive("pax");
        let mut endless = vec![0; 512];
        endless[0] = b'x';
        endless[124..136].copy_from_slice(b"\x80\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff");
        for bad in [&[][..], &[0; 511], &[0xff; 2048], &archive[..700], &endless] {
            assert_eq!(find_in(bad, "firn.json").0, None);
            let read = async |from: u64, size: u64| {
                let from = usize::try_from(from).unwrap().min(bad.len());
                let to = from.saturating_add(usize::try_from(size).unwrap()).min(bad.len());
                Ok::<_, Infallible>(bad[from..to].to_vec())
            };
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let Ok(listed) = runtime.block_on(list(bad.len() as u64, read));
            assert!(listed.is_none());
        }
    }
}
