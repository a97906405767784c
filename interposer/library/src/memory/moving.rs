//! Takes the program's memory out, and puts it back: its addresses stay.
//!
//! The gate is shut while this runs, so that nobody else changes the table.

use core::cell::Cell;
use core::sync::atomic::Ordering;

use firn_interposer::table::{Access, Kind, Mapping, Piece, State};
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::{access, table, within};
use crate::area::{self, Area, Memory};
use crate::driver::{self, Accessor, DESCRIPTOR, DEVICE, INVALID_VALUE, Location, Properties};
use crate::driver::{READ, READ_WRITE, SUCCESS, Status};
use crate::message::Descriptors;

/// What a rehearsal makes.
const REHEARSED: u64 = 2 << 20;

/// The driver does not do that: CUDA_ERROR_NOT_SUPPORTED.
const NOT_SUPPORTED: Status = 801;

/// Waits for all work, and takes each step once that is to be taken later: if threads that wait outside of
/// the driver hold something that it needs, it shows now.
pub fn rehearse() -> Status {
    let Some(area) = area::get() else {
        return SUCCESS;
    };
    for context in area.contexts() {
        // SAFETY: it has no arguments.
        let waited = within(context, || unsafe { driver::cuCtxSynchronize() });
        if waited != SUCCESS {
            return waited;
        }
    }
    let devices = area.primary.iter().enumerate();
    for (device, context) in devices {
        let context = context.load(Ordering::Acquire);
        if context != 0 {
            let tried = within(context, || tried(device as u32));
            if tried != SUCCESS {
                return tried;
            }
        }
    }
    SUCCESS
}

/// Makes, maps, unmaps and releases a piece that nobody has.
fn tried(device: u32) -> Status {
    let kind = Kind {
        location: DEVICE,
        id: device,
        ..Kind::default()
    };
    let made = Own::make(kind, REHEARSED)
        .and_then(|own| Passing::reserve(REHEARSED)?.map(0, REHEARSED, &own, device));
    made.err().unwrap_or(SUCCESS)
}

/// Descriptors of pieces, in the order of the table.
pub fn lend(from: usize, count: usize, descriptors: &mut Descriptors) -> Status {
    let Some(table) = table() else {
        return INVALID_VALUE;
    };
    let pieces = table.pieces.all().iter().skip(from).take(count);
    for (piece, descriptor) in pieces.zip(descriptors) {
        let mut number = -1_i32;
        // SAFETY: the driver's function, with a place for its result.
        let exported =
            unsafe { driver::cuMemExportToShareableHandle(&mut number, piece.real, DESCRIPTOR, 0) };
        if exported != SUCCESS {
            return exported;
        }
        // SAFETY: the driver has made it for this caller.
        *descriptor = (number >= 0).then(|| unsafe { OwnedFd::from_raw_fd(number) });
    }
    SUCCESS
}

/// Unmaps and releases every piece.
pub fn detach() -> Status {
    let Some(mut table) = table() else {
        return INVALID_VALUE;
    };
    if table.lost > 0 || table.pieces.all().iter().any(|piece| piece.is_imported) {
        return NOT_SUPPORTED;
    }
    let table = &mut *table;
    for mapping in table.mappings.all() {
        let is_in = |piece: &&Piece| piece.state == State::In;
        if table.pieces.get(mapping.piece).filter(is_in).is_some() {
            // SAFETY: it is mapped, and nobody uses it: the gate is shut, and all work is done.
            let unmapped = unsafe { driver::cuMemUnmap(mapping.begin, mapping.bytes) };
            if unmapped != SUCCESS {
                return unmapped;
            }
        }
    }
    for piece in table.pieces.all_mut() {
        if piece.state == State::In {
            // SAFETY: the table has this handle of the driver's.
            let released = unsafe { driver::cuMemRelease(piece.real) };
            if released != SUCCESS {
                return released;
            }
            (piece.state, piece.real) = (State::Out, 0);
        }
    }
    SUCCESS
}

/// Maps pieces again.
pub fn attach(from: usize, count: usize, descriptors: &mut Descriptors) -> Status {
    let Some((area, mut table)) = area::get().zip(table()) else {
        return INVALID_VALUE;
    };
    let table = &mut *table;
    let pieces = table.pieces.all_mut().iter_mut().skip(from).take(count);
    for (piece, descriptor) in pieces.zip(descriptors.iter_mut()) {
        // One that is there already stays: the request may come once more.
        if piece.state == State::Out
            && let Some(descriptor) = descriptor.take()
        {
            match returned(area, piece, &descriptor) {
                Ok(real) => (piece.state, piece.real) = (State::Back, real),
                Err(status) => return status,
            }
        }
    }
    let mapped = map_back(table);
    for piece in table.pieces.all_mut() {
        if piece.state == State::Back && mapped == SUCCESS {
            piece.state = State::In;
        }
    }
    mapped
}

/// Maps what has come back.
fn map_back(table: &Memory) -> Status {
    for mapping in table.mappings.all() {
        let is_back = |piece: &&Piece| piece.state == State::Back;
        let Some(piece) = table.pieces.get(mapping.piece).filter(is_back) else {
            continue;
        };
        // SAFETY: the addresses are reserved since the program has had it there.
        let mapped = unsafe {
            match driver::cuMemMap(mapping.begin, mapping.bytes, mapping.offset, piece.real, 0) {
                SUCCESS => allow(mapping),
                refused => refused,
            }
        };
        if mapped != SUCCESS {
            return mapped;
        }
    }
    SUCCESS
}

