//! What the program allocates in one step: an address range, and pieces mapped into it.

use core::sync::atomic::Ordering;

use firn_interposer::sorted::Refused;
use firn_interposer::table::{Allocation, Kind, Mapping, Piece, Stage};

use super::{access, current, grant, wait_for_work, within};
use crate::area::{self, Area, Memory};
use crate::driver::{self, Accessor, DESCRIPTOR, DEVICE, Properties, READ_WRITE, SUCCESS, Status};

/// Smaller allocations are the driver's own: many of them share its pages.
const SMALLEST: u64 = 2 << 20;
/// Of the size of a piece.
const GRANULARITY: u64 = 2 << 20;
/// A larger allocation has several pieces: to replace one by a copy needs room for one.
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
            Some((to, begin)) => {
                *to = begin;
                SUCCESS
            }
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
            Some(((to, pitch), begin)) => {
                (*to, *pitch) = (begin, row.unwrap_or_default());
                SUCCESS
            }
        }
    }
}

/// cuMemFree
///
/// # Safety
/// As the driver's.
pub unsafe fn free(real: unsafe extern "C" fn(u64) -> Status, address: u64) -> Status {
    let own = |table: &Memory| table.allocation(address).filter(|found| found.begin == address);
    // What is open of another process is closed, and not freed.
    let known = |area: &&Area| own(&area.memory.take()).is_some() && !area.shares.take().is_open(address);
    let Some(area) = area::get().filter(known) else {
        // SAFETY: the arguments are those of the program.
        return unsafe { real(address) };
    };
    wait_and_discard(area, address)
}

/// Frees the allocation that begins at an address, once no work uses it, as the driver does.
fn wait_and_discard(area: &Area, address: u64) -> Status {
    let own = |table: &Memory| table.allocation(address).filter(|found| found.begin == address);
    let Some(found) = own(&area.memory.take()) else {
        return driver::INVALID_VALUE;
    };
    let waited = wait(area, &found);
    if waited != SUCCESS {
        return waited;
    }
    // Another thread of the program may have freed it, and made another one there.
    let found = {
        let mut table = area.memory.take();
        let found = own(&table);
        if let Some(found) = found {
            set_stage(&mut table, found.begin, Stage::Partial);
        }
        found
    };
    found.map_or(driver::INVALID_VALUE, |found| {
        discard(area, found.begin, found.bytes)
    })
}

/// cuMemFreeAsync
///
/// # Safety
/// As the driver's.
pub unsafe fn free_in_stream(
    real: unsafe extern "C" fn(u64, u64) -> Status,
    address: u64,
    stream: u64,
) -> Status {
    let is_own = |area: &Area| area.memory.take().allocation(address).is_some();
    if !area::get().is_some_and(is_own) {
        // SAFETY: the arguments are those of the program.
        return unsafe { real(address, stream) };
    }
    // This waits for the whole context.
    extern "C" fn unknown(_: u64) -> Status {
        driver::INVALID_VALUE
    }
    // SAFETY: as the program's; an allocation that another thread has freed is unknown.
    unsafe { free(unknown, address) }
}

/// Waits for the work of an allocation's context, and of those that may access it.
pub fn wait(area: &Area, found: &Allocation) -> Status {
    let peers = area.peers.get(found.device as usize);
    let peers = peers.map_or(0, |peers| peers.load(Ordering::Acquire));
    let others = area
        .primary
        .iter()
        .zip(0..)
        .filter(|(_, device)| peers & (1 << *device) != 0);
    let others = others.map(|(context, _)| context.load(Ordering::Acquire));
    for context in others.filter(|context| *context != 0) {
        // One that is just being released has no work.
        let _ = within(context, wait_for_work);
    }
    within(found.context, wait_for_work)
}

/// Makes an allocation of so many bytes in the current context. None: the driver is to make it, or to refuse
/// it in its own words.
fn make(area: &Area, asked: u64) -> Option<u64> {
    let (device, context) = current()?;
    let abilities = abilities(area, device)?;
    let bytes = rounded(asked)?;
    if abilities & CAN_MAP == 0 || abilities & CAN_EXPORT == 0 || !has_room(bytes) {
        return None;
    }
    let mut begin = 0;
    // SAFETY: the driver's function, with a place for its result.
    check(unsafe { driver::cuMemAddressReserve(&mut begin, bytes, 0, 0, 0) })?;
    let range = Range {
        begin,
        bytes,
        asked,
        context,
        device,
    };
    let wanted = Wanted {
        range,
        kind: Kind {
            location: DEVICE,
            id: device,
            rdma: u8::from(abilities & CAN_RDMA != 0),
            ..Kind::default()
        },
    };
    if wanted.fill(area).is_none() {
        discard(area, begin, bytes);
        return None;
    }
    Some(begin)
}

/// Bytes of the pieces of an allocation of so many bytes.
pub fn rounded(asked: u64) -> Option<u64> {
    asked.checked_next_multiple_of(GRANULARITY)
}

