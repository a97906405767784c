//! CRIU's pages files, made from the memory of the processes: CRIU itself has written them to /dev/null.
//!
//! Pages of private anonymous memory that are zero are left out: in the restored task they are zero.

use std::io;
use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::pages::{BLOCK, Block, pages, replace};
use super::progress::Counter;
use super::shared;
use super::{Bulk, MemoryError, Process};
use crate::checksums::ImageFile;
use crate::criu::memory::{Pagemap, Run, Vma, advise_huge_pages, vmas};
use firn_store::UntrustedDir;

/// What is in the pages files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Bytes in them.
    pub bytes: u64,
    /// Bytes that were zero and left out.
    pub zero: u64,
    /// The files, with checksums that were made while they were written.
    pub files: Vec<ImageFile>,
}

/// Writes the pages files of these processes that are links to /dev/null, without what the store has. `dir`
/// is the image directory, to which nobody else writes.
pub fn rest(
    dir: &Path,
    processes: &[Process],
    bulk: &[Bulk],
    counter: &Counter,
) -> Result<Kept, MemoryError> {
    let mut kept = Kept::default();
    for process in processes {
        let Some(mut map) = Pagemap::read(dir, process.inside)? else {
            continue;
        };
        if !is_discarded(&dir.join(map.pages_name())) {
            continue;
        }
        let in_store: Vec<Range<u64>> = bulk
            .iter()
            .filter(|bulk| bulk.process == *process)
            .map(|bulk| bulk.at.clone())
            .collect();
        let vmas = vmas(dir, process.inside)?;
        let blocks = blocks(&map.runs, &in_store, &vmas, process.pid);
        map.runs = pages(dir, &map.pages_name(), &blocks, &mut kept, counter)?;
        map.write(dir, &Pagemap::name(process.inside))?;
        if !in_store.is_empty() {
            advise_huge_pages(dir, process.inside, &in_store)?;
        }
    }
    let listed = UntrustedDir::open(dir).and_then(|dir| dir.names());
    let names = listed.map_err(|source| MemoryError::Pages {
        file: "the directory".to_owned(),
        source,
    })?;
    shared::write(dir, &names, processes, &mut kept, counter)?;
    expect_no_discarded(dir, &names)?;
    Ok(kept)
}

/// Makes empty files of pages files that are links: CRIU writes them in another dump.
pub fn empty_discarded_pages(dir: &Path) -> io::Result<()> {
    for name in UntrustedDir::open(dir)?.names()? {
        if name.starts_with("pages-") && is_discarded(&dir.join(&name)) {
            replace(dir, &name)?;
        }
    }
    Ok(())
}

/// Whether CRIU's pages went nowhere.
pub(super) fn is_discarded(path: &Path) -> bool {
    path.is_symlink()
}

/// A pages file that is still a link becomes an empty one if CRIU has not used it; memory that CRIU has put
/// there is lost.
fn expect_no_discarded(dir: &Path, names: &[String]) -> Result<(), MemoryError> {
    let is_left = |name: &&String| name.starts_with("pages-") && is_discarded(&dir.join(name));
    let left: Vec<&String> = names.iter().filter(is_left).collect();
    if left.is_empty() {
        return Ok(());
    }
    for map in names.iter().filter(|name| name.starts_with("pagemap-")) {
        let used = Pagemap::read_named(dir, map)?.map(|map| map.pages_name());
        if let Some(pages) = used.filter(|used| left.contains(&used)) {
            return Err(MemoryError::Unexpected {
                file: map.clone(),
                pages,
            });
        }
    }
    for name in left {
        // Not removed: firn sees by a missing file that another program clears the image.
        replace(dir, name).map_err(|source| MemoryError::Pages {
            file: name.clone(),
            source,
        })?;
    }
    Ok(())
}

