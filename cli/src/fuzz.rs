//! What must hold for archives of which parts are read, whatever their bytes are.
//!
//! The fuzz target includes this file and [`crate::archive`]: firn is a program.

use std::convert::Infallible;
use std::path::PathBuf;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use firn_image::form::EntryKind;

use crate::archive::{Entry, FileSpan, find, kind, list};

/// The files of an archive lie within it. What is found by its name is the first of that name in the list.
/// The reader that unpacks an archive finds the same.
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
    let Some(listed) = listed else {
        return;
    };
    for name in listed.iter().filter_map(|entry| entry.path.to_str()).take(8) {
        let first = listed.iter().find(|entry| entry.is(name));
        let found = now(find(name, size, read));
        assert_eq!(found.as_ref(), first.map(|first| &first.place));
    }
    let mut archive = tar::Archive::new(bytes);
    let unpacked = archive.entries().expect("nothing was read");
    let unpacked: Vec<_> = unpacked
        .map(|entry| seen(&entry.expect("it is listed")))
        .collect();
    let listed = listed
        .into_iter()
        .map(|Entry { path, kind, place }| (path, kind, place));
    assert_eq!(listed.collect::<Vec<_>>(), unpacked);
}

fn seen(entry: &tar::Entry<'_, impl std::io::Read>) -> (PathBuf, EntryKind, FileSpan) {
    let path = entry.path().expect("a path of bytes");
    let place = FileSpan {
        from: entry.raw_file_position(),
        length: entry.size(),
    };
    (
        path.strip_prefix(".").unwrap_or(&path).to_owned(),
        kind(entry.header()),
        place,
    )
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
