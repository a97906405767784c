//! The library's state between nvmlInit and nvmlShutdown.

use std::ffi::{CStr, OsStr, c_void};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use libloading::os::unix::Library as Shared;
use simgpu_model::{Control, CudaProcess, GpuInfo, GpuMemory, paths};

use crate::abi::Error;

/// A GPU that this process may open.
pub(crate) struct Device {
    pub(crate) info: GpuInfo,
    memory: GpuMemory,
}

struct Library {
    /// nvmlInit calls without nvmlShutdown.
    users: usize,
    /// None while the process is checkpointed.
    open: Option<Open>,
}

struct Open {
    control: Control,
    devices: Vec<Device>,
}

static LIBRARY: Mutex<Option<Library>> = Mutex::new(None);
static RESTORED: Condvar = Condvar::new();

fn library() -> MutexGuard<'static, Option<Library>> {
    LIBRARY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// nvmlInit
pub(crate) fn init() -> Result<(), Error> {
    if library().is_none() {
        attach();
    }
    let mut library = library();
    match library.as_mut() {
        Some(library) => library.users += 1,
        None => {
            let open = Some(open()?);
            *library = Some(Library { users: 1, open });
        }
    }
    Ok(())
}

/// Makes the process known to the driver, which closes and opens what NVML has. Without GPUs it has nothing to do with it.
fn attach() {
    type Attach = extern "C" fn(extern "C" fn(), extern "C" fn()) -> i32;
    let Some(driver) = driver() else {
        return;
    };
    // SAFETY: the type is the function's.
    if let Ok(attach) = unsafe { driver.get::<Attach>("simgpu_attach") } {
        attach(before_checkpoint, after_restore);
    }
    // Its threads run from now on.
    std::mem::forget(driver);
}

/// libcuda, as the program has it, or else a copy without its name: NVIDIA's NVML does not map libcuda. By its soname the
/// copy is what a program gets that loads libcuda later.
fn driver() -> Option<Shared> {
    const NAME: &str = "libcuda.so.1";
    // SAFETY: the simulated library's constructors do nothing; so below.
    if let Ok(loaded) = unsafe { Shared::open(Some(NAME), libc::RTLD_NOW | libc::RTLD_NOLOAD) } {
        return Some(loaded);
    }
    // SAFETY: the name is a C string; the new descriptor is nobody else's.
    let copy = unsafe { libc::memfd_create(c"simgpu-driver".as_ptr(), libc::MFD_CLOEXEC) };
    if copy < 0 {
        return None;
    }
    // SAFETY: as above.
    let mut copy = unsafe { File::from_raw_fd(copy) };
    io::copy(&mut File::open(own_directory()?.join(NAME)).ok()?, &mut copy).ok()?;
    // SAFETY: as above.
    let opened = unsafe {
        Shared::open(
            Some(format!("/proc/self/fd/{}", copy.as_raw_fd())),
            libc::RTLD_NOW,
        )
    };
    opened.ok()
}

/// Where this library lies.
fn own_directory() -> Option<PathBuf> {
    let mut info = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: the address is one of this library's, and `info` is there to be filled.
    let found = unsafe { libc::dladdr(init as *const c_void, info.as_mut_ptr()) };
    if found == 0 {
        return None;
    }
    // SAFETY: it was found, so the struct is filled.
    let info = unsafe { info.assume_init() };
    // SAFETY: the loader keeps the name for as long as the library is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Path::new(OsStr::from_bytes(name.to_bytes()))
        .parent()
        .map(Path::to_owned)
}

extern "C" fn before_checkpoint() {
    if let Some(library) = library().as_mut() {
        library.open = None;
    }
}

extern "C" fn after_restore() {
    if let Some(library) = library().as_mut() {
        library.open = open().ok();
    }
    RESTORED.notify_all();
}

fn open() -> Result<Open, Error> {
    let dev = paths::dev_dir();
    let control = Control::open(&dev).map_err(|_| Error::DriverNotLoaded)?;
    let open = |info: &GpuInfo| {
        let path = dev.join(&info.node.name);
        let file = File::options().read(true).write(true).open(&path).ok()?;
        let same = info.node.is_at(&path).unwrap_or(false);
        let memory = same.then(|| GpuMemory::open(file).ok()).flatten()?;
        Some(Device {
            info: info.clone(),
            memory,
        })
    };
    let devices = control.table.gpus.iter().filter_map(open).collect();
    Ok(Open { control, devices })
}

/// nvmlShutdown
pub(crate) fn shutdown() -> Result<(), Error> {
    let mut library = library();
    let open = library.as_mut().ok_or(Error::Uninitialized)?;
    open.users -= 1;
    if open.users == 0 {
        *library = None;
    }
    Ok(())
}

/// Asks what is open. Whether NVML's functions wait in a checkpointed process, as those of CUDA do, was not measured.
fn with_open<T>(ask: impl FnOnce(&Open) -> Result<T, Error>) -> Result<T, Error> {
    let closed =
        |library: &mut Option<Library>| library.as_ref().is_some_and(|library| library.open.is_none());
    let library = RESTORED
        .wait_while(library(), closed)
        .unwrap_or_else(PoisonError::into_inner);
    ask(library
        .as_ref()
        .and_then(|library| library.open.as_ref())
        .ok_or(Error::Uninitialized)?)
}

/// Asks the control device.
pub(crate) fn with_control<T>(ask: impl FnOnce(&Control) -> T) -> Result<T, Error> {
    with_open(|open| Ok(ask(&open.control)))
}

/// Asks all devices.
pub(crate) fn with_devices<T>(ask: impl FnOnce(&[Device]) -> Result<T, Error>) -> Result<T, Error> {
    with_open(|open| ask(&open.devices))
}

/// Asks the device at a place.
pub(crate) fn with_device<T>(place: usize, ask: impl FnOnce(&Device) -> T) -> Result<T, Error> {
    with_devices(|devices| devices.get(place).map(ask).ok_or(Error::InvalidArgument))
}

impl Device {
    /// Free bytes, those of dead processes included.
    pub(crate) fn free(&self) -> u64 {
        self.memory.sweep();
        self.memory.free_bytes()
    }

    /// Total bytes.
    pub(crate) fn total(&self) -> u64 {
        self.memory.total()
    }

    /// The processes of this pid namespace that have memory here, and how much.
    pub(crate) fn processes(&self) -> Vec<(u32, u64)> {
        self.memory.sweep();
        let processes = CudaProcess::all();
        let owners = self.memory.slots().owners().into_iter();
        let named = owners.filter_map(|(slot, token)| {
            let process = processes.iter().find(|process| process.token == token)?;
            Some((process.pid.cast_unsigned(), self.memory.used_by(slot)))
        });
        named.filter(|(_, used)| *used > 0).collect()
    }
}
