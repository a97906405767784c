//! `gpu-sample`: small programs, each with one habit that may keep it from being checkpointed, or looks as if
//! it did.
//!
//! Each continues for ever and writes into its GPU memory what it checks in the next iteration: `sample NAME
//! pid=7 iter=12 ok`, for every process. Exits with 1 on the first wrong byte or driver error. What an audit
//! reports for them and what the driver does is compared by `tests/gpu/samples.py`. None has more than 2 MiB
//! of managed memory.

#![forbid(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use firn_workloads::children::{self, Kind};
use firn_workloads::driver::{Driver, IpcHandle, Nvml, VMM_GRANULE};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::dup2_stdin;

const MEMORY: usize = 2 << 20;
const SMALL: usize = 64 << 10;
const MANAGED_VARIABLE: &str = include_str!("managed.ptx");
const STREAMS: usize = 32;
const CONTEXTS: usize = 4;

/// Runs a small program with one habit.
#[derive(Parser)]
#[command(name = "gpu-sample", version)]
struct Options {
    /// Which
    habit: Habit,
    /// Pause between iterations
    #[arg(long, default_value_t = 100)]
    interval_ms: u64,
    /// Iterations; 0 for ever
    #[arg(long, default_value_t = 0)]
    iterations: u32,
    /// Started by another gpu-sample: which part of the habit it has
    #[arg(long, hide = true)]
    part: Option<Part>,
    /// The IPC handle to open
    #[arg(long, hide = true)]
    handle: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Habit {
    /// Device memory and nothing else
    Plain,
    /// 2 MiB of managed memory
    Managed,
    /// 64 KiB of managed memory
    ManagedSmall,
    /// A managed variable of a module
    ManagedVariable,
    /// Managed memory that is freed at once
    ManagedFreed,
    /// Many streams, and several contexts with memory of their own
    Streams,
    /// Memory mapped by the functions for virtual memory
    Vmm,
    /// The same, exported, and imported by nobody
    VmmExported,
    /// The same, imported by another process
    VmmImported,
    /// The same of a process without a context
    VmmBroker,
    /// Memory that another process has opened by legacy IPC
    Ipc,
    /// The same, closed again
    IpcClosed,
    /// Two processes with memory of their own
    Two,
    /// A child forked from a CUDA process, which runs no program of its own
    Fork,
    /// NVML and no CUDA
    Nvml,
    /// A process that computes, and another with NVML and no CUDA
    Monitored,
    /// CUDA, and no context
    Init,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    Alone,
    Importer,
    Monitor,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpu-sample pid={}: {error:#}", std::process::id());
            // Who attaches to a container only after its start would not see why it ended.
            thread::sleep(Duration::from_secs(2));
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    if options.part.is_some() {
        prctl::set_pdeathsig(Signal::SIGKILL).context("cannot tie this process to its parent")?;
    }
    match (options.habit, options.part) {
        (Habit::Nvml, _) | (_, Some(Part::Monitor)) => {
            let nvml = Nvml::open()?;
            let devices = nvml.devices()?;
            return options.go_on(|_| {
                let found = nvml.devices()?;
                ensure!(found == devices, "{found} GPUs, not {devices}");
                Ok(())
            });
        }
        (Habit::Two, None) => return two(options),
        _ => {}
    }
    let driver = Driver::open()?;
    driver.init()?;
    match (options.habit, options.part) {
        (Habit::Init, _) => return options.go_on(|_| Ok(())),
        (Habit::VmmBroker, None) => {
            let memory = driver.create(0, VMM_GRANULE, true)?;
            options.start(Part::Importer, &[], driver.export_descriptor(memory)?.into())?;
            return options.go_on(|_| Ok(()));
        }
        _ => {}
    }
    driver.set_current(driver.primary_context(0)?)?;
    match options.part {
        Some(Part::Importer) => importer(&driver, options),
        Some(Part::Alone | Part::Monitor) => compute(&driver, options, driver.allocate(MEMORY)?, MEMORY),
        None => owner(&driver, options),
    }
}

/// The program, or the one of two that the memory belongs to.
fn owner(driver: &Driver, options: &Options) -> Result<()> {
    let plain = || driver.allocate(MEMORY);
    let (address, bytes) = match options.habit {
        Habit::Plain => (plain()?, MEMORY),
        Habit::Monitored => {
            options.start(Part::Monitor, &[], Stdio::null())?;
            (plain()?, MEMORY)
        }
        Habit::Managed => (driver.allocate_managed(MEMORY)?, MEMORY),
        Habit::ManagedSmall => (driver.allocate_managed(SMALL)?, SMALL),
        Habit::ManagedVariable => (driver.variable(&CString::new(MANAGED_VARIABLE)?, "block")?, SMALL),
        Habit::ManagedFreed => {
            let managed = driver.allocate_managed(MEMORY)?;
            driver.fill(managed, 7, MEMORY)?;
            driver.synchronize()?;
            driver.free(managed)?;
            (plain()?, MEMORY)
        }
        Habit::Streams => {
            for _ in 0..CONTEXTS {
                driver.create_context(0)?;
                driver.fill(driver.allocate(SMALL)?, 7, SMALL)?;
                (0..STREAMS / CONTEXTS).try_for_each(|_| driver.create_stream())?;
            }
            (plain()?, MEMORY)
        }
        Habit::Vmm | Habit::VmmExported | Habit::VmmImported => {
            let shareable = options.habit != Habit::Vmm;
            let allocation = driver.create(0, VMM_GRANULE, shareable)?;
            let address = driver.map(allocation, 0, VMM_GRANULE)?;
            driver.fill(address, 0, VMM_GRANULE)?;
            driver.synchronize()?;
            if shareable {
                let descriptor = driver.export_descriptor(allocation)?;
                if options.habit == Habit::VmmImported {
                    options.start(Part::Importer, &[], descriptor.into())?;
                }
            }
            (address, VMM_GRANULE)
        }
        Habit::Ipc | Habit::IpcClosed => {
            let address = plain()?;
            driver.zero(address, MEMORY)?;
            driver.synchronize()?;
            let IpcHandle(handle) = driver.export(address)?;
            let hex: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
            options.start(Part::Importer, &[format!("--handle={hex}")], Stdio::null())?;
            (address, MEMORY)
        }
        Habit::Fork => {
            let address = plain()?;
            children::fork(Kind::Idle, driver).context("cannot fork")?;
            (address, MEMORY)
        }
        Habit::Two | Habit::Nvml | Habit::Init | Habit::VmmBroker => {
            unreachable!("these have no context of their own")
        }
    };
    compute(driver, options, address, bytes)
}

/// Writes the memory in every iteration and finds in the next what it wrote.
fn compute(driver: &Driver, options: &Options, address: u64, bytes: usize) -> Result<()> {
    let last = address + u64::try_from(bytes)? - 8;
    driver.zero(address, bytes)?;
    driver.synchronize()?;
    let mut holds = 0_u8;
    options.go_on(|iteration| {
        for at in [address, last] {
            let found: [u8; 8] = driver.read(at)?;
            ensure!(
                found == [holds; 8],
                "iteration {iteration}: {found:?} at {at:#x}, not {holds}"
            );
        }
        holds = holds.wrapping_add(1);
        driver.fill(address, holds, bytes)?;
        Ok(driver.synchronize()?)
    })
}

/// Looks at the memory of the process that started this one.
fn importer(driver: &Driver, options: &Options) -> Result<()> {
    let address = match &options.handle {
        Some(hex) => driver.import(parse_handle(hex)?)?,
        None => {
            // The driver takes the number 0 for no descriptor.
            let descriptor = std::io::stdin().as_fd().try_clone_to_owned()?;
            let allocation = driver.import_descriptor(descriptor.as_fd())?;
            // A descriptor that stays open would be a sign of its own.
            drop(descriptor);
            dup2_stdin(File::open("/dev/null")?)?;
            driver.map(allocation, 0, VMM_GRANULE)?
        }
    };
    if options.habit == Habit::IpcClosed {
        driver.read::<8>(address)?;
        driver.close_import(address)?;
        return compute(driver, options, driver.allocate(MEMORY)?, MEMORY);
    }
    options.go_on(|_| Ok(driver.read::<8>(address).map(|_| ())?))
}

fn parse_handle(hex: &str) -> Result<IpcHandle> {
    ensure!(hex.len() == 128, "an IPC handle has 64 bytes");
    let mut bytes = [0; 64];
    for (byte, at) in bytes.iter_mut().zip((0..128).step_by(2)) {
        *byte = u8::from_str_radix(&hex[at..at + 2], 16).context("the IPC handle is not hexadecimal")?;
    }
    Ok(IpcHandle(bytes))
}

/// Two processes that know nothing of each other's memory; the first that fails ends both.
fn two(options: &Options) -> Result<()> {
    let watched: Vec<_> = (0..2)
        .map(|_| options.start(Part::Alone, &[], Stdio::null()))
        .collect::<Result<_>>()?;
    for one in watched {
        if let Ok(status) = one.join() {
            ensure!(status?.success(), "a child failed");
        }
    }
    Ok(())
}

/// As the command line has it.
fn word(value: impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map(|value| value.get_name().to_owned()).unwrap_or_default()
}

type Watched = thread::JoinHandle<std::io::Result<std::process::ExitStatus>>;

impl Options {
    /// Starts a part of the habit in a process that ends with this one.
    fn start(&self, part: Part, more: &[String], stdin: Stdio) -> Result<Watched> {
        let mut command = Command::new(std::env::current_exe().context("cannot find the own program")?);
        command
            .arg(word(self.habit))
            .arg(format!("--part={}", word(part)))
            .arg(format!("--interval-ms={}", self.interval_ms))
            .arg(format!("--iterations={}", self.iterations))
            .args(more)
            .stdin(stdin);
        let mut child = command.spawn().context("cannot start a child")?;
        Ok(thread::spawn(move || child.wait()))
    }

    /// The iterations of one process, each with its line.
    fn go_on(&self, mut step: impl FnMut(u32) -> Result<()>) -> Result<()> {
        let name = word(self.habit);
        for iteration in 0_u32.. {
            step(iteration)?;
            let mut out = std::io::stdout().lock();
            writeln!(
                out,
                "sample {name} pid={} iter={iteration} ok",
                std::process::id()
            )
            .and_then(|()| out.flush())
            .context("cannot print")?;
            if iteration + 1 == self.iterations {
                break;
            }
            thread::sleep(Duration::from_millis(self.interval_ms));
        }
        Ok(())
    }
}
