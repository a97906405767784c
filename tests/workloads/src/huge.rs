//! Memory in huge pages.

use std::io;
use std::ptr::NonNull;
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::mman::{MmapAdvise, madvise};

/// What advice begins and ends at.
const PAGE: usize = 4096;

/// Room for so many values, in huge pages where the kernel has them. Nothing of it is touched.
pub fn with_capacity<T>(count: usize) -> io::Result<Vec<T>> {
    let mut values = Vec::with_capacity(count);
    advise(&mut values, MmapAdvise::MADV_HUGEPAGE)?;
    Ok(values)
}

/// Lets the kernel take what these values have, should it need it. It counts as available from now on.
pub fn offer<T: Copy>(values: &mut Vec<T>) -> io::Result<()> {
    values.clear();
    advise(values, MmapAdvise::MADV_FREE)
}

/// Advises about the room of values that has none.
fn advise<T>(values: &mut Vec<T>, advice: MmapAdvise) -> io::Result<()> {
    debug_assert!(values.is_empty(), "advice about values");
    let bytes = values.capacity() * size_of::<T>();
    let first = values.as_mut_ptr().cast::<u8>();
    let skipped = first.align_offset(PAGE);
    let length = bytes.saturating_sub(skipped) / PAGE * PAGE;
    let at = NonNull::new(first.wrapping_add(skipped)).ok_or(io::ErrorKind::InvalidInput)?;
    let mut tries = 100;
    loop {
        // SAFETY: the range is a part of this allocation, and has no content that could be lost.
        match unsafe { madvise(at.cast(), length, advice) } {
            // madvise(2): the kernel has no memory for its own notes at this moment.
            Err(Errno::EAGAIN) if tries > 0 => tries -= 1,
            advised => return Ok(advised?),
        }
        thread::sleep(Duration::from_millis(10));
    }
}
