//! `libcuda.so.1` opened at run time, as much of it as the workloads call.
//!
//! The only module with unsafe code: a table of the library's functions and a safe method per call.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;

use libloading::Library;

const LIBRARY: &str = "libcuda.so.1";

/// The driver library, or a call into it, failed.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The library is not there.
    #[error("cannot open {name}; hint: is a driver installed, or LD_LIBRARY_PATH set?")]
    Open {
        /// The library.
        name: &'static str,
        /// The loader's message.
        source: libloading::Error,
    },
    /// The library is too old.
    #[error("the driver's library lacks {name}")]
    Missing {
        /// The function.
        name: &'static str,
        /// The loader's message.
        source: libloading::Error,
    },
    /// A call answered an error.
    #[error("{call} answered {name}")]
    Call {
        /// The function.
        call: &'static str,
        /// Name of the CUresult.
        name: String,
        /// The CUresult.
        code: i32,
    },
}

type Result<T> = std::result::Result<T, DriverError>;

/// A GPU's UUID as the driver gives it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uuid(pub [u8; 16]);

impl std::fmt::Display for Uuid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hex = format!("{:032x}", u128::from_be_bytes(self.0));
        write!(
            f,
            "GPU-{}-{}-{}-{}-{}",
            &hex[..8],
            &hex[8..12],
            &hex[12..16],
            &hex[16..20],
            &hex[20..]
        )
    }
}

impl std::str::FromStr for Uuid {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let digits: String = text.trim_start_matches("GPU-").split('-').collect();
        let value = u128::from_str_radix(&digits, 16)
            .ok()
            .filter(|_| digits.len() == 32);
        Ok(Self(
            value
                .ok_or_else(|| format!("not a GPU UUID: {text}"))?
                .to_be_bytes(),
        ))
    }
}

/// What another process needs to open an allocation.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle(pub [u8; 64]);

/// One pair of the map given to restore.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GpuPair {
    /// GPU at the checkpoint.
    pub old: Uuid,
    /// GPU to restore on.
    pub new: Uuid,
}

#[repr(C)]
struct LockArgs {
    timeout_ms: c_uint,
    reserved: [u32; 15],
}

#[repr(C)]
struct RestoreArgs {
    pairs: *const GpuPair,
    count: c_uint,
    reserved: [u8; 52],
}

/// Any opaque handle of the driver.
type Raw = *mut c_void;

