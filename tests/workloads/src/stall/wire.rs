//! Requests and replies of FUSE: fields of fixed size, one after the other.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

/// Little-endian fields, one after the other; zeros behind the end.
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    pub fn take(&mut self, bytes: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(bytes.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub fn u32(&mut self) -> u32 {
        self.take(4).try_into().map_or(0, u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> u64 {
        self.take(8).try_into().map_or(0, u64::from_le_bytes)
    }

    /// A string that ends with NUL.
    pub fn name(&mut self) -> &'a OsStr {
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(self.0.len());
        let name = self.take(end);
        self.take(1);
        OsStr::from_bytes(name)
    }
}

/// A reply under construction.
#[derive(Default)]
pub struct Reply(pub Vec<u8>);

impl Reply {
    pub fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    pub fn zeros(self, count: usize) -> Self {
        self.bytes(&vec![0; count])
    }

    #[expect(clippy::disallowed_methods, reason = "FUSE has one file system here")]
    pub fn attributes(self, of: &fs::Metadata) -> Self {
        let time = |seconds: i64| u64::try_from(seconds).unwrap_or(0);
        let nanos = |nanos: i64| u32::try_from(nanos).unwrap_or(0);
        let small = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        self.u64(of.ino())
            .u64(of.size())
            .u64(of.blocks())
            .u64(time(of.atime()))
            .u64(time(of.mtime()))
            .u64(time(of.ctime()))
            .u32(nanos(of.atime_nsec()))
            .u32(nanos(of.mtime_nsec()))
            .u32(nanos(of.ctime_nsec()))
            .u32(of.mode())
            .u32(small(of.nlink()))
            .u32(of.uid())
            .u32(of.gid())
            .u32(small(of.rdev()))
            .u32(4096)
            .u32(0)
    }
}
