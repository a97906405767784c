//! `cuda-step`: the driver's process checkpoint calls, one by one, from the command line.
//!
//! `cuda-step lock,checkpoint,restore,unlock 4711 --pair GPU-...=GPU-...`. Prints one line per call and
//! process, and exits with 1 when any call failed.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use firn_workloads::driver::{Driver, DriverError, GpuPair};

/// Makes the driver's process checkpoint calls.
#[derive(Parser)]
#[command(name = "cuda-step", version)]
struct Options {
    /// Calls, in order, comma-separated: state, tid, lock, checkpoint, restore, unlock
    #[arg(value_parser = parse_calls)]
    calls: Calls,
    /// Processes
    #[arg(required = true)]
    pids: Vec<i32>,
    /// For restore: OLD=NEW, one per GPU that the process could see; none for the same GPUs
    #[arg(long = "pair", value_parser = parse_pair)]
    pairs: Vec<GpuPair>,
    /// For lock
    #[arg(long, default_value_t = 5000)]
    timeout_ms: u32,
    /// Call cuInit first
    #[arg(long)]
    init: bool,
}

#[derive(Clone, Debug)]
struct Calls(Vec<Call>);

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Call {
    State,
    Tid,
    Lock,
    Checkpoint,
    Restore,
    Unlock,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cuda-step: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<bool> {
    let driver = Driver::open()?;
    if options.init {
        driver.init()?;
    }
    let mut fine = true;
    for &call in &options.calls.0 {
        for &pid in &options.pids {
            let start = Instant::now();
            let done = make(&driver, call, pid, options);
            let ms = start.elapsed().as_secs_f64() * 1e3;
            let name = call
                .to_possible_value()
                .context("every call has a name")?
                .get_name()
                .to_owned();
            match done {
                Ok(answer) => println!("{name} {pid}: CUDA_SUCCESS{answer} ({ms:.1} ms)"),
                Err(DriverError::Call { name: error, .. }) => {
                    println!("{name} {pid}: {error} ({ms:.1} ms)");
                    fine = false;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(fine)
}

fn make(driver: &Driver, call: Call, pid: i32, options: &Options) -> Result<String, DriverError> {
    match call {
        Call::State => return driver.state(pid).map(|state| format!(" {state}")),
        Call::Tid => return driver.restore_thread(pid).map(|tid| format!(" {tid}")),
        Call::Lock => driver.lock(pid, options.timeout_ms)?,
        Call::Checkpoint => driver.checkpoint(pid)?,
        Call::Restore => driver.restore(pid, &options.pairs)?,
        Call::Unlock => driver.unlock(pid)?,
    }
    Ok(String::new())
}

fn parse_calls(text: &str) -> Result<Calls> {
    let call = |name| Call::from_str(name, false).map_err(|_| anyhow::anyhow!("unknown call {name:?}"));
    Ok(Calls(text.split(',').map(call).collect::<Result<_>>()?))
}

fn parse_pair(text: &str) -> Result<GpuPair> {
    let (old, new) = text.split_once('=').context("a pair is OLD=NEW")?;
    let uuid = |text: &str| text.parse().map_err(anyhow::Error::msg);
    Ok(GpuPair {
        old: uuid(old)?,
        new: uuid(new)?,
    })
}
