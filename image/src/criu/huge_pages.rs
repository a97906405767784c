//! Huge pages of hugetlbfs: a node has a pool of each size, and CRIU's mappings fail where it is too small.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use firn_host::{bounded, proc_maps};
use serde::{Deserialize, Serialize};

use super::files::{MAGIC as OPEN_FILES_MAGIC, NAME as OPEN_FILES};
use super::shared_memory::{FILES, FILES_MAGIC};
use super::tasks::{PSTREE, PSTREE_MAGIC};
use super::{Image, ImageFault, MAX_BYTES, memory};

/// The pools of this node.
const POOLS: &str = "/sys/kernel/mm/hugepages";

/// How many bytes of lists of mappings are read. Memory in others does not count.
const MOST_BYTES: u64 = MAX_BYTES;

/// How many pieces of shared memory are counted.
const MOST_SHARED: usize = 100_000;

/// Bytes of memory in huge pages that processes have at least, by the size of a page in KiB. Files of
/// hugetlbfs and segments of System V do not count.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugePages(BTreeMap<u64, u64>);

/// Two numbers of memory that several mappings share.
type Shared = (u64, u64);

#[derive(Debug, Default)]
struct Sum {
    private: BTreeMap<u64, u64>,
    shared: BTreeMap<(u64, Shared), u64>,
}

impl Sum {
    /// Adds a mapping of pages of this size.
    fn add(&mut self, size: u64, shared: Option<Shared>, bytes: u64) {
        match shared {
            None => {
                let sum = self.private.entry(size).or_default();
                *sum = sum.saturating_add(bytes);
            }
            Some(memory) if self.shared.len() < MOST_SHARED => {
                let most = self.shared.entry((size, memory)).or_default();
                *most = bytes.max(*most);
            }
            Some(_) => {}
        }
    }

    fn total(self) -> HugePages {
        let mut all = self.private;
        for ((size, _), bytes) in self.shared {
            let sum = all.entry(size).or_default();
            *sum = sum.saturating_add(bytes);
        }
        HugePages(all)
    }
}

impl HugePages {
    /// Those of an image, for which CRIU makes mappings. Memory that is forked counts for each process: CRIU
    /// maps it once for each.
    ///
    /// # Errors
    /// If a list of mappings is not as CRIU writes it.
    pub fn of_image(dir: &Path) -> Result<Self, ImageFault> {
        let (image, mut sum, mut left) = (Image::open(dir)?, Sum::default(), MOST_BYTES);
        // Files of an earlier dump may be there, too.
        let pids = image.read(PSTREE, PSTREE_MAGIC, |process| process.required(1))?;
        for pid in pids.into_iter().flatten().collect::<BTreeSet<u32>>() {
            let list = memory::huge(dir, i32::try_from(pid).unwrap_or_default(), left)?;
            left = left.saturating_sub(list.length);
            for huge in list.mappings {
                sum.add(huge.size, None, huge.bytes);
            }
        }
        // CRIU takes shared memory in huge pages for files of it, also where it has no name.
        let open = image.read(OPEN_FILES, OPEN_FILES_MAGIC, |file| {
            let memory = file.message(20)?;
            memory.map(|memory| memory.required(5)).transpose()
        })?;
        let open: BTreeSet<u32> = open.into_iter().flatten().flatten().collect();
        let files = image.read(FILES, FILES_MAGIC, |file| {
            let flags = file.number(8)?.unwrap_or(0);
            Ok((
                memory::huge_page(flags),
                file.required_long(4)?,
                file.required(7)?,
            ))
        })?;
        let is_open = |file: &(Option<u64>, u64, u32)| open.contains(&file.2);
        let files = files.into_iter().flatten().filter(is_open);
        for (size, bytes, inode) in files {
            if let Some(size) = size {
                sum.add(size, Some((0, inode.into())), bytes);
            }
        }
        Ok(sum.total())
    }

