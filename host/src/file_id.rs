//! Which file something is.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use nix::sys::stat::makedev;

/// A file of the host. An inode number names a file on one device alone: another file system has other files
/// of the same numbers. Therefore the number cannot be had without the device, and `clippy.toml` forbids
/// `Metadata::ino` elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// The file behind this metadata.
    #[allow(clippy::disallowed_methods, reason = "its device is kept with it")]
    pub fn of(metadata: &Metadata) -> Self {
        Self::new(metadata.dev(), metadata.ino())
    }

    /// The file with this inode on the device with this number, as stat(2) has both.
    pub fn new(device: u64, inode: u64) -> Self {
        Self { device, inode }
    }

    /// The same of the two numbers of its device, as statx(2) has them.
    pub fn of_numbers(major: u64, minor: u64, inode: u64) -> Self {
        Self::new(makedev(major, minor), inode)
    }

    /// The same of numbers in text: `00:1a` (major and minor number, hexadecimal) and a decimal inode.
    pub(crate) fn parse(device: &str, inode: &str) -> Option<Self> {
        let (major, minor) = device.split_once(':')?;
        let number = |digits| u64::from_str_radix(digits, 16).ok();
        Some(Self::of_numbers(
            number(major)?,
            number(minor)?,
            inode.parse().ok()?,
        ))
    }

    /// Whether it is on the device with this number.
    pub fn is_on(self, device: u64) -> bool {
        self.device == device
    }

    /// The file with another inode on the same device.
    pub fn on_same_device(self, inode: u64) -> Self {
        Self { inode, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_two_devices_differ_though_their_inodes_are_equal() {
        let file = FileId::parse("fe:01", "12").unwrap();
        assert_eq!(file, FileId::new(makedev(0xfe, 1), 12));
        assert_ne!(file, FileId::parse("00:01", "12").unwrap());
        assert_eq!(FileId::parse("fe:01", "9").unwrap().on_same_device(12), file);
        for (device, inode) in [("fe", "12"), ("fe:x", "12"), ("fe:01", "a")] {
            assert_eq!(FileId::parse(device, inode), None, "{device} {inode}");
        }
    }

    #[test]
    fn the_kernel_shows_a_file_by_the_same_numbers() {
        let own = std::env::current_exe().unwrap();
        let id = FileId::of(&own.metadata().unwrap());
        let mut is_mapped = false;
        let me = std::process::id().cast_signed();
        crate::proc_maps::each(std::path::Path::new("/proc"), me, |mapping| {
            is_mapped |= mapping.file == id;
            std::ops::ControlFlow::Continue(())
        })
        .unwrap();
        assert!(is_mapped);
    }
}
