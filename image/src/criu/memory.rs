//! Memory in CRIU's files: which pages of a task an image has, and where its mappings lie.
//!
//! `pagemap-PID.img` names runs of pages; their content follows in the same order in `pages-ID.img`. A page
//! of a private anonymous mapping that no run has is zero in the restored task.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use super::connections::write;
use super::wire::{self, Message, WireError};
use super::{ImageFault, each_message, messages};
use firn_host::bounded::read_at_most;
use firn_store::UntrustedDir;

const PAGEMAP_MAGIC: u32 = 0x5608_4025;
const MM_MAGIC: u32 = 0x5749_2820;

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// Largest file that is read: a run for every second page of 100 GiB.
const MAX_BYTES: u64 = 1 << 30;

/// Most bytes of a pagemap's head, and of each of its entries: they have a few numbers.
const HEAD: u64 = 4096;
const ENTRY: u64 = 64;

/// Largest list of mappings: some two million of them.
const MAX_MM: u64 = 128 << 20;

/// The content is in the pages file.
const PRESENT: u32 = 1 << 2;
/// The content is in the image of an earlier dump.
const PARENT: u32 = 1;

/// The bit of `MADV_HUGEPAGE` in the advice of a mapping.
const HUGE_PAGES: u64 = 1 << 14;

/// `VMA_ANON_PRIVATE`.
const ANON_PRIVATE: u32 = 1 << 9;

/// Fields of `pagemap_entry`. Before CRIU 4.2 there is no long count.
mod entry {
    pub(super) const ADDRESS: u32 = 1;
    pub(super) const COUNT: u32 = 2;
    pub(super) const IN_PARENT: u32 = 3;
    pub(super) const FLAGS: u32 = 4;
    pub(super) const LONG_COUNT: u32 = 5;
}

/// What the status of memory may be that is plain: an ordinary mapping, the heap.
const PLAIN_STATUS: u32 = ANON_PRIVATE | 1 | 1 << 5;
/// `PROT_READ | PROT_WRITE`.
const READ_WRITE: u32 = 3;
/// `MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE`.
const PLAIN_FLAGS: u32 = 0x4022;
/// Advice about huge pages (for and against them) and core files.
const PLAIN_ADVICE: u64 = HUGE_PAGES | 1 << 15 | 1 << 16;

/// Fields of `vma_entry`.
mod vma {
    pub(super) const START: u32 = 1;
    pub(super) const END: u32 = 2;
    pub(super) const PROTECTION: u32 = 5;
    pub(super) const FLAGS: u32 = 6;
    pub(super) const STATUS: u32 = 7;
    pub(super) const ADVICE: u32 = 9;
}

/// Field of `mm_entry` with its mappings.
const VMAS: u32 = 14;

/// Pages side by side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Addresses in the task.
    pub at: Range<u64>,
    /// CRIU's flags.
    flags: u32,
}

impl Run {
    /// Pages whose content is in the pages file.
    pub fn present(at: Range<u64>) -> Self {
        Self { at, flags: PRESENT }
    }

    /// A part of it.
    pub fn part(&self, at: Range<u64>) -> Self {
        Self {
            at,
            flags: self.flags,
        }
    }

    /// Whether `next` continues where this one ends.
    pub fn joins(&self, next: &Self) -> bool {
        self.at.end == next.at.start && self.flags == next.flags
    }
}

/// What `pagemap-PID.img` holds.
#[derive(Debug)]
pub struct Pagemap {
    /// Number of the pages file.
    pub pages_id: u32,
    /// In the order of the pages file, which is that of their addresses.
    pub runs: Vec<Run>,
    /// Whether this CRIU writes counts of 64 bits.
    long_counts: bool,
}

impl Pagemap {
    /// Name of the file of the task with this pid in the container.
    pub fn name(pid: i32) -> String {
        format!("pagemap-{pid}.img")
    }

    /// Name of the file with the content.
    pub fn pages_name(&self) -> String {
        Self::pages_of(self.pages_id)
    }

    fn pages_of(id: u32) -> String {
        format!("pages-{id}.img")
    }

    /// Reads the runs of a task; none if CRIU has written none.
    pub fn read(dir: &Path, pid: i32) -> Result<Option<Self>, ImageFault> {
        Self::read_named(dir, &Self::name(pid))
    }

    /// The same for a file of this name, which may be that of shared memory.
    pub fn read_named(dir: &Path, name: &str) -> Result<Option<Self>, ImageFault> {
        let bytes = bytes(dir, name)?;
        bytes.map(|bytes| Self::parse(name, &bytes, u64::MAX)).transpose()
    }

