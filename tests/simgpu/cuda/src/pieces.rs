//! Memory of the virtual memory functions: pieces, and where they are mapped.
//!
//! A piece is a memory file, which descriptors keep as they keep the driver's memory. Unlike that, memory
//! that only descriptors have counts as free: nobody frees the chunks of a process that has ended.

use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, Once};

use simgpu_model::{CHUNK, Mapping, Uuid};

use crate::error::Error;
use crate::hardware::Hardware;
use crate::process::Process;

/// How the name of a piece's file begins, before the UUID of its GPU.
const NAME: &str = "simgpu ";

/// The bytes of a piece. Forked children do not have them: the driver's handles are no descriptors.
struct Bytes(File);

static OPEN: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());

extern "C" fn close_in_child() {
    if let Ok(open) = OPEN.try_lock() {
        for descriptor in open.iter() {
            // SAFETY: the child has it of its parent, and nobody uses it there.
            unsafe { libc::close(*descriptor) };
        }
    }
}

impl Bytes {
    fn make(gpu: Uuid, size: usize) -> io::Result<Self> {
        let name = CString::new(format!("{NAME}{gpu}"))?;
        // SAFETY: the name is a C string that lives through the call.
        let descriptor = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made it.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len(size as u64)?;
        Ok(Self::of(file))
    }

    fn of(file: File) -> Self {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| {
            // SAFETY: the handler does what is allowed in a child. Without it children have more open.
            unsafe { libc::pthread_atfork(None, None, Some(close_in_child)) };
        });
        let mut open = OPEN.lock().expect("nothing panics with the list locked");
        open.insert(file.as_raw_fd());
        Self(file)
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        let mut open = OPEN.lock().expect("nothing panics with the list locked");
        open.remove(&self.0.as_raw_fd());
    }
}

struct Piece {
    gpu: usize,
    size: usize,
    /// Its chunks on the GPU; none of another process's piece.
    id: Option<u32>,
    can_export: bool,
    /// None while checkpointed.
    bytes: Option<Bytes>,
    /// What a checkpoint has saved.
    saved: Option<Mapping>,
    handles: usize,
    mappings: usize,
}

struct Mapped {
    piece: u64,
    size: usize,
    offset: usize,
    /// While checkpointed nothing is mapped there.
    mapping: Mapping,
    /// The GPUs with access.
    readers: BTreeSet<usize>,
}

/// See the module head.
#[derive(Default)]
pub(crate) struct Pieces {
    pieces: BTreeMap<u64, Piece>,
    /// Reserved addresses.
    ranges: BTreeMap<u64, usize>,
    mapped: BTreeMap<u64, Mapped>,
}

impl Pieces {
    fn piece(&mut self, handle: u64) -> Result<&mut Piece, Error> {
        self.pieces.get_mut(&handle).ok_or(Error::INVALID_VALUE)
    }

    pub(crate) fn has_imported(&self) -> bool {
        self.pieces.values().any(|piece| piece.id.is_none())
    }

    /// Where this process can reach `len` bytes at a device address.
    pub(crate) fn reach(&self, address: u64, len: usize) -> Option<*mut u8> {
        let (start, mapped) = self.mapped.range(..=address).next_back()?;
        let offset = simgpu_model::index(address - start);
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= mapped.size);
        (is_inside && !mapped.readers.is_empty()).then(|| mapped.mapping.at(offset, len))
    }

    /// Copies all bytes into ordinary memory and closes the files.
    pub(crate) fn save(&mut self) -> io::Result<()> {
        for piece in self.pieces.values_mut() {
            if let Some(Bytes(file)) = &piece.bytes
                && piece.id.is_some()
            {
                let (from, to) = (
                    Mapping::shared(file.as_fd(), 0, piece.size, None)?,
                    Mapping::anonymous(piece.size)?,
                );
                copy(&from, &to, piece.size);
                piece.saved = Some(to);
            }
        }
        self.unload()
    }

    /// Closes all files, and keeps the addresses.
    pub(crate) fn unload(&mut self) -> io::Result<()> {
        for mapped in self.mapped.values() {
            mapped.mapping.reserve()?;
        }
        self.pieces.values_mut().for_each(|piece| piece.bytes = None);
        Ok(())
    }

    /// Makes all files again, on these GPUs, from what was saved. [`Self::forget_saved`] or [`Self::unload`]
    /// follows.
    pub(crate) fn load(&mut self, hardware: &Hardware, gpus: &[Uuid]) -> Result<(), Error> {
        for piece in self.pieces.values_mut() {
            let (Some(id), Some(saved)) = (piece.id, &piece.saved) else {
                continue;
            };
            let gpu = hardware.gpu(piece.gpu);
            let taken = gpu.memory.allocate(gpu.slot, id, piece.size);
            taken.ok_or(Error::OUT_OF_MEMORY)?;
            let bytes = Bytes::make(gpus[piece.gpu], piece.size);
            let bytes = bytes.map_err(|_| Error::OUT_OF_MEMORY)?;
            let to = Mapping::shared(bytes.0.as_fd(), 0, piece.size, None);
            copy(saved, &to.map_err(|_| Error::OUT_OF_MEMORY)?, piece.size);
            piece.bytes = Some(bytes);
        }
        for mapped in self.mapped.values() {
            if let Some(Bytes(file)) = self
                .pieces
                .get(&mapped.piece)
                .and_then(|piece| piece.bytes.as_ref())
            {
                let over = mapped.mapping.map_over(file.as_fd(), mapped.offset);
                over.map_err(|_| Error::OUT_OF_MEMORY)?;
            }
        }
        Ok(())
    }

    /// What was saved is no longer needed.
    pub(crate) fn forget_saved(&mut self) {
        self.pieces.values_mut().for_each(|piece| piece.saved = None);
    }
}

