//! What the library opens, between nvmlInit and nvmlShutdown.

use std::fs::File;
use std::sync::{Mutex, MutexGuard, PoisonError};

use libloading::Library as Shared;
use simgpu_model::{Control, CudaProcess, GpuInfo, GpuMemory, paths};

use crate::abi::Error;

/// A GPU that this process may open.
pub(crate) struct Device {
    pub(crate) info: GpuInfo,
    memory: GpuMemory,
}

struct Open {
    control: Control,
    devices: Vec<Device>,
}

/// nvmlInit calls without nvmlShutdown.
static USERS: Mutex<usize> = Mutex::new(0);

fn users() -> MutexGuard<'static, usize> {
    USERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// nvmlInit
pub(crate) fn init() -> Result<(), Error> {
    open()?;
    attach();
    *users() += 1;
    Ok(())
}

/// Makes the process known to the driver, which has its devices open from now on. Without GPUs it has nothing
/// to do with it.
fn attach() {
    // SAFETY: the simulated library's constructors do nothing.
    let Ok(driver) = (unsafe { Shared::new("libcuda.so.1") }) else {
        return;
    };
    // SAFETY: the type is the function's.
    if let Ok(attach) = unsafe { driver.get::<extern "C" fn() -> i32>("simgpu_attach") } {
        attach();
    }
    // Its threads run from now on.
    std::mem::forget(driver);
}

/// Opens the devices, for one call: NVIDIA's maps none of them.
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
    let mut users = users();
    *users = users.checked_sub(1).ok_or(Error::Uninitialized)?;
    Ok(())
}

/// Asks what is open. Whether NVML's functions wait in a checkpointed process, as those of CUDA do, was not
/// measured.
fn with_open<T>(ask: impl FnOnce(&Open) -> Result<T, Error>) -> Result<T, Error> {
    match *users() {
        0 => Err(Error::Uninitialized),
        _ => ask(&open()?),
    }
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
