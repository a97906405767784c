//! A node with simulated GPUs in a directory of its own, the counter on it, and the checkpoint calls about
//! it.

#![allow(dead_code, reason = "each test program uses a part of this")]
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

pub mod control;
pub mod freezer;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Once, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

/// Longest time that anything here may take.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// GPUs of an ordinary node.
pub const TWO: &[&str] = &["mem=256M", "mem=256M"];

/// What the tests need of the machine; the reason to skip when it is missing.
pub fn missing() -> Option<&'static str> {
    if !nix::unistd::geteuid().is_root() {
        return Some("needs root");
    }
    (!Path::new("/dev/loop-control").exists()).then_some("needs loop devices")
}

/// Leaves the test with a printed reason when the machine lacks something.
#[macro_export]
macro_rules! require {
    ($missing:expr) => {
        if let Some(reason) = $missing {
            eprintln!("skipped: {reason}");
            return;
        }
    };
}

/// Directory of the built programs and libraries, built now if they are not there.
fn build_dir() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let packages = ["simgpu-model", "simgpu-cuda", "simgpu-nvml", "firn-workloads"];
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .arg("build")
            .arg("--quiet")
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        if cfg!(debug_assertions) {
            // As the suites build them: packages by name have other features, and cargo would build the
            // programs again, for the suites as well.
            cargo.arg("--workspace");
        } else {
            let named = packages.iter().flat_map(|package| ["--package", package]);
            cargo.arg("--release").args(named);
        }
        assert!(
            cargo.status().unwrap().success(),
            "cannot build the simulator and its workloads"
        );
        std::env::current_exe()
            .unwrap()
            .ancestors()
            .nth(2)
            .unwrap()
            .to_owned()
    })
}

/// Waits until `done` gives something.
pub fn eventually<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Simulated GPUs under a directory that stands in for /dev; removed when dropped.
pub struct Node {
    dir: tempfile::TempDir,
    /// UUIDs in the order of the GPUs.
    pub uuids: Vec<String>,
}

impl Node {
    /// Sets up GPUs as described.
    pub fn new(gpus: &[&str]) -> Self {
        remove_left_over();
        let prefix = format!("{PREFIX}{}-", std::process::id());
        let dir = tempfile::Builder::new().prefix(&prefix).tempdir().unwrap();
        for sub in ["dev", "state", "lib"] {
            fs::create_dir(dir.path().join(sub)).unwrap();
        }
        for (built, name) in [
            ("libcuda.so", "libcuda.so.1"),
            ("libnvidia_ml.so", "libnvidia-ml.so.1"),
        ] {
            std::os::unix::fs::symlink(build_dir().join(built), dir.path().join("lib").join(name)).unwrap();
        }
        let mut node = Self {
            dir,
            uuids: Vec::new(),
        };
        let descriptions = gpus.iter().flat_map(|gpu| ["--gpu", gpu]);
        let printed = node.simgpu(&["setup"].into_iter().chain(descriptions).collect::<Vec<_>>());
        node.uuids = printed
            .lines()
            .map(|line| line.split(' ').nth(1).unwrap().to_owned())
            .collect();
        node
    }

    /// The directory that stands in for /dev.
    pub fn dev(&self) -> PathBuf {
        self.dir.path().join("dev")
    }

    /// Where the fault script lies.
    pub fn state_dir(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    /// A program of the build, in the environment of this node.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(build_dir().join(program));
        self.enter(&mut command);
        command
    }

    /// Gives a command the environment of this node.
    pub fn enter(&self, command: &mut Command) {
        command
            .env("SIMGPU_DEV", self.dev())
            .env("SIMGPU_STATE", self.state_dir());
        command
            .env("LD_LIBRARY_PATH", self.dir.path().join("lib"))
            .env_remove("CUDA_VISIBLE_DEVICES");
        command.stdin(Stdio::null());
    }

