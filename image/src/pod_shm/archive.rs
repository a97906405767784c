//! The archive: files with their names, owners, modes and content, and with the holes that they had.
//!
//! ```text
//! firn-dev-shm 1\n
//! entry:  length u32, Entry as JSON; of a file also its content:
//!         (offset u64, length u64, that many bytes)..., then offset 2^64-1
//! end:    length 0
//! ```
//!
//! Numbers are little-endian. An archive names files in bytes, whatever their encoding, and has exactly as
//! many bytes as it states, also of a file that is written meanwhile.

use std::io::{self, Read, Seek, SeekFrom, Write};

use serde::{Deserialize, Serialize};

const BEGIN: &[u8] = b"firn-dev-shm 1\n";
/// Longest entry without its content: two names in JSON.
const LONGEST: u32 = 64 << 10;
/// Longest piece of content.
const PIECE: u64 = 1 << 20;
const END_OF_CONTENT: u64 = u64::MAX;

/// Something in the directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its name below the directory, in bytes.
    pub name: Vec<u8>,
    pub kind: Kind,
    /// Permissions.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// A process of the container has it open or mapped.
    pub held: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    Directory,
    /// A file of this many bytes.
    File(u64),
    /// Another name of a file that an earlier entry has, by that name.
    Link(Vec<u8>),
    /// What it leads to.
    Symlink(Vec<u8>),
    /// A named pipe.
    Pipe,
}

