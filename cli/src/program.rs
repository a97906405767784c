//! Runs other programs, with a deadline and bounded output.

use std::io::{self, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use firn_config::{Config, find_program, names};
use firn_gpu::Inventory;
use firn_gpu::protocol::ProcessReply;
use firn_host::ProblemReport;

/// How much output is read.
const MAX_BYTES: u64 = 4 << 20;

/// What a program has printed.
pub struct Output {
    /// Whether it ended with status 0.
    pub success: bool,
    pub stdout: String,
    pub stderr: String,
}

/// Runs a program to its end, or kills it at the deadline.
pub fn run(program: &Path, arguments: &[&str], limit: Duration) -> Result<Output> {
    let name = program.display();
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {name}"))?;
    let (stdout, stderr) = (collect(child.stdout.take()), collect(child.stderr.take()));
    let deadline = Instant::now() + limit;
    let mut text = |stream: Receiver<io::Result<String>>| {
        if let Ok(text) = stream.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            return text.with_context(|| format!("cannot read from {name}"));
        }
        child.kill().with_context(|| format!("cannot end {name}"))?;
        child.wait().with_context(|| format!("cannot wait for {name}"))?;
        bail!("{name} did not finish within {} s", limit.as_secs());
    };
    let (stdout, stderr) = (text(stdout)?, text(stderr)?);
    let status = child.wait().with_context(|| format!("cannot wait for {name}"))?;
    Ok(Output {
        success: status.success(),
        stdout,
        stderr,
    })
}

/// Reads a stream in a thread of its own.
fn collect(stream: Option<impl Read + Send + 'static>) -> Receiver<io::Result<String>> {
    let (sender, text) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = stream.map_or(Ok(0), |stream| stream.take(MAX_BYTES).read_to_end(&mut bytes));
        // The receiver is gone if the deadline has passed.
        let _ = sender.send(read.map(|_| String::from_utf8_lossy(&bytes).into_owned()));
    });
    text
}

/// Driver version and GPUs of this node.
pub fn inventory(config: &Config) -> Result<Inventory> {
    query(config, &["inventory"], config.deadlines.inventory)
}

/// Which of these processes use CUDA, with their GPU memory.
pub fn discover(config: &Config, pids: &[i32]) -> Result<Vec<ProcessReply>> {
    let pids: Vec<String> = pids.iter().map(i32::to_string).collect();
    let mut arguments = vec!["discover"];
    arguments.extend(pids.iter().map(String::as_str));
    query(config, &arguments, config.deadlines.discover)
}

/// The inventory of another node: the output of `firn-gpu inventory` there.
pub fn read_inventory(file: &Path) -> Result<Inventory> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} is no output of firn-gpu inventory", file.display()))
}

/// The JSON that firn-gpu prints.
fn query<T: serde::de::DeserializeOwned>(config: &Config, arguments: &[&str], limit: Duration) -> Result<T> {
    let worker =
        find_program(names::WORKER_PROGRAM, config.worker.path.as_deref()).map_err(ProblemReport::from)?;
    let output = run(&worker, arguments, limit)?;
    if !output.success {
        bail!("{}", output.stderr.trim().trim_start_matches("firn-gpu: "));
    }
    serde_json::from_str(&output.stdout)
        .with_context(|| format!("{} {} printed something else", worker.display(), arguments[0]))
}