    /// As [`Pagemap::read`] of an image that is complete, and may be anybody's: the pages file bounds what is
    /// read. What names more than that has is refused.
    pub fn of_image(dir: &Path, pid: i32) -> Result<Option<Self>, ImageFault> {
        let name = Self::name(pid);
        let Some(head) = open(dir, &name)? else {
            return Ok(None);
        };
        let mut begin = Vec::new();
        let read = head.take(HEAD).read_to_end(&mut begin);
        read.map_err(|error| ImageFault::unreadable(&name, &error))?;
        let pages = Self::pages_of(head_of(&name, &begin)?);
        let size = match open(dir, &pages)?.map(|file| file.metadata()) {
            Some(found) => found
                .map_err(|error| ImageFault::unreadable(&pages, &error))?
                .len(),
            None => 0,
        };
        let most = HEAD.saturating_add((size / PAGE).saturating_mul(ENTRY));
        let bytes = bytes_within(dir, &name, most.min(MAX_BYTES))?;
        bytes.map(|bytes| Self::parse(&name, &bytes, size)).transpose()
    }

    /// The runs, which have `most` bytes together at most.
    fn parse(name: &str, bytes: &[u8], most: u64) -> Result<Self, ImageFault> {
        let malformed = |error: WireError| ImageFault::malformed(name, error);
        let mut map = Self {
            pages_id: head_of(name, bytes)?,
            runs: Vec::new(),
            long_counts: false,
        };
        let (mut end, mut left) = (0, most);
        for entry in each_message(name, PAGEMAP_MAGIC, bytes)?.skip(1) {
            let (run, is_long) = run(entry?).map_err(malformed)?;
            map.long_counts |= is_long;
            if run.at.start < end {
                return Err(ImageFault::malformed(name, "its pages are not in order"));
            }
            if run.flags & PRESENT == 0 || run.flags & PARENT != 0 {
                return Err(ImageFault::malformed(name, "its pages are not in the image"));
            }
            end = run.at.end;
            // Order matters: a list of any length is not kept first.
            let bytes = run.at.end - run.at.start;
            left = left.checked_sub(bytes).filter(|_| bytes > 0).ok_or_else(|| {
                let reason = "it names more pages than its pages file has, or none";
                ImageFault::malformed(name, reason)
            })?;
            map.runs.push(run);
        }
        Ok(map)
    }

    /// Bytes in the pages file.
    pub fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.at.end - run.at.start).sum()
    }

    /// Bytes that it has of these addresses.
    pub fn bytes_in(&self, at: &Range<u64>) -> u64 {
        let common = |run: &Run| run.at.end.min(at.end).saturating_sub(run.at.start.max(at.start));
        self.runs.iter().map(common).sum()
    }

    /// Writes the file again.
    pub fn write(&self, dir: &Path, name: &str) -> Result<(), ImageFault> {
        let mut head = Vec::new();
        wire::push_number(&mut head, 1, self.pages_id.into());
        let entries = self.runs.iter().map(|run| self.entry(run));
        let all: Vec<Vec<u8>> = std::iter::once(head).chain(entries).collect();
        write(dir, name, PAGEMAP_MAGIC, &all)
    }

    fn entry(&self, run: &Run) -> Vec<u8> {
        let pages = (run.at.end - run.at.start) / PAGE;
        let mut entry = Vec::new();
        wire::push_number(&mut entry, entry::ADDRESS, run.at.start);
        // CRIU 4.2 reads the long count where there is one.
        wire::push_number(&mut entry, entry::COUNT, u32::try_from(pages).unwrap_or(0).into());
        wire::push_number(&mut entry, entry::FLAGS, run.flags.into());
        if self.long_counts {
            wire::push_number(&mut entry, entry::LONG_COUNT, pages);
        }
        entry
    }
}

fn run(entry: &[u8]) -> Result<(Run, bool), WireError> {
    let message = Message::parse(entry)?;
    let start = message.required_long(entry::ADDRESS)?;
    let long = message.long(entry::LONG_COUNT)?;
    let pages = long.unwrap_or(u64::from(message.required(entry::COUNT)?));
    let bytes = pages.checked_mul(PAGE).ok_or(WireError { field: entry::COUNT })?;
    let end = start.checked_add(bytes).ok_or(WireError {
        field: entry::ADDRESS,
    })?;
    let in_parent = message.number(entry::IN_PARENT)?.unwrap_or(0);
    let flags = message.number(entry::FLAGS)?.unwrap_or(PRESENT) | in_parent;
    if start % PAGE != 0 {
        return Err(WireError {
            field: entry::ADDRESS,
        });
    }
    Ok((
        Run {
            at: start..end,
            flags,
        },
        long.is_some(),
    ))
}

