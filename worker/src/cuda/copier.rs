//! Copies pieces of GPU memory, which are descriptors, from GPU to GPU.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::OnceLock;

use super::check;
use super::raw::{Access, LIBRARY, PieceTable, Properties, Result32, Table};
use crate::sys::{Library, LoadError};
use firn_gpu::protocol::DriverError;
use firn_gpu::{GpuPair, GpuUuid};

/// CU_MEM_LOCATION_TYPE_DEVICE
const DEVICE: c_int = 1;
/// CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
const DESCRIPTOR: c_int = 1;
/// CU_MEM_ACCESS_FLAGS_PROT_READWRITE
const READ_WRITE: c_int = 3;
/// CUDA_ERROR_NO_DEVICE
const NO_DEVICE: Result32 = 100;
/// CUDA_ERROR_INVALID_VALUE
const INVALID_VALUE: Result32 = 1;

/// Why nothing can be copied.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopierError {
    #[error(transparent)]
    Library(#[from] LoadError),
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// The GPUs of this node, as this process numbers them.
pub(crate) struct Copier {
    calls: PieceTable,
    base: Table,
    devices: Vec<Device>,
}

struct Device {
    number: c_int,
    uuid: GpuUuid,
    /// Its primary context, by its address.
    context: OnceLock<usize>,
}

impl Copier {
    /// Finds the GPUs. cuInit was called before.
    pub(crate) fn open() -> Result<Self, CopierError> {
        let library = Library::open(LIBRARY)?;
        let mut copier = Self {
            calls: PieceTable::load(library)?,
            base: Table::load(library)?,
            devices: Vec::new(),
        };
        let mut count: c_int = 0;
        // SAFETY: the pointer is to a live int, which the call writes.
        let counted = unsafe { (copier.calls.device_count)(&raw mut count) };
        copier.check("cuDeviceGetCount", counted)?;
        for number in 0..count {
            let mut bytes = [0; 16];
            // SAFETY: the pointer is to 16 live bytes, which the call writes.
            let named = unsafe { (copier.calls.device_uuid)(&raw mut bytes, number) };
            copier.check("cuDeviceGetUuid_v2", named)?;
            copier.devices.push(Device {
                number,
                uuid: GpuUuid::from_bytes(bytes),
                context: OnceLock::new(),
            });
        }
        Ok(copier)
    }

    /// Makes contexts on the GPUs that memory moves to, which takes time.
    pub(crate) fn warm_up(&self, pairs: &[GpuPair]) -> Result<(), DriverError> {
        for pair in pairs.iter().filter(|pair| pair.old != pair.new) {
            self.device(&pair.old)?;
            self.enter(self.device(&pair.new)?)?;
        }
        Ok(())
    }

    fn device(&self, uuid: &GpuUuid) -> Result<&Device, DriverError> {
        let device = self.devices.iter().find(|device| device.uuid == *uuid);
        device.ok_or_else(|| DriverError {
            call: format!("looking for {uuid}"),
            code: NO_DEVICE,
            name: "that CUDA does not have it".to_owned(),
        })
    }

    /// The piece on the GPU that its own is paired with, with the same bytes.
    pub(crate) fn copy(&self, piece: OwnedFd, bytes: u64, pairs: &[GpuPair]) -> Result<OwnedFd, DriverError> {
        let from = self.imported(&piece)?;
        let mut properties = Properties::default();
        // SAFETY: the pointer is to a live struct of the header's layout; the handle is the driver's.
        let asked = unsafe { (self.calls.properties)(&raw mut properties, from.handle) };
        self.check("cuMemGetAllocationPropertiesFromHandle", asked)?;
        let Some((old, new)) = self.moved(properties, pairs)? else {
            return Ok(piece);
        };
        properties.id = new.number;
        properties.handle_types = DESCRIPTOR;
        let to = self.made(&properties, bytes)?;
        self.copy_between(&from, &to, bytes, [old, new])?;
        self.exported(&to)
    }

    /// Where memory with these properties moves from and to; none if it stays.
    fn moved(
        &self,
        properties: Properties,
        pairs: &[GpuPair],
    ) -> Result<Option<(&Device, &Device)>, DriverError> {
        let mut pairs = pairs.iter().filter(|pair| pair.old != pair.new);
        let found = self.devices.iter().find(|device| device.number == properties.id);
        let Some(old) = found.filter(|_| properties.location == DEVICE) else {
            return Ok(None);
        };
        let pair = pairs.find(|pair| pair.old == old.uuid);
        let new = pair.map(|pair| self.device(&pair.new)).transpose()?;
        Ok(new.map(|new| (old, new)))
    }

    fn copy_between(
        &self,
        from: &Piece<'_>,
        to: &Piece<'_>,
        bytes: u64,
        devices: [&Device; 2],
    ) -> Result<(), DriverError> {
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let [old, new] = devices;
        self.enter(new)?;
        let addresses = Addresses::reserve(self, size, 2)?;
        let target = addresses.map(to)?;
        addresses.allow(target, new)?;
        let source = addresses.map(from)?;
        if addresses.allow(source, new).is_ok() {
            // SAFETY: both ranges are mapped with so many bytes, the current context's device reaches them,
            // and nobody else knows them.
            let copied = unsafe { (self.calls.copy)(target, source, size) };
            self.check("cuMemcpyDtoD_v2", copied)?;
        } else {
            // The GPUs do not reach each other: the driver copies through host memory.
            addresses.allow(source, old)?;
            let from = self.enter(old)?;
            let context = self.enter(new)?;
            // SAFETY: both ranges are mapped with so many bytes, each for its context's device.
            let copied = unsafe { (self.calls.copy_peer)(target, context, source, from, size) };
            self.check("cuMemcpyPeer", copied)?;
        }
        // SAFETY: the call takes no argument; the new GPU's context is current.
        let waited = unsafe { (self.calls.synchronize)() };
        self.check("cuCtxSynchronize", waited)
    }

    /// Makes the primary context of a device current, and returns it.
    fn enter(&self, device: &Device) -> Result<*mut c_void, DriverError> {
        let context = match device.context.get() {
            Some(context) => *context,
            None => {
                let mut context = ptr::null_mut();
                // SAFETY: the pointer is to a live handle, which the call writes; the device is the driver's.
                let retained = unsafe { (self.calls.retain)(&raw mut context, device.number) };
                self.check("cuDevicePrimaryCtxRetain", retained)?;
                *device.context.get_or_init(|| context.expose_provenance())
            }
        };
        let context = ptr::with_exposed_provenance_mut(context);
        // SAFETY: the context is one that the driver has returned, and is never released.
        self.check("cuCtxSetCurrent", unsafe { (self.calls.set_current)(context) })?;
        Ok(context)
    }

    fn imported(&self, piece: &OwnedFd) -> Result<Piece<'_>, DriverError> {
        let descriptor = ptr::without_provenance_mut(piece.as_raw_fd().unsigned_abs() as usize);
        let mut handle = 0;
        // SAFETY: the pointer is to a live handle, which the call writes; the driver takes a descriptor as
        // the value of the second argument.
        let imported = unsafe { (self.calls.import)(&raw mut handle, descriptor, DESCRIPTOR) };
        self.check("cuMemImportFromShareableHandle", imported)?;
        Ok(Piece { copier: self, handle })
    }

    fn made(&self, properties: &Properties, bytes: u64) -> Result<Piece<'_>, DriverError> {
        let (mut handle, size) = (0, usize::try_from(bytes).unwrap_or(usize::MAX));
        // SAFETY: the pointers are to a live handle, which the call writes, and to properties of the header's
        // layout.
        let made = unsafe { (self.calls.create)(&raw mut handle, size, properties, 0) };
        self.check("cuMemCreate", made)?;
        Ok(Piece { copier: self, handle })
    }

    fn exported(&self, piece: &Piece<'_>) -> Result<OwnedFd, DriverError> {
        let (call, mut descriptor): (_, c_int) = ("cuMemExportToShareableHandle", -1);
        let to = (&raw mut descriptor).cast::<c_void>();
        // SAFETY: for this type of handle the driver writes an int.
        let exported = unsafe { (self.calls.export)(to, piece.handle, DESCRIPTOR, 0) };
        self.check(call, exported)?;
        if descriptor < 0 {
            self.check(call, INVALID_VALUE)?;
        }
        // SAFETY: the driver has made it for this caller.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    fn check(&self, call: &'static str, result: Result32) -> Result<(), DriverError> {
        check(self.base.get_error_name, call, result)
    }
}

