//! Allocations that other processes open by handles of 64 bytes, which the driver has for its own alone: a
//! handle names a process and an allocation of it, and that process gives its pieces to whoever asks by it.

use firn_interposer::abi::PIECES;
use firn_interposer::sorted::{Keyed, Sorted};
use firn_interposer::table::{Allocation, Kind, Piece, Stage};
use firn_interposer::token::{Token, Words};
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use rustix::process::getpid;

use super::allocations::{Range, discard, grant_peers, grant_range, rounded, set_stage, wait};
use super::{access, current};
use crate::area::{self, Area};
use crate::calls::{self, InMemory};
use crate::driver::{self, DESCRIPTOR, INVALID_VALUE, Properties, READ_WRITE, SUCCESS, Status};
use crate::meeting::{self, Peer};
use crate::message::{Descriptors, NONE};

/// The device context is not one that can open the memory: CUDA_ERROR_INVALID_CONTEXT.
const INVALID_CONTEXT: Status = 201;
/// The process that has the memory does not give it: CUDA_ERROR_MAP_FAILED.
const MAP_FAILED: Status = 205;

/// Allocations of this process that others may open, and of others that it has open.
const MOST: usize = 4096;

#[repr(C)]
pub struct Shares {
    /// By which others reach this process; 0: by nothing yet.
    pub name: u64,
    given: Sorted<Given, MOST>,
    open: Sorted<Open, MOST>,
}

/// An allocation of this process, and the secret of its token.
#[derive(Clone, Copy)]
#[repr(C)]
struct Given {
    begin: u64,
    secret: [u64; 2],
}

impl Keyed for Given {
    fn key(&self) -> u64 {
        self.begin
    }
}

/// Where this process has an allocation of another one, and how often it was opened.
#[derive(Clone, Copy)]
#[repr(C)]
struct Open {
    begin: u64,
    secret: [u64; 2],
    count: u64,
}

impl Keyed for Open {
    fn key(&self) -> u64 {
        self.begin
    }
}

impl Shares {
    /// An allocation is there no longer.
    pub fn forget(&mut self, begin: u64) {
        self.given.remove(begin);
        self.open.remove(begin);
    }

    pub fn is_open(&self, begin: u64) -> bool {
        self.open.get(begin).is_some()
    }
}

/// cuIpcGetMemHandle
///
/// # Safety
/// As the driver's.
pub unsafe fn get(real: unsafe extern "C" fn(u64, u64) -> Status, to: u64, address: u64) -> Status {
    // SAFETY: the arguments are those of the program.
    unsafe {
        let own = area::get().and_then(|area| Some((area, area.memory.take().allocation(address)?)));
        // The driver's handles are bytes: they may lie anywhere.
        let place = core::ptr::with_exposed_provenance_mut::<Words>(to as usize);
        let Some((area, found)) = own.filter(|_| !place.is_null()) else {
            return real(to, address);
        };
        match token(area, &found) {
            Ok(token) => {
                place.write_unaligned(token.to_words());
                SUCCESS
            }
            Err(status) => status,
        }
    }
}

fn token(area: &'static Area, found: &Allocation) -> Result<Token, Status> {
    let mut shares = area.shares.take();
    // Another thread may have freed it.
    let is_there = area.memory.take().allocation(found.begin).as_ref() == Some(found);
    if shares.is_open(found.begin) || !is_there {
        return Err(INVALID_VALUE);
    }
    if shares.name == 0 {
        shares.name = meeting::begin().ok_or(driver::OUT_OF_MEMORY)?;
    }
    let known = shares.given.get(found.begin).map(|given| given.secret);
    let secret = known.or_else(meeting::secret).ok_or(driver::OUT_OF_MEMORY)?;
    if known.is_none() {
        let given = Given {
            begin: found.begin,
            secret,
        };
        let added = shares.given.insert(given);
        added.map_err(|_| driver::OUT_OF_MEMORY)?;
    }
    Ok(Token {
        name: shares.name,
        pid: getpid().as_raw_nonzero().get().unsigned_abs().into(),
        secret,
        begin: found.begin,
        bytes: found.asked,
    })
}

/// Gives a peer what it has a token for.
pub fn give(area: &Area, peer: &Peer) -> Option<()> {
    let token = Token::of(&peer.take_first()?.0)?;
    let is_given = || {
        let shares = area.shares.take();
        let given = shares.given.get(token.begin);
        given.is_some_and(|given| given.secret == token.secret)
    };
    let mut index = 0;
    loop {
        let mut descriptors = NONE;
        is_given().then_some(())?;
        let count = export(area, token.begin, index, &mut descriptors)?;
        // It may have been freed meanwhile, and its pieces have become others.
        is_given().then_some(())?;
        peer.send(&token.to_words(), &descriptors)?;
        index += count;
        if count < descriptors.len() {
            return Some(());
        }
    }
}

/// Descriptors of the pieces of an allocation from this one on. Returns how many there are.
fn export(area: &Area, begin: u64, from: usize, descriptors: &mut Descriptors) -> Option<usize> {
    let mut pieces = [0; PIECES as usize];
    let mut count = 0;
    {
        let table = area.memory.take();
        let found = table.allocation(begin).filter(|found| found.begin == begin)?;
        let mappings = table.mappings.between(begin, begin.saturating_add(found.bytes));
        for (place, mapping) in pieces.iter_mut().zip(mappings.iter().skip(from)) {
            *place = mapping.piece;
            count += 1;
        }
    }
    for (descriptor, piece) in descriptors.iter_mut().zip(pieces.iter().take(count)) {
        let mut number = -1_i32;
        let place = core::ptr::from_mut(&mut number).expose_provenance() as u64;
        // As the program itself would: through the gate, and the piece is shared from then on.
        // SAFETY: the driver's function, with a place for its result.
        let status = unsafe { calls::cuMemExportToShareableHandle(place, *piece, DESCRIPTOR, 0) };
        if status != SUCCESS || number < 0 {
            return None;
        }
        // SAFETY: the driver has made it for this caller.
        *descriptor = Some(unsafe { OwnedFd::from_raw_fd(number) });
    }
    Some(count)
}

