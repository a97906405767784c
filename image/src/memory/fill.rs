//! Fills the memory of restored processes, which are stopped, from the store.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::path::Path;

use firn_host::proc_maps;

use super::progress::Counter;
use super::{MemoryError, remote};
use firn_store::threads;
use firn_store::{EXTENT, Index, Piece, Store};

/// Fills the memory that the index names, in the processes that have these pids on the host (by their pids in
/// the container). Every extent is compared with its digest before it is written. Returns the bytes that were
/// written.
pub fn fill(
    store: &Store,
    index: &Index,
    pids: &BTreeMap<i32, i32>,
    counter: &Counter,
) -> Result<u64, MemoryError> {
    let mut parts = Vec::new();
    for piece in &index.pieces {
        let outside = |at| MemoryError::Layout {
            inside: piece.pid,
            at,
        };
        let pid = *pids.get(&piece.pid).ok_or_else(|| outside(piece.address))?;
        let end = piece
            .address
            .checked_add(piece.length)
            .ok_or_else(|| outside(piece.address))?;
        expect_anonymous(pid, piece, &(piece.address..end))?;
        for (at, (extent, length)) in (piece.address..end).step_by(EXTENT).zip(piece.extents()) {
            // A zero extent is a hole, which is zero already.
            parts.extend(extent.map(|digest| (pid, at, length, digest)));
        }
    }
    let written = threads::each(
        parts.len(),
        || vec![0; EXTENT],
        |number, buffer| {
            let (pid, at, length, digest) = parts[number];
            let buffer = &mut buffer[..length];
            store.read(&digest, buffer)?;
            remote::write(pid, at, buffer)?;
            counter.add(length as u64);
            Ok::<_, MemoryError>(length as u64)
        },
    )?;
    Ok(written.iter().sum())
}

/// The index is untrusted: it fills private anonymous memory and no other.
fn expect_anonymous(pid: i32, piece: &Piece, range: &Range<u64>) -> Result<(), MemoryError> {
    let mut covered = range.start;
    let read = proc_maps::each(Path::new("/proc"), pid, |mapping| {
        let is_fit = mapping.perms == b"rw-p" && (mapping.path.is_empty() || mapping.path.starts_with(b"["));
        if is_fit && mapping.start <= covered && covered < mapping.end {
            covered = mapping.end;
        }
        ControlFlow::Continue(())
    });
    let read = read.map_err(|source| MemoryError::Mappings { pid, source })?;
    let is_fit = read.is_some() && covered >= range.end;
    is_fit.then_some(()).ok_or(MemoryError::Layout {
        inside: piece.pid,
        at: covered,
    })
}