/// A handle of the driver's, released in the end.
struct Piece<'c> {
    copier: &'c Copier,
    handle: u64,
}

impl Drop for Piece<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is the driver's, and nobody else has it.
        unsafe { (self.copier.calls.release)(self.handle) };
    }
}

/// Reserved addresses for pieces of one size, with what is mapped there.
struct Addresses<'c> {
    copier: &'c Copier,
    begin: u64,
    size: usize,
    pieces: usize,
    mapped: Cell<usize>,
}

impl<'c> Addresses<'c> {
    fn reserve(copier: &'c Copier, size: usize, pieces: usize) -> Result<Self, DriverError> {
        let (mut begin, all) = (0, size.saturating_mul(pieces));
        // SAFETY: the pointer is to a live address, which the call writes.
        let reserved = unsafe { (copier.calls.reserve)(&raw mut begin, all, 0, 0, 0) };
        copier.check("cuMemAddressReserve", reserved)?;
        Ok(Self {
            copier,
            begin,
            size,
            pieces,
            mapped: Cell::new(0),
        })
    }

    fn address(&self, index: usize) -> u64 {
        self.begin.saturating_add(self.size.saturating_mul(index) as u64)
    }

    fn map(&self, piece: &Piece<'_>) -> Result<u64, DriverError> {
        let address = self.address(self.mapped.get());
        // SAFETY: the addresses are reserved, and nothing is mapped there.
        let mapped = unsafe { (self.copier.calls.map)(address, self.size, 0, piece.handle, 0) };
        self.copier.check("cuMemMap", mapped)?;
        self.mapped.set(self.mapped.get() + 1);
        Ok(address)
    }

    /// Lets a device reach what is mapped at this address.
    fn allow(&self, address: u64, device: &Device) -> Result<(), DriverError> {
        let access = Access {
            location: DEVICE,
            id: device.number,
            flags: READ_WRITE,
        };
        // SAFETY: the range is mapped, and the description has the header's layout.
        let allowed = unsafe { (self.copier.calls.set_access)(address, self.size, &raw const access, 1) };
        self.copier.check("cuMemSetAccess", allowed)
    }
}

impl Drop for Addresses<'_> {
    fn drop(&mut self) {
        let calls = &self.copier.calls;
        for index in 0..self.mapped.get() {
            // SAFETY: it was mapped, and nobody uses it.
            unsafe { (calls.unmap)(self.address(index), self.size) };
        }
        // SAFETY: the addresses were reserved, and nothing is mapped there.
        unsafe { (calls.free)(self.begin, self.size.saturating_mul(self.pieces)) };
    }
}
