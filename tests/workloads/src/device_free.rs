//! `device-free`: computes on whatever device it finds, a GPU by CUDA or the CPU, and can let go of it.
//!
//! The state is in host memory of the main process. A worker process owns the GPU: it gets the state,
//! computes, and returns the state when it is to end. Without a worker the main process computes itself. One
//! line per iteration, as `gpu-counter` prints it, with `uuid=cpu` where the CPU computes.
//!
//! `device-free release` and `device-free take` are for the job's hooks: they return once the worker has
//! ended, or once the job has looked for a device again. They talk to the job by files.

#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write, stdin, stdout};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use firn_workloads::counter::{self, Counter};
use firn_workloads::driver::Driver;
use nix::sys::prctl;
use nix::sys::signal::Signal;

/// What the hooks want, `released` or `taken`, and what the job has done. firn's tmpfs for a job with hooks.
const WANTED: &str = "/run/firn/wanted";
const DONE: &str = "/run/firn/done";

/// Computes on whatever device is there.
#[derive(Parser)]
#[command(name = "device-free", version)]
struct Options {
    #[arg(default_value = "run")]
    part: Part,
    /// Size of the state
    #[arg(long, default_value_t = 1)]
    mib: usize,
    /// Pause between iterations
    #[arg(long, default_value_t = 50)]
    interval_ms: u64,
    /// Append lines to this file instead of printing them
    #[arg(long)]
    out: Option<PathBuf>,
    /// Keep the worker when the hook wants the device released
    #[arg(long)]
    keeps: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Part {
    /// The job
    Run,
    /// Owns the GPU; started by the job
    #[value(hide = true)]
    Worker,
    /// Let the job release its device
    Release,
    /// Let the job look for a device
    Take,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let done = match options.part {
        Part::Run => run(&options),
        Part::Worker => work(),
        Part::Release => ask("released"),
        Part::Take => ask("taken"),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("device-free pid={}: {error:#}", std::process::id());
            ExitCode::FAILURE
        }
    }
}

/// Waits until the job has done it. The hook's deadline bounds the wait.
fn ask(wanted: &str) -> Result<()> {
    fs::write(WANTED, wanted)?;
    while fs::read_to_string(DONE).ok().as_deref() != Some(wanted) {
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn run(options: &Options) -> Result<()> {
    let mut out: Box<dyn Write> = match &options.out {
        Some(path) => Box::new(File::options().append(true).create(true).open(path)?),
        None => Box::new(stdout()),
    };
    let mut state = State::new(options.mib << 20);
    let mut worker = Worker::start(&state)?;
    let mut done = String::new();
    loop {
        let wanted = fs::read_to_string(WANTED).unwrap_or_default();
        if wanted != done {
            match (&*wanted, worker.take()) {
                ("released", Some(kept)) if options.keeps => worker = Some(kept),
                ("released", Some(used)) => used.release(&mut state)?,
                ("taken", None) => worker = Worker::start(&state)?,
                (_, kept) => worker = kept,
            }
            // Whole, or not there.
            let part = Path::new(DONE).with_extension("part");
            fs::write(&part, &wanted)?;
            fs::rename(&part, DONE)?;
            done = wanted;
        }
        let (uuid, checksum) = match &mut worker {
            Some(worker) => (&*worker.uuid.clone(), worker.step()?),
            None => ("cpu", state.step()?),
        };
        let (pid, iter) = (std::process::id(), state.iteration);
        writeln!(
            out,
            "counter pid={pid} thread=0 gpu=0 uuid={uuid} iter={iter} checksum={checksum} ok"
        )?;
        out.flush()?;
        state.iteration += 1;
        thread::sleep(Duration::from_millis(options.interval_ms));
    }
}

/// What is computed, in host memory.
struct State {
    bytes: Vec<u8>,
    /// The next iteration.
    iteration: u32,
}

impl State {
    fn new(size: usize) -> Self {
        let elements = 0..(size / size_of::<u32>()) as u64;
        Self {
            bytes: elements
                .flat_map(|at| counter::pattern(at, 0).to_ne_bytes())
                .collect(),
            iteration: 0,
        }
    }

    /// What a step does on a GPU: checks all elements and moves them on; gives the sum of what they were.
    fn step(&mut self) -> Result<u64> {
        let (mut sum, iteration) = (0, self.iteration);
        for (element, at) in self.bytes.as_chunks_mut().0.iter_mut().zip(0..) {
            let found = u32::from_ne_bytes(*element);
            ensure!(
                found == counter::pattern(at, iteration),
                "iteration {iteration}: element {at} is {found:#x}"
            );
            sum += u64::from(found);
            *element = counter::pattern(at, iteration + 1).to_ne_bytes();
        }
        Ok(sum)
    }
}

/// The process that owns the GPU.
struct Worker {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    uuid: String,
}

impl Worker {
    /// None where there is no GPU.
    fn start(state: &State) -> Result<Option<Self>> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("worker")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut orders = child.stdin.take().context("no pipe to the worker")?;
        let mut answers = BufReader::new(child.stdout.take().context("no pipe from the worker")?);
        let mut uuid = String::new();
        if answers.read_line(&mut uuid)? == 0 {
            child.wait()?;
            return Ok(None);
        }
        let head = [u64::from(state.iteration), state.bytes.len() as u64];
        orders.write_all(&head.map(u64::to_ne_bytes).concat())?;
        orders.write_all(&state.bytes)?;
        let uuid = uuid.trim().to_owned();
        Ok(Some(Self {
            child,
            orders,
            answers,
            uuid,
        }))
    }

    fn step(&mut self) -> Result<u64> {
        self.orders.write_all(b"s")?;
        let mut checksum = [0; 8];
        self.answers.read_exact(&mut checksum)?;
        Ok(u64::from_ne_bytes(checksum))
    }

    /// Afterwards nothing of it is left, and the state is what the worker has computed.
    fn release(mut self, state: &mut State) -> Result<()> {
        self.orders.write_all(b"g")?;
        self.answers.read_exact(&mut state.bytes)?;
        ensure!(self.child.wait()?.success(), "the worker has failed");
        Ok(())
    }
}

fn work() -> Result<()> {
    prctl::set_pdeathsig(Signal::SIGKILL).context("cannot tie this process to its parent")?;
    let driver = Driver::open()?;
    driver.init()?;
    driver.set_current(driver.primary_context(0)?)?;
    println!("{}", driver.uuid(0)?);
    let (mut orders, mut answers) = (stdin(), stdout());
    let mut number = || -> Result<u64> {
        let mut bytes = [0; 8];
        orders.read_exact(&mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    };
    let (iteration, size) = (u32::try_from(number()?)?, usize::try_from(number()?)?);
    let mut bytes = vec![0; size];
    orders.read_exact(&mut bytes)?;
    let mut counter = Counter::with(&driver, &bytes, iteration)?;
    loop {
        let mut order = [0];
        orders.read_exact(&mut order)?;
        if order == *b"g" {
            counter.read(&mut bytes)?;
            answers.write_all(&bytes)?;
            return Ok(answers.flush()?);
        }
        answers.write_all(&counter.step()?.to_ne_bytes())?;
        answers.flush()?;
    }
}
