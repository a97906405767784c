//! Which shared memory an image has. CRIU calls its file `pagemap-shmem-N.img`: N is the inode of a memory
//! file, or the id of a SysV segment. Only the lists of both kinds show which of them it is.

use std::collections::BTreeSet;
use std::path::Path;

use super::wire::Message;
use super::{ImageFault, memory, messages};

const SEGMENTS_MAGIC: u32 = 0x4628_3044;
pub(super) const FILES_MAGIC: u32 = 0x4845_3499;

/// The list of the memory files.
pub(super) const FILES: &str = "memfd.img";

/// Fields of `ipc_shm_entry`, `ipc_desc_entry` and `memfd_inode_entry`.
mod field {
    pub(super) const DESCRIPTION: u32 = 1;
    pub(super) const ID: u32 = 7;
    pub(super) const NUMBER: u32 = 5;
}

/// The numbers of the shared memory that an image lists.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct SharedNumbers {
    /// Ids of SysV segments, also of those that no process has attached.
    pub segments: BTreeSet<u64>,
    /// Inodes of memory files.
    pub files: BTreeSet<u64>,
}

impl SharedNumbers {
    /// Reads both lists of the image in `dir`, which has files of these names.
    ///
    /// # Errors
    /// If a list is not as CRIU writes it.
    pub fn read(dir: &Path, names: &[String]) -> Result<Self, ImageFault> {
        let mut numbers = Self::default();
        for name in names.iter().filter(|name| name.starts_with("ipcns-shm-")) {
            numbers.segments.extend(all(dir, name, SEGMENTS_MAGIC, |entry| {
                let description = entry.message(field::DESCRIPTION)?;
                description.map(|one| one.required(field::ID)).transpose()
            })?);
        }
        numbers.files = all(dir, FILES, FILES_MAGIC, |entry| entry.number(field::NUMBER))?;
        Ok(numbers)
    }
}

/// The numbers that `number` finds in the entries of a file; none if there is no such file.
fn all(
    dir: &Path,
    name: &str,
    magic: u32,
    number: impl Fn(&Message<'_>) -> Result<Option<u32>, super::wire::WireError>,
) -> Result<BTreeSet<u64>, ImageFault> {
    let Some(bytes) = memory::bytes(dir, name)? else {
        return Ok(BTreeSet::new());
    };
    let numbers = messages(name, magic, &bytes)?.into_iter().map(|entry| {
        let found = Message::parse(entry).and_then(|entry| number(&entry));
        let found = found.map_err(|error| ImageFault::malformed(name, error))?;
        found
            .map(u64::from)
            .ok_or_else(|| ImageFault::malformed(name, "an entry has no number"))
    });
    numbers.collect()
}

#[cfg(test)]
pub(crate) mod testing {
    use super::super::connections::write;
    use super::super::wire;
    use super::*;

    pub(crate) fn write_segments(dir: &Path, ids: &[u64]) {
        let segment = |id: &u64| {
            let (mut description, mut entry) = (Vec::new(), Vec::new());
            (1..field::ID).for_each(|other| wire::push_number(&mut description, other, 99));
            wire::push_number(&mut description, field::ID, *id);
            wire::push_bytes(&mut entry, field::DESCRIPTION, &description);
            wire::push_number(&mut entry, 2, 4096);
            entry
        };
        let all: Vec<_> = ids.iter().map(segment).collect();
        write(dir, "ipcns-shm-11.img", SEGMENTS_MAGIC, &all).unwrap();
    }

    pub(crate) fn write_files(dir: &Path, inodes: &[u64]) {
        let file = |inode: &u64| {
            let mut entry = Vec::new();
            wire::push_bytes(&mut entry, 1, b"name");
            wire::push_number(&mut entry, field::NUMBER, *inode);
            wire::push_number(&mut entry, 7, 99);
            entry
        };
        let all: Vec<_> = inodes.iter().map(file).collect();
        write(dir, FILES, FILES_MAGIC, &all).unwrap();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(dir: &Path) -> Result<SharedNumbers, ImageFault> {
        SharedNumbers::read(dir, &["ipcns-shm-11.img".to_owned(), "core-1.img".to_owned()])
    }

    #[test]
    fn segments_and_files_are_listed_apart() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), SharedNumbers::default());
        testing::write_segments(dir.path(), &[0, 3]);
        testing::write_files(dir.path(), &[3, 1025]);
        let expected = SharedNumbers {
            segments: BTreeSet::from([0, 3]),
            files: BTreeSet::from([3, 1025]),
        };
        assert_eq!(read(dir.path()).unwrap(), expected);
    }

    #[test]
    fn a_list_of_another_shape_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("ipcns-shm-11.img"), "no list").unwrap();
        assert!(read(dir.path()).is_err());
        // A segment without an id, and one without a description.
        for entry in [&[10, 2, 8, 1][..], &[16, 1]] {
            let all = [entry.to_vec()];
            super::super::connections::write(dir.path(), "ipcns-shm-11.img", SEGMENTS_MAGIC, &all).unwrap();
            assert!(read(dir.path()).is_err(), "{entry:?}");
        }
    }
}