    /// Those of running processes. Nothing counts of a process whose mappings cannot be read.
    pub fn of_processes(pids: &[i32]) -> Self {
        let mut sum = Sum::default();
        for &pid in pids.iter().filter(|pid| has_huge_pages(**pid)) {
            let (mut head, mut size) = (None, 0);
            let visit = |line: &[u8]| {
                let line = String::from_utf8_lossy(line);
                let mut words = line.split_ascii_whitespace();
                match words.next() {
                    Some("KernelPageSize:") => {
                        size = words.next().and_then(|size| size.parse().ok()).unwrap_or(0);
                    }
                    Some("VmFlags:") => {
                        let flags: Vec<&str> = words.collect();
                        let counts = |head: &Head| head.shared.is_some() || !flags.contains(&"nr");
                        if let Some(head) = head.take().filter(counts)
                            && flags.contains(&"ht")
                        {
                            sum.add(size, head.shared, head.bytes);
                        }
                    }
                    Some(word) if !word.ends_with(':') => head = Head::of(&line),
                    _ => {}
                }
                ControlFlow::Continue(())
            };
            let smaps = format!("/proc/{pid}/smaps");
            let _read = bounded::each(Path::new(&smaps), b'\n', bounded::LINES, visit);
        }
        sum.total()
    }

    /// Looks whether this node has them.
    ///
    /// # Errors
    /// If a pool has too few pages.
    pub fn expect(&self) -> Result<(), ImageFault> {
        self.expect_in(Path::new(POOLS))
    }

    fn expect_in(&self, pools: &Path) -> Result<(), ImageFault> {
        for (&size, &bytes) in &self.0 {
            let needed = (bytes >> 10).div_ceil(size.max(1));
            let free = free(&pools.join(format!("hugepages-{size}kB")));
            if free < needed {
                return Err(ImageFault::HugePages { size, needed, free });
            }
        }
        Ok(())
    }
}

/// Pages of a pool that a new mapping can have; none of a pool that the kernel has not.
fn free(pool: &Path) -> u64 {
    let number = |name| -> u64 {
        let read = fs::read_to_string(pool.join(name)).ok();
        read.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    };
    let in_pool = number("free_hugepages").saturating_sub(number("resv_hugepages"));
    let beyond = number("nr_overcommit_hugepages").saturating_sub(number("surplus_hugepages"));
    in_pool.saturating_add(beyond)
}

/// How the kernel names anonymous memory in huge pages, and files of it.
const NAMES: [&[u8]; 2] = [b"/anon_hugepage", b"/memfd:"];

fn is_memory(name: &[u8]) -> bool {
    NAMES.iter().any(|known| name.starts_with(known))
}

/// Whether a process may have some.
fn has_huge_pages(pid: i32) -> bool {
    let mut found = false;
    let read = proc_maps::each(Path::new("/proc"), pid, |mapping| {
        found = is_memory(mapping.path);
        if found {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    read.is_ok() && found
}

/// The first line of a mapping of memory, in smaps.
#[derive(Debug, PartialEq, Eq)]
struct Head {
    bytes: u64,
    /// Device and inode of memory that is shared.
    shared: Option<Shared>,
}

impl Head {
    fn of(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let hex = |digits| u64::from_str_radix(digits, 16).ok();
        let (start, end) = words.next()?.split_once('-')?;
        let bytes = hex(end)?.checked_sub(hex(start)?)?;
        let is_shared = words.next()?.ends_with('s');
        let offset = hex(words.next()?)?;
        let (major, minor) = words.next()?.split_once(':')?;
        let device = hex(major)? << 32 | hex(minor)?;
        let inode = words.next()?.parse().ok()?;
        words.next().filter(|name| is_memory(name.as_bytes()))?;
        Some(Self {
            bytes: if is_shared {
                offset.saturating_add(bytes)
            } else {
                bytes
            },
            shared: is_shared.then_some((device, inode)),
        })
    }
}

#[cfg(test)]
mod tests;
