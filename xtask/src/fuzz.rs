//! `cargo xtask fuzz`: the targets of fuzz/, built as cargo-fuzz builds them, without cargo-fuzz.
//!
//! No sanitizer is used, because the code is safe Rust. So the pinned stable compiler suffices, with a C++
//! compiler for libFuzzer (a part of the crate libfuzzer-sys). Dependencies are instrumented too, in a target
//! directory of their own.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::thread;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::tools::{cargo_program, exit_code};
use crate::workspace;

/// What cargo-fuzz passes to the compiler with `--sanitizer none`.
const FLAGS: [&str; 10] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cllvm-args=-sanitizer-coverage-stack-depth",
    "-Cllvm-args=-simplifycfg-branch-fold-threshold=0",
    "-Ccodegen-units=1",
    "--cfg",
    "fuzzing",
];

/// Longest input, in bytes; more than any input of the corpus.
const MAX_LEN: u32 = 16 << 10;
/// A target that uses more memory, in MiB, fails. Targets use about 30.
const MEMORY: u32 = 512;
/// An input that takes longer, in seconds, fails. A machine that runs tests may be busy.
const INPUT_TIME: u32 = 60;
/// Lines of the log that are shown of a target that failed.
const REASON: usize = 40;

/// Run the fuzz targets
///
/// Runs the corpus first, then generated inputs. An input that fails is left in fuzz/artifacts. Needs a C++
/// compiler.
#[derive(clap::Args)]
pub struct Cmd {
    /// Target; all when none is named
    target: Option<String>,
    /// Run these inputs only
    files: Vec<PathBuf>,
    /// Time for each target; $FIRN_FUZZ_SECONDS, or else 6
    #[arg(long)]
    seconds: Option<u32>,
}

/// Numbers of targets.
pub struct Counts {
    pub passed: u64,
    pub failed: u64,
}

pub fn run(cmd: &Cmd) -> Result<ExitCode> {
    let targets = Targets::build()?;
    let counts = match &cmd.target {
        None => targets.run(&targets.names()?, seconds(cmd.seconds)?)?,
        Some(target) if cmd.files.is_empty() => {
            targets.run(std::slice::from_ref(target), seconds(cmd.seconds)?)?
        }
        Some(target) => {
            let status = targets.command(target)?.args(&cmd.files).status();
            return Ok(exit_code(status.context("run the target")?.success()));
        }
    };
    Ok(exit_code(counts.failed == 0))
}

/// Runs all targets.
pub fn all() -> Result<Counts> {
    let targets = Targets::build()?;
    targets.run(&targets.names()?, seconds(None)?)
}

fn seconds(option: Option<u32>) -> Result<u32> {
    const DEFAULT: u32 = 6;
    match (option, std::env::var("FIRN_FUZZ_SECONDS")) {
        (Some(seconds), _) => Ok(seconds),
        (None, Ok(text)) => text.parse().context("FIRN_FUZZ_SECONDS is no number"),
        (None, Err(_)) => Ok(DEFAULT),
    }
}

/// The C++ compiler that the build of libfuzzer-sys calls.
pub fn compiler() -> String {
    std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned())
}

/// The built targets.
struct Targets {
    fuzz: PathBuf,
    programs: PathBuf,
    /// Where targets keep files; in memory if possible.
    scratch: TempDir,
}

impl Targets {
    fn build() -> Result<Self> {
        let workspace = workspace()?;
        let (fuzz, dir) = (workspace.join("fuzz"), workspace.join("target/fuzz"));
        // Given explicitly, so that build scripts and macros are not instrumented.
        let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let mut cargo = Command::new(cargo_program());
        cargo
            .args(["build", "--release", "--manifest-path"])
            .arg(fuzz.join("Cargo.toml"))
            .arg("--target")
            .arg(&platform)
            .arg("--target-dir")
            .arg(&dir)
            .env("CARGO_ENCODED_RUSTFLAGS", FLAGS.join("\x1f"))
            .current_dir(&workspace);
        ensure!(
            cargo.status().context("run cargo")?.success(),
            "the fuzz targets cannot be built"
        );
        let memory = Path::new("/dev/shm");
        let scratch = tempfile::tempdir_in(memory).or_else(|_| tempfile::tempdir());
        Ok(Self {
            fuzz,
            programs: dir.join(platform).join("release"),
            scratch: scratch.context("make a temporary directory")?,
        })
    }

