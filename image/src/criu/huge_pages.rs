//! Huge pages of hugetlbfs: a node has a pool of each size, and CRIU's mappings fail where it is too small.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use firn_host::bounded;
use serde::{Deserialize, Serialize};

use super::ImageFault;
use super::memory::{self, Vma};

/// The pools of this node.
const POOLS: &str = "/sys/kernel/mm/hugepages";

/// Bytes of huge pages that processes have, by the size of a page in KiB.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugePages(BTreeMap<u64, u64>);

/// Memory that a pool has to give: a size of pages, and what it is counted by, for memory that several
/// mappings share.
#[derive(Debug, Default)]
struct Sum {
    private: BTreeMap<u64, u64>,
    shared: BTreeMap<(u64, String), u64>,
}

impl Sum {
    /// Adds a mapping. `shared`: by what the memory is known that it shares with others.
    fn add(&mut self, size: u64, shared: Option<String>, bytes: u64) {
        match shared {
            None => {
                let sum = self.private.entry(size).or_default();
                *sum = sum.saturating_add(bytes);
            }
            Some(memory) => {
                let most = self.shared.entry((size, memory)).or_default();
                *most = bytes.max(*most);
            }
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
        let unreadable = |error| ImageFault::unreadable("the directory", &error);
        let mut sum = Sum::default();
        for entry in fs::read_dir(dir).map_err(unreadable)? {
            let name = entry.map_err(unreadable)?.file_name();
            let pid = name
                .to_str()
                .and_then(|name| name.strip_prefix("mm-")?.strip_suffix(".img")?.parse().ok());
            let Some(pid) = pid else { continue };
            for Vma { at, huge, .. } in memory::vmas(dir, pid)? {
                if let Some(huge) = huge {
                    let shared = huge.shared.map(|memory| memory.to_string());
                    sum.add(huge.size, shared, huge.offset.saturating_add(at.end - at.start));
                }
            }
        }
        Ok(sum.total())
    }

    /// Those of running processes. Memory for which no page is reserved does not count, and nothing of a
    /// process whose mappings cannot be read.
    pub fn of_processes(pids: &[i32]) -> Self {
        let mut sum = Sum::default();
        for pid in pids.iter().filter(|pid| has_huge_pages(**pid)) {
            let (mut head, mut size) = (Head::default(), 0);
            let visit = |line: &[u8]| {
                let line = String::from_utf8_lossy(line);
                let mut words = line.split_ascii_whitespace();
                match words.next() {
                    Some("KernelPageSize:") => {
                        size = words.next().and_then(|size| size.parse().ok()).unwrap_or(0);
                    }
                    Some("VmFlags:") => {
                        let flags: Vec<&str> = words.collect();
                        if flags.contains(&"ht") && !flags.contains(&"nr") {
                            sum.add(size, head.shared.take(), head.bytes);
                        }
                    }
                    Some(word) if !word.ends_with(':') => head = Head::of(&line).unwrap_or_default(),
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

/// Whether a process has such a page in its memory.
fn has_huge_pages(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pages = status.lines().find_map(|line| line.strip_prefix("HugetlbPages:"));
    pages.is_some_and(|pages| pages.trim() != "0 kB")
}

/// The first line of a mapping in smaps.
#[derive(Debug, Default, PartialEq, Eq)]
struct Head {
    bytes: u64,
    /// Device and inode of memory that is shared.
    shared: Option<String>,
}

impl Head {
    fn of(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let hex = |digits| u64::from_str_radix(digits, 16).ok();
        let bytes = hex(end)?.checked_sub(hex(start)?)?;
        let is_shared = words.next()?.ends_with('s');
        let offset = hex(words.next()?)?;
        let file = format!("{} {}", words.next()?, words.next()?);
        Some(Self {
            bytes: if is_shared {
                offset.saturating_add(bytes)
            } else {
                bytes
            },
            shared: is_shared.then_some(file),
        })
    }
}

#[cfg(test)]
mod tests;
