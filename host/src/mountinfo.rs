//! What is mounted, as the kernel lists it.

use std::ffi::OsString;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use crate::bounded;

/// The mounts of this thread's namespace.
const MOUNTINFO: &str = "/proc/thread-self/mountinfo";

/// Bytes of such a list at most. A container may make mounts up to the kernel's bound (`fs.mount-max`,
/// 100,000).
const LONGEST: u64 = 64 << 20;

/// One mount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountEntry {
    /// Its number, which no other mount of the machine has.
    pub id: u32,
    /// Number of the mount that it is in.
    pub parent: u32,
    /// `major:minor` of the file system.
    pub device: String,
    /// What of the file system is seen at the mount point.
    pub root: PathBuf,
    /// Where.
    pub mount_point: PathBuf,
    /// Options of the mount itself: `ro`, `nosuid` and the like.
    pub options: String,
    /// Whether mounts that are made elsewhere can appear below it: it has a group of its own, or a master.
    pub propagates: bool,
    /// Type of file system.
    pub fs_type: String,
    /// Options of the file system, as opposed to those of the mount.
    pub super_options: String,
}

/// All mounts that a process sees, in the order in which they were made.
pub fn of_process(pid: i32) -> io::Result<Vec<MountEntry>> {
    read(Path::new(&format!("/proc/{pid}/mountinfo")))
}

/// All mounts, in the order in which they were made.
pub fn mounted() -> io::Result<Vec<MountEntry>> {
    read(Path::new(MOUNTINFO))
}

/// Whether one of these mounts is at this path.
pub fn is_mount_point(mounts: &[MountEntry], path: &Path) -> bool {
    mounts.iter().any(|mount| mount.mount_point == path)
}

/// All mounts of a list as the kernel writes it, such as /proc/PID/mountinfo.
pub fn read(file: &Path) -> io::Result<Vec<MountEntry>> {
    let mut mounts = Vec::new();
    bounded::each(file, b'\n', LONGEST, |line| {
        mounts.extend(entry(line));
        ControlFlow::Continue(())
    })?;
    Ok(mounts)
}

/// Lines that are not as documented are left out: the kernel does not write them.
pub fn parse(text: &[u8]) -> Vec<MountEntry> {
    text.split(|byte| *byte == b'\n').filter_map(entry).collect()
}

fn entry(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|byte| *byte == b' ');
    let mut entry = MountEntry {
        id: text(fields.next()?).parse().ok()?,
        parent: text(fields.next()?).parse().ok()?,
        device: text(fields.next()?),
        root: path(fields.next()?),
        mount_point: path(fields.next()?),
        options: text(fields.next()?),
        ..MountEntry::default()
    };
    // A varying number of optional fields ends with a dash.
    loop {
        match fields.next()? {
            b"-" => break,
            field => entry.propagates |= field.starts_with(b"shared:") || field.starts_with(b"master:"),
        }
    }
    entry.fs_type = text(fields.next()?);
    entry.super_options = text(fields.nth(1)?);
    Some(entry)
}

fn path(field: &[u8]) -> PathBuf {
    OsString::from_vec(unescape(field)).into()
}

fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(&unescape(field)).into_owned()
}

/// Decodes the kernel's octal escapes of space, tab, newline, backslash and `#`.
fn unescape(mut field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    while let [byte, tail @ ..] = field {
        field = tail;
        let escaped = match (byte, tail) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..]) => {
                Some((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'))
            }
            _ => None,
        };
        if escaped.is_some() {
            field = &tail[3..];
        }
        plain.push(escaped.unwrap_or(*byte));
    }
    plain
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn entries_are_decoded() {
        let text = b"36 35 98:0 /mnt1 /mnt/with\\040space\\134x rw,noatime master:1 shared:2 - \
            ext3 /dev/root rw,errors=continue\n\
            31 23 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
            garbage\n";
        let entries = parse(text);
        assert_eq!(entries.len(), 2);
        assert_eq!((entries[0].id, entries[0].device.as_str()), (36, "98:0"));
        assert_eq!(entries[0].root, PathBuf::from("/mnt1"));
        assert_eq!(entries[0].mount_point, PathBuf::from("/mnt/with space\\x"));
        assert_eq!(entries[0].super_options, "rw,errors=continue");
        assert!(entries[0].propagates && !entries[1].propagates);
        assert_eq!(
            (entries[1].fs_type.as_str(), entries[1].super_options.as_str()),
            ("cgroup", "rw,cpu,cpuacct")
        );
    }

    #[test]
    fn the_root_of_this_process_is_mounted() {
        assert!(
            mounted()
                .unwrap()
                .iter()
                .any(|entry| entry.mount_point == Path::new("/"))
        );
    }
}