/// A mapping of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vma {
    pub at: Range<u64>,
    /// Private and anonymous: a page without content is zero.
    pub is_anonymous: bool,
    /// In addition, readable and writable, and with no policy that a copy has to repeat.
    pub is_plain: bool,
}

/// Private anonymous memory of a task in huge pages of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Huge {
    /// Of a page, in KiB.
    pub(super) size: u64,
    pub(super) bytes: u64,
}

impl Huge {
    /// None for another mapping, and for one for which the kernel reserves no page.
    fn of(vma: &Message<'_>) -> Result<Option<Self>, WireError> {
        const NO_RESERVE: u32 = 0x4000;
        const HUGE: u32 = 0x4_0000;
        let (flags, status) = (vma.required(vma::FLAGS)?, vma.required(vma::STATUS)?);
        let bytes = vma
            .required_long(vma::END)?
            .saturating_sub(vma.required_long(vma::START)?);
        let is_meant = status & ANON_PRIVATE != 0 && flags & (HUGE | NO_RESERVE) == HUGE;
        Ok(huge_page(flags)
            .filter(|_| is_meant)
            .map(|size| Self { size, bytes }))
    }
}

/// Size of a huge page in KiB, whose binary logarithm is in these flags of mmap(2) or memfd_create(2). None
/// without: then CRIU has not seen the pool.
pub(super) fn huge_page(flags: u32) -> Option<u64> {
    let size = 1_u64.checked_shl(flags >> 26)? >> 10;
    (size > 0).then_some(size)
}

fn mm_name(pid: i32) -> String {
    format!("mm-{pid}.img")
}

/// The mappings of the task with this pid in the container, by address.
pub fn vmas(dir: &Path, pid: i32) -> Result<Vec<Vma>, ImageFault> {
    each_vma(dir, &mm_name(pid), MAX_MM, vma)
}

/// What a list of mappings has of huge pages.
#[derive(Debug, Default)]
pub(super) struct HugeList {
    pub(super) mappings: Vec<Huge>,
    /// Of the list, in bytes; 0 if it was not read.
    pub(super) length: u64,
}

/// The mappings in huge pages of the task with this pid in the container. Of a list of more than `most` bytes
/// none.
pub(super) fn huge(dir: &Path, pid: i32, most: u64) -> Result<HugeList, ImageFault> {
    let name = mm_name(pid);
    let length = open(dir, &name)?.and_then(|file| Some(file.metadata().ok()?.len()));
    match length.filter(|length| *length <= most) {
        None => Ok(HugeList::default()),
        Some(length) => Ok(HugeList {
            mappings: each_vma(dir, &name, most, Huge::of)?
                .into_iter()
                .flatten()
                .collect(),
            length,
        }),
    }
}

