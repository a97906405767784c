//! What the program makes and maps itself, and what it shares.

use firn_interposer::table::{Kind, Mapping, Piece, Stage};

use super::allocations::abilities;
use super::{grant, table};
use crate::area;
use crate::driver::{self, Accessor, DESCRIPTOR, DEVICE, Properties, SUCCESS, Status};

/// cuMemCreate
///
/// # Safety
/// As the driver's.
pub unsafe fn create(
    real: unsafe extern "C" fn(u64, u64, u64, u64) -> Status,
    to: u64,
    bytes: u64,
    properties: u64,
    flags: u64,
) -> Status {
    // SAFETY: the arguments are those of the program.
    unsafe {
        let asked = driver::given::<Properties>(properties).copied();
        let Some((asked, to)) = asked.zip(driver::out::<u64>(to)) else {
            return real(to, bytes, properties, flags);
        };
        let place = core::ptr::from_mut(to).expose_provenance() as u64;
        let made = with_descriptors(&asked).is_some_and(|more| {
            let more = core::ptr::from_ref(&more).expose_provenance() as u64;
            real(place, bytes, more, flags) == SUCCESS
        });
        if !made {
            let status = real(place, bytes, properties, flags);
            if status != SUCCESS {
                return status;
            }
        }
        let kind = Kind {
            location: asked.location.kind,
            id: asked.location.id,
            compression: asked.compression,
            rdma: asked.rdma,
            usage: asked.usage,
        };
        add(
            to,
            Piece {
                bytes,
                asked: asked.handles,
                kind,
                ..Piece::default()
            },
        );
    }
    SUCCESS
}

/// The same properties with descriptors as handles. None: they have them, or cannot.
fn with_descriptors(asked: &Properties) -> Option<Properties> {
    let area = area::get()?;
    let is_device = asked.location.kind == DEVICE && asked.handles == 0;
    let can = is_device && abilities(area, asked.location.id)? & super::allocations::CAN_EXPORT != 0;
    can.then_some(Properties {
        handles: DESCRIPTOR,
        ..*asked
    })
}

/// Adds a piece that the program has a handle of, and gives it the number by which it is known.
fn add(handle: &mut u64, piece: Piece) {
    if let Some(mut table) = table() {
        let piece = Piece {
            known: table.fresh(*handle),
            real: *handle,
            handles: 1,
            ..piece
        };
        // Without room for it the program has the driver's own handle.
        if table.add_piece(piece).is_ok() {
            *handle = piece.known;
        }
    }
}

/// The driver's handle for one of the program's.
fn real_handle(known: u64) -> u64 {
    table().map_or(known, |table| table.real(known))
}

/// The same, of a piece to which something else refers from now on.
pub fn shared_handle(known: u64) -> u64 {
    let Some(mut table) = table() else {
        return known;
    };
    let Some(piece) = table.pieces.get_mut(known) else {
        return known;
    };
    piece.is_shared = true;
    piece.real
}

/// Something else refers to a range from now on.
pub fn share_range(begin: u64, bytes: u64) {
    if let Some(mut table) = table() {
        table.share(begin, begin.saturating_add(bytes));
    }
}

/// cuMemRelease
///
/// # Safety
/// As the driver's.
pub unsafe fn release(real: unsafe extern "C" fn(u64) -> Status, handle: u64) -> Status {
    let left = {
        let mut table = table();
        let piece = table.as_ref().and_then(|table| table.pieces.get(handle).copied());
        match (&mut table, piece) {
            // The program has released all of its own.
            (_, Some(Piece { handles: 0, .. })) => return driver::INVALID_VALUE,
            (Some(table), Some(_)) => table.release(handle),
            _ => Some(handle),
        }
    };
    // SAFETY: nobody has it any more, or it is not one of the table's.
    left.map_or(SUCCESS, |handle| unsafe { real(handle) })
}

/// cuMemMap
///
/// # Safety
/// As the driver's.
pub unsafe fn map(
    real: unsafe extern "C" fn(u64, u64, u64, u64, u64) -> Status,
    begin: u64,
    bytes: u64,
    offset: u64,
    handle: u64,
    flags: u64,
) -> Status {
    // SAFETY: the arguments are those of the program.
    let status = unsafe { real(begin, bytes, offset, real_handle(handle), flags) };
    if let Some(mut table) = table().filter(|_| status == SUCCESS) {
        let is_known = table.pieces.get(handle).is_some();
        let added = table.add_mapping(Mapping {
            begin,
            bytes,
            offset,
            piece: handle,
            ..Mapping::default()
        });
        // A piece of the table cannot be taken out any more.
        if is_known && added.is_err() {
            table.lost = table.lost.saturating_add(1);
        }
    }
    status
}

/// cuMemUnmap
///
/// # Safety
/// As the driver's.
pub unsafe fn unmap(real: unsafe extern "C" fn(u64, u64) -> Status, begin: u64, bytes: u64) -> Status {
    // Before the driver does it: once it has, another thread may map something there.
    let end = begin.saturating_add(bytes);
    let set_stage = |stage| {
        if let Some(mut table) = table() {
            for mapping in table.mappings.between_mut(begin, end) {
                mapping.stage = stage;
            }
        }
    };
    set_stage(Stage::Partial);
    // SAFETY: the arguments are those of the program.
    let status = unsafe { real(begin, bytes) };
    if status != SUCCESS {
        set_stage(Stage::Whole);
        return status;
    }
    let is_unmapped = |mapping: &&Mapping| mapping.stage == Stage::Partial;
    let next = || {
        let mut table = table()?;
        let mapping = table
            .mappings
            .between(begin, end)
            .iter()
            .find(is_unmapped)
            .copied()?;
        Some(table.remove_mapping(mapping.begin))
    };
    while let Some(left) = next() {
        if let Some(handle) = left {
            // SAFETY: nobody has it any more.
            unsafe { driver::cuMemRelease(handle) };
        }
    }
    status
}

