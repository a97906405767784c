//! The GPU memory that a program has by the driver's functions that make and map it in two steps.
//!
//! A *piece* is physical memory, a *mapping* an address range that has one. What the program has allocated by
//! cuMemAlloc is made of pieces and mappings as well, of which it knows nothing: an *allocation*.

use crate::sorted::{Keyed, Refused, Sorted};

/// Physical memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Piece {
    /// By which the program knows it: the driver's handle when it was made.
    pub known: u64,
    /// The driver's handle for it.
    pub real: u64,
    pub bytes: u64,
    /// The types of handles that the program asked for.
    pub asked: u32,
    /// Handles that the program has not released.
    pub handles: u32,
    pub mappings: u32,
    /// Whether it came from another process, by a handle.
    pub is_imported: bool,
    /// Whether something else may refer to it as well: another process, a multicast object, an array.
    pub is_shared: bool,
    /// A descriptor of it was lent, and the gate has not been open since.
    pub is_lent: bool,
    /// It is out of the process, and has no handle of the driver's.
    pub is_out: bool,
    pub kind: Kind,
}

/// What a piece is made of, as the driver has it (CUmemAllocationProp).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Kind {
    /// A kind of location, and which one of it.
    pub location: u32,
    pub id: u32,
    pub compression: u8,
    pub rdma: u8,
    pub usage: u16,
}

impl Keyed for Piece {
    fn key(&self) -> u64 {
        self.known
    }
}

/// An address range with a piece, or a part of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Mapping {
    pub begin: u64,
    pub bytes: u64,
    /// Of the piece: from where it is mapped.
    pub offset: u64,
    /// The piece, by its `known`.
    pub piece: u64,
    /// Where the allocation begins that this is a part of; 0: the program has mapped it itself.
    pub allocation: u64,
    /// Bytes that the program asked for, in the first mapping of an allocation.
    pub asked: u64,
    /// The context that an allocation belongs to, and its device's number in the process.
    pub context: u64,
    pub device: u32,
    /// Nothing is mapped there at the moment.
    pub is_empty: bool,
    /// Of an allocation, in its first mapping.
    pub stage: Stage,
    /// Of an allocation, in its first mapping: its context is being destroyed.
    pub is_ending: bool,
    pub access: Access,
}

impl Keyed for Mapping {
    fn key(&self) -> u64 {
        self.begin
    }
}

impl Mapping {
    pub fn end(&self) -> u64 {
        self.begin.saturating_add(self.bytes)
    }

    /// Whether it is a part of an allocation.
    pub fn is_allocation(&self) -> bool {
        self.allocation != 0
    }
}

/// Whether a program has an allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// It has.
    #[default]
    Whole = 0,
    /// It does not have it yet, or no longer: one thread makes it or discards it.
    Partial = 1,
}

/// Who may access a mapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Access {
    /// A bit for each device, by its number in the process.
    pub reading: u32,
    pub writing: u32,
    /// Of processors: types and numbers are the driver's (CUmemLocation). A mapping has few.
    pub hosts: [Host; 2],
}

/// What processors of a place may do; type 0: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Host {
    pub kind: u32,
    pub id: u32,
    pub flags: u32,
}

/// An allocation, as the program has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    pub begin: u64,
    pub asked: u64,
    /// With all its mappings.
    pub bytes: u64,
    pub context: u64,
    pub device: u32,
}

/// Of numbers for handles: the driver gives none of these.
const OWN: u64 = 0xf1 << 56;

/// At most `N` pieces and as many mappings. Of zero bytes it has none.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Table<const N: usize> {
    pub pieces: Sorted<Piece, N>,
    pub mappings: Sorted<Mapping, N>,
    /// Mappings of pieces of the table that it had no room for.
    pub lost: u64,
}

impl<const N: usize> Table<N> {
    /// By which a new piece is known: the driver's handle, unless the program has another of that number.
    pub fn fresh(&self, real: u64) -> u64 {
        let mut known = real;
        while self.pieces.get(known).is_some() {
            known = known.wrapping_add(1) | OWN;
        }
        known
    }

    /// The driver's handle for one that the program has: its own, if the table does not know it.
    pub fn real(&self, known: u64) -> u64 {
        self.pieces.get(known).map_or(known, |piece| piece.real)
    }

    /// Adds a piece of which the program has a handle.
    ///
    /// # Errors
    /// There is no room.
    pub fn add_piece(&mut self, piece: Piece) -> Result<(), Refused> {
        self.pieces.insert(piece)
    }

    /// Adds a mapping of a piece.
    ///
    /// # Errors
    /// There is no such piece, or no room.
    pub fn add_mapping(&mut self, mapping: Mapping) -> Result<(), Refused> {
        let piece = self.pieces.get_mut(mapping.piece).ok_or(Refused)?;
        let mappings = piece.mappings.checked_add(1).ok_or(Refused)?;
        piece.mappings = mappings;
        self.mappings.insert(mapping).inspect_err(|_| {
            if let Some(piece) = self.pieces.get_mut(mapping.piece) {
                piece.mappings = piece.mappings.saturating_sub(1);
            }
        })
    }

    /// Removes a mapping. Returns the driver's handle of its piece, if nothing is left of that: it is to be
    /// released.
    pub fn remove_mapping(&mut self, begin: u64) -> Option<u64> {
        let mapping = self.mappings.remove(begin)?;
        let piece = self.pieces.get_mut(mapping.piece)?;
        piece.mappings = piece.mappings.saturating_sub(1);
        self.drop_piece(mapping.piece)
    }

