//! GPU memory that is out of its processes: what firn holds until it is back in them.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use firn_gpu::GpuUuid;
use firn_host::descriptors;
use firn_process::pidfd::Life;

/// Bytes that go back in one message at most, if it is more than one piece: what comes back is there twice
/// until the message is answered.
const AT_ONCE: u64 = 256 << 20;

/// Memory of the processes of a container.
#[derive(Debug)]
pub struct Pieces {
    /// The file of firn's library that they have.
    pub(crate) library: PathBuf,
    /// The container's GPUs when it was lent.
    pub(crate) home: Vec<GpuUuid>,
    /// Those of its copies, in the same order; empty if there are none.
    pub(crate) copied_to: Vec<GpuUuid>,
    pub(crate) processes: Vec<Lent>,
}

/// Memory of a process, or what is left of it to attach.
#[derive(Debug)]
pub(crate) struct Lent {
    pub pid: i32,
    pub life: Life,
    /// The index of the first piece.
    pub from: u32,
    pub pieces: VecDeque<Piece>,
}

/// A piece: as long as there is a descriptor of it, its bytes stay.
#[derive(Debug)]
pub(crate) struct Piece {
    pub bytes: u64,
    pub lent: OwnedFd,
    /// The same bytes on another GPU.
    pub copy: Option<OwnedFd>,
}

impl Pieces {
    pub(crate) fn pids(&self) -> Vec<i32> {
        self.processes.iter().map(|lent| lent.pid).collect()
    }

    /// Takes out what is known of copies: the processes get what they have lent.
    pub(crate) fn take_copies(&mut self) -> Vec<OwnedFd> {
        self.copied_to.clear();
        let pieces = self.processes.iter_mut().flat_map(|lent| &mut lent.pieces);
        pieces.filter_map(|piece| piece.copy.take()).collect()
    }
}

impl Lent {
    pub(crate) fn new(pid: i32, life: Life, pieces: Vec<(u64, OwnedFd)>) -> Self {
        let piece = |(bytes, lent)| Piece {
            bytes,
            lent,
            copy: None,
        };
        Self {
            pid,
            life,
            from: 0,
            pieces: pieces.into_iter().map(piece).collect(),
        }
    }

    /// How many of the first ones go back in one message, at most `most`.
    pub(crate) fn next(&self, most: usize) -> usize {
        let mut bytes = 0_u64;
        let fits = self.pieces.iter().take_while(|piece| {
            bytes = bytes.saturating_add(piece.bytes);
            bytes <= AT_ONCE
        });
        fits.count()
            .clamp(1, most.clamp(1, descriptors::MOST))
            .min(self.pieces.len())
    }

    /// So many of the first ones.
    pub(crate) fn first(&self, count: usize) -> Vec<BorrowedFd<'_>> {
        self.pieces.iter().take(count).map(Piece::descriptor).collect()
    }

    /// Takes so many of the first ones out: they are back.
    pub(crate) fn take_first(&mut self, count: usize) -> Vec<Piece> {
        let back: Vec<Piece> = self.pieces.drain(..count.min(self.pieces.len())).collect();
        self.from += u32::try_from(back.len()).unwrap_or(u32::MAX);
        back
    }

    /// These are the copies of pieces from this index on.
    pub(crate) fn put_copies(&mut self, from: usize, copies: Vec<OwnedFd>) {
        for (piece, copy) in self.pieces.iter_mut().skip(from).zip(copies) {
            piece.copy = Some(copy);
        }
    }
}

impl Piece {
    /// The copy, or else what was lent.
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.copy.as_ref().unwrap_or(&self.lent).as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::*;

    fn descriptor() -> OwnedFd {
        File::open("/dev/null").unwrap().into()
    }

    fn lent(sizes: impl IntoIterator<Item = u64>) -> Lent {
        let life = Life::of(std::process::id().cast_signed()).unwrap();
        let pieces = sizes.into_iter().map(|bytes| (bytes, descriptor()));
        Lent::new(7, life, pieces.collect())
    }

    #[test]
    fn what_is_back_is_taken_from_the_front() {
        let mut lent = lent(0..70);
        assert_eq!(lent.first(lent.next(usize::MAX)).len(), 64);
        assert_eq!(lent.take_first(64).len(), 64);
        assert_eq!((lent.from, lent.pieces.len(), lent.pieces[0].bytes), (64, 6, 64));
        lent.take_first(64);
        assert_eq!((lent.from, lent.pieces.len(), lent.next(64)), (70, 0, 0));
    }

    #[test]
    fn a_message_has_one_large_piece_or_several_small_ones() {
        let (large, small) = (1 << 30, 2 << 20);
        assert_eq!(lent([large, large]).next(64), 1);
        assert_eq!(lent([small, small, large]).next(64), 2);
        assert_eq!(lent([small, small, large]).next(1), 1);
        assert_eq!(lent([large, small]).next(0), 1);
    }

    #[test]
    fn copies_are_used_while_they_are_there() {
        let mut all = Pieces {
            library: PathBuf::new(),
            home: Vec::new(),
            copied_to: Vec::new(),
            processes: vec![lent([1, 2])],
        };
        let used = |all: &Pieces| -> Vec<i32> {
            let first = all.processes[0].first(2);
            first.iter().map(AsRawFd::as_raw_fd).collect()
        };
        let before = used(&all);
        all.processes[0].put_copies(1, vec![descriptor()]);
        let copied = used(&all);
        assert!(copied[0] == before[0] && copied[1] != before[1]);
        assert_eq!(all.take_copies().len(), 1);
        assert_eq!(used(&all), before);
    }
}