/// Lets the peers of a device access an allocation that is whole: who becomes one from now on sees it.
pub fn grant_peers(area: &Area, device: u32, begin: u64, bytes: u64) {
    let peers = area.peers.get(device as usize);
    let peers = peers.map_or(0, |peers| peers.load(Ordering::Acquire));
    for device in (0..u32::BITS).filter(|peer| peers & (1 << peer) != 0) {
        // As without this a peer that cannot access it fails where it tries.
        let _ = grant_range(area, begin, bytes, &access(device, READ_WRITE));
    }
}

/// Whether there is room for an allocation of several pieces, of which the first ones could be had.
fn has_room(bytes: u64) -> bool {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the driver's function, with places for its results.
    bytes <= LARGEST || unsafe { driver::cuMemGetInfo_v2(&mut free, &mut total) } != SUCCESS || bytes <= free
}

struct Wanted {
    range: Range,
    kind: Kind,
}

impl Wanted {
    /// Maps pieces into the whole range. None: it cannot be. What is there by then is in the table.
    fn fill(&self, area: &Area) -> Option<()> {
        let Range {
            begin, bytes, device, ..
        } = self.range;
        let mut done = 0;
        while done < bytes {
            done += self.map_next(area, done)?;
        }
        grant_range(area, begin, bytes, &access(device, READ_WRITE)).ok()?;
        set_stage(&mut area.memory.take(), begin, Stage::Whole);
        grant_peers(area, device, begin, bytes);
        Some(())
    }

    /// Maps the next piece, and returns its size.
    fn map_next(&self, area: &Area, done: u64) -> Option<u64> {
        let (bytes, kind) = (self.range.next(done), self.kind);
        let mut real = 0;
        // SAFETY: the driver's function, with a place for its result.
        check(unsafe { driver::cuMemCreate(&mut real, bytes, &Properties::of(kind, DESCRIPTOR), 0) })?;
        let piece = Piece {
            real,
            kind,
            ..Piece::default()
        };
        self.range.map(area, done, piece).ok()
    }
}

/// Addresses that an allocation is to have: its pieces are mapped there side by side.
pub struct Range {
    pub begin: u64,
    pub bytes: u64,
    pub asked: u64,
    pub context: u64,
    pub device: u32,
}

impl Range {
    /// Bytes of the next piece where so many are done.
    fn next(&self, done: u64) -> u64 {
        (self.bytes - done).min(LARGEST)
    }

    /// Maps a piece of the driver's behind what is done, or releases it. Returns its size.
    pub fn map(&self, area: &Area, done: u64, piece: Piece) -> Result<u64, Status> {
        let (begin, bytes) = (self.begin + done, self.next(done));
        // SAFETY: the range is reserved, and nothing is mapped there.
        let mut status = unsafe { driver::cuMemMap(begin, bytes, 0, piece.real, 0) };
        if status == SUCCESS {
            if self.add(&mut area.memory.take(), piece, done, bytes).is_ok() {
                return Ok(bytes);
            }
            // SAFETY: it was mapped above.
            unsafe { driver::cuMemUnmap(begin, bytes) };
            status = driver::OUT_OF_MEMORY;
        }
        // SAFETY: it is mapped nowhere, and nobody has it.
        unsafe { driver::cuMemRelease(piece.real) };
        Err(status)
    }

    fn add(&self, table: &mut Memory, piece: Piece, done: u64, bytes: u64) -> Result<(), Refused> {
        let known = table.fresh(piece.real);
        let mapping = Mapping {
            begin: self.begin + done,
            bytes,
            piece: known,
            allocation: self.begin,
            asked: if done == 0 { self.asked } else { 0 },
            context: self.context,
            device: self.device,
            stage: Stage::Partial,
            ..Mapping::default()
        };
        table.add_piece(Piece {
            known,
            bytes,
            ..piece
        })?;
        table.add_mapping(mapping).inspect_err(|_| table.forget(known))
    }
}

fn check(status: Status) -> Option<()> {
    (status == SUCCESS).then_some(())
}

pub fn set_stage(table: &mut Memory, begin: u64, stage: Stage) {
    if let Some(first) = table.mappings.get_mut(begin) {
        first.stage = stage;
    }
}

/// Gives a device access to a range, or takes it.
pub fn grant_range(area: &Area, begin: u64, bytes: u64, accessor: &Accessor) -> Result<(), Status> {
    // SAFETY: the range is mapped.
    let granted = unsafe { driver::cuMemSetAccess(begin, bytes, accessor, 1) };
    if granted != SUCCESS {
        return Err(granted);
    }
    let mut table = area.memory.take();
    for mapping in table.mappings.between_mut(begin, begin.saturating_add(bytes)) {
        grant(&mut mapping.access, accessor);
    }
    Ok(())
}

/// Unmaps what is mapped in the range of an allocation that the program does not have, from its end on, and
/// gives the range back.
pub fn discard(area: &Area, begin: u64, bytes: u64) -> Status {
    area.shares.take().forget(begin);
    let end = begin.saturating_add(bytes);
    let last = || area.memory.take().mappings.between(begin, end).last().copied();
    while let Some(mapping) = last() {
        // SAFETY: it is mapped.
        let unmapped = unsafe { driver::cuMemUnmap(mapping.begin, mapping.bytes) };
        if unmapped != SUCCESS {
            return unmapped;
        }
        let left = area.memory.take().remove_mapping(mapping.begin);
        if let Some(real) = left {
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
