//! The processes and threads of gpu-counter.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use firn_workloads::children::{self, Kind, Pool};
use firn_workloads::counter::Counter;
use firn_workloads::driver::{Driver, IpcHandle};
use firn_workloads::habits;
use firn_workloads::shared::{Shared, Which};
use nix::sys::prctl;
use nix::sys::signal::Signal;

use crate::ranks::{Ranks, Sums};

/// Computes in GPU memory and checks all of it in every iteration.
#[derive(Clone, Parser)]
#[command(name = "gpu-counter", version, args_override_self = true)]
pub struct Options {
    /// Size of each buffer
    #[arg(long, default_value_t = 64)]
    mib: usize,
    /// Device memory that each process allocates in addition and never uses
    #[arg(long, default_value_t = 0)]
    reserve_mib: usize,
    /// Device memory that each thread allocates in addition, fills, and only looks at afterwards
    #[arg(long, default_value_t = 0)]
    fixed_mib: usize,
    /// Device ordinals; each thread has a buffer on each
    #[arg(long, value_delimiter = ',', default_value = "0")]
    gpu: Vec<i32>,
    /// Processes; with more than one, children are started and watched
    #[arg(long, default_value_t = 1)]
    procs: usize,
    /// Threads per process
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Processes that talk to each other over TCP in every iteration; rank N computes on the Nth of the
    /// devices
    #[arg(long, default_value_t = 1, conflicts_with_all = ["procs", "threads", "ipc"])]
    ranks: usize,
    /// Ranks sum up on their GPUs so often in each iteration, and start that without waiting for each other
    #[arg(long, default_value_t = 0)]
    collectives: u32,
    /// Rank 0 sleeps for so long in each iteration: the others wait for it on their GPUs
    #[arg(long, default_value_t = 0)]
    straggle_ms: u64,
    /// Allocate so many MiB on each of the devices, and let them access each other's memory
    #[arg(long, default_value_t = 0)]
    peer_mib: usize,
    /// Use managed memory
    #[arg(long)]
    managed: bool,
    /// Let a child process open the first buffer by legacy IPC
    #[arg(long)]
    ipc: bool,
    /// Hold an io_uring
    #[arg(long)]
    io_uring: bool,
    /// Protect a page by a key
    #[arg(long)]
    protection_key: bool,
    /// Keep a file of memfd_create(2) of so many MiB open that is mapped nowhere
    #[arg(long, default_value_t = 0)]
    memory_file_mib: usize,
    /// Hold the socket that a communicator of NCCL has, while this file does not exist
    #[arg(long)]
    communicator: Option<PathBuf>,
    /// Fork children of these kinds once CUDA is in use
    #[arg(long, value_delimiter = ',')]
    forks: Vec<Kind>,
    /// Fork so many children once CUDA is in use, that answer the first thread over pipes in every iteration
    #[arg(long, default_value_t = 0)]
    pool: usize,
    /// Start a program before CUDA is in use that forks so many children
    #[arg(long, default_value_t = 0)]
    server: usize,
    /// Start a process with this argument before CUDA is in use that calls cuInit and forks two children
    #[arg(long)]
    compiles: Option<String>,
    /// Have a node of the driver open for so many milliseconds before CUDA is in use
    #[arg(long, default_value_t = 0)]
    slow_start_ms: u64,
    /// Fork a chain of so many processes, each the child of the one before, that do nothing
    #[arg(long, default_value_t = 0)]
    chain: usize,
    /// Hold so many descriptors, which the chain inherits
    #[arg(long, default_value_t = 0)]
    descriptors: usize,
    /// Exchange posts of named semaphores with a child
    #[arg(long)]
    semaphores: bool,
    /// Have shared memory of all kinds, of which every word is compared in every iteration
    #[arg(long)]
    shared_words: Option<Which>,
    /// Show an environment of so many MiB in /proc
    #[arg(long, default_value_t = 0)]
    environment_mib: usize,
    /// Pause between iterations
    #[arg(long, default_value_t = 200)]
    interval_ms: u64,
    /// Iterations; 0 for ever
    #[arg(long, default_value_t = 0)]
    iterations: u32,
    /// Append lines to this file instead of printing them
    #[arg(long)]
    out: Option<PathBuf>,
    /// Started by another gpu-counter: end with it
    #[arg(long, hide = true)]
    child: bool,
    /// Started by --ranks: which it is
    #[arg(long, hide = true)]
    rank: Option<usize>,
    /// Started by --ipc: the handle to open
    #[arg(long, hide = true)]
    import: Option<String>,
    /// Started by --server: how many children to fork
    #[arg(long, hide = true)]
    serve: Option<usize>,
    /// Started by --compiles: its argument
    #[arg(long, hide = true)]
    compile: Option<String>,
}