/// Gives a mapping the access that it has had.
fn allow(mapping: &Mapping) -> Status {
    let Access {
        reading,
        writing,
        hosts,
    } = mapping.access;
    for device in (0..u32::BITS).filter(|device| reading & (1 << device) != 0) {
        let flags = if writing & (1 << device) == 0 {
            READ
        } else {
            READ_WRITE
        };
        let allowed = set_access(mapping, &access(device, flags));
        if allowed != SUCCESS {
            return allowed;
        }
    }
    for host in hosts.iter().filter(|host| host.flags != 0) {
        let location = Location {
            kind: host.kind,
            id: host.id,
        };
        let flags = host.flags;
        let allowed = set_access(mapping, &Accessor { location, flags });
        if allowed != SUCCESS {
            return allowed;
        }
    }
    SUCCESS
}

fn set_access(mapping: &Mapping, accessor: &Accessor) -> Status {
    // SAFETY: it is mapped.
    unsafe { driver::cuMemSetAccess(mapping.begin, mapping.bytes, accessor, 1) }
}

/// The driver's handle of a piece that has come back. What another process has shared cannot be lent again:
/// where there is room, its bytes are copied into a piece of this process's own.
fn returned(area: &Area, piece: &Piece, descriptor: &OwnedFd) -> Result<u64, Status> {
    let mut real = 0;
    let number = descriptor.as_raw_fd().unsigned_abs() as usize;
    // SAFETY: the driver's function, with a place for its result.
    check(unsafe { driver::cuMemImportFromShareableHandle(&mut real, number, DESCRIPTOR) })?;
    let shared = Own { handle: real };
    let context = area.primary.get(piece.kind.id as usize);
    let context = context.map_or(0, |context| context.load(Ordering::Acquire));
    if piece.kind.location == DEVICE && context != 0 {
        let mut copied = Err(INVALID_VALUE);
        within(context, || {
            copied = copy(piece, &shared);
            SUCCESS
        });
        if let Ok(own) = copied {
            return Ok(own.keep());
        }
    }
    Ok(shared.keep())
}

/// A copy of a piece that is this process's own.
fn copy(piece: &Piece, shared: &Own) -> Result<Own, Status> {
    let own = Own::make(piece.kind, piece.bytes)?;
    let passing = Passing::reserve(piece.bytes.checked_mul(2).ok_or(INVALID_VALUE)?)?;
    let device = piece.kind.id;
    passing.map(0, piece.bytes, shared, device)?;
    passing.map(piece.bytes, piece.bytes, &own, device)?;
    let to = passing.begin.saturating_add(piece.bytes);
    // SAFETY: both are mapped, and nobody else knows them.
    unsafe {
        check(driver::cuMemcpyDtoD_v2(to, passing.begin, piece.bytes))?;
        check(driver::cuCtxSynchronize())?;
    }
    Ok(own)
}

fn check(status: Status) -> Result<(), Status> {
    if status == SUCCESS { Ok(()) } else { Err(status) }
}

/// A handle of the driver's, released if it is not kept.
struct Own {
    handle: u64,
}

impl Own {
    fn make(kind: Kind, bytes: u64) -> Result<Self, Status> {
        let properties = Properties::of(kind, DESCRIPTOR);
        let mut handle = 0;
        // SAFETY: the driver's function, with a place for its result.
        check(unsafe { driver::cuMemCreate(&mut handle, bytes, &properties, 0) })?;
        Ok(Self { handle })
    }

    fn keep(self) -> u64 {
        let handle = self.handle;
        core::mem::forget(self);
        handle
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        unsafe { driver::cuMemRelease(self.handle) };
    }
}

/// Addresses that are needed for a moment, with what is mapped there.
struct Passing {
    begin: u64,
    bytes: u64,
    mapped: Cell<[(u64, u64); 2]>,
}

impl Passing {
    fn reserve(bytes: u64) -> Result<Self, Status> {
        let mut begin = 0;
        // SAFETY: the driver's function, with a place for its result.
        check(unsafe { driver::cuMemAddressReserve(&mut begin, bytes, 0, 0, 0) })?;
        Ok(Self {
            begin,
            bytes,
            mapped: Cell::new([(0, 0); 2]),
        })
    }

    /// Maps a piece of so many bytes at an offset.
    fn map(&self, offset: u64, bytes: u64, own: &Own, device: u32) -> Result<(), Status> {
        let begin = self.begin.saturating_add(offset);
        let [_, last] = self.mapped.get();
        // SAFETY: the addresses are reserved, and nothing is mapped there.
        unsafe {
            check(driver::cuMemMap(begin, bytes, 0, own.handle, 0))?;
            self.mapped.set([last, (begin, bytes)]);
            check(driver::cuMemSetAccess(
                begin,
                bytes,
                &access(device, READ_WRITE),
                1,
            ))
        }
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        for (begin, bytes) in self.mapped.get() {
            if bytes > 0 {
                // SAFETY: it was mapped, and nobody uses it.
                unsafe { driver::cuMemUnmap(begin, bytes) };
            }
        }
        // SAFETY: nothing is mapped there any more.
        unsafe { driver::cuMemAddressFree(self.begin, self.bytes) };
    }
}