    fn names(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.fuzz.join("fuzz_targets")).context("list the targets")? {
            let path = entry?.path();
            names.extend(path.file_stem().map(|name| name.to_string_lossy().into_owned()));
        }
        names.sort();
        Ok(names)
    }

    /// The program of a target, with limits per input.
    fn command(&self, target: &str) -> Result<Command> {
        let program = self.programs.join(target);
        ensure!(program.is_file(), "there is no fuzz target {target}");
        let artifacts = self.fuzz.join("artifacts").join(target);
        fs::create_dir_all(&artifacts).with_context(|| format!("make {}", artifacts.display()))?;
        let mut command = Command::new(program);
        command
            .arg(format!("-artifact_prefix={}/", artifacts.display()))
            .arg(format!("-max_len={MAX_LEN}"))
            .arg(format!("-rss_limit_mb={MEMORY}"))
            .arg(format!("-timeout={INPUT_TIME}"))
            .env("TMPDIR", self.scratch.path());
        Ok(command)
    }

    /// Runs targets, as many at a time as there are processors.
    fn run(&self, targets: &[String], seconds: u32) -> Result<Counts> {
        let waiting = Mutex::new(targets.iter());
        let counts = Mutex::new(Counts { passed: 0, failed: 0 });
        let work = || -> Result<()> {
            loop {
                let next = waiting.lock().expect("nothing panics with it").next();
                let Some(target) = next else { return Ok(()) };
                let good = self.fuzz(target, seconds)?;
                let mut counts = counts.lock().expect("nothing panics with it");
                counts.passed += u64::from(good);
                counts.failed += u64::from(!good);
            }
        };
        let width = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| -> Result<()> {
            let threads: Vec<_> = (0..width).map(|_| scope.spawn(work)).collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().expect("nothing panics in it"))
        })?;
        Ok(counts.into_inner().expect("nothing panics with it"))
    }

    fn fuzz(&self, target: &str, seconds: u32) -> Result<bool> {
        let corpus = self.fuzz.join("corpus").join(target);
        ensure!(corpus.is_dir(), "there is no corpus {}", corpus.display());
        let (found, log) = (
            self.scratch.path().join(target),
            self.scratch.path().join(format!("{target}.log")),
        );
        fs::create_dir_all(&found).context("make a directory for new inputs")?;
        let output = File::create(&log).context("make a log")?;
        let status = self
            .command(target)?
            .arg(format!("-max_total_time={seconds}"))
            .arg("-print_final_stats=1")
            .args([&found, &corpus])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(output)
            .status()
            .with_context(|| format!("run {target}"))?;
        let log = fs::read(&log).context("read the log")?;
        // In one call: other threads print too.
        println!(
            "{}",
            report(target, status.success(), &String::from_utf8_lossy(&log))
        );
        Ok(status.success())
    }
}

/// The result of a target; of one that failed, the reason and how to repeat it.
fn report(target: &str, good: bool, log: &str) -> String {
    let after = |text: &'static str| log.lines().find_map(move |line| line.split_once(text));
    if good {
        let inputs = after("number_of_executed_units:").map_or("no", |(_, count)| count.trim());
        return format!("{target}: {inputs} inputs");
    }
    // The message of a panic, or else the end of libFuzzer's log.
    let lines: Vec<&str> = log.lines().collect();
    let begin = lines.iter().position(|line| line.contains(" panicked at "));
    let begin = begin.unwrap_or(lines.len().saturating_sub(REASON));
    let reason = lines.iter().skip(begin).take(REASON);
    let reason: String = reason.map(|line| format!("    {line}\n")).collect();
    let again = match after("Test unit written to ") {
        Some((_, file)) => format!("repeat it by: cargo xtask fuzz {target} {file}"),
        None => "it left no input".to_owned(),
    };
    format!("{target}: FAILED\n{reason}{target}: {again}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_reported_with_its_reason_and_input() {
        let log = "#2\tINITED cov: 3\nthread '<unnamed>' (7) panicked at shim/src/x.rs:1:2:\nleft: 3\n\
                   artifact_prefix='/f/'; Test unit written to /f/crash-0a\n\
                   stat::number_of_executed_units: 80\n";
        let failed = report("stdio", false, log);
        assert!(
            failed.starts_with(
                "stdio: FAILED\n    thread '<unnamed>' (7) panicked at shim/src/x.rs:1:2:\n    left: 3\n"
            ),
            "{failed}"
        );
        assert!(
            failed.ends_with("stdio: repeat it by: cargo xtask fuzz stdio /f/crash-0a"),
            "{failed}"
        );
        assert_eq!(report("stdio", true, log), "stdio: 80 inputs");
        let killed = report("stdio", false, "");
        assert_eq!(killed, "stdio: FAILED\nstdio: it left no input");
    }
}
