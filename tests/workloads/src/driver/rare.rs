//! Functions that only `gpu-sample` calls. A driver that lacks them, as the simulated one does, lacks nothing
//! else.

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::AtomicU32;

use libloading::Library;

use super::{Context, Driver, DriverError, Raw, Result};

/// A size that every GPU so far maps as it is.
pub const VMM_GRANULE: usize = 2 << 20;

const DEVICE: c_int = 1;
const PINNED: c_int = 1;
const POSIX_DESCRIPTOR: c_int = 1;
const READ_WRITE: c_int = 3;

/// `CUmemLocation`
#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAllocationProp`
#[repr(C)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    win32: *const c_void,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`
#[repr(C)]
struct Access {
    location: Location,
    flags: c_int,
}

const _: () = assert!(size_of::<Properties>() == 32 && size_of::<Access>() == 12);

functions! {
    Rare:
    cuCtxCreate_v2: fn(*mut Raw, c_uint, c_int);
    cuStreamCreate: fn(*mut Raw, c_uint);
    cuIpcCloseMemHandle: fn(u64);
}

functions! {
    Vmm:
    cuMemCreate: fn(*mut u64, usize, *const Properties, u64);
    cuMemAddressReserve: fn(*mut u64, usize, usize, u64, u64);
    cuMemMap: fn(u64, usize, usize, u64, u64);
    cuMemSetAccess: fn(u64, usize, *const Access, usize);
    cuMemExportToShareableHandle: fn(*mut c_int, u64, c_int, u64);
    cuMemImportFromShareableHandle: fn(*mut u64, *const c_void, c_int);
}

functions! {
    Peers:
    cuCtxEnablePeerAccess: fn(Raw, c_uint);
}

functions! {
    Waits:
    cuStreamWaitValue32_v2: fn(Raw, u64, c_uint, c_uint);
}

functions! {
    Variables:
    cuModuleGetGlobal_v2: fn(*mut u64, *mut usize, Raw, *const std::ffi::c_char);
}

/// Physical memory of a GPU, as `cuMemCreate` makes it.
#[derive(Clone, Copy)]
pub struct Allocation(u64);

impl Driver {
    /// A context in addition to the primary one, which becomes the calling thread's.
    pub fn create_context(&self, ordinal: i32) -> Result<Context> {
        let mut device = 0;
        call!(self.cuDeviceGet(&raw mut device, ordinal))?;
        let rare = Rare::load(&self.library)?;
        let mut context = ptr::null_mut();
        call!(self, rare, cuCtxCreate_v2(&raw mut context, 0, device))?;
        Ok(Context(context))
    }

    /// A stream of the current context, for as long as that lives.
    pub fn create_stream(&self) -> Result<()> {
        let rare = Rare::load(&self.library)?;
        let mut stream = ptr::null_mut();
        call!(self, rare, cuStreamCreate(&raw mut stream, 0))
    }

    /// Lets the current context's GPU access the memory of another context's.
    pub fn enable_peer_access(&self, Context(peer): Context) -> Result<()> {
        let peers = Peers::load(&self.library)?;
        call!(self, peers, cuCtxEnablePeerAccess(peer, 0))
    }

    /// Starts work on the current context's GPU that is done when `word` is as large as `value`.
    pub fn wait_on_gpu(&self, word: &'static AtomicU32, value: u32) -> Result<()> {
        const GEQ: c_uint = 0;
        let waits = Waits::load(&self.library)?;
        let address = ptr::from_ref(word).expose_provenance() as u64;
        call!(
            self,
            waits,
            cuStreamWaitValue32_v2(ptr::null_mut(), address, value, GEQ)
        )
    }

    /// Closes what [`Driver::import`] opened.
    pub fn close_import(&self, address: u64) -> Result<()> {
        let rare = Rare::load(&self.library)?;
        call!(self, rare, cuIpcCloseMemHandle(address))
    }

    /// Physical memory of a GPU, which may be exported where `shareable`.
    pub fn create(&self, ordinal: i32, bytes: usize, shareable: bool) -> Result<Allocation> {
        let vmm = Vmm::load(&self.library)?;
        let properties = Properties {
            kind: PINNED,
            handle_types: if shareable { POSIX_DESCRIPTOR } else { 0 },
            location: Location {
                kind: DEVICE,
                id: ordinal,
            },
            win32: ptr::null(),
            flags: [0; 8],
        };
        let mut handle = 0;
        call!(
            self,
            vmm,
            cuMemCreate(&raw mut handle, bytes, &raw const properties, 0)
        )?;
        Ok(Allocation(handle))
    }