/// Runs as the options define.
pub fn run(options: &Options) -> Result<()> {
    ensure!(
        options.mib > 0 && options.procs > 0 && options.threads > 0,
        "sizes and counts start at 1"
    );
    if options.child {
        prctl::set_pdeathsig(Signal::SIGKILL).context("cannot tie this process to its parent")?;
    }
    if let Some(handle) = &options.import {
        return import(options, handle);
    }
    if options.compile.is_some() {
        Driver::open()?.init()?;
    }
    if let Some(count) = options.serve {
        return children::serve(count).context("cannot fork");
    }
    if options.procs > 1 || (options.ranks > 1 && options.rank.is_none()) {
        return supervise(options);
    }
    compute(options)
}

/// Starts the children and waits for them; the first failure ends all.
fn supervise(options: &Options) -> Result<()> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let start = |more: &[String]| spawn(&[&given, more, &["--child".to_owned()]].concat());
    // The last of repeated options counts.
    let children = match options.ranks {
        1 => (0..options.procs)
            .map(|_| start(&["--procs=1".to_owned()]))
            .collect::<Result<Vec<_>>>()?,
        ranks => (0..ranks)
            .map(|rank| start(&[format!("--rank={rank}")]))
            .collect::<Result<Vec<_>>>()?,
    };
    watch(children)
}

fn spawn(arguments: &[String]) -> Result<Child> {
    let program = std::env::current_exe().context("cannot find the own program")?;
    Command::new(program)
        .args(arguments)
        .spawn()
        .context("cannot start a child")
}

/// Starts a process that has CUDA and no context, and two children.
fn compiler(argument: &str) -> Result<Child> {
    let arguments = ["--child", "--serve=2", "--compile", argument];
    spawn(&arguments.map(str::to_owned))
}

fn watch(children: Vec<Child>) -> Result<()> {
    let (sender, ended) = mpsc::channel();
    for mut child in children {
        let sender = sender.clone();
        thread::spawn(move || {
            let pid = child.id();
            // The receiver goes away only when this process ends.
            let _ = sender.send((pid, child.wait()));
        });
    }
    drop(sender);
    for (pid, status) in ended {
        let status = status.context("cannot wait for a child")?;
        if !status.success() {
            bail!("child {pid} ended with {status}");
        }
    }
    Ok(())
}

/// What a process holds and never uses.
#[derive(Default)]
struct Held {
    _files: Vec<File>,
    _ring: Option<OwnedFd>,
}

/// What a process does before it has threads.
fn begin(options: &Options) -> Result<Held> {
    let mut held = Held::default();
    for _ in 0..options.descriptors {
        held._files
            .push(File::open("/dev/null").context("cannot open /dev/null")?);
    }
    habits::chain(options.chain).context("cannot fork a chain")?;
    if options.semaphores {
        habits::semaphores().context("cannot exchange posts of semaphores")?;
    }
    if options.environment_mib > 0 {
        habits::long_environment(options.environment_mib << 20).context("cannot lengthen the environment")?;
    }
    if options.io_uring {
        held._ring = Some(habits::io_uring().context("cannot set up an io_uring")?);
    }
    if options.protection_key {
        habits::protection_key().context("cannot protect a page by a key")?;
    }
    let memory = habits::memory_file(options.memory_file_mib << 20);
    held._files.extend(memory.context("cannot make a memory file")?);
    Ok(held)
}

