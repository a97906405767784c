//! What the program allocates in one step: an address range, and pieces mapped into it.

use core::sync::atomic::Ordering;

use firn_interposer::sorted::Refused;
use firn_interposer::table::{Kind, Mapping, Piece};

use super::{access, current, grant, table, within};
use crate::area::{self, Area, Memory};
use crate::driver::{self, Accessor, DESCRIPTOR, DEVICE, Properties, READ_WRITE, SUCCESS, Status};

/// Smaller allocations are the driver's own: many of them share its pages.
const SMALLEST: u64 = 2 << 20;
/// Of the size of a piece.
const GRANULARITY: u64 = 2 << 20;
/// A larger allocation has several pieces: to put one in the place of another needs room for one.
const LARGEST: u64 = 1 << 30;

/// Bits of what a device can do.
const ASKED: u32 = 1;
const CAN_MAP: u32 = 2;
pub const CAN_EXPORT: u32 = 4;
const CAN_RDMA: u32 = 8;
/// The attributes of a device that these are: of virtual memory, of descriptors, of RDMA with virtual memory.
const ATTRIBUTES: [(u32, u32); 3] = [(CAN_MAP, 102), (CAN_EXPORT, 103), (CAN_RDMA, 110)];

/// The driver rounds a row up to this.
const PITCH: u64 = 512;

/// cuMemAlloc
///
/// # Safety
/// As the driver's.
pub unsafe fn allocate(real: unsafe extern "C" fn(u64, u64) -> Status, to: u64, bytes: u64) -> Status {
    // SAFETY: the arguments are those of the program.
    unsafe {
        let own = area::get()
            .filter(|_| bytes >= SMALLEST)
            .zip(driver::out::<u64>(to));
        let made = own.and_then(|(area, to)| Some((to, make(area, bytes)?)));
        match made {
            None => real(to, bytes),
            Some((to, Ok(begin))) => {
                *to = begin;
                SUCCESS
            }
            Some((_, Err(status))) => status,
        }
    }
}

/// cuMemAllocPitch
///
/// # Safety
/// As the driver's.
pub unsafe fn allocate_pitched(
    real: unsafe extern "C" fn(u64, u64, u64, u64, u32) -> Status,
    to: u64,
    pitch: u64,
    width: u64,
    height: u64,
    element: u32,
) -> Status {
    // SAFETY: the arguments are those of the program.
    unsafe {
        let row = width.checked_next_multiple_of(PITCH);
        let bytes = row.and_then(|row| row.checked_mul(height));
        let own = area::get()
            .zip(bytes.filter(|bytes| *bytes >= SMALLEST && matches!(element, 4 | 8 | 16)))
            .zip(driver::out::<u64>(to).zip(driver::out::<u64>(pitch)));
        let made = own.and_then(|((area, bytes), out)| Some((out, make(area, bytes)?)));
        match made {
            None => real(to, pitch, width, height, element),
            Some(((to, pitch), Ok(begin))) => {
                (*to, *pitch) = (begin, row.unwrap_or_default());
                SUCCESS
            }
            Some((_, Err(status))) => status,
        }
    }
}

/// cuMemFree
///
/// # Safety
/// As the driver's.
pub unsafe fn free(real: unsafe extern "C" fn(u64) -> Status, address: u64) -> Status {
    let own = |table: &Memory| table.allocation(address).filter(|found| found.begin == address);
    let Some(found) = table().and_then(|table| own(&table)) else {
        // SAFETY: the arguments are those of the program.
        return unsafe { real(address) };
    };
    // The driver waits as well for the work that may use it. Nobody waits for this thread meanwhile.
    // SAFETY: it has no arguments.
    let waited = within(found.context, || unsafe { driver::cuCtxSynchronize() });
    if waited != SUCCESS {
        return waited;
    }
    match table() {
        Some(mut table) if own(&table).is_some() => discard(&mut table, address, found.bytes),
        // Another thread of the program has freed it.
        _ => driver::INVALID_VALUE,
    }
}

/// Makes an allocation of so many bytes in the current context. None: the driver is to make it.
fn make(area: &Area, asked: u64) -> Option<Result<u64, Status>> {
    let (device, context) = current()?;
    let abilities = abilities(area, device)?;
    let bytes = asked.checked_next_multiple_of(GRANULARITY)?;
    if abilities & CAN_MAP == 0 || abilities & CAN_EXPORT == 0 {
        return None;
    }
    let mut begin = 0;
    // SAFETY: the driver's function, with a place for its result.
    let reserved = unsafe { driver::cuMemAddressReserve(&mut begin, bytes, 0, 0, 0) };
    if reserved != SUCCESS {
        return Some(Err(reserved));
    }
    let wanted = Wanted {
        begin,
        bytes,
        asked,
        context,
        device,
        kind: Kind {
            location: DEVICE,
            id: device,
            rdma: u8::from(abilities & CAN_RDMA != 0),
            ..Kind::default()
        },
    };
    // From here to the end: an allocation that others see is complete.
    let mut table = area.memory.take();
    let filled = wanted.fill(&mut table, area);
    if filled.is_err() {
        discard(&mut table, begin, bytes);
    }
    match filled {
        Ok(()) => Some(Ok(begin)),
        Err(Some(status)) => Some(Err(status)),
        // There is no room in the table.
        Err(None) => None,
    }
}