/// cuIpcOpenMemHandle
///
/// # Safety
/// As the driver's.
pub unsafe fn open(
    real: unsafe extern "C" fn(u64, InMemory<8>, u32) -> Status,
    to: u64,
    handle: InMemory<8>,
    flags: u32,
) -> Status {
    // SAFETY: the arguments are those of the program.
    unsafe {
        let ours = area::get().zip(Token::of(&handle.0));
        let Some(((area, token), to)) = ours.zip(driver::out::<u64>(to)) else {
            return real(to, handle, flags);
        };
        match open_token(area, &token) {
            Ok(begin) => {
                *to = begin;
                SUCCESS
            }
            Err(status) => status,
        }
    }
}

fn open_token(area: &Area, token: &Token) -> Result<u64, Status> {
    {
        let mut shares = area.shares.take();
        // The driver does not open a process's own memory.
        if shares.name == token.name {
            return Err(INVALID_CONTEXT);
        }
        let mut all = shares.open.all_mut().iter_mut();
        if let Some(open) = all.find(|open| open.secret == token.secret) {
            open.count += 1;
            return Ok(open.begin);
        }
    }
    map(area, token)
}

/// Maps an allocation of another process side by side, for the current device.
fn map(area: &Area, token: &Token) -> Result<u64, Status> {
    let (device, context) = current().ok_or(INVALID_CONTEXT)?;
    let bytes = rounded(token.bytes).filter(|bytes| *bytes > 0);
    let bytes = bytes.ok_or(INVALID_VALUE)?;
    let peer = Peer::reach(token.name, token.pid).ok_or(MAP_FAILED)?;
    peer.send(&token.to_words(), &NONE).ok_or(MAP_FAILED)?;
    let mut begin = 0;
    // SAFETY: the driver's function, with a place for its result.
    let reserved = unsafe { driver::cuMemAddressReserve(&mut begin, bytes, 0, 0, 0) };
    if reserved != SUCCESS {
        return Err(reserved);
    }
    let range = Range {
        begin,
        bytes,
        asked: token.bytes,
        context,
        device,
    };
    let mapped = fill(area, &range, &peer).and_then(|()| {
        grant_range(area, begin, bytes, &access(device, READ_WRITE))?;
        let open = Open {
            begin,
            secret: token.secret,
            count: 1,
        };
        // Order matters: once it is whole, others may end it.
        let added = area.shares.take().open.insert(open);
        added.map_err(|_| driver::OUT_OF_MEMORY)?;
        set_stage(&mut area.memory.take(), begin, Stage::Whole);
        grant_peers(area, device, begin, bytes);
        Ok(begin)
    });
    if mapped.is_err() {
        discard(area, begin, bytes);
    }
    mapped
}

/// Maps the pieces that the peer gives into the whole range.
fn fill(area: &Area, range: &Range, peer: &Peer) -> Result<(), Status> {
    let mut done = 0;
    while done < range.bytes {
        let (_, descriptors): (Words, Descriptors) = peer.take().ok_or(MAP_FAILED)?;
        for descriptor in descriptors.iter().flatten() {
            if done >= range.bytes {
                return Err(MAP_FAILED);
            }
            done += range.map(area, done, imported(descriptor)?)?;
        }
        if descriptors.iter().flatten().next().is_none() {
            return Err(MAP_FAILED);
        }
    }
    Ok(())
}

/// A piece of another process.
fn imported(descriptor: &OwnedFd) -> Result<Piece, Status> {
    let mut real = 0;
    let number = descriptor.as_raw_fd().unsigned_abs() as usize;
    let mut properties = Properties::of(Kind::default(), 0);
    // SAFETY: the driver's functions, with places for their results. What is refused has been imported here,
    // and nobody else has it.
    unsafe {
        let imported = driver::cuMemImportFromShareableHandle(&mut real, number, DESCRIPTOR);
        if imported != SUCCESS {
            return Err(imported);
        }
        let known = driver::cuMemGetAllocationPropertiesFromHandle(&mut properties, real);
        if known != SUCCESS {
            driver::cuMemRelease(real);
            return Err(known);
        }
    }
    Ok(Piece {
        real,
        is_imported: true,
        kind: Kind {
            location: properties.location.kind,
            id: properties.location.id,
            ..Kind::default()
        },
        ..Piece::default()
    })
}

/// cuIpcCloseMemHandle
///
/// # Safety
/// As the driver's.
pub unsafe fn close(real: unsafe extern "C" fn(u64) -> Status, address: u64) -> Status {
    let left = area::get().and_then(|area| {
        let mut shares = area.shares.take();
        let open = shares.open.get_mut(address)?;
        open.count = open.count.saturating_sub(1);
        let left = open.count;
        if left == 0 {
            shares.open.remove(address);
        }
        Some((area, left))
    });
    match left {
        // SAFETY: the arguments are those of the program.
        None => unsafe { real(address) },
        Some((area, 0)) => {
            let found = area.memory.take().allocation(address);
            let Some(found) = found.filter(|found| found.begin == address) else {
                return INVALID_VALUE;
            };
            // Work that uses it would fail; if it cannot be waited for, the device has failed.
            let _ = wait(area, &found);
            set_stage(&mut area.memory.take(), address, Stage::Partial);
            discard(area, address, found.bytes)
        }
        Some(_) => SUCCESS,
    }
}
