//! Memory that processes share, of which CRIU numbers the files among those of processes. It is read where a
//! process has it mapped.
//!
//! CRIU names the file by a number alone: the inode of a memory file, or the id of a SysV segment, which
//! /proc shows as its inode. Files of other devices have the same numbers, and ids begin at 0 in every
//! container. Nothing is read that is not known to be the memory of that file: the mapping must be of the
//! kernel's own mount for shared memory, and of the kind that CRIU has listed under this number.

use std::collections::BTreeSet;
use std::io;
use std::ops::{ControlFlow, Range};
use std::path::Path;

use firn_host::{FileId, proc_maps};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::pages::{BLOCK, Block, pages};
use super::progress::Counter;
use super::rest::is_discarded;
use super::{Kept, MemoryError, Process};
use crate::criu::memory::{Pagemap, Run};
use crate::criu::shared_memory::SharedNumbers;

/// How /proc begins the names of SysV segments, and of other memory that is shared without a file of a file
/// system: memory files, shared anonymous memory, and both in huge pages.
const SEGMENT: &[u8] = b"/SYSV";
const WITHOUT_FILE: [&[u8]; 4] = [SEGMENT, b"/memfd:", b"/dev/zero", b"/anon_hugepage"];

/// Where a process has shared memory mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SharedMapping {
    pid: i32,
    at: Range<u64>,
    /// Where in the shared memory the mapping begins.
    offset: u64,
}

/// Which shared memory it is. A SysV segment and a memory file of the kernel's mount may have one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Memory {
    file: FileId,
    is_segment: bool,
}

/// Writes the pages files of shared memory in `dir`, which has files of these names.
pub(super) fn write(
    dir: &Path,
    names: &[String],
    processes: &[Process],
    kept: &mut Kept,
    counter: &Counter,
) -> Result<(), MemoryError> {
    let listed = SharedNumbers::read(dir, names)?;
    let mount = kernels_mount().map_err(|source| MemoryError::Mount { source })?;
    for name in names {
        let number = name
            .strip_prefix("pagemap-shmem-")
            .and_then(|name| name.strip_suffix(".img"));
        let Some(number) = number.and_then(|number| number.parse().ok()) else {
            continue;
        };
        let Some(mut map) = Pagemap::read_named(dir, name)? else {
            continue;
        };
        if !is_discarded(&dir.join(map.pages_name())) {
            continue;
        }
        // What is mapped nowhere stays a link, and is found as such.
        let seen = seen(Path::new("/proc"), number, mount, processes)?;
        if let Some(blocks) = blocks(&map.runs, &places(number, mount, &listed, seen)?) {
            map.runs = pages(dir, &map.pages_name(), &blocks, kept, counter)?;
            map.write(dir, name)?;
        }
    }
    Ok(())
}

/// A file of the mount in which the kernel keeps memory files, shared anonymous memory and SysV segments.
fn kernels_mount() -> io::Result<FileId> {
    let file = std::fs::File::from(memfd_create(c"firn", MFdFlags::MFD_CLOEXEC)?);
    Ok(FileId::of(&file.metadata()?))
}

/// Where these processes have memory mapped that CRIU may mean by this number, and which memory it is.
fn seen(
    proc_root: &Path,
    number: u64,
    mount: FileId,
    processes: &[Process],
) -> Result<Vec<(Memory, SharedMapping)>, MemoryError> {
    let mut seen = Vec::new();
    for &Process { pid, .. } in processes {
        let read = proc_maps::each(proc_root, pid, |mapping| {
            let has_number = mapping.file == mapping.file.on_same_device(number);
            // Huge pages are of other mounts.
            let is_shared_memory = mapping.file == mount.on_same_device(number)
                || WITHOUT_FILE.iter().any(|name| mapping.path.starts_with(name));
            if has_number && is_shared_memory && mapping.perms.ends_with(b"s") {
                let memory = Memory {
                    file: mapping.file,
                    is_segment: mapping.path.starts_with(SEGMENT),
                };
                let place = SharedMapping {
                    pid,
                    at: mapping.start..mapping.end,
                    offset: mapping.offset,
                };
                seen.push((memory, place));
            }
            ControlFlow::Continue(())
        });
        read.map_err(|source| MemoryError::Mappings { pid, source })?;
    }
    Ok(seen)
}