    /// The program releases a handle. Returns as [`Self::remove_mapping`] does; none also if the table does
    /// not know the handle.
    pub fn release(&mut self, known: u64) -> Option<u64> {
        let piece = self.pieces.get_mut(known)?;
        piece.handles = piece.handles.saturating_sub(1);
        self.drop_piece(known)
    }

    /// Removes a piece that nobody has, where something has failed.
    pub fn forget(&mut self, known: u64) {
        let _ = self.drop_piece(known);
    }

    fn drop_piece(&mut self, known: u64) -> Option<u64> {
        let piece = self.pieces.get(known)?;
        if piece.handles > 0 || piece.mappings > 0 {
            return None;
        }
        Some(self.pieces.remove(known)?.real)
    }

    /// Every piece, and whether it could be taken out and put back: none is another process's or shared, and
    /// each mapping is known.
    pub fn is_own(&self) -> bool {
        let is_own = |piece: &Piece| !piece.is_imported && !piece.is_shared;
        self.lost == 0 && self.pieces.all().iter().all(is_own)
    }

    /// Something else may refer to the pieces of a range from now on.
    pub fn share(&mut self, begin: u64, end: u64) {
        let mut from = begin;
        while let Some(mapping) = self.at(from).copied() {
            if let Some(piece) = self.pieces.get_mut(mapping.piece) {
                piece.is_shared = true;
            }
            from = mapping.end();
            if from >= end {
                break;
            }
        }
    }

    /// The mapping that has an address.
    pub fn at(&self, address: u64) -> Option<&Mapping> {
        let mapping = self.mappings.last_up_to(address)?;
        (address < mapping.end()).then_some(mapping)
    }

    /// The allocation that has an address.
    pub fn allocation(&self, address: u64) -> Option<Allocation> {
        let begin = self.at(address)?.allocation;
        let first = self.mappings.get(begin).filter(|first| first.is_allocation())?;
        if first.stage != Stage::Whole {
            return None;
        }
        let parts = self.mappings.between(begin, u64::MAX).iter();
        let parts = parts.take_while(|mapping| mapping.allocation == begin);
        Some(Allocation {
            begin,
            asked: first.asked,
            bytes: parts.map(|mapping| mapping.bytes).sum(),
            context: first.context,
            device: first.device,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::vec::Vec;

    use super::*;

    fn piece(known: u64) -> Piece {
        Piece {
            known,
            real: known + 1000,
            bytes: 10,
            handles: 1,
            ..Piece::default()
        }
    }

    fn mapping(begin: u64, piece: u64) -> Mapping {
        Mapping {
            begin,
            bytes: 10,
            piece,
            ..Mapping::default()
        }
    }

    fn table() -> Box<Table<4>> {
        Box::default()
    }

    #[test]
    fn a_piece_stays_while_it_has_handles_or_mappings() {
        let mut table = table();
        table.add_piece(piece(1)).unwrap();
        table.add_mapping(mapping(100, 1)).unwrap();
        table.add_mapping(mapping(200, 1)).unwrap();
        assert_eq!(table.real(1), 1001);
        assert_eq!(table.real(2), 2);
        assert_eq!(table.release(1), None);
        assert_eq!(table.remove_mapping(100), None);
        assert_eq!(table.remove_mapping(100), None, "it is gone");
        assert_eq!(table.remove_mapping(200), Some(1001));
        assert!(table.pieces.all().is_empty() && table.mappings.all().is_empty());
        table.add_piece(piece(1)).unwrap();
        assert_eq!(table.release(1), Some(1001));
        assert_eq!(table.release(1), None);
    }

    #[test]
    fn addresses_belong_to_mappings_and_allocations() {
        let mut table = table();
        table.add_piece(piece(1)).unwrap();
        let part = |begin| Mapping {
            allocation: 100,
            asked: if begin == 100 { 17 } else { 0 },
            context: 5,
            device: 3,
            ..mapping(begin, 1)
        };
        for mapping in [part(100), part(110), mapping(120, 1)] {
            table.add_mapping(mapping).unwrap();
        }
        let expected = Allocation {
            begin: 100,
            asked: 17,
            bytes: 20,
            context: 5,
            device: 3,
        };
        for (address, expected) in [
            (99, None),
            (100, Some(expected)),
            (119, Some(expected)),
            (120, None),
            (130, None),
        ] {
            assert_eq!(table.allocation(address), expected, "{address}");
        }
        let mapped: Vec<_> = [99, 100, 119, 129, 130]
            .map(|at| table.at(at).map(|found| found.begin))
            .into();
        assert_eq!(mapped, [None, Some(100), Some(110), Some(120), None]);
    }

    #[test]
    fn what_has_no_room_is_refused() {
        let mut table = table();
        table.add_piece(piece(1)).unwrap();
        assert_eq!(table.add_piece(piece(1)), Err(Refused));
        assert_eq!((table.fresh(2), table.fresh(1)), (2, OWN | 2));
        for begin in 1..=4 {
            table.add_mapping(mapping(begin * 10, 1)).unwrap();
        }
        assert_eq!(table.add_mapping(mapping(50, 1)), Err(Refused));
        assert_eq!(table.add_mapping(mapping(60, 2)), Err(Refused), "no such piece");
        assert_eq!(table.pieces.get(1).unwrap().mappings, 4);
    }
}
