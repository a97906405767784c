//! What must hold for an index of a store, a signature's statement and CRIU's files of memory, whatever
//! their bytes are.
//!
//! The fuzz targets (fuzz/) call these functions with what they make up, the unit tests with the kept corpus.

use std::path::Path;

use crate::criu::memory::{PAGE, Pagemap, vmas};
use crate::signature::{Namespaces, Statement};
use firn_store::{Digest, EXTENT, Index, write_index};

/// An index that is accepted describes memory that can exist, and is the same when it is written again.
pub fn store_index(bytes: &[u8]) {
    let read = |bytes: &[u8]| Index::from_bytes(bytes, &Digest::of(bytes));
    let Ok(index) = read(bytes) else {
        return;
    };
    let lengths = || index.extents().map(|(_, length)| length as u64);
    assert_eq!(lengths().sum::<u64>(), index.bytes());
    assert!(lengths().all(|length| (1..=EXTENT as u64).contains(&length)));
    assert!(index.zero_bytes() <= index.bytes());
    let written = write_index(&index).expect("it was accepted");
    assert_eq!(read(&written).expect("it is ours"), index);
}

/// A statement that is understood is written as it was read: no word of it was skipped. It permits the
/// namespaces that it names, and no others.
pub fn statement(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    // Of a file with a signature, and alone.
    let comment = minisign_verify::Signature::decode(text).ok();
    let comment = comment.as_ref().map(minisign_verify::Signature::trusted_comment);
    for comment in [Some(text), comment].into_iter().flatten() {
        let Some(statement) = Statement::parse(comment) else {
            continue;
        };
        assert_eq!(statement.to_string(), comment);
        let is_named = |name: &str| comment.split([' ', '=', ',']).any(|word| word == name);
        if let Namespaces::These(names) = &statement.namespaces {
            assert!(
                names
                    .iter()
                    .all(|name| is_named(name) && statement.namespaces.include(name))
            );
            assert!(!statement.namespaces.include("") && !statement.namespaces.include("*"));
        }
        let sum = statement.layer.as_deref().unwrap_or_default();
        assert!(sum.bytes().all(|byte| byte.is_ascii_hexdigit()) && [0, 64].contains(&sum.len()));
    }
}

/// The first byte decides which file of a task the others are: `p` is its pagemap, anything else its
/// mappings. An accepted pagemap has its pages in order, and is the same when it is written again.
pub fn criu_memory(dir: &Path, bytes: &[u8]) {
    let Some((kind, content)) = bytes.split_first() else {
        return;
    };
    if *kind != b'p' {
        std::fs::write(dir.join("mm-1.img"), content).expect("the directory is writable");
        drop(vmas(dir, 1));
        return;
    }
    let name = Pagemap::name(1);
    std::fs::write(dir.join(&name), content).expect("the directory is writable");
    let Ok(Some(map)) = Pagemap::read(dir, 1) else {
        return;
    };
    let mut end = 0;
    for run in &map.runs {
        assert!(run.at.start >= end && run.at.end >= run.at.start, "{run:?}");
        assert_eq!((run.at.end - run.at.start) % PAGE, 0, "{run:?}");
        end = run.at.end;
    }
    assert!(map.bytes() <= end);
    assert_eq!(map.bytes_in(&(0..u64::MAX)), map.bytes());
    map.write(dir, &name).expect("the directory is writable");
    let again = Pagemap::read(dir, 1).expect("it is ours").expect("it is there");
    assert_eq!((again.pages_id, again.bytes()), (map.pages_id, map.bytes()));
}

#[cfg(test)]
#[path = "../../fuzz/kept.rs"]
mod kept;

#[cfg(test)]
mod tests {
    #[test]
    fn the_kept_inputs_pass() {
        super::kept::run("store_index", super::store_index);
        super::kept::run("statement", super::statement);
        super::kept::run("criu_memory", |bytes| {
            let dir = tempfile::tempdir().expect("there is a temporary directory");
            super::criu_memory(dir.path(), bytes);
        });
    }
}