struct Wanted {
    begin: u64,
    bytes: u64,
    asked: u64,
    context: u64,
    device: u32,
    kind: Kind,
}

impl Wanted {
    /// Maps pieces into the whole range. Err: what the driver answers, or none if the table has no room. What
    /// is there by then is in the table.
    fn fill(&self, table: &mut Memory, area: &Area) -> Result<(), Option<Status>> {
        let mut done = 0;
        while done < self.bytes {
            done += self.map_next(table, done)?;
        }
        let peers = area.peers.get(self.device as usize);
        let peers = peers.map_or(0, |peers| peers.load(Ordering::Acquire));
        let devices = (0..u32::BITS).filter(|peer| *peer == self.device || peers & (1 << peer) != 0);
        for device in devices {
            grant_range(table, self.begin, self.bytes, &access(device, READ_WRITE)).map_err(Some)?;
        }
        Ok(())
    }

    /// Maps the next piece, and returns its size.
    fn map_next(&self, table: &mut Memory, done: u64) -> Result<u64, Option<Status>> {
        let bytes = (self.bytes - done).min(LARGEST);
        let begin = self.begin + done;
        let mut real = 0;
        // SAFETY: the driver's function, with a place for its result.
        check(unsafe { driver::cuMemCreate(&mut real, bytes, &Properties::of(self.kind, DESCRIPTOR), 0) })?;
        // SAFETY: the range is reserved, and nothing is mapped there.
        let mapped = check(unsafe { driver::cuMemMap(begin, bytes, 0, real, 0) });
        let known = table.fresh(real);
        let added = mapped.and_then(|()| {
            let piece = Piece {
                known,
                real,
                bytes,
                kind: self.kind,
                ..Piece::default()
            };
            let mapping = Mapping {
                begin,
                bytes,
                piece: known,
                allocation: self.begin,
                asked: if done == 0 { self.asked } else { 0 },
                context: self.context,
                device: self.device,
                ..Mapping::default()
            };
            let added = table.add_piece(piece).and_then(|()| table.add_mapping(mapping));
            added.map_err(|Refused| {
                // SAFETY: it was mapped above.
                unsafe { driver::cuMemUnmap(begin, bytes) };
                None
            })
        });
        if added.is_err() {
            table.forget(known);
            // SAFETY: it was made above, and nobody has it.
            unsafe { driver::cuMemRelease(real) };
        }
        added.map(|()| bytes)
    }
}

fn check(status: Status) -> Result<(), Option<Status>> {
    if status == SUCCESS {
        Ok(())
    } else {
        Err(Some(status))
    }
}

/// Gives a device access to a range, or takes it.
pub fn grant_range(table: &mut Memory, begin: u64, bytes: u64, accessor: &Accessor) -> Result<(), Status> {
    // SAFETY: the range is mapped.
    let granted = unsafe { driver::cuMemSetAccess(begin, bytes, accessor, 1) };
    if granted != SUCCESS {
        return Err(granted);
    }
    for mapping in table.mappings.between_mut(begin, begin.saturating_add(bytes)) {
        grant(&mut mapping.access, accessor);
    }
    Ok(())
}

/// Unmaps what is mapped in the range of an allocation, and gives the range back.
pub fn discard(table: &mut Memory, begin: u64, bytes: u64) -> Status {
    let end = begin.saturating_add(bytes);
    while let Some(mapping) = table.mappings.between(begin, end).first().copied() {
        // SAFETY: it is mapped.
        let unmapped = unsafe { driver::cuMemUnmap(mapping.begin, mapping.bytes) };
        if unmapped != SUCCESS {
            return unmapped;
        }
        if let Some(real) = table.remove_mapping(mapping.begin) {
            // SAFETY: nobody has it.
            unsafe { driver::cuMemRelease(real) };
        }
    }
    // SAFETY: nothing is mapped there any more.
    unsafe { driver::cuMemAddressFree(begin, bytes) }
}

/// What a device can do.
pub fn abilities(area: &Area, device: u32) -> Option<u32> {
    let known = area.abilities.get(device as usize)?;
    let bits = known.load(Ordering::Relaxed);
    if bits != 0 {
        return Some(bits);
    }
    let ordinal = i32::try_from(device).ok()?;
    let mut bits = ASKED;
    for (bit, attribute) in ATTRIBUTES {
        let mut value = 0;
        // SAFETY: the driver's function, with a place for its result.
        let answer = unsafe { driver::cuDeviceGetAttribute(&mut value, attribute, ordinal) };
        if answer == SUCCESS && value != 0 {
            bits |= bit;
        }
    }
    known.store(bits, Ordering::Relaxed);
    Some(bits)
}
