//! What must hold for archives of which parts are read, whatever their bytes are.
//!
//! The fuzz target includes this file and [`crate::archive`]: firn is a program.

use std::convert::Infallible;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use crate::archive::{FileSpan, find, list};

/// The files of an archive lie within it. What is found by its name is the first of that name in the list.
pub fn archive(bytes: &[u8]) {
    let size = bytes.len() as u64;
    let read = async |from: u64, length: u64| {
        assert!(
            from <= size && length <= 64 << 10,
            "{length} from {from} of {size}"
        );
        let at = |offset: u64| usize::try_from(offset.min(size)).expect("it is in the input");
        Ok::<_, Infallible>(bytes[at(from)..at(from + length)].to_vec())
    };
    let is_within = |place: &FileSpan| place.from.saturating_add(place.length) <= size;
    let listed = now(list(size, read));
    assert!(listed.iter().flatten().all(|entry| is_within(&entry.place)));
    // Also of one that ends early, by the name that it begins with.
    let begins = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    let found = now(find(&String::from_utf8_lossy(begins), size, read));
    assert!(found.as_ref().is_none_or(is_within), "{found:?}");
    let files = || listed.iter().flatten().filter(|entry| entry.is_file);
    for entry in files().take(8) {
        let first = files().find(|file| file.name == entry.name);
        let found = now(find(&entry.name, size, read));
        assert_eq!(found.as_ref(), first.map(|first| &first.place));
    }
}

/// The result of what never waits.
fn now<T>(work: impl Future<Output = Result<T, Infallible>>) -> T {
    match pin!(work).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(done)) => done,
        Poll::Pending => unreachable!("it reads from memory"),
    }
}

#[cfg(test)]
#[expect(clippy::print_stdout, reason = "the last one that is shown has failed")]
#[path = "../../fuzz/kept.rs"]
mod kept;

#[cfg(test)]
mod tests {
    #[test]
    fn the_kept_inputs_pass() {
        super::kept::run("archive", super::archive);
    }
}