/// An archive that is not as described.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveFault {
    #[error("the archive of the pod's /dev/shm is cut or damaged: {0}")]
    Damaged(&'static str),
    #[error("the archive of the pod's /dev/shm cannot be read")]
    Io(#[from] io::Error),
}

/// Writes an archive.
pub struct Writer<W> {
    into: W,
}

impl<W: Write> Writer<W> {
    pub fn begin(mut into: W) -> io::Result<Self> {
        into.write_all(BEGIN)?;
        Ok(Self { into })
    }

    /// Writes an entry. Of a file, the caller writes the [`Writer::content`] and then its end.
    pub fn entry(&mut self, entry: &Entry) -> io::Result<()> {
        let text = serde_json::to_vec(entry)?;
        let length = u32::try_from(text.len()).ok().filter(|length| *length <= LONGEST);
        let length = length.ok_or_else(|| io::Error::other("its name is too long"))?;
        self.into.write_all(&length.to_le_bytes())?;
        self.into.write_all(&text)
    }

    /// Writes a part of the content that is in `from`, at this offset. Parts are in order.
    ///
    /// # Errors
    /// Also if `from` has fewer bytes.
    pub fn content(&mut self, mut offset: u64, length: u64, from: &mut impl Read) -> io::Result<()> {
        let end = offset.saturating_add(length);
        while offset < end {
            let piece = (end - offset).min(PIECE);
            self.into.write_all(&offset.to_le_bytes())?;
            self.into.write_all(&piece.to_le_bytes())?;
            if io::copy(&mut from.by_ref().take(piece), &mut self.into)? < piece {
                return Err(io::Error::other("it was cut meanwhile"));
            }
            offset += piece;
        }
        Ok(())
    }

    pub fn end_content(&mut self) -> io::Result<()> {
        self.into.write_all(&END_OF_CONTENT.to_le_bytes())
    }

    /// Ends the archive.
    pub fn end(mut self) -> io::Result<()> {
        self.into.write_all(&0_u32.to_le_bytes())?;
        self.into.flush()
    }
}

/// Reads an archive.
pub struct Reader<R> {
    from: R,
}

impl<R: Read> Reader<R> {
    pub fn begin(mut from: R) -> Result<Self, ArchiveFault> {
        let mut begin = [0; BEGIN.len()];
        read(&mut from, &mut begin)?;
        if begin == *BEGIN {
            Ok(Self { from })
        } else {
            Err(ArchiveFault::Damaged("it begins with something else"))
        }
    }

    /// The next entry; none at the end. Of a file, the caller reads the whole [`Reader::content`].
    pub fn entry(&mut self) -> Result<Option<Entry>, ArchiveFault> {
        let mut length = [0; 4];
        read(&mut self.from, &mut length)?;
        let length = match u32::from_le_bytes(length) {
            0 => return Ok(None),
            length if length > LONGEST => return Err(ArchiveFault::Damaged("an entry is too long")),
            length => length,
        };
        let mut text = vec![0; length as usize];
        read(&mut self.from, &mut text)?;
        let entry = serde_json::from_slice(&text);
        entry
            .map(Some)
            .map_err(|_| ArchiveFault::Damaged("an entry is not understood"))
    }

    /// Reads the next part of the content of a file of `size` bytes into `into`, and returns where in the
    /// file it is; none at its end. Parts are in order and within the file.
    pub fn content(
        &mut self,
        least: u64,
        size: u64,
        into: &mut Vec<u8>,
    ) -> Result<Option<u64>, ArchiveFault> {
        let offset = self.number()?;
        if offset == END_OF_CONTENT {
            return Ok(None);
        }
        let length = self.number()?;
        let end = offset.checked_add(length).filter(|end| *end <= size);
        if end.is_none() || offset < least || length == 0 || length > PIECE {
            return Err(ArchiveFault::Damaged("content is outside of its file"));
        }
        into.clear();
        self.from.by_ref().take(length).read_to_end(into)?;
        if (into.len() as u64) < length {
            return Err(ArchiveFault::Damaged("its end is missing"));
        }
        Ok(Some(offset))
    }

    /// Reads content that nobody wants.
    pub fn skip_content(&mut self, size: u64) -> Result<(), ArchiveFault> {
        let (mut piece, mut end) = (Vec::new(), 0);
        while let Some(offset) = self.content(end, size, &mut piece)? {
            end = offset + piece.len() as u64;
        }
        Ok(())
    }

    /// Where it is, for [`Reader::seek`].
    pub fn position(&mut self) -> Result<u64, ArchiveFault>
    where
        R: Seek,
    {
        Ok(self.from.stream_position()?)
    }

    pub fn seek(&mut self, position: u64) -> Result<(), ArchiveFault>
    where
        R: Seek,
    {
        self.from.seek(SeekFrom::Start(position))?;
        Ok(())
    }

    fn number(&mut self) -> Result<u64, ArchiveFault> {
        let mut bytes = [0; 8];
        read(&mut self.from, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }
}

fn read(from: &mut impl Read, into: &mut [u8]) -> Result<(), ArchiveFault> {
    from.read_exact(into).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => ArchiveFault::Damaged("its end is missing"),
        _ => error.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(size: u64) -> Entry {
        Entry {
            name: b"a\xff\n".to_vec(),
            kind: Kind::File(size),
            mode: 0o640,
            uid: 7,
            gid: 8,
            held: true,
        }
    }

    fn archive() -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut writer = Writer::begin(&mut bytes).unwrap();
        writer.entry(&file(5 << 20)).unwrap();
        writer.content(0, 3, &mut &b"abc"[..]).unwrap();
        writer.content(4096, 2 << 20, &mut io::repeat(1)).unwrap();
        writer.end_content().unwrap();
        writer.end().unwrap();
        bytes
    }

    /// The bytes of the only file, without holes, and how many parts there were.
    fn whole(archive: &[u8]) -> Result<(Vec<u8>, usize), ArchiveFault> {
        let mut reader = Reader::begin(archive)?;
        let entry = reader.entry()?.unwrap();
        let Kind::File(size) = entry.kind else {
            return Err(ArchiveFault::Damaged("no file"));
        };
        let (mut content, mut piece, mut parts, mut least) = (Vec::new(), Vec::new(), 0, 0);
        while let Some(offset) = reader.content(least, size, &mut piece)? {
            content.extend(&piece);
            parts += 1;
            least = offset + piece.len() as u64;
        }
        assert_eq!(reader.entry()?, None);
        Ok((content, parts))
    }

    #[test]
    fn what_is_written_is_read_with_its_holes() {
        let (content, parts) = whole(&archive()).unwrap();
        assert_eq!((content.len(), parts), (3 + (2 << 20), 3));
        assert!(content.starts_with(b"abc\x01"));
        let mut reader = Reader::begin(&*archive()).map(|mut reader| reader.entry().unwrap());
        assert_eq!(reader.as_mut().unwrap().take(), Some(file(5 << 20)));
    }

    #[test]
    fn every_cut_is_an_error() {
        let bytes = archive();
        for length in (0..200).chain(bytes.len() - 20..bytes.len()) {
            assert!(whole(&bytes[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn content_is_in_order_and_within_its_file() {
        for (first, second, size) in [((8, 4), (4, 4), 100), ((0, 4), (3, 4), 100), ((0, 4), (4, 4), 7)] {
            let mut bytes = Vec::new();
            let mut writer = Writer::begin(&mut bytes).unwrap();
            writer.entry(&file(size)).unwrap();
            for (offset, length) in [first, second] {
                writer.content(offset, length, &mut io::repeat(1)).unwrap();
            }
            writer.end_content().unwrap();
            writer.end().unwrap();
            assert!(whole(&bytes).is_err(), "{first:?} {second:?} {size}");
        }
        let mut endless = BEGIN.to_vec();
        endless.extend(u32::MAX.to_le_bytes());
        assert!(whole(&endless).is_err());
    }

    #[test]
    fn a_source_that_is_shorter_is_an_error() {
        let mut writer = Writer::begin(Vec::new()).unwrap();
        let error = writer.content(0, 4, &mut &b"abc"[..]).unwrap_err();
        assert_eq!(error.to_string(), "it was cut meanwhile");
    }
}