/// One thread per thread and GPU asked for; the first failure ends the process.
fn compute(options: &Options) -> Result<()> {
    let _held = begin(options)?;
    let shared = options.shared_words.map(Shared::make).transpose();
    let shared = Arc::new(shared.context("cannot make shared memory")?);
    if let Some(file) = options
        .communicator
        .clone()
        .filter(|_| options.ranks < 2 || options.rank.is_some())
    {
        thread::spawn(move || habits::communicator(&file));
    }
    let _server = match options.server {
        0 => None,
        count => Some(spawn(&["--child".to_owned(), format!("--serve={count}")])?),
    };
    let _compiler = options.compiles.as_deref().map(compiler).transpose()?;
    let driver = Arc::new(Driver::open()?);
    habits::slow_start(options.slow_start_ms).context("cannot open a node")?;
    driver.init()?;
    let mut pool = None;
    if options.pool > 0 || !options.forks.is_empty() {
        driver.set_current(driver.primary_context(options.gpu[0])?)?;
        for &kind in &options.forks {
            children::fork(kind, &driver).context("cannot fork")?;
        }
        pool = Some(Pool::fork(options.pool).context("cannot fork a pool")?);
    }
    if options.reserve_mib > 0 {
        driver.set_current(driver.primary_context(options.gpu[0])?)?;
        driver.allocate(options.reserve_mib << 20)?;
    }
    if options.peer_mib > 0 {
        peers(&driver, options)?;
    }
    let (sender, ended) = mpsc::channel();
    let gpus = match options.rank {
        Some(rank) => std::slice::from_ref(options.gpu.get(rank).context("fewer devices than ranks")?),
        None => &options.gpu,
    };
    for number in 0..options.threads {
        for &gpu in gpus {
            let (driver, options, sender) = (Arc::clone(&driver), options.clone(), sender.clone());
            let exports = options.ipc && number == 0 && gpu == options.gpu[0];
            let (pool, shared) = (pool.take(), Arc::clone(&shared));
            thread::spawn(move || {
                let importer = exports.then(|| sender.clone());
                let shared = shared.as_ref().as_ref();
                // The receiver goes away only when this process ends.
                let _ = sender.send(work(&driver, &options, number, gpu, importer, pool, shared));
            });
        }
    }
    drop(sender);
    ended.into_iter().collect()
}