fn copy(from: &Mapping, to: &Mapping, size: usize) {
    // SAFETY: `at` checks the sizes of both, and nobody else uses them: the gate is closed.
    unsafe { std::ptr::copy_nonoverlapping(from.at(0, size), to.at(0, size), size) };
}

/// The functions, for a process with devices.
impl Process {
    pub(crate) fn create_piece(&mut self, gpu: usize, size: usize, can_export: bool) -> Result<u64, Error> {
        if size == 0 || !size.is_multiple_of(CHUNK) {
            return Err(Error::INVALID_VALUE);
        }
        let id = self.fresh_id();
        let open = self.open_gpu(gpu)?;
        let taken = open.memory.allocate(open.slot, id, size);
        taken.ok_or(Error::OUT_OF_MEMORY)?;
        let bytes = Bytes::make(self.current[gpu], size).map_err(|_| {
            open.memory.free(open.slot, id);
            Error::OUT_OF_MEMORY
        })?;
        Ok(self.add_piece(gpu, size, Some(id), can_export, bytes))
    }

    fn add_piece(&mut self, gpu: usize, size: usize, id: Option<u32>, can_export: bool, bytes: Bytes) -> u64 {
        let handle = self.fresh_handle() as u64;
        let piece = Piece {
            gpu,
            size,
            id,
            can_export,
            bytes: Some(bytes),
            saved: None,
            handles: 1,
            mappings: 0,
        };
        self.pieces.pieces.insert(handle, piece);
        handle
    }

    /// The GPU of a piece, and whether it can be exported.
    pub(crate) fn piece_of(&mut self, handle: u64) -> Result<(usize, bool), Error> {
        let piece = self.pieces.piece(handle)?;
        Ok((piece.gpu, piece.can_export))
    }

    pub(crate) fn release_piece(&mut self, handle: u64) -> Result<(), Error> {
        let piece = self.pieces.piece(handle)?;
        piece.handles = piece.handles.checked_sub(1).ok_or(Error::INVALID_VALUE)?;
        self.drop_if_unused(handle)
    }

    fn drop_if_unused(&mut self, handle: u64) -> Result<(), Error> {
        let btree_map::Entry::Occupied(entry) = self.pieces.pieces.entry(handle) else {
            return Ok(());
        };
        if entry.get().handles > 0 || entry.get().mappings > 0 {
            return Ok(());
        }
        let piece = entry.remove();
        if let Some(id) = piece.id {
            let open = self.open_gpu(piece.gpu)?;
            open.memory.free(open.slot, id);
        }
        Ok(())
    }

    /// The handle of the piece that is mapped at an address, once more.
    pub(crate) fn retain_piece(&mut self, address: u64) -> Result<u64, Error> {
        let found = self.pieces.mapped.range(..=address).next_back();
        let (start, mapped) = found.ok_or(Error::INVALID_VALUE)?;
        if simgpu_model::index(address - start) >= mapped.size {
            return Err(Error::INVALID_VALUE);
        }
        let handle = mapped.piece;
        self.pieces.piece(handle)?.handles += 1;
        Ok(handle)
    }

    /// A descriptor of a piece. One that was imported cannot be exported: seen of driver 580.
    pub(crate) fn export_piece(&mut self, handle: u64) -> Result<OwnedFd, Error> {
        let piece = self.pieces.piece(handle)?;
        match &piece.bytes {
            Some(Bytes(file)) if piece.can_export && piece.id.is_some() => {
                let copy = file.try_clone().map_err(|_| Error::OPERATING_SYSTEM)?;
                Ok(copy.into())
            }
            _ => Err(Error::INVALID_VALUE),
        }
    }

