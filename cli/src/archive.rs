//! Finds a file in a tar archive of which parts can be read, without reading the rest: a checkpoint's archive
//! may hold all of its memory.
//!
//! Headers have the meaning that they have for whoever unpacks it, so that nobody is shown another image.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use firn_image::form::EntryKind;
use tar::{EntryType, Header, PaxExtensions};

/// Size of a header, and what entries are padded to.
const BLOCK: u64 = 512;

/// Most entries that are looked at.
const MOST: usize = 100_000;

/// Longest header of a name, or of other properties, that is read.
const MAX_EXTENDED: u64 = 64 << 10;

/// A file of an archive: where its content begins, and its length.
#[derive(Debug, PartialEq, Eq)]
pub struct FileSpan {
    pub from: u64,
    pub length: u64,
}

/// An entry of an archive, as the reader that unpacks archives sees it.
#[derive(Debug)]
pub struct Entry {
    /// Without a `./` before it.
    pub path: PathBuf,
    pub kind: EntryKind,
    pub place: FileSpan,
}

impl Entry {
    /// Whether it is a regular file of this path.
    pub fn is(&self, path: impl AsRef<Path>) -> bool {
        self.kind == EntryKind::File && self.path == path.as_ref()
    }
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
        if entry.is(name) {
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
    let (mut at, mut before) = (0, Before::default());
    for _ in 0..MOST {
        if at + BLOCK > size {
            return Ok(false);
        }
        let bytes = read(at, BLOCK).await?;
        if at > 0 && bytes.iter().all(|byte| *byte == 0) {
            return Ok(before == Before::default());
        }
        let Some((header, header_length)) = header(&bytes) else {
            return Ok(false);
        };
        let from = at + BLOCK;
        let length = before.length(header).unwrap_or(header_length);
        let next = length
            .checked_next_multiple_of(BLOCK)
            .and_then(|length| from.checked_add(length));
        let Some(next) = next.filter(|next| *next <= size) else {
            return Ok(false);
        };
        at = next;
        if let Some(extension) = before.extension(header) {
            if extension.is_some() || length > MAX_EXTENDED {
                return Ok(false);
            }
            *extension = Some(read(from, length).await?);
            continue;
        }
        // The header of such a file continues behind it.
        if header.entry_type().is_gnu_sparse() {
            return Ok(false);
        }
        let kind = kind(header);
        let path = relative(OsString::from_vec(before.path(header)).into());
        let place = FileSpan { from, length };
        if !visit(Entry { path, kind, place }) {
            return Ok(true);
        }
        before = Before::default();
    }
    Ok(false)
}

/// A path without a `./` before it, as `tar -C DIR .` writes it.
pub fn relative(path: PathBuf) -> PathBuf {
    path.strip_prefix(".").map(Path::to_owned).unwrap_or(path)
}

/// What the reader of archives takes an entry for.
pub fn kind(header: &Header) -> EntryKind {
    match header.entry_type() {
        EntryType::Regular => EntryKind::File,
        EntryType::Directory => EntryKind::Directory,
        _ => EntryKind::Other,
    }
}

/// A header, and the length that it has for its entry. None where there is none.
fn header(bytes: &[u8]) -> Option<(&Header, u64)> {
    let whole = bytes.len() as u64 == BLOCK;
    let header = whole.then(|| Header::from_byte_slice(bytes))?;
    let summed = [&bytes[..148], &[b' '; 8], &bytes[156..]].into_iter().flatten();
    let sum: u32 = summed.map(|byte| u32::from(*byte)).sum();
    let is_whole = header.cksum().is_ok_and(|expected| expected == sum);
    Some((header, header.entry_size().ok().filter(|_| is_whole)?))
}

/// What headers before that of an entry have for it.
#[derive(Default, PartialEq)]
struct Before {
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    properties: Option<Vec<u8>>,
}

impl Before {
    /// Where the content of this header belongs; none: it is that of an entry.
    fn extension(&mut self, header: &Header) -> Option<&mut Option<Vec<u8>>> {
        let is_known = header.as_gnu().is_some() || header.as_ustar().is_some();
        match header.entry_type() {
            EntryType::GNULongName if is_known => Some(&mut self.name),
            EntryType::GNULongLink if is_known => Some(&mut self.link),
            EntryType::XHeader if is_known => Some(&mut self.properties),
            _ => None,
        }
    }