/// Computes in one buffer. With `importer`, lets a child open it, whose failure is reported there at once.
fn work(
    driver: &Driver,
    options: &Options,
    number: usize,
    gpu: i32,
    importer: Option<Sender<Result<()>>>,
    mut pool: Option<Pool>,
    shared: Option<&Shared>,
) -> Result<()> {
    driver.set_current(driver.primary_context(gpu)?)?;
    let mut counter = Counter::new(driver, options.mib << 20, options.managed)?;
    let fixed = match options.fixed_mib {
        0 => None,
        // Others than those of another container.
        mib => Some(Counter::at(driver, mib << 20, false, clock()?)?),
    };
    let mut ranks = match options.rank {
        Some(rank) => Some(Ranks::join(rank, options.ranks)?),
        None => None,
    };
    let mut sums = match options.collectives {
        0 => None,
        _ => ranks.take().map(Sums::start).transpose()?,
    };
    let watcher = match importer {
        Some(sender) => {
            let child = start_importer(driver, &counter, gpu)?;
            Some(thread::spawn(move || sender.send(watch(vec![child]))))
        }
        None => None,
    };
    loop {
        let iteration = counter.iteration();
        let checksum = counter
            .step()
            .with_context(|| format!("thread {number} on gpu {gpu}"))?;
        if let Some(fixed) = &fixed {
            fixed.look(iteration)?;
        }
        if let Some(shared) = shared {
            shared.look().context("shared memory")?;
        }
        if let Some(ranks) = &mut ranks {
            ranks.agree(iteration)?;
        }
        if let Some(sums) = &mut sums {
            for _ in 0..options.collectives {
                sums.start_one(driver)?;
            }
        }
        if options.rank == Some(0) {
            thread::sleep(Duration::from_millis(options.straggle_ms));
        }
        if let Some(pool) = &mut pool {
            pool.answer(iteration).context("a child of the pool")?;
        }
        let (uuid, pid) = (driver.uuid(gpu)?, std::process::id());
        let line = format!(
            "counter pid={pid} thread={number} gpu={gpu} uuid={uuid} iter={iteration} checksum={checksum} ok"
        );
        print(options, &line)?;
        if options.iterations > 0 && counter.iteration() >= options.iterations {
            break;
        }
        thread::sleep(Duration::from_millis(options.interval_ms));
    }
    // Order matters: the child is killed when the thread that started it ends.
    if let Some(watcher) = watcher {
        let _ended = watcher.join();
    }
    Ok(())
}

/// Contexts on all devices, which may access each other's memory.
fn peers(driver: &Driver, options: &Options) -> Result<()> {
    let contexts = options.gpu.iter().map(|gpu| driver.primary_context(*gpu));
    let contexts = contexts.collect::<Result<Vec<_>, _>>()?;
    for (place, own) in contexts.iter().enumerate() {
        driver.set_current(*own)?;
        driver.allocate(options.peer_mib << 20)?;
        for (_, peer) in contexts.iter().enumerate().filter(|(other, _)| *other != place) {
            driver.enable_peer_access(*peer)?;
        }
    }
    Ok(())
}

/// A number that is another one at another time.
fn clock() -> Result<u32> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).context("no time")?;
    Ok(now.subsec_nanos())
}

fn start_importer(driver: &Driver, counter: &Counter<'_>, gpu: i32) -> Result<Child> {
    let IpcHandle(bytes) = driver.export(counter.address())?;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    arguments.extend([
        format!("--gpu={gpu}"),
        "--child".to_owned(),
        format!("--import={hex}"),
    ]);
    spawn(&arguments)
}

/// The child of `--ipc`: looks at the parent's buffer.
fn import(options: &Options, handle: &str) -> Result<()> {
    ensure!(handle.len() == 128, "an IPC handle has 64 bytes");
    let mut bytes = [0; 64];
    for (byte, at) in bytes.iter_mut().zip((0..128).step_by(2)) {
        *byte = u8::from_str_radix(&handle[at..at + 2], 16).context("the IPC handle is not hexadecimal")?;
    }
    let driver = Driver::open()?;
    driver.init()?;
    let gpu = *options.gpu.last().context("no device ordinal")?;
    driver.set_current(driver.primary_context(gpu)?)?;
    let address = driver.import(IpcHandle(bytes))?;
    let pid = std::process::id();
    for iteration in 0_u32.. {
        let first = u32::from_ne_bytes(driver.read(address)?);
        print(
            options,
            &format!("importer pid={pid} gpu={gpu} iter={iteration} first={first:#010x} ok"),
        )?;
        if options.iterations > 0 && iteration + 1 >= options.iterations {
            break;
        }
        thread::sleep(Duration::from_millis(options.interval_ms));
    }
    Ok(())
}

/// Writes one line; keeps no file open.
fn print(options: &Options, line: &str) -> Result<()> {
    let Some(path) = &options.out else {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{line}")
            .and_then(|()| out.flush())
            .context("cannot print")?;
        return Ok(());
    };
    let file = File::options().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}
