//! The driver as loaded in this process: started by the first cuInit or by NVML, once.

use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::thread;

use simgpu_model::GpuInfo;

use crate::caller;
use crate::error::Error;
use crate::gate::{Gate, Passed};
use crate::hardware::{self, Hardware};
use crate::process::Process;
use crate::service::{self, Service};
use crate::waits::Waits;
use crate::wire::Request;

/// See the module head.
pub(crate) struct Driver {
    pub(crate) gate: Gate,
    pub(crate) waits: Waits,
    process: Mutex<Process>,
    /// To the restore thread.
    channel: OwnedFd,
    pid: u32,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();
static STARTING: Mutex<()> = Mutex::new(());

impl Driver {
    /// What the driver knows of this process.
    pub(crate) fn process(&self) -> MutexGuard<'_, Process> {
        self.process
            .lock()
            .expect("nothing panics with the process locked")
    }
}

/// A call of the application, for as long as it is under way.
pub(crate) struct Entered {
    driver: &'static Driver,
    _passed: Passed<'static>,
}

impl Entered {
    /// What the driver knows of this process.
    pub(crate) fn process(&self) -> MutexGuard<'static, Process> {
        self.driver.process()
    }

    /// The work of this process that waits on the GPU.
    pub(crate) fn waits(&self) -> &'static Waits {
        &self.driver.waits
    }
}

/// Begins a call of the application; waits while the process is locked.
pub(crate) fn enter() -> Result<Entered, Error> {
    let driver = own().ok_or(Error::NOT_INITIALIZED)?;
    let entered = Entered {
        driver,
        _passed: driver.gate.pass(),
    };
    if entered.process().ordinals.is_empty() {
        return Err(Error::NOT_INITIALIZED);
    }
    Ok(entered)
}

/// The driver of this process. A forked child has none.
fn own() -> Option<&'static Driver> {
    DRIVER.get().filter(|driver| driver.pid == std::process::id())
}

/// cuInit: starts the driver, or reports that it runs.
pub(crate) fn start() -> Result<(), Error> {
    let driver = run()?;
    let _passed = driver.gate.pass();
    if driver.process().seen.is_empty() {
        // The restore thread holds what belongs to the process.
        caller::ask(&driver.channel, &Request::Init)?;
    }
    let mut process = driver.process();
    if process.ordinals.is_empty() {
        process.ordinals = visible(
            &process.seen,
            std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref(),
        );
    }
    if process.ordinals.is_empty() {
        Err(Error::NO_DEVICE)
    } else {
        Ok(())
    }
}

/// nvmlInit: a process that uses NVML alone is known to the driver as one with CUDA is.
pub(crate) fn attach() -> Result<(), Error> {
    run().map(drop)
}

/// The driver, started if it does not run.
fn run() -> Result<&'static Driver, Error> {
    let starting = STARTING.lock().expect("nothing panics while starting");
    if DRIVER.get().is_none() {
        let (sender, reported) = mpsc::channel();
        let _signals = service::SignalsBlocked::new();
        let spawned = thread::Builder::new().spawn(move || match begin() {
            Ok((driver, service)) => {
                let driver = DRIVER.get_or_init(|| driver);
                // The starter waits for this; it cannot be gone.
                let _ = sender.send(Ok(()));
                service.serve(driver);
            }
            Err(error) => {
                let _ = sender.send(Err(error));
            }
        });
        spawned.map_err(|_| Error::OUT_OF_MEMORY)?;
        reported.recv().map_err(|_| Error::UNKNOWN)??;
    }
    drop(starting);
    own().ok_or(Error::NOT_INITIALIZED)
}

/// Makes the channel; runs in what becomes the restore thread.
fn begin() -> Result<(Driver, Service), Error> {
    let nodes = hardware::open_nodes();
    if nodes.is_empty() {
        return Err(Error::NO_DEVICE);
    }
    let service = Service::new(service::fresh_token().map_err(|_| Error::UNKNOWN)?);
    let service = service.map_err(|_| Error::UNKNOWN)?;
    let driver = Driver {
        gate: Gate::default(),
        waits: Waits::default(),
        process: Mutex::new(Process::new(nodes)),
        channel: service.channel().map_err(|_| Error::UNKNOWN)?,
        pid: std::process::id(),
    };
    Ok((driver, service))
}

/// What cuInit adds; runs in the restore thread. Returns the process's token.
pub(crate) fn initialise(process: &mut Process) -> Result<u64, Error> {
    let control = hardware::open_control().ok_or(Error::NO_DEVICE)?;
    let mut seen: Vec<GpuInfo> = Vec::new();
    let mut memories = Vec::new();
    for gpu in &control.table.gpus {
        if let Ok(memory) = hardware::open_gpu(gpu) {
            seen.push(gpu.clone());
            memories.push(memory);
        }
    }
    if seen.is_empty() {
        return Err(Error::NO_DEVICE);
    }
    let token = service::fresh_token().map_err(|_| Error::UNKNOWN)?;
    process.initialise(seen, Hardware::enter(control, memories, token)?);
    Ok(token)
}

/// Places of the GPUs that CUDA_VISIBLE_DEVICES lets through, in its order; it ends at the first entry that
/// names none.
fn visible(seen: &[GpuInfo], filter: Option<&str>) -> Vec<usize> {
    let Some(filter) = filter else {
        return (0..seen.len()).collect();
    };
    let mut places = Vec::new();
    for entry in filter.split(',').map(str::trim) {
        let place = match entry.parse::<usize>() {
            Ok(place) => Some(place).filter(|place| *place < seen.len()),
            Err(_) if entry.starts_with("GPU-") => seen.iter().position(|gpu| {
                gpu.uuid
                    .to_string()
                    .starts_with(&entry.to_ascii_lowercase().replace("gpu-", "GPU-"))
            }),
            Err(_) => None,
        };
        match place {
            Some(place) if !places.contains(&place) => places.push(place),
            _ => break,
        }
    }
    places
}