macro_rules! functions {
    ($table:ident: $($name:ident: fn($($argument:ty),*);)*) => {
        #[allow(non_snake_case, reason = "the names are the driver's")]
        struct $table {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl $table {
            fn load(library: &Library) -> Result<Self> {
                Ok(Self {
                    $($name: {
                        let name = stringify!($name);
                        // SAFETY: the type is that of the function with this name in the CUDA driver API.
                        *unsafe { library.get(name) }.map_err(|source| DriverError::Missing { name, source })?
                    },)*
                })
            }
        }
    };
}

functions! {
    Functions:
    cuInit: fn(c_uint);
    cuGetErrorName: fn(c_int, *mut *const c_char);
    cuDeviceGetCount: fn(*mut c_int);
    cuDeviceGet: fn(*mut c_int, c_int);
    cuDeviceGetUuid_v2: fn(*mut Uuid, c_int);
    cuDeviceGetPCIBusId: fn(*mut c_char, c_int, c_int);
    cuDevicePrimaryCtxRetain: fn(*mut Raw, c_int);
    cuCtxSetCurrent: fn(Raw);
    cuCtxSynchronize: fn();
    cuMemAlloc_v2: fn(*mut u64, usize);
    cuMemAllocManaged: fn(*mut u64, usize, c_uint);
    cuMemFree_v2: fn(u64);
    cuMemGetInfo_v2: fn(*mut usize, *mut usize);
    cuMemsetD8_v2: fn(u64, u8, usize);
    cuMemcpyDtoH_v2: fn(*mut c_void, u64, usize);
    cuMemcpyHtoD_v2: fn(u64, *const c_void, usize);
    cuModuleLoadData: fn(*mut Raw, *const c_void);
    cuModuleGetFunction: fn(*mut Raw, Raw, *const c_char);
    cuLaunchKernel: fn(
        Raw, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Raw,
        *const *const c_void, *const *const c_void
    );
    cuIpcGetMemHandle: fn(*mut IpcHandle, u64);
    cuIpcOpenMemHandle_v2: fn(*mut u64, IpcHandle, c_uint);
    cuCheckpointProcessGetState: fn(c_int, *mut c_int);
    cuCheckpointProcessGetRestoreThreadId: fn(c_int, *mut c_int);
    cuCheckpointProcessLock: fn(c_int, *const LockArgs);
    cuCheckpointProcessCheckpoint: fn(c_int, *const c_void);
    cuCheckpointProcessRestore: fn(c_int, *const RestoreArgs);
    cuCheckpointProcessUnlock: fn(c_int, *const c_void);
}

/// The opened driver library.
pub struct Driver {
    call: Functions,
    library: Library,
}

/// A context; valid in every thread that makes it current.
#[derive(Clone, Copy)]
pub struct Context(Raw);

// SAFETY: the driver's contexts may be used by any thread.
unsafe impl Send for Context {}

/// A kernel of a loaded module.
#[derive(Clone, Copy)]
pub struct Kernel(Raw);

/// One argument of a kernel.
#[derive(Clone, Copy)]
pub enum Argument {
    /// A 64-bit value or an address.
    U64(u64),
    /// A 32-bit value.
    U32(u32),
}

macro_rules! call {
    ($driver:ident.$name:ident($($argument:expr),*)) => {
        call!($driver, $driver.call, $name($($argument),*))
    };
    ($driver:ident, $table:expr, $name:ident($($argument:expr),*)) => {{
        // SAFETY: the arguments are of the types that the driver API gives this function; pointers go to live
        // values of the caller.
        let code = unsafe { ($table.$name)($($argument),*) };
        $driver.check(stringify!($name), code)
    }};
}

mod rare;

pub use rare::{Allocation, Nvml, VMM_GRANULE};

impl Driver {
    /// Opens the library. Makes no call into it.
    pub fn open() -> Result<Self> {
        // SAFETY: loading the driver runs its constructors, which is what every CUDA program does.
        let library = unsafe { Library::new(LIBRARY) }.map_err(|source| DriverError::Open {
            name: LIBRARY,
            source,
        })?;
        Ok(Self {
            call: Functions::load(&library)?,
            library,
        })
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: the pointer goes to a live variable.
        let known = unsafe { (self.call.cuGetErrorName)(code, &raw mut text) } == 0 && !text.is_null();
        let name = if known {
            // SAFETY: the driver gave a C string that lives as long as the library.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        } else {
            format!("CUresult {code}")
        };
        Err(DriverError::Call { call, name, code })
    }

    /// cuInit
    pub fn init(&self) -> Result<()> {
        call!(self.cuInit(0))
    }

    /// Number of devices.
    pub fn device_count(&self) -> Result<i32> {
        let mut count = 0;
        call!(self.cuDeviceGetCount(&raw mut count))?;
        Ok(count)
    }

    /// UUID of a device ordinal, as the process sees it.
    pub fn uuid(&self, ordinal: i32) -> Result<Uuid> {
        let mut device = 0;
        call!(self.cuDeviceGet(&raw mut device, ordinal))?;
        let mut uuid = Uuid::default();
        call!(self.cuDeviceGetUuid_v2(&raw mut uuid, device))?;
        Ok(uuid)
    }

    /// PCI address of a device ordinal, as the process sees it.
    pub fn bus_id(&self, ordinal: i32) -> Result<String> {
        let mut text = [0_u8; 32];
        call!(self.cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), 32, ordinal))?;
        let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    /// The primary context of a device ordinal.
    pub fn primary_context(&self, ordinal: i32) -> Result<Context> {
        let mut device = 0;
        call!(self.cuDeviceGet(&raw mut device, ordinal))?;
        let mut context = ptr::null_mut();
        call!(self.cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        Ok(Context(context))
    }

    /// Makes a context the calling thread's.
    pub fn set_current(&self, context: Context) -> Result<()> {
        call!(self.cuCtxSetCurrent(context.0))
    }

    /// Waits for all work of the current context.
    pub fn synchronize(&self) -> Result<()> {
        call!(self.cuCtxSynchronize())
    }

    /// Allocates device memory.
    pub fn allocate(&self, bytes: usize) -> Result<u64> {
        let mut address = 0;
        call!(self.cuMemAlloc_v2(&raw mut address, bytes))?;
        Ok(address)
    }

    /// Allocates managed memory.
    pub fn allocate_managed(&self, bytes: usize) -> Result<u64> {
        const ATTACH_GLOBAL: c_uint = 1;
        let mut address = 0;
        call!(self.cuMemAllocManaged(&raw mut address, bytes, ATTACH_GLOBAL))?;
        Ok(address)
    }

    /// Frees device or managed memory.
    pub fn free(&self, address: u64) -> Result<()> {
        call!(self.cuMemFree_v2(address))
    }

    /// Free and total bytes of the current context's device.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        call!(self.cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
        Ok((free, total))
    }

    /// Zeroes device memory.
    pub fn zero(&self, address: u64, bytes: usize) -> Result<()> {
        call!(self.cuMemsetD8_v2(address, 0, bytes))
    }

    /// Reads `N` bytes of device memory.
    pub fn read<const N: usize>(&self, address: u64) -> Result<[u8; N]> {
        let mut bytes = [0_u8; N];
        call!(self.cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), address, N))?;
        Ok(bytes)
    }

    /// Reads device memory.
    pub fn read_all(&self, address: u64, into: &mut [u8]) -> Result<()> {
        call!(self.cuMemcpyDtoH_v2(into.as_mut_ptr().cast(), address, into.len()))
    }

    /// Writes device memory.
    pub fn write_all(&self, address: u64, bytes: &[u8]) -> Result<()> {
        call!(self.cuMemcpyHtoD_v2(address, bytes.as_ptr().cast(), bytes.len()))
    }

    /// Loads the kernels of a PTX text into the current context.
    pub fn kernels<const N: usize>(&self, ptx: &CStr, names: [&str; N]) -> Result<[Kernel; N]> {
        let mut module = ptr::null_mut();
        call!(self.cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()))?;
        let mut kernels = [Kernel(ptr::null_mut()); N];
        for (kernel, name) in kernels.iter_mut().zip(names) {
            let name = CString::new(name).unwrap_or_default();
            call!(self.cuModuleGetFunction(&raw mut kernel.0, module, name.as_ptr()))?;
        }
        Ok(kernels)
    }

    /// Launches a kernel on the default stream.
    pub fn launch(&self, kernel: Kernel, blocks: u32, threads: u32, arguments: &[Argument]) -> Result<()> {
        let pointers: Vec<*const c_void> = (arguments.iter())
            .map(|argument| match argument {
                Argument::U64(value) => ptr::from_ref(value).cast(),
                Argument::U32(value) => ptr::from_ref(value).cast(),
            })
            .collect();
        let (stream, extra) = (ptr::null_mut(), ptr::null());
        call!(self.cuLaunchKernel(
            kernel.0,
            blocks,
            1,
            1,
            threads,
            1,
            1,
            0,
            stream,
            pointers.as_ptr(),
            extra
        ))
    }

    /// Exports an allocation.
    pub fn export(&self, address: u64) -> Result<IpcHandle> {
        let mut handle = IpcHandle([0; 64]);
        call!(self.cuIpcGetMemHandle(&raw mut handle, address))?;
        Ok(handle)
    }

    /// Opens another process's allocation.
    pub fn import(&self, handle: IpcHandle) -> Result<u64> {
        const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
        let mut address = 0;
        call!(self.cuIpcOpenMemHandle_v2(&raw mut address, handle, LAZY_ENABLE_PEER_ACCESS))?;
        Ok(address)
    }

    /// State of a CUDA process: 0 running, 1 locked, 2 checkpointed.
    pub fn state(&self, pid: i32) -> Result<i32> {
        let mut state = -1;
        call!(self.cuCheckpointProcessGetState(pid, &raw mut state))?;
        Ok(state)
    }

    /// Restore thread of a CUDA process.
    pub fn restore_thread(&self, pid: i32) -> Result<i32> {
        let mut tid = -1;
        call!(self.cuCheckpointProcessGetRestoreThreadId(pid, &raw mut tid))?;
        Ok(tid)
    }

    /// Locks a CUDA process.
    pub fn lock(&self, pid: i32, timeout_ms: u32) -> Result<()> {
        let args = LockArgs {
            timeout_ms,
            reserved: [0; 15],
        };
        call!(self.cuCheckpointProcessLock(pid, &raw const args))
    }

    /// Checkpoints a locked CUDA process.
    pub fn checkpoint(&self, pid: i32) -> Result<()> {
        let args = [0_u64; 8];
        call!(self.cuCheckpointProcessCheckpoint(pid, args.as_ptr().cast()))
    }

    /// Restores a checkpointed CUDA process.
    pub fn restore(&self, pid: i32, pairs: &[GpuPair]) -> Result<()> {
        let count = c_uint::try_from(pairs.len()).unwrap_or(c_uint::MAX);
        let pairs = if pairs.is_empty() {
            ptr::null()
        } else {
            pairs.as_ptr()
        };
        let args = RestoreArgs {
            pairs,
            count,
            reserved: [0; 52],
        };
        call!(self.cuCheckpointProcessRestore(pid, &raw const args))
    }

    /// Unlocks a locked CUDA process.
    pub fn unlock(&self, pid: i32) -> Result<()> {
        let args = [0_u64; 8];
        call!(self.cuCheckpointProcessUnlock(pid, args.as_ptr().cast()))
    }
}