/// cuMemSetAccess
///
/// # Safety
/// As the driver's.
pub unsafe fn set_access(
    real: unsafe extern "C" fn(u64, u64, u64, u64) -> Status,
    begin: u64,
    bytes: u64,
    accessors: u64,
    count: u64,
) -> Status {
    // SAFETY: the arguments are those of the program.
    let status = unsafe { real(begin, bytes, accessors, count) };
    if let Some(mut table) = table().filter(|_| status == SUCCESS) {
        let first = core::ptr::with_exposed_provenance::<Accessor>(accessors as usize);
        for mapping in table.mappings.between_mut(begin, begin.saturating_add(bytes)) {
            for index in 0..count as usize {
                // SAFETY: the driver has read as many.
                grant(&mut mapping.access, unsafe { &*first.add(index) });
            }
        }
    }
    status
}

/// cuMemRetainAllocationHandle
///
/// # Safety
/// As the driver's.
pub unsafe fn retain(real: unsafe extern "C" fn(u64, u64) -> Status, to: u64, address: u64) -> Status {
    // SAFETY: the arguments are those of the program.
    unsafe {
        if let Some(to) = driver::out::<u64>(to)
            && let Some(mut table) = table()
            && let Some(mapping) = table.at(address).copied()
        {
            // The driver has no handles for what it allocates in one step.
            if mapping.is_allocation() {
                return driver::INVALID_VALUE;
            }
            if let Some(piece) = table.pieces.get_mut(mapping.piece) {
                piece.handles = piece.handles.saturating_add(1);
                *to = mapping.piece;
                return SUCCESS;
            }
        }
        real(to, address)
    }
}

/// cuMemImportFromShareableHandle
///
/// # Safety
/// As the driver's.
pub unsafe fn import(
    real: unsafe extern "C" fn(u64, u64, u32) -> Status,
    to: u64,
    shared: u64,
    kind: u32,
) -> Status {
    // SAFETY: the arguments are those of the program.
    unsafe {
        let status = real(to, shared, kind);
        if let Some(to) = driver::out::<u64>(to).filter(|_| status == SUCCESS) {
            add(
                to,
                Piece {
                    asked: kind,
                    is_imported: true,
                    ..Piece::default()
                },
            );
        }
        status
    }
}

/// cuMemGetAllocationPropertiesFromHandle
///
/// # Safety
/// As the driver's.
pub unsafe fn properties(real: unsafe extern "C" fn(u64, u64) -> Status, to: u64, handle: u64) -> Status {
    let piece = table().and_then(|table| table.pieces.get(handle).copied());
    // SAFETY: the arguments are those of the program.
    unsafe {
        let status = real(to, piece.map_or(handle, |piece| piece.real));
        let to = driver::out::<Properties>(to).filter(|_| status == SUCCESS);
        if let Some((piece, to)) = piece.zip(to)
            && !piece.is_imported
        {
            to.handles = piece.asked;
        }
        status
    }
}

/// `CUarrayMapInfo`, as far as it matters here.
#[repr(C)]
#[derive(Clone, Copy)]
struct ArrayMapping {
    resource: [u64; 8],
    handle: u64,
    rest: [u64; 3],
}

/// cuMemMapArrayAsync
///
/// # Safety
/// As the driver's.
pub unsafe fn map_arrays(
    real: unsafe extern "C" fn(u64, u32, u64) -> Status,
    mappings: u64,
    count: u32,
    stream: u64,
) -> Status {
    let first = core::ptr::with_exposed_provenance::<ArrayMapping>(mappings as usize);
    if first.is_null() || count == 0 {
        // SAFETY: the arguments are those of the program.
        return unsafe { real(mappings, count, stream) };
    }
    // One by one: in a stream they are done in their order anyway.
    for index in 0..count as usize {
        // SAFETY: the program has given as many.
        let mut mapping = unsafe { first.add(index).read() };
        mapping.handle = shared_handle(mapping.handle);
        let one = core::ptr::from_ref(&mapping).expose_provenance() as u64;
        // SAFETY: as the program's, with the driver's handle.
        let status = unsafe { real(one, 1, stream) };
        if status != SUCCESS {
            return status;
        }
    }
    SUCCESS
}

/// cuMulticastCreate
///
/// # Safety
/// As the driver's.
pub unsafe fn create_multicast(
    real: unsafe extern "C" fn(u64, u64) -> Status,
    to: u64,
    properties: u64,
) -> Status {
    // SAFETY: the arguments are those of the program.
    unsafe {
        let status = real(to, properties);
        let Some(handle) = driver::out::<u64>(to).filter(|_| status == SUCCESS) else {
            return status;
        };
        // A number by which the program knows a piece: the next one is another as long as this one is there.
        if table().is_none_or(|table| table.pieces.get(*handle).is_none()) {
            return status;
        }
        let taken = *handle;
        let status = create_multicast(real, to, properties);
        driver::cuMemRelease(taken);
        status
    }
}
