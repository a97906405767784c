//! Reader of `/proc/PID/maps`, shared by discovery and preflight.
//!
//! Paths are those that the process itself sees, container or not: `/dev/nvidia-uvm`,
//! `/usr/lib/.../libcuda.so.580.1`.

use std::io;
use std::ops::ControlFlow;
use std::path::Path;

use nix::errno::Errno;

use crate::{FileId, bounded};

/// One line of the file.
#[derive(Debug, PartialEq, Eq)]
pub struct Mapping<'a> {
    pub start: u64,
    pub end: u64,
    /// `rw-s` and the like.
    pub perms: &'a [u8],
    pub offset: u64,
    /// The file behind the mapping, or shared memory; inode 0 of device 0 for private anonymous memory.
    pub file: FileId,
    /// File behind the mapping; empty for anonymous memory.
    pub path: &'a [u8],
}

impl<'a> Mapping<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.splitn(6, |b| *b == b' ');
        let range = fields.next()?;
        let dash = range.iter().position(|b| *b == b'-')?;
        let perms = fields.next()?;
        let offset = hex(fields.next()?)?;
        let mut text = || std::str::from_utf8(fields.next()?).ok();
        let file = FileId::parse(text()?, text()?)?;
        let path = fields.next().unwrap_or_default().trim_ascii();
        Some(Self {
            start: hex(&range[..dash])?,
            end: hex(&range[dash + 1..])?,
            perms,
            offset,
            file,
            path,
        })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// Last component of the path.
    pub fn file_name(&self) -> &'a [u8] {
        self.path.rsplit(|b| *b == b'/').next().unwrap_or_default()
    }
}

fn hex(digits: &[u8]) -> Option<u64> {
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

/// Visits the mappings of process `pid` until `visit` breaks; `None` when the process is gone. Lines of
/// another shape are passed over.
pub fn each(
    proc_root: &Path,
    pid: i32,
    mut visit: impl FnMut(Mapping<'_>) -> ControlFlow<()>,
) -> io::Result<Option<()>> {
    let path = proc_root.join(pid.to_string()).join("maps");
    unless_gone(bounded::each(&path, b'\n', bounded::LINES, |line| {
        Mapping::parse(line).map_or(ControlFlow::Continue(()), &mut visit)
    }))
}

/// File `name` of process `pid`; `None` when the process is gone.
pub fn read(proc_root: &Path, pid: i32, name: &str) -> io::Result<Option<Vec<u8>>> {
    unless_gone(bounded::read(&proc_root.join(pid.to_string()).join(name)))
}

/// Nothing of a process or cgroup that is gone.
pub fn unless_gone<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Name of a process, for messages.
pub fn comm(proc_root: &Path, pid: i32) -> String {
    let bytes = read(proc_root, pid, "comm").ok().flatten().unwrap_or_default();
    String::from_utf8_lossy(&bytes)
        .trim_end()
        .replace(char::is_control, "?")
}

/// Whether `error` means that the process has ended, or that the cgroup was removed while its file was open
/// (ENODEV).
pub fn is_gone(error: &io::Error) -> bool {
    let gone = [Errno::ESRCH, Errno::ENODEV].map(|errno| Some(errno as i32));
    error.kind() == io::ErrorKind::NotFound || gone.contains(&error.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_with_and_without_a_path() {
        let text = b"204a00000-204c00000 rw-s 204a00000 00:06 612      /dev/nvidia-uvm\n\
            7f10-7f20 rw-p 00000000 00:00 0 \n\
            nonsense\n\
            7f30-7f40 r--p 00001000 fe:00 77   /a b/libcuda.so.580.1 (deleted)\n";
        let found: Vec<_> = text.split(|b| *b == b'\n').filter_map(Mapping::parse).collect();
        assert_eq!(found.len(), 3);
        assert_eq!(found[0].path, b"/dev/nvidia-uvm");
        assert_eq!(
            (found[0].start, found[0].offset, found[0].bytes()),
            (0x204a00000, 0x204a00000, 2 << 20)
        );
        assert_eq!(found[1].path, b"");
        assert_eq!(found[1].file, FileId::new(0, 0));
        assert_eq!(found[2].file, FileId::parse("fe:00", "77").unwrap());
        assert_eq!(found[2].file_name(), b"libcuda.so.580.1 (deleted)");
    }
}