    /// Maps it where the GPU may read and write it.
    pub fn map(&self, Allocation(handle): Allocation, ordinal: i32, bytes: usize) -> Result<u64> {
        let vmm = Vmm::load(&self.library)?;
        let mut address = 0;
        call!(self, vmm, cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0))?;
        call!(self, vmm, cuMemMap(address, bytes, 0, handle, 0))?;
        let access = Access {
            location: Location {
                kind: DEVICE,
                id: ordinal,
            },
            flags: READ_WRITE,
        };
        call!(self, vmm, cuMemSetAccess(address, bytes, &raw const access, 1))?;
        Ok(address)
    }

    /// A descriptor by which another process can import it.
    pub fn export_descriptor(&self, Allocation(handle): Allocation) -> Result<OwnedFd> {
        let vmm = Vmm::load(&self.library)?;
        let mut descriptor: RawFd = -1;
        call!(
            self,
            vmm,
            cuMemExportToShareableHandle(&raw mut descriptor, handle, POSIX_DESCRIPTOR, 0)
        )?;
        // SAFETY: the driver has just made this descriptor for us, and nothing else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// Memory of another process, by the descriptor that it exported.
    pub fn import_descriptor(&self, descriptor: BorrowedFd<'_>) -> Result<Allocation> {
        let vmm = Vmm::load(&self.library)?;
        let mut handle = 0;
        // The function takes the number in place of a pointer.
        let number = usize::try_from(descriptor.as_raw_fd()).unwrap_or(usize::MAX);
        let number = ptr::without_provenance::<c_void>(number);
        call!(
            self,
            vmm,
            cuMemImportFromShareableHandle(&raw mut handle, number, POSIX_DESCRIPTOR)
        )?;
        Ok(Allocation(handle))
    }

    /// Loads a PTX text into the current context; gives the address of a variable of it.
    pub fn variable(&self, ptx: &CStr, name: &str) -> Result<u64> {
        let variables = Variables::load(&self.library)?;
        let mut module = ptr::null_mut();
        call!(self.cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()))?;
        let name = CString::new(name).unwrap_or_default();
        let (mut address, mut size) = (0, 0);
        call!(
            self,
            variables,
            cuModuleGetGlobal_v2(&raw mut address, &raw mut size, module, name.as_ptr())
        )?;
        Ok(address)
    }

    /// Sets every byte of device memory.
    pub fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        call!(self.cuMemsetD8_v2(address, byte, bytes))
    }
}

const NVML: &str = "libnvidia-ml.so.1";

/// NVML, initialised for as long as this lives.
pub struct Nvml(Library);

impl Nvml {
    /// Loads and initialises it.
    pub fn open() -> Result<Self> {
        // SAFETY: loading the library runs its constructors, which is what every program that uses it does.
        let library =
            unsafe { Library::new(NVML) }.map_err(|source| DriverError::Open { name: NVML, source })?;
        let name = "nvmlInit_v2";
        // SAFETY: the type is that of the function with this name in NVML.
        let function = unsafe { library.get::<unsafe extern "C" fn() -> c_int>(name) };
        let function = function.map_err(|source| DriverError::Missing { name, source })?;
        // SAFETY: the function takes nothing.
        expect_success(name, unsafe { function() })?;
        Ok(Self(library))
    }

    /// Number of GPUs that it shows.
    pub fn devices(&self) -> Result<u32> {
        let name = "nvmlDeviceGetCount_v2";
        let mut number: c_uint = 0;
        // SAFETY: the type is that of the function with this name in NVML.
        let function = unsafe { self.0.get::<unsafe extern "C" fn(*mut c_uint) -> c_int>(name) };
        let function = function.map_err(|source| DriverError::Missing { name, source })?;
        // SAFETY: the pointer goes to a live variable.
        expect_success(name, unsafe { function(&raw mut number) })?;
        Ok(number)
    }
}

fn expect_success(call: &'static str, code: c_int) -> Result<()> {
    match code {
        0 => Ok(()),
        _ => Err(DriverError::Call {
            call,
            name: format!("nvmlReturn {code}"),
            code,
        }),
    }
}
