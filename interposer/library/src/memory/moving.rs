//! Takes the program's memory out, and puts it back: its addresses stay.
//!
//! The gate is shut while this runs, so that nobody else changes the table.

use core::cell::Cell;
use core::sync::atomic::Ordering;

use firn_interposer::abi::PIECES;
use firn_interposer::table::{Access, Kind, Mapping, Piece};
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::{access, current, table, wait_for_work, within};
use crate::area::{self, Area, Memory};
use crate::driver::{self, Accessor, DESCRIPTOR, DEVICE, INVALID_VALUE, Location, Properties};
use crate::driver::{READ, READ_WRITE, SUCCESS, Status};
use crate::message::Descriptors;

/// What a rehearsal makes.
const REHEARSED: u64 = 2 << 20;

/// The driver does not do that: CUDA_ERROR_NOT_SUPPORTED.
const NOT_SUPPORTED: Status = 801;
/// A stream is captured: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.
const CAPTURING: Status = 900;
/// There may be work, or the gate is open: CUDA_ERROR_NOT_READY.
const NOT_READY: Status = 600;
/// Nobody holds a piece: CUDA_ERROR_NOT_MAPPED.
const NOT_LENT: Status = 211;

/// Waits for all work, and takes each step once that is to be taken later: if threads that wait outside of
/// the driver hold something that it needs, it shows now.
pub fn rehearse() -> Status {
    let Some(area) = area::get() else {
        return SUCCESS;
    };
    if area.has_unknown.load(Ordering::Acquire) {
        return NOT_SUPPORTED;
    }
    for context in area.contexts() {
        // It may have been opened since this was asked for, and contexts destroyed.
        if !area.gate.is_shut() {
            return NOT_READY;
        }
        if area.is_capturing() {
            return CAPTURING;
        }
        let tried = within(context, || match (wait_for_work(), current()) {
            (SUCCESS, Some((device, _))) => attempt(device).err().unwrap_or(SUCCESS),
            (SUCCESS, None) => NOT_SUPPORTED,
            (refused, _) => refused,
        });
        if tried != SUCCESS {
            return tried;
        }
    }
    area.is_rehearsed.store(area.gate.is_shut(), Ordering::Release);
    SUCCESS
}

/// Makes a piece, lends, maps, unmaps and releases it.
fn attempt(device: u32) -> Result<(), Status> {
    let kind = Kind {
        location: DEVICE,
        id: device,
        ..Kind::default()
    };
    let own = Own::make(kind, REHEARSED)?;
    drop(own.lend()?);
    let passing = Passing::reserve(REHEARSED)?;
    passing.map(0, REHEARSED, &own, device)?;
    passing.unmap()?;
    own.release()
}

/// Descriptors of pieces, in the order of the table.
pub fn lend(from: usize, count: usize, descriptors: &mut Descriptors) -> Status {
    let Some((area, table)) = area::get().zip(table()) else {
        return INVALID_VALUE;
    };
    if !area.gate.is_shut() {
        return NOT_READY;
    }
    if !table.is_own() {
        return NOT_SUPPORTED;
    }
    let mut pieces = [0; PIECES as usize];
    let wanted = table.pieces.all().iter().skip(from).take(count);
    for (place, piece) in pieces.iter_mut().zip(wanted) {
        *place = piece.real;
    }
    // If the driver hangs now, the gate can be opened all the same.
    drop(table);
    let wanted = pieces.into_iter().take_while(|real| *real != 0);
    for (real, descriptor) in wanted.zip(descriptors) {
        match exported(real) {
            Ok(lent) => *descriptor = Some(lent),
            Err(status) => return status,
        }
    }
    SUCCESS
}