    /// A piece of a descriptor. Of a GPU that this process cannot open there is none, nor of one that it has
    /// got by a restore and did not have at cuInit: seen of driver 580. Other descriptors were not measured.
    pub(crate) fn import_piece(&mut self, descriptor: BorrowedFd<'_>) -> Result<u64, Error> {
        let link = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        let link = fs::read_link(link).map_err(|_| Error::INVALID_VALUE)?;
        let name = link.to_str().and_then(|link| link.strip_prefix("/memfd:"));
        let uuid = name.and_then(|name| name.strip_prefix(NAME)?.strip_suffix(" (deleted)"));
        let uuid = uuid.ok_or(Error::INVALID_VALUE)?;
        let gpu = self.current.iter().position(|gpu| gpu.to_string() == uuid);
        let had = self.seen.iter().any(|gpu| gpu.uuid.to_string() == uuid);
        let gpu = gpu.filter(|_| had).ok_or(Error::INVALID_DEVICE)?;
        let file = descriptor.try_clone_to_owned().map(File::from);
        let file = file.map_err(|_| Error::OPERATING_SYSTEM)?;
        let size = file.metadata().map_err(|_| Error::OPERATING_SYSTEM)?.len();
        Ok(self.add_piece(gpu, simgpu_model::index(size), None, false, Bytes::of(file)))
    }

    pub(crate) fn reserve_addresses(&mut self, size: usize) -> Result<u64, Error> {
        if size == 0 || !size.is_multiple_of(CHUNK) {
            return Err(Error::INVALID_VALUE);
        }
        let address = self.fresh_address(size);
        self.pieces.ranges.insert(address, size);
        Ok(address)
    }

    pub(crate) fn free_addresses(&mut self, address: u64, size: usize) -> Result<(), Error> {
        let end = address.saturating_add(size as u64);
        let is_used = self.pieces.mapped.range(address..end).next().is_some();
        if is_used || self.pieces.ranges.get(&address) != Some(&size) {
            return Err(Error::INVALID_VALUE);
        }
        self.pieces.ranges.remove(&address);
        Ok(())
    }

    pub(crate) fn map_piece(
        &mut self,
        address: u64,
        size: usize,
        offset: usize,
        handle: u64,
    ) -> Result<(), Error> {
        let end = address.checked_add(size as u64).ok_or(Error::INVALID_VALUE)?;
        let range = self.pieces.ranges.range(..=address).next_back();
        let is_reserved = range.is_some_and(|(begin, size)| end <= begin + *size as u64);
        let before = self.pieces.mapped.range(..end).next_back();
        let is_used = before.is_some_and(|(begin, mapped)| begin + mapped.size as u64 > address);
        let piece = self.pieces.piece(handle)?;
        let fits = offset.checked_add(size).is_some_and(|end| end <= piece.size);
        let is_even = size > 0 && [size, offset].iter().all(|bytes| bytes.is_multiple_of(CHUNK));
        if !is_reserved || is_used || !fits || !is_even {
            return Err(Error::INVALID_VALUE);
        }
        let Some(Bytes(file)) = &piece.bytes else {
            return Err(Error::ILLEGAL_STATE);
        };
        let mapping = Mapping::shared(file.as_fd(), offset, size, None);
        let mapping = mapping.map_err(|_| Error::OUT_OF_MEMORY)?;
        piece.mappings += 1;
        let mapped = Mapped {
            piece: handle,
            size,
            offset,
            mapping,
            readers: BTreeSet::new(),
        };
        self.pieces.mapped.insert(address, mapped);
        Ok(())
    }

    /// Unmaps everything between two addresses, which must not lie within a mapping. Work that uses it is not
    /// waited for: seen of driver 580.
    pub(crate) fn unmap_pieces(&mut self, address: u64, size: usize) -> Result<(), Error> {
        let starts = self.mapped_between(address, size)?;
        for start in starts {
            if let Some(mapped) = self.pieces.mapped.remove(&start) {
                self.pieces.piece(mapped.piece)?.mappings -= 1;
                self.drop_if_unused(mapped.piece)?;
            }
        }
        Ok(())
    }

    pub(crate) fn grant(&mut self, address: u64, size: usize, gpu: usize, reads: bool) -> Result<(), Error> {
        for start in self.mapped_between(address, size)? {
            if let Some(mapped) = self.pieces.mapped.get_mut(&start) {
                if reads {
                    mapped.readers.insert(gpu);
                } else {
                    mapped.readers.remove(&gpu);
                }
            }
        }
        Ok(())
    }

    /// The mappings that fill a range.
    fn mapped_between(&self, address: u64, size: usize) -> Result<Vec<u64>, Error> {
        let end = address.checked_add(size as u64).ok_or(Error::INVALID_VALUE)?;
        let (mut next, mut starts) = (address, Vec::new());
        while next < end {
            let mapped = self.pieces.mapped.get(&next).ok_or(Error::INVALID_VALUE)?;
            starts.push(next);
            next += mapped.size as u64;
        }
        if next == end && !starts.is_empty() {
            Ok(starts)
        } else {
            Err(Error::INVALID_VALUE)
        }
    }
}
