//! Copies memory into the store.

use super::progress::Counter;
use super::{Bulk, MemoryError, remote};
use firn_store::threads;
use firn_store::{EXTENT, Piece, Writer};

/// A part of a range that is one extent.
struct Part {
    bulk: usize,
    at: u64,
    length: usize,
}

/// Copies the memory, on several threads. Nothing of the processes is changed.
pub fn save(bulk: &[Bulk], writer: &Writer, counter: &Counter) -> Result<Vec<Piece>, MemoryError> {
    let parts: Vec<Part> = bulk
        .iter()
        .enumerate()
        .flat_map(|(at, bulk)| parts(at, bulk))
        .collect();
    let digests = threads::each(
        parts.len(),
        || vec![0; EXTENT],
        |number, buffer| {
            let Part { bulk: of, at, length } = parts[number];
            let buffer = &mut buffer[..length];
            remote::read(bulk[of].process.pid, at, buffer)?;
            let digest = writer.put(buffer)?;
            counter.add(length as u64);
            Ok::<_, MemoryError>(digest)
        },
    )?;
    let mut pieces: Vec<Piece> = bulk.iter().map(empty).collect();
    for (part, digest) in parts.iter().zip(digests) {
        pieces[part.bulk].extents.push(digest);
    }
    Ok(pieces)
}

fn empty(bulk: &Bulk) -> Piece {
    Piece {
        pid: bulk.process.inside,
        address: bulk.at.start,
        length: bulk.at.end - bulk.at.start,
        extents: Vec::new(),
    }
}

fn parts(number: usize, bulk: &Bulk) -> impl Iterator<Item = Part> {
    let end = bulk.at.end;
    let starts = bulk.at.clone().step_by(EXTENT);
    starts.map(move |at| Part {
        bulk: number,
        at,
        length: usize::try_from(end - at).map_or(EXTENT, |left| left.min(EXTENT)),
    })
}