/// A descriptor of a piece.
fn exported(real: u64) -> Result<OwnedFd, Status> {
    let mut number = -1_i32;
    // SAFETY: the driver's function, with a place for its result.
    check(unsafe { driver::cuMemExportToShareableHandle(&mut number, real, DESCRIPTOR, 0) })?;
    if number < 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the driver has made it for this caller.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Unmaps and releases every piece. What fails half way is mapped again by [`attach`].
pub fn detach() -> Status {
    let Some((area, mut table)) = area::get().zip(table()) else {
        return INVALID_VALUE;
    };
    if !table.is_own() || area.has_unknown.load(Ordering::Acquire) {
        return NOT_SUPPORTED;
    }
    if !area.is_rehearsed.load(Ordering::Acquire) || area.is_capturing() {
        return NOT_READY;
    }
    if table.pieces.all().iter().any(|piece| !piece.is_lent) {
        return NOT_LENT;
    }
    for mapping in table
        .mappings
        .all_mut()
        .iter_mut()
        .filter(|mapping| !mapping.is_empty)
    {
        // SAFETY: it is mapped, and nobody uses it: the gate is shut, and all work is done.
        let unmapped = unsafe { driver::cuMemUnmap(mapping.begin, mapping.bytes) };
        if unmapped != SUCCESS {
            return unmapped;
        }
        mapping.is_empty = true;
    }
    for piece in table.pieces.all_mut().iter_mut().filter(|piece| !piece.is_out) {
        // SAFETY: the table has this handle of the driver's.
        let released = unsafe { driver::cuMemRelease(piece.real) };
        if released != SUCCESS {
            return released;
        }
        (piece.is_out, piece.real) = (true, 0);
    }
    SUCCESS
}

/// Maps pieces again: those that have a descriptor, and those that have never left. One that is there already
/// stays, as the request may come once more.
pub fn attach(from: usize, count: usize, descriptors: &mut Descriptors) -> Status {
    let Some((area, mut table)) = area::get().zip(table()) else {
        return INVALID_VALUE;
    };
    let pieces = table.pieces.all_mut().iter_mut().skip(from).take(count);
    for (piece, descriptor) in pieces
        .zip(descriptors.iter_mut())
        .filter(|(piece, _)| piece.is_out)
    {
        let Some(descriptor) = descriptor.take() else {
            // The kernel has kept it, as where the process has too many.
            return INVALID_VALUE;
        };
        match returned(area, piece, &descriptor) {
            Ok(real) => (piece.is_out, piece.real) = (false, real),
            Err(status) => return status,
        }
    }
    let Memory { pieces, mappings, .. } = &mut *table;
    for mapping in mappings.all_mut().iter_mut().filter(|mapping| mapping.is_empty) {
        let Some(piece) = pieces.get(mapping.piece).filter(|piece| !piece.is_out) else {
            continue;
        };
        let mapped = map_back(mapping, piece.real);
        if mapped != SUCCESS {
            return mapped;
        }
        mapping.is_empty = false;
    }
    SUCCESS
}

/// Maps a piece where it was.
fn map_back(mapping: &Mapping, real: u64) -> Status {
    let Mapping {
        begin, bytes, offset, ..
    } = *mapping;
    // SAFETY: the addresses are reserved since the program has had it there, and nothing is mapped.
    let mapped = unsafe { driver::cuMemMap(begin, bytes, offset, real, 0) };
    if mapped != SUCCESS {
        return mapped;
    }
    let allowed = allow(mapping);
    if allowed != SUCCESS {
        // SAFETY: it was mapped above.
        unsafe { driver::cuMemUnmap(begin, bytes) };
    }
    allowed
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
/// where there is room, its bytes are copied into a piece of this process's own. Else the piece counts as
/// imported from then on.
fn returned(area: &Area, piece: &mut Piece, descriptor: &OwnedFd) -> Result<u64, Status> {
    let mut real = 0;
    let number = descriptor.as_raw_fd().unsigned_abs() as usize;
    // SAFETY: the driver's function, with a place for its result.
    check(unsafe { driver::cuMemImportFromShareableHandle(&mut real, number, DESCRIPTOR) })?;
    let shared = Own { handle: real };
    let mut copied = Err(NOT_SUPPORTED);
    for context in area.contexts().filter(|_| piece.kind.location == DEVICE) {
        within(context, || {
            if current().is_some_and(|(device, _)| device == piece.kind.id) {
                copied = copy(piece, &shared);
            }
            SUCCESS
        });
        if copied.is_ok() {
            break;
        }
    }
    (piece.is_imported, piece.is_lent) = (copied.is_err(), false);
    Ok(copied.unwrap_or(shared).keep())
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

    fn lend(&self) -> Result<OwnedFd, Status> {
        exported(self.handle)
    }

    fn release(self) -> Result<(), Status> {
        // SAFETY: nobody else has it.
        check(unsafe { driver::cuMemRelease(self.keep()) })
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

impl Passing {
    /// Unmaps what is mapped.
    fn unmap(&self) -> Result<(), Status> {
        for (begin, bytes) in self.mapped.take() {
            if bytes > 0 {
                // SAFETY: it was mapped, and nobody uses it.
                check(unsafe { driver::cuMemUnmap(begin, bytes) })?;
            }
        }
        Ok(())
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        let _ = self.unmap();
        // SAFETY: nothing is mapped there any more.
        unsafe { driver::cuMemAddressFree(self.begin, self.bytes) };
    }
}