/// Of what was seen, the places of the memory that CRIU has dumped under this number; none if it is mapped
/// nowhere.
///
/// # Errors
/// If CRIU has written two memories into one file.
fn places(
    number: u64,
    mount: FileId,
    listed: &SharedNumbers,
    seen: Vec<(Memory, SharedMapping)>,
) -> Result<Vec<SharedMapping>, MemoryError> {
    let is_segment = listed.segments.contains(&number);
    let memories: BTreeSet<Memory> = seen.iter().map(|(memory, _)| *memory).collect();
    let is_file_too = listed.files.contains(&number) || memories.iter().any(|memory| !memory.is_segment);
    if memories.len() > 1 || is_segment && is_file_too {
        return Err(MemoryError::SameNumber { number });
    }
    let expected = Memory {
        file: mount.on_same_device(number),
        is_segment,
    };
    let of_it = seen.into_iter().filter(|(memory, _)| *memory == expected);
    Ok(of_it.map(|(_, place)| place).collect())
}

/// The runs, of which addresses are offsets, in parts that one of the processes has mapped; none if no
/// process has one of them.
fn blocks(runs: &[Run], places: &[SharedMapping]) -> Option<Vec<Block>> {
    let mut blocks = Vec::new();
    for run in runs {
        let mut at = run.at.start;
        while at < run.at.end {
            let (pid, address, left) = places.iter().find_map(|place| {
                let address = place.at.start.checked_add(at.checked_sub(place.offset)?)?;
                (address < place.at.end).then(|| (place.pid, address, place.at.end - address))
            })?;
            let end = run.at.end.min(at + left.min(BLOCK));
            blocks.push(Block {
                run: run.part(at..end),
                pid,
                address,
                is_anonymous: false,
            });
            at = end;
        }
    }
    Some(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::criu::memory::PAGE;
    use crate::criu::memory::testing::write_pagemap;

    #[test]
    fn shared_memory_is_read_where_it_is_mapped() {
        let dir = tempfile::tempdir().unwrap();
        let all = 0..4 * PAGE;
        write_pagemap(dir.path(), 7, 1, &all);
        let runs = Pagemap::read(dir.path(), 7).unwrap().unwrap().runs;
        let place = |pid, start, pages, offset| SharedMapping {
            pid,
            at: start..start + pages * PAGE,
            offset: offset * PAGE,
        };
        let (first, second) = (place(1, 0x10_0000, 2, 0), place(2, 0x20_0000, 3, 1));
        let found = |places: &[SharedMapping]| {
            let blocks = blocks(&runs, places)?;
            let seen = |block: Block| (block.run.at.start / PAGE, block.pid, block.address);
            Some(blocks.into_iter().map(seen).collect::<Vec<_>>())
        };
        assert_eq!(found(&[]), None);
        assert_eq!(
            found(std::slice::from_ref(&first)),
            None,
            "a part is mapped nowhere"
        );
        assert_eq!(
            found(&[first, second]),
            Some(vec![(0, 1, 0x10_0000), (2, 2, 0x20_0000 + PAGE)])
        );
    }

    #[test]
    fn shared_memory_is_read_in_blocks_that_follow_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let all = PAGE..BLOCK * 2 + 2 * PAGE;
        write_pagemap(dir.path(), 7, 1, &all);
        let runs = Pagemap::read(dir.path(), 7).unwrap().unwrap().runs;
        let place = |bytes| {
            [SharedMapping {
                pid: 1,
                at: 0x10_0000..0x10_0000 + bytes,
                offset: 0,
            }]
        };
        let read = blocks(&runs, &place(all.end)).unwrap();
        let parts: Vec<_> = read.iter().map(|block| block.run.at.clone()).collect();
        let (second, third) = (PAGE + BLOCK, PAGE + 2 * BLOCK);
        assert_eq!(parts, [PAGE..second, second..third, third..all.end]);
        let addresses: Vec<_> = read.iter().map(|block| block.address - 0x10_0000).collect();
        assert_eq!(addresses, [PAGE, second, third]);
        // It ends where the memory would continue.
        assert!(blocks(&runs, &place(third)).is_none());
    }

    const MAPS: &str = "\
        1000-3000 rw-s 00001000 00:01 3      /memfd:three (deleted)\n\
        3000-4000 rw-s 00000000 00:01 4      /dev/zero (deleted)\n\
        4000-5000 rw-p 00000000 00:01 4      /memfd:four (deleted)\n\
        5000-6000 rw-s 00000000 00:2a 3      /dev/shm/three\n\
        6000-7000 rw-s 00000000 00:01 5      /SYSV00000000 (deleted)\n\
        7000-8000 rw-s 00000000 00:2a 5      /dev/shm/five\n\
        8000-9000 rw-s 00000000 00:0f 6      /anon_hugepage (deleted)\n\
        9000-a000 rw-s 00000000 00:01 7      /drm mm object (deleted)\n";

    /// What is seen of a number, as kind and address, and where CRIU's memory is; none for an error.
    fn found(number: u64, segments: &[u64], files: &[u64]) -> (Vec<(bool, u64)>, Option<Vec<u64>>) {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("7")).unwrap();
        std::fs::write(root.path().join("7/maps"), MAPS).unwrap();
        let mount = FileId::new(1, 99);
        let both = [7, 8].map(|pid| Process { pid, inside: 1 });
        let seen = seen(root.path(), number, mount, &both).unwrap();
        let shown = seen
            .iter()
            .map(|(memory, place)| (memory.is_segment, place.at.start));
        let shown = shown.collect();
        let listed = SharedNumbers {
            segments: segments.iter().copied().collect(),
            files: files.iter().copied().collect(),
        };
        let places = places(number, mount, &listed, seen).ok();
        (
            shown,
            places.map(|places| places.iter().map(|place| place.at.start).collect()),
        )
    }

    #[test]
    fn a_number_names_memory_of_the_kernels_mount_and_of_the_listed_kind() {
        let memory = |at| vec![(false, at)];
        assert_eq!(found(3, &[], &[3]), (memory(0x1000), Some(vec![0x1000])));
        assert_eq!(found(4, &[], &[]), (memory(0x3000), Some(vec![0x3000])));
        assert_eq!(found(7, &[], &[7]), (memory(0x9000), Some(vec![0x9000])));
        // The file of /dev/shm has the number of the segment.
        assert_eq!(found(5, &[5], &[]), (vec![(true, 0x6000)], Some(vec![0x6000])));
        assert_eq!(
            found(5, &[], &[]),
            (vec![(true, 0x6000)], Some(vec![])),
            "no segment"
        );
        assert_eq!(found(6, &[], &[6]), (memory(0x8000), Some(vec![])), "huge pages");
        assert_eq!(found(8, &[8], &[]), (vec![], Some(vec![])), "mapped nowhere");
    }

    #[test]
    fn two_memories_of_one_number_are_an_error() {
        assert_eq!(found(3, &[3], &[]).1, None, "a segment that is attached nowhere");
        assert_eq!(
            found(5, &[5], &[5]).1,
            None,
            "a memory file that is mapped nowhere"
        );
        assert_eq!(found(6, &[6], &[]).1, None, "huge pages");
        let place = |start| SharedMapping {
            pid: 7,
            at: start..start + PAGE,
            offset: 0,
        };
        let memory = |device, is_segment| Memory {
            file: FileId::new(device, 3),
            is_segment,
        };
        let both = vec![(memory(1, false), place(0)), (memory(15, false), place(PAGE))];
        let (mount, listed) = (FileId::new(1, 99), SharedNumbers::default());
        assert!(matches!(
            places(3, mount, &listed, both.clone()),
            Err(MemoryError::SameNumber { number: 3 })
        ));
        assert_eq!(places(3, mount, &listed, both[..1].to_vec()).unwrap(), [place(0)]);
    }
}