/// The runs without what the store has, in parts that a thread reads at once.
fn blocks(runs: &[Run], in_store: &[Range<u64>], vmas: &[Vma], pid: i32) -> Vec<Block> {
    // Where one of the ranges or mappings begins or ends.
    let mut bounds: Vec<u64> = in_store
        .iter()
        .chain(vmas.iter().map(|vma| &vma.at))
        .flat_map(|at| [at.start, at.end])
        .collect();
    bounds.sort_unstable();
    let mut blocks = Vec::new();
    for run in runs {
        let mut at = run.at.start;
        while at < run.at.end {
            let bound = bounds[bounds.partition_point(|bound| *bound <= at)..].first();
            let end = run
                .at
                .end
                .min(at.saturating_add(BLOCK))
                .min(bound.copied().unwrap_or(u64::MAX));
            if !in_store.iter().any(|range| range.contains(&at)) {
                let vma = vmas.get(vmas.partition_point(|vma| vma.at.end <= at));
                let is_anonymous = vma.is_some_and(|vma| vma.at.contains(&at) && vma.is_anonymous);
                blocks.push(Block {
                    run: run.part(at..end),
                    pid,
                    address: at,
                    is_anonymous,
                });
            }
            at = end;
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::criu::memory::PAGE;
    use crate::criu::memory::testing::{write_mm, write_pagemap};

    const INSIDE: i32 = 7;

    /// Memory of this process at the bounds of pages: a page of ones, a zero page, a page of twos, a zero
    /// page.
    struct Memory(Vec<u8>);

    impl Memory {
        fn new() -> Self {
            let mut bytes = vec![0_u8; 5 * 4096];
            let begin = usize::try_from(Self::aligned(&bytes)).unwrap() - bytes.as_ptr().addr();
            bytes[begin..][..4096].fill(1);
            bytes[begin + 2 * 4096..][..4096].fill(2);
            Self(bytes)
        }

        fn aligned(bytes: &[u8]) -> u64 {
            (bytes.as_ptr().addr() as u64).next_multiple_of(PAGE)
        }

        fn at(&self) -> u64 {
            Self::aligned(&self.0)
        }
    }

    fn me() -> Process {
        Process {
            pid: std::process::id().cast_signed(),
            inside: INSIDE,
        }
    }

    /// The pages file, the runs that are in it, and what `rest` returned.
    fn rest_of(
        memory: &Memory,
        is_anonymous: bool,
        bulk: Option<Range<u64>>,
    ) -> (Vec<u8>, Vec<Range<u64>>, Kept) {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let all = memory.at()..memory.at() + 4 * PAGE;
        write_mm(dir, INSIDE, &[(all.clone(), is_anonymous)]);
        write_pagemap(dir, INSIDE, 1, &all);
        for number in [1, 2] {
            std::os::unix::fs::symlink("/dev/null", dir.join(format!("pages-{number}.img"))).unwrap();
        }
        let bulk: Vec<Bulk> = bulk.into_iter().map(|at| Bulk { process: me(), at }).collect();
        let kept = rest(dir, &[me()], &bulk, &Counter::default()).unwrap();
        assert!(!dir.join("pages-2.img").is_symlink(), "an unused link is left");
        let map = Pagemap::read(dir, INSIDE).unwrap().unwrap();
        let pages = std::fs::read(dir.join("pages-1.img")).unwrap();
        (pages, map.runs.into_iter().map(|run| run.at).collect(), kept)
    }

    #[test]
    fn zero_pages_of_anonymous_memory_are_left_out() {
        let memory = Memory::new();
        let at = memory.at();
        let (pages, runs, kept) = rest_of(&memory, true, None);
        assert_eq!(pages, [[1_u8; 4096], [2; 4096]].concat());
        assert_eq!(runs, [at..at + PAGE, at + 2 * PAGE..at + 3 * PAGE]);
        assert_eq!((kept.bytes, kept.zero), (2 * PAGE, 2 * PAGE));
        let sum = firn_store::block_hash::sha256(&pages);
        assert_eq!(kept.files[0].name, "pages-1.img");
        assert_eq!(
            (kept.files[0].size, &kept.files[0].sha256),
            (2 * PAGE, &Some(sum))
        );
        let (pages, runs, kept) = rest_of(&memory, false, None);
        assert_eq!(pages, [[1_u8; 4096], [0; 4096], [2; 4096], [0; 4096]].concat());
        assert_eq!(runs, vec![at..at + 4 * PAGE], "a file may be behind it");
        assert_eq!(kept.zero, 0);
    }

    #[test]
    fn what_the_store_has_is_left_out() {
        let memory = Memory::new();
        let at = memory.at();
        let (pages, runs, _) = rest_of(&memory, true, Some(at..at + 2 * PAGE));
        assert_eq!(pages, [2; 4096]);
        assert_eq!(runs, vec![at + 2 * PAGE..at + 3 * PAGE]);
    }

    #[test]
    fn memory_that_went_nowhere_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        write_pagemap(dir.path(), 9, 1, &(0x1000..0x2000));
        std::os::unix::fs::symlink("/dev/null", dir.path().join("pages-1.img")).unwrap();
        let lost = rest(dir.path(), &[me()], &[], &Counter::default());
        assert!(matches!(lost, Err(MemoryError::Unexpected { .. })), "{lost:?}");
    }

    #[test]
    fn a_pages_file_that_criu_has_written_stays() {
        let dir = tempfile::tempdir().unwrap();
        write_pagemap(dir.path(), INSIDE, 1, &(0x1000..0x2000));
        std::fs::write(dir.path().join("pages-1.img"), "as it was").unwrap();
        assert_eq!(
            rest(dir.path(), &[me()], &[], &Counter::default()).unwrap(),
            Kept::default()
        );
        assert_eq!(
            std::fs::read(dir.path().join("pages-1.img")).unwrap(),
            b"as it was"
        );
    }
}