fn each_vma<T>(
    dir: &Path,
    name: &str,
    most: u64,
    read: impl Fn(&Message<'_>) -> Result<T, WireError>,
) -> Result<Vec<T>, ImageFault> {
    let Some(bytes) = bytes_within(dir, name, most)? else {
        return Ok(Vec::new());
    };
    let malformed = |error: WireError| ImageFault::malformed(name, error);
    let all = messages(name, MM_MAGIC, &bytes)?;
    let [mm] = all[..] else {
        return Err(ImageFault::malformed(name, "it holds not one message"));
    };
    Message::parse(mm)
        .and_then(|mm| mm.each(VMAS, read))
        .map_err(malformed)
}

fn vma(vma: &Message<'_>) -> Result<Vma, WireError> {
    let status = vma.required(vma::STATUS)?;
    let is_anonymous = status & ANON_PRIVATE != 0;
    let is_plain = is_anonymous
        && status & !PLAIN_STATUS == 0
        && vma.required(vma::PROTECTION)? == READ_WRITE
        && vma.required(vma::FLAGS)? & !PLAIN_FLAGS == 0
        && vma.long(vma::ADVICE)?.unwrap_or(0) & !PLAIN_ADVICE == 0;
    Ok(Vma {
        at: vma.required_long(vma::START)?..vma.required_long(vma::END)?,
        is_anonymous,
        is_plain,
    })
}

/// Lets CRIU ask for transparent huge pages in the mappings that lie in `ranges`, before anything is in them:
/// they are then filled several times as fast.
pub fn advise_huge_pages(dir: &Path, pid: i32, ranges: &[Range<u64>]) -> Result<(), ImageFault> {
    let name = mm_name(pid);
    let bytes = bytes(dir, &name)?.ok_or_else(|| super::missing(&name))?;
    let malformed = |error: WireError| ImageFault::malformed(&name, error);
    let all = messages(&name, MM_MAGIC, &bytes)?;
    let edited: Result<Vec<Vec<u8>>, WireError> = all.into_iter().map(|mm| advised(mm, ranges)).collect();
    write(dir, &name, MM_MAGIC, &edited.map_err(malformed)?)
}

fn advised(mm: &[u8], ranges: &[Range<u64>]) -> Result<Vec<u8>, WireError> {
    wire::replace(mm, VMAS, |bytes| {
        let message = Message::parse(bytes)?;
        let at = vma(&message)?.at;
        if !ranges
            .iter()
            .any(|range| range.start <= at.start && at.end <= range.end)
        {
            return Ok(None);
        }
        let advice = message.long(vma::ADVICE)?.unwrap_or(0) | HUGE_PAGES;
        let mut edited = wire::without(bytes, |field| field == vma::ADVICE)?;
        wire::push_number(&mut edited, vma::ADVICE, advice);
        Ok(Some(edited))
    })
}

/// The number of the pages file.
fn head_of(name: &str, bytes: &[u8]) -> Result<u32, ImageFault> {
    let head = each_message(name, PAGEMAP_MAGIC, bytes)?.next();
    let head = head.ok_or_else(|| ImageFault::malformed(name, "it has no head"))??;
    let id = Message::parse(head).and_then(|head| head.required(1));
    id.map_err(|error| ImageFault::malformed(name, error))
}

pub(super) fn bytes(dir: &Path, name: &str) -> Result<Option<Vec<u8>>, ImageFault> {
    bytes_within(dir, name, MAX_BYTES)
}

fn bytes_within(dir: &Path, name: &str, most: u64) -> Result<Option<Vec<u8>>, ImageFault> {
    let Some(file) = open(dir, name)? else {
        return Ok(None);
    };
    let bytes = read_at_most(file, most).map_err(|error| ImageFault::unreadable(name, &error))?;
    bytes
        .map(Some)
        .ok_or_else(|| ImageFault::malformed(name, "it is too large"))
}

fn open(dir: &Path, name: &str) -> Result<Option<File>, ImageFault> {
    match UntrustedDir::open(dir).and_then(|dir| dir.file(name)) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        file => file
            .map(Some)
            .map_err(|error| ImageFault::unreadable(name, &error)),
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! Files as CRIU before 4.2 writes them.

    use super::*;

    pub(crate) fn entry(address: u64, pages: u64, flags: u64) -> Vec<u8> {
        let mut entry = Vec::new();
        for (field, number) in [
            (entry::ADDRESS, address),
            (entry::COUNT, pages),
            (entry::FLAGS, flags),
        ] {
            wire::push_number(&mut entry, field, number);
        }
        entry
    }

    pub(crate) fn write_pagemap(dir: &Path, pid: i32, pages_id: u8, run: &Range<u64>) {
        let run = entry(run.start, (run.end - run.start) / PAGE, PRESENT.into());
        write(dir, &Pagemap::name(pid), PAGEMAP_MAGIC, &[vec![8, pages_id], run]).unwrap();
    }

    /// Mappings, and whether each is private and anonymous.
    pub(crate) fn write_mm(dir: &Path, pid: i32, vmas: &[(Range<u64>, bool)]) {
        let status = |is_anonymous| if is_anonymous { ANON_PRIVATE.into() } else { 0 };
        let vmas: Vec<Vec<u8>> = vmas
            .iter()
            .map(|(at, is_anonymous)| vma(at.clone(), status(*is_anonymous), 0))
            .collect();
        write_vmas(dir, pid, &vmas);
    }

    pub(crate) fn write_vmas(dir: &Path, pid: i32, vmas: &[Vec<u8>]) {
        let mut mm = Vec::new();
        for vma in vmas {
            wire::push_bytes(&mut mm, VMAS, vma);
        }
        write(dir, &mm_name(pid), MM_MAGIC, &[mm]).unwrap();
    }

    /// Private memory in pages of 2 MiB.
    pub(crate) fn huge_vma(at: Range<u64>) -> Vec<u8> {
        let mut vma = Vec::new();
        let fields = [
            (vma::START, at.start),
            (vma::END, at.end),
            (vma::FLAGS, 0x5404_0022),
            (vma::STATUS, 1 << 9 | 1),
            (vma::PROTECTION, 3),
        ];
        for (field, number) in fields {
            wire::push_number(&mut vma, field, number);
        }
        vma
    }

    pub(crate) fn vma(at: Range<u64>, status: u64, advice: u64) -> Vec<u8> {
        let mut vma = Vec::new();
        let fields = [
            (vma::START, at.start),
            (vma::END, at.end),
            (vma::PROTECTION, 3),
            (vma::FLAGS, 0x22),
            (vma::STATUS, status),
            (vma::ADVICE, advice),
        ];
        for (field, number) in fields {
            wire::push_number(&mut vma, field, number);
        }
        vma
    }
}

#[cfg(test)]
mod tests;
