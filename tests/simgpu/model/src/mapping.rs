//! Regions of this process's address space.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// A region of this process's address space, unmapped when dropped and absent in forked children.
#[derive(Debug)]
pub struct Mapping {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory; those who share it agree among themselves about its bytes.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset`, shared, somewhere or exactly at `fixed`.
    pub fn shared(file: BorrowedFd<'_>, offset: usize, len: usize, fixed: Option<usize>) -> io::Result<Self> {
        let flags = libc::MAP_SHARED
            | if fixed.is_some() {
                libc::MAP_FIXED_NOREPLACE
            } else {
                0
            };
        let mapping = Self::map(
            fixed,
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            file.as_raw_fd(),
            offset,
        )?;
        mapping.keep_from_children()?;
        Ok(mapping)
    }

    /// `len` bytes of private anonymous memory, zeroed, inherited by children like any other.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        Self::map(None, len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    }

    /// `len` bytes of shared anonymous memory (/dev/zero in /proc/PID/maps), of which the first page is used.
    pub fn shared_anonymous(len: usize) -> io::Result<Self> {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        let mapping = Self::map(None, len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)?;
        // SAFETY: the mapping has at least a byte, and nobody else has its address yet.
        unsafe { mapping.at(0, 1).write_volatile(1) };
        Ok(mapping)
    }

    pub(crate) fn map(
        fixed: Option<usize>,
        len: usize,
        protection: i32,
        flags: i32,
        fd: i32,
        offset: usize,
    ) -> io::Result<Self> {
        let hint = std::ptr::without_provenance_mut(fixed.unwrap_or(0));
        let offset = i64::try_from(offset).map_err(io::Error::other)?;
        // SAFETY: without MAP_FIXED the kernel puts the mapping where nothing else is (MAP_FIXED_NOREPLACE
        // included).
        let at = unsafe { libc::mmap(hint, len, protection, flags, fd, offset) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { at, len })
    }

    /// Maps `file` from `offset`, shared, over all of it.
    pub fn map_over(&self, file: BorrowedFd<'_>, offset: usize) -> io::Result<()> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let offset = i64::try_from(offset).map_err(io::Error::other)?;
        let (len, fd) = (self.len, file.as_raw_fd());
        self.replace(0, len, protection, libc::MAP_SHARED, fd, offset)?;
        self.keep_from_children()
    }

    /// Replaces what is mapped by nothing: the addresses stay taken, and nobody can use them.
    pub fn reserve(&self) -> io::Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        self.replace(0, self.len, libc::PROT_NONE, flags, -1, 0)?;
        self.keep_from_children()
    }

    /// Maps `len` bytes of `fd` over a part of it.
    pub(crate) fn replace(
        &self,
        from: usize,
        len: usize,
        protection: i32,
        flags: i32,
        fd: i32,
        offset: i64,
    ) -> io::Result<()> {
        let (at, flags) = (self.at(from, len).cast(), flags | libc::MAP_FIXED);
        // SAFETY: MAP_FIXED replaces only a part of this mapping, which this value owns.
        let got = unsafe { libc::mmap(at, len, protection, flags, fd, offset) };
        if got == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    pub(crate) fn keep_from_children(&self) -> io::Result<()> {
        // SAFETY: the range is this mapping's own; the advice does not touch its contents.
        match unsafe { libc::madvise(self.at.as_ptr().cast(), self.len, libc::MADV_DONTFORK) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The address of `len` bytes at `offset`, which must lie inside.
    pub fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "outside of the mapping"
        );
        self.at.as_ptr().wrapping_add(offset)
    }

    /// Where it starts.
    pub fn as_ptr(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// Its length in bytes.
    pub fn size(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by this type and nobody else unmaps it.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.len) };
    }
}