    /// The length that replaces that of the header.
    fn length(&self, header: &Header) -> Option<u64> {
        let kind = header.entry_type();
        let is_extension = kind.is_gnu_longname()
            || kind.is_gnu_longlink()
            || kind.is_pax_local_extensions()
            || kind.is_pax_global_extensions();
        let properties = self.properties.as_deref().filter(|_| !is_extension)?;
        let mut known = PaxExtensions::new(properties).map_while(Result::ok);
        let size = known.find(|property| property.key_bytes() == b"size")?;
        size.value().ok()?.parse().ok()
    }

    fn path(&mut self, header: &Header) -> Vec<u8> {
        if let Some(mut name) = self.name.take() {
            name.pop_if(|last| *last == 0);
            return name;
        }
        let properties = self.properties.as_deref().unwrap_or_default();
        let mut known = PaxExtensions::new(properties).filter_map(Result::ok);
        match known.find(|property| property.key_bytes() == b"path") {
            Some(path) => path.value_bytes().to_vec(),
            None => header.path_bytes().into_owned(),
        }
    }
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

    /// An archive of one file, with a header before it.
    fn with_extension(kind: EntryType, extension: &[u8], name: &str, text: &[u8]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = Header::new_ustar();
        header.set_entry_type(kind);
        header.set_size(extension.len() as u64);
        header.set_cksum();
        builder.append(&header, extension).unwrap();
        let mut header = Header::new_ustar();
        header.set_path(name).unwrap();
        header.set_size(text.len() as u64);
        header.set_cksum();
        builder.append(&header, text).unwrap();
        builder.into_inner().unwrap()
    }

    #[test]
    fn a_file_has_the_name_by_which_it_is_unpacked() {
        let text = b"{}";
        let renamed = |kind, extension: &[u8]| with_extension(kind, extension, "report", text);
        let long = format!("{}/firn.json", "a".repeat(120));
        let mut prefixed = tar::Builder::new(Vec::new());
        let mut header = Header::new_ustar();
        header.set_path(&long).unwrap();
        header.set_size(0);
        header.set_cksum();
        prefixed.append(&header, &[][..]).unwrap();
        for (archive, name) in [
            (renamed(EntryType::XHeader, b"18 path=firn.json\n"), "firn.json"),
            (renamed(EntryType::GNULongName, b"./firn.json\0"), "firn.json"),
            (prefixed.into_inner().unwrap(), &long),
        ] {
            assert!(find_in(&archive, name).0.is_some(), "{name}");
            assert_eq!(find_in(&archive, "report").0, None);
            let mut unpacked = tar::Archive::new(&*archive);
            let first = unpacked.entries().unwrap().next().unwrap().unwrap();
            let path = first.path().unwrap().into_owned();
            assert_eq!(path.strip_prefix(".").unwrap_or(&path), Path::new(name));
        }
    }

    #[test]
    fn a_length_before_the_header_comes_first() {
        let text = vec![7; 700];
        let plain = |bytes: &[u8]| with_extension(EntryType::XHeader, bytes, "firn.json", &text);
        assert_eq!(find_in(&plain(b""), "firn.json").0.unwrap().length, 700);
        let sized = plain(b"30 mtime=1350244992.023960108\n12 size=600\n");
        assert_eq!(find_in(&sized, "firn.json").0.unwrap().length, 600);
        let mut large = plain(b"");
        let header = &mut large[512..];
        header[124..136].copy_from_slice(b"\x80\0\0\0\0\0\0\0\0\0\x02\x58");
        assert_eq!(
            find_in(&large, "firn.json").0,
            None,
            "the checksum is another one"
        );
    }

    #[test]
    fn what_is_no_archive_ends_the_search() {
        let archive = archive("pax");
        let mut endless = Header::new_ustar();
        endless.set_path("x").unwrap();
        endless.set_size(u64::MAX);
        endless.set_cksum();
        let endless = endless.as_bytes().to_vec();
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
