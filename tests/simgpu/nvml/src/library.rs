//! The library's state between nvmlInit and nvmlShutdown.

use std::fs::File;
use std::sync::{Mutex, MutexGuard};

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
    control: Control,
    devices: Vec<Device>,
}

static LIBRARY: Mutex<Option<Library>> = Mutex::new(None);

fn library() -> MutexGuard<'static, Option<Library>> {
    LIBRARY.lock().expect("nothing panics with the library locked")
}

/// nvmlInit
pub(crate) fn init() -> Result<(), Error> {
    let mut library = library();
    if let Some(library) = library.as_mut() {
        library.users += 1;
        return Ok(());
    }
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
    *library = Some(Library {
        users: 1,
        control,
        devices,
    });
    Ok(())
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

/// Asks the control device.
pub(crate) fn with_control<T>(ask: impl FnOnce(&Control) -> T) -> Result<T, Error> {
    Ok(ask(&library().as_ref().ok_or(Error::Uninitialized)?.control))
}

/// Asks all devices.
pub(crate) fn with_devices<T>(ask: impl FnOnce(&[Device]) -> Result<T, Error>) -> Result<T, Error> {
    ask(&library().as_ref().ok_or(Error::Uninitialized)?.devices)
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
