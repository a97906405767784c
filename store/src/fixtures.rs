//! An index for unit tests.

use crate::{Index, Piece};

/// An index of a store with these pieces of memory.
pub fn index(pieces: Vec<Piece>) -> Index {
    Index {
        checkpoint: "5b0f".to_owned(),
        made: 1_700_000_000,
        container: "job".to_owned(),
        host: "node".to_owned(),
        machine: None,
        image: "/images/job".into(),
        owner: None,
        mount: None,
        pieces,
    }
}
