//! Which memory of a process the store gets: large private anonymous mappings that it shares with nobody. The
//! driver puts GPU state into such mappings; a program's own large arrays are in others.
//!
//! Anything odd stays with CRIU: mappings with a policy that a copy has to repeat (locked, guarded, not
//! inherited, watched by userfaultfd), stacks, what is mostly untouched, and pages that parent and child
//! still share.

use std::io;
use std::ops::{ControlFlow, Range};
use std::path::PathBuf;

use firn_host::bounded;

use super::{Bulk, MemoryError, Process};

/// Smaller mappings are not worth an extent of their own.
pub(super) const SMALLEST: u64 = 16 << 20;

/// What `VmFlags` may list: readable, writable, executable by policy, accounted, advice about huge pages and
/// core files.
const FLAGS: [&str; 11] = ["rd", "wr", "mr", "mw", "me", "ac", "sd", "nr", "hg", "nh", "dd"];

/// The memory of these processes that the store gets.
pub fn find(processes: &[Process]) -> Result<Vec<Bulk>, MemoryError> {
    let mut found = Vec::new();
    for &process in processes {
        let ranges = of(process.pid).map_err(|source| MemoryError::Mappings {
            pid: process.pid,
            source,
        })?;
        found.extend(ranges.into_iter().map(|at| Bulk { process, at }));
    }
    Ok(found)
}

fn of(pid: i32) -> io::Result<Vec<Range<u64>>> {
    let path = PathBuf::from(format!("/proc/{pid}/smaps"));
    let (mut found, mut current) = (Vec::new(), None::<Mapping>);
    bounded::each(&path, b'\n', bounded::LINES, |line| {
        let line = String::from_utf8_lossy(line);
        match Mapping::begin(&line) {
            Some(next) => current = Some(next),
            None => {
                if let Some(mapping) = &mut current {
                    mapping.add(&line);
                }
            }
        }
        // The last line of a mapping.
        if line.starts_with("VmFlags:")
            && let Some(mapping) = current.take().filter(Mapping::is_bulk)
        {
            found.push(mapping.at);
        }
        ControlFlow::Continue(())
    })?;
    Ok(found)
}

/// A mapping in /proc/PID/smaps. Sizes are in KiB.
#[derive(Debug, Default)]
struct Mapping {
    at: Range<u64>,
    is_private_anonymous: bool,
    resident: u64,
    swapped: u64,
    shared: u64,
    flags: Vec<String>,
}

impl Mapping {
    /// `7f5a40000000-7f5a80000000 rw-p 00000000 00:00 0   [anon: name]`
    fn begin(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let hex = |digits| u64::from_str_radix(digits, 16).ok();
        let (perms, _offset, _device, inode) = (words.next()?, words.next()?, words.next()?, words.next()?);
        let name = words.next().unwrap_or_default();
        let is_anonymous = inode == "0" && (name.is_empty() || name == "[heap]" || name.starts_with("[anon"));
        Some(Self {
            at: hex(start)?..hex(end)?,
            is_private_anonymous: perms == "rw-p" && is_anonymous,
            ..Self::default()
        })
    }

    fn add(&mut self, line: &str) {
        let Some((name, value)) = line.split_once(':') else {
            return;
        };
        let size = || value.trim().trim_end_matches(" kB").parse().unwrap_or(u64::MAX);
        match name {
            "Rss" => self.resident = size(),
            "Swap" => self.swapped = size(),
            "Shared_Clean" | "Shared_Dirty" | "Shared_Hugetlb" | "Private_Hugetlb" => {
                self.shared = self.shared.saturating_add(size());
            }
            "VmFlags" => self.flags = value.split_ascii_whitespace().map(str::to_owned).collect(),
            _ => {}
        }
    }

    fn is_bulk(&self) -> bool {
        let size = self.at.end.saturating_sub(self.at.start);
        let has_content = self.resident.saturating_add(self.swapped).saturating_mul(2) >= size >> 10;
        let is_plain = self.flags.iter().all(|flag| FLAGS.contains(&flag.as_str()));
        self.is_private_anonymous && size >= SMALLEST && has_content && self.shared == 0 && is_plain
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: &str = "7f0000000000-7f0002000000 rw-p 00000000 00:00 0 ";

    fn is_bulk(head: &str, lines: &[&str]) -> bool {
        let mut mapping = Mapping::begin(head).unwrap();
        lines.iter().for_each(|line| mapping.add(line));
        mapping.is_bulk()
    }

    #[test]
    fn large_private_memory_is_bulk_and_anything_odd_is_not() {
        let full = [
            "Rss:               32768 kB",
            "Shared_Clean:          0 kB",
            "VmFlags: rd wr mr mw me ac sd",
        ];
        let with = |line| [&full[..], &[line]].concat();
        assert!(is_bulk(LARGE, &full));
        assert!(is_bulk(&format!("{LARGE} [anon: cuda]"), &full));
        assert!(!is_bulk(LARGE, &with("Rss: 1024 kB")), "mostly untouched");
        assert!(is_bulk(
            LARGE,
            &[&with("Rss: 1024 kB")[..], &["Swap: 20000 kB"]].concat()
        ));
        for odd in [
            "Shared_Dirty: 4 kB",
            "Shared_Dirty: lots",
            "VmFlags: rd wr lo",
            "VmFlags: rd wr gd",
            "VmFlags: rd wr um",
        ] {
            assert!(!is_bulk(LARGE, &with(odd)), "{odd}");
        }
        for head in [
            "7f0000000000-7f0000ff0000 rw-p 00000000 00:00 0 ",
            "7f0000000000-7f0002000000 r--p 00000000 00:00 0 ",
            "7f0000000000-7f0002000000 rw-s 00000000 00:01 9 /dev/zero (deleted)",
            "7f0000000000-7f0002000000 rw-p 00000000 fe:00 77 /lib/x.so",
            "7f0000000000-7f0002000000 rw-p 00000000 00:00 0 [stack]",
        ] {
            assert!(!is_bulk(head, &full), "{head}");
        }
    }

    #[test]
    fn a_large_array_of_this_process_is_found() {
        let array = vec![7_u8; 40 << 20];
        let at = std::hint::black_box(&array).as_ptr().addr() as u64;
        let pid = std::process::id().cast_signed();
        let found = find(&[Process { pid, inside: 1 }]).unwrap();
        assert!(
            found
                .iter()
                .any(|bulk| bulk.at.contains(&at) && bulk.process.inside == 1),
            "{found:?}"
        );
        assert!(
            find(&[Process {
                pid: i32::MAX,
                inside: 1
            }])
            .is_err()
        );
    }
}