    /// Runs the setup tool; gives what it prints.
    pub fn simgpu(&self, arguments: &[&str]) -> String {
        let output = self.command("simgpu").args(arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "simgpu {arguments:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// MiB in use on a GPU, dead processes not counted.
    pub fn used(&self, gpu: usize) -> u64 {
        let shown = self.simgpu(&["smi"]);
        let line = shown
            .lines()
            .find(|line| line.contains(&self.uuids[gpu]))
            .unwrap()
            .to_owned();
        let (_, rest) = line.split_once("used=").unwrap();
        rest.split_once("MiB").unwrap().0.parse().unwrap()
    }

    /// Starts the counter.
    pub fn counter(&self, arguments: &[&str]) -> Counter {
        self.counter_of(&[], arguments)
    }

    /// The same with variables.
    pub fn counter_of(&self, variables: &[(&str, &Path)], arguments: &[&str]) -> Counter {
        let mut command = self.command("gpu-counter");
        Counter::start(
            command
                .envs(variables.iter().copied())
                .args(["--interval-ms", "10", "--mib", "4"])
                .args(arguments),
        )
    }

    /// Starts the counter and waits until it computes.
    pub fn busy_counter(&self, arguments: &[&str]) -> Counter {
        let counter = self.counter(arguments);
        counter.iteration();
        counter
    }

    /// Makes checkpoint calls about a process; gives the answers, one word per call (and its value).
    pub fn step(&self, calls: &str, pid: i32, pairs: &[(usize, usize)]) -> Vec<String> {
        let mut caller = self.patient_caller(calls, pid, pairs);
        caller
            .answers(PATIENCE)
            .unwrap_or_else(|| panic!("{calls} did not return"))
    }

    /// Starts a process that makes checkpoint calls about another, a lock with a short timeout.
    pub fn caller(&self, calls: &str, pid: i32, pairs: &[(usize, usize)]) -> Caller {
        self.caller_with_timeout(Duration::from_millis(200), calls, pid, pairs)
    }

    /// The same with a timeout that no lock needs.
    pub fn patient_caller(&self, calls: &str, pid: i32, pairs: &[(usize, usize)]) -> Caller {
        self.caller_with_timeout(PATIENCE, calls, pid, pairs)
    }

    fn caller_with_timeout(&self, lock: Duration, calls: &str, pid: i32, pairs: &[(usize, usize)]) -> Caller {
        let mut command = self.command("cuda-step");
        command.args([
            calls,
            &pid.to_string(),
            "--timeout-ms",
            &lock.as_millis().to_string(),
        ]);
        for &(old, new) in pairs {
            command.arg(format!("--pair={}={}", self.uuids[old], self.uuids[new]));
        }
        Caller::start(&mut command)
    }

    /// Restore thread of a process.
    pub fn restore_tid(&self, pid: i32) -> i32 {
        self.step("tid", pid, &[])[0].parse().unwrap()
    }

    /// State of a process as the driver gives it.
    pub fn state(&self, pid: i32) -> String {
        self.step("state", pid, &[]).remove(0)
    }
}

/// Start of the names of the nodes' directories; the pid of the test program follows.
const PREFIX: &str = "simgpu-test-";

/// Removes the nodes of test programs that were killed.
fn remove_left_over() {
    static DONE: Once = Once::new();
    DONE.call_once(|| {
        for entry in fs::read_dir(std::env::temp_dir()).unwrap().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some((pid, _)) = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-')) else {
                continue;
            };
            if Path::new("/proc").join(pid).exists() {
                continue;
            }
            let mut teardown = Command::new(build_dir().join("simgpu"));
            let done = teardown
                .arg("teardown")
                .env("SIMGPU_DEV", entry.path().join("dev"))
                .status();
            if done.is_ok_and(|status| status.success()) {
                fs::remove_dir_all(entry.path()).unwrap();
            }
        }
    });
}

impl Drop for Node {
    fn drop(&mut self) {
        // A test that panics has a better message than this could have.
        let _ = self.command("simgpu").arg("teardown").status();
    }
}

/// A process that makes checkpoint calls; killed when dropped.
pub struct Caller {
    child: Child,
    lines: Receiver<String>,
}

impl Caller {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = read_lines(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// Its answers, once it ends; nothing when it does not within `patience`.
    pub fn answers(&mut self, patience: Duration) -> Option<Vec<String>> {
        let deadline = Instant::now() + patience;
        let mut answers = Vec::new();
        loop {
            match self
                .lines
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok(line) => answers.push(answer(&line)),
                Err(mpsc::RecvTimeoutError::Disconnected) => return Some(answers),
                Err(mpsc::RecvTimeoutError::Timeout) => return None,
            }
        }
    }

