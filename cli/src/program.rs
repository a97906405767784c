//! Runs other programs, with a deadline and bounded output.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use firn_config::{Config, find_program, in_path, names};
use firn_gpu::Inventory;
use firn_gpu::protocol::ProcessReply;
use firn_host::ProblemReport;
use firn_preflight::CriuLimits;
use firn_process::reaper::{OutputError, Reaper};

/// How long a program may take that shows its version.
pub const LIMIT: Duration = Duration::from_secs(10);

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
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let output = runtime.block_on(async {
        let reaper = Reaper::start().context("cannot watch for the end of programs")?;
        let output = reaper.output(Command::new(program).args(arguments), limit).await;
        output.map_err(|error| match error {
            OutputError::Spawn { source, .. } => anyhow!(source).context(format!("cannot start {name}")),
            OutputError::Pipe { source, .. } => anyhow!(source).context(format!("cannot read from {name}")),
            OutputError::TimedOut { .. } => anyhow!("{name} did not finish within {} s", limit.as_secs()),
        })
    })?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(Output {
        success: output.success(),
        stdout: text(&output.stdout),
        stderr: text(&output.stderr),
    })
}

/// A program in these directories, and its version.
pub fn versioned(name: &str, path: &OsStr) -> Result<(PathBuf, String), String> {
    let program = in_path(name, path).ok_or_else(|| format!("no {name} in PATH"))?;
    match run(&program, &["--version"], LIMIT) {
        Ok(output) if output.success => {
            // `runc version 1.3.6`, `Version: 4.2.1`
            let version = first_line(&output.stdout).split_whitespace().last();
            Ok((program, version.unwrap_or_default().to_owned()))
        }
        Ok(output) => Err(format!(
            "{} --version fails: {}",
            program.display(),
            last_line(&output.stderr)
        )),
        Err(error) => Err(format!("{error:#}")),
    }
}

/// What the CRIU in these directories cannot do on this kernel. Nothing is known of one that does not run.
pub fn criu_limits(path: &OsStr, config: &Config) -> CriuLimits {
    versioned("criu", path).map_or(CriuLimits::default(), |(_, version)| {
        CriuLimits::of(&version, &kernel(), config.criu.repaired)
    })
}

/// The release of the running kernel.
pub fn kernel() -> String {
    let shown = nix::sys::utsname::uname();
    shown
        .map(|name| name.release().to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// What a program has printed first.
pub fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default().trim()
}

/// What a program has printed last.
pub fn last_line(text: &str) -> &str {
    text.trim().lines().last().unwrap_or("no message").trim()
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
        let message = output.stderr.trim().trim_start_matches("firn-gpu: ");
        // What the driver's libraries refuse has a hint, and the code that the shim reports it by.
        let code = if message.contains(". hint: ") {
            "FIRN-DRIVER-MISSING: "
        } else {
            ""
        };
        bail!("{code}{message}");
    }
    serde_json::from_str(&output.stdout)
        .with_context(|| format!("{} {} printed something else", worker.display(), arguments[0]))
}
