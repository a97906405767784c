//! What must hold for an index of a store, whatever its bytes are.
//!
//! The fuzz target (fuzz/) calls this function with what it makes up, the unit tests with the kept corpus.

use crate::store::{Digest, EXTENT, Index, write_index};

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

#[cfg(test)]
#[path = "../../fuzz/kept.rs"]
mod kept;

#[cfg(test)]
mod tests {
    #[test]
    fn the_kept_inputs_pass() {
        super::kept::run("store_index", super::store_index);
    }
}