    /// Kills it, as firn does with a worker that overruns its deadline.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// How it ended.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `state 7: CUDA_SUCCESS 2 (0.1 ms)` becomes `2`; without a value the CUresult stays, without its prefix.
fn answer(line: &str) -> String {
    let (_, rest) = line.split_once(": ").unwrap();
    let (rest, _) = rest.split_once(" (").unwrap();
    rest.trim_start_matches("CUDA_SUCCESS ")
        .trim_start_matches("CUDA_ERROR_")
        .trim_start_matches("CUDA_")
        .to_owned()
}

/// A running counter; killed when dropped.
pub struct Counter {
    child: Child,
    lines: Receiver<String>,
}

impl Counter {
    /// Starts it by a command made ready.
    pub fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = read_lines(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// Its pid.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    /// Its next line that was not read yet.
    pub fn line(&self) -> String {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => line,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("the counter prints nothing"),
            Err(mpsc::RecvTimeoutError::Disconnected) => panic!("the counter ended: {}", self.errors()),
        }
    }

    /// What it printed as errors before it ended.
    fn errors(&self) -> String {
        let errors = self.child.stderr.as_ref().unwrap().as_fd();
        std::io::read_to_string(fs::File::from(errors.try_clone_to_owned().unwrap())).unwrap()
    }

    /// Waits for the next line that begins with `start`.
    pub fn line_of(&self, start: &str) -> String {
        eventually(start, || Some(self.line()).filter(|line| line.starts_with(start)))
    }

    /// Waits until it is computing; gives the iteration.
    pub fn iteration(&self) -> u32 {
        field(&self.line(), "iter").parse().unwrap()
    }

    /// Reads and forgets all lines printed so far; gives the last iteration.
    pub fn drain(&self) -> Option<u32> {
        let lines = self.lines.try_iter().filter(|line| line.starts_with("counter "));
        lines.last().map(|line| field(&line, "iter").parse().unwrap())
    }

    /// Reads lines until none comes for `quiet`; gives how many came.
    pub fn lines_until_quiet(&self, quiet: Duration) -> usize {
        std::iter::from_fn(|| self.lines.recv_timeout(quiet).ok()).count()
    }

    /// Where a private anonymous region of at least `size` bytes starts, if it has one.
    pub fn private_region(&self, size: u64) -> Option<u64> {
        let maps = self.maps();
        let regions = maps
            .lines()
            .filter(|line| line.contains(" rw-p 00000000 00:00 0"))
            .map(range);
        regions
            .filter(|(start, end)| end - start >= size)
            .map(|(start, _)| start)
            .next()
    }

    /// Waits for its end; gives status and what it printed as errors.
    pub fn end(mut self) -> (ExitStatus, String) {
        let status = eventually("the counter's end", || self.child.try_wait().unwrap());
        let errors = std::io::read_to_string(self.child.stderr.take().unwrap()).unwrap();
        (status, errors)
    }

    /// Kills it.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        assert_eq!(self.child.wait().unwrap().signal(), Some(9));
    }

    /// Descriptors and mappings that it has of the node's devices.
    pub fn device_uses(&self, node: &Node) -> Vec<String> {
        device_uses(node, self.pid())
    }

    /// Its memory map.
    pub fn maps(&self) -> String {
        fs::read_to_string(format!("/proc/{}/maps", self.pid())).unwrap()
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Start and end of a line of a memory map.
pub fn range(line: &str) -> (u64, u64) {
    let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
    (
        u64::from_str_radix(start, 16).unwrap(),
        u64::from_str_radix(end, 16).unwrap(),
    )
}

/// Value of `key=value` in a line.
pub fn field(line: &str, key: &str) -> String {
    let found = line
        .split(' ')
        .find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
    found.unwrap_or_else(|| panic!("no {key} in {line:?}")).to_owned()
}

fn read_lines(from: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    lines
}

/// Descriptors and mappings that a process has of the node's devices.
pub fn device_uses(node: &Node, pid: i32) -> Vec<String> {
    let dev = node.dev();
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let fds = fds
        .flatten()
        .filter_map(|fd| fs::read_link(fd.path()).ok())
        .filter(|to| to.starts_with(&dev));
    let mut uses: Vec<String> = fds.map(|to| format!("fd {}", to.display())).collect();
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let mapped = maps.lines().filter(|line| line.contains(dev.to_str().unwrap()));
    uses.extend(mapped.map(str::to_owned));
    uses
}
