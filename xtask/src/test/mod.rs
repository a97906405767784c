//! `cargo xtask test`: everything that CI checks, in one command.

mod cuda_facts;
mod failures;
mod flaky;
mod outcome;
mod programs;
mod python;
mod spelling;
mod summary;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use firn_lab::{TIER, Tier};
use firn_node::{Store, Suite};
use nix::unistd::geteuid;

use crate::tools::{self, exit_code, in_path};
use crate::{fuzz, workspace};
use outcome::{Outcome, Output, Verdict, through};
use programs::{Compiler, Programs};

/// Check and test what every commit has to pass, as CI does
///
/// Formatting, lints (while the tests are built; with --all by themselves), licences (where cargo-deny is
/// installed), spelling (by typos, which pip installs where it is missing), unit tests of all crates, the
/// scripts of tests/gpu, and the suites that run containers in test nodes. With --all everything: all suites
/// on all platforms, next to the stock shim, the fuzz targets (for $FIRN_FUZZ_SECONDS each, 6 by default),
/// and a comparison with CUDA's headers. tests/README.md lists what is left out without it.
///
/// Needs root. The first run installs debootstrap and iproute2 with apt-get where they are missing, and makes
/// two Debian roots in target/node from the mirror that apt is configured with. Nothing else of the host is
/// changed.
#[derive(clap::Args)]
pub struct Cmd {
    /// Leave out the suites that need test nodes
    #[arg(long)]
    fast: bool,
    /// Everything, before an issue is resolved or a release is made; a test that passes only when it is
    /// repeated fails
    #[arg(long, conflicts_with = "fast")]
    all: bool,
}

/// Trials of suites that run at the same time: a trial waits half of its time for containerd, runc and CRIU,
/// and unit tests run next to them.
fn trials() -> usize {
    2 * thread::available_parallelism().map_or(2, usize::from)
}

/// Programs of suites: `cluster` is for all of it alone.
const SUITES: [&str; 2] = ["suites", "cluster"];

type Work = Box<dyn FnOnce(&mut Output) -> Result<Outcome> + Send>;

/// A check that is still to be made.
struct Check {
    name: String,
    work: Work,
    /// Arguments of cargo that run single tests of it, before their names.
    again: Option<Vec<String>>,
}

impl Check {
    fn new(
        name: impl Into<String>,
        work: impl FnOnce(&mut Output) -> Result<Outcome> + Send + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            work: Box::new(work),
            again: None,
        }
    }

    /// With arguments of `cargo test` that choose the programs whose single tests are run again.
    fn again(self, programs: &[&str]) -> Self {
        let words = [
            &["test", "--locked"],
            programs,
            &["--", "--test-threads=1", "--exact"],
        ]
        .concat();
        Self {
            again: Some(words.into_iter().map(str::to_owned).collect()),
            ..self
        }
    }

    fn run(self, out: &mut Output) -> Result<StageResult> {
        let begun = Instant::now();
        let outcome = match (self.work)(out) {
            Ok(outcome) => outcome,
            Err(error) => {
                out.line(format!("error: {error:#}").as_bytes())?;
                Outcome::new(false)
            }
        };
        Ok(StageResult {
            name: self.name,
            outcome,
            took: begun.elapsed(),
            again: self.again,
        })
    }
}

/// A check that was made.
struct StageResult {
    name: String,
    outcome: Outcome,
    took: Duration,
    /// As in [`Check`].
    again: Option<Vec<String>>,
}

/// All checks: some one after the other, then the lanes at the same time.
struct Plan {
    first: Vec<Check>,
    lanes: Vec<Lane>,
}

/// Checks that are made one after the other.
struct Lane {
    checks: Vec<Check>,
    /// Whether what they print is shown at once; else at the end of each check.
    at_once: bool,
}

impl Lane {
    fn new(checks: Vec<Check>) -> Self {
        Self {
            checks,
            at_once: false,
        }
    }
}

impl Plan {
    /// Without `cmd`'s options: with the suites, and without what only a run of all has.
    fn new(cmd: &Cmd) -> Result<Self> {
        let tests = Programs::default();
        // One compilation for lints and tests; before a release the tests run what rustc has made.
        let compiler = if cmd.all {
            Compiler::Rustc
        } else {
            Compiler::Clippy
        };
        let mut first = vec![
            Check::new("format", |out| cargo(out, &["fmt", "--all", "--check"])),
            Check::new("format of the fuzz targets", |out| {
                cargo(out, &["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"])
            }),
            Check::new("the interposer's library", library),
            Check::new("dependencies", deny),
            Check::new("advisories", advisories),
        ];
        if compiler == Compiler::Rustc {
            first.push(Check::new("lints", |out| cargo(out, &LINTS)));
        }
        first.extend([
            tests.build("build of the tests", compiler, &["test", "--no-run"]),
            Programs::default().build("build of the programs", compiler, &["build"]),
        ]);
        let mut others = vec![
            programs::unit_tests(&tests, &SUITES),
            Check::new("spelling", spelling::check),
            Check::new("scripts for GPU machines", scripts),
        ];
        if cmd.all {
            others.push(Check::new("facts of the CUDA driver", cuda_facts::check));
        }
        if cmd.fast {
            return Ok(Self {
                first,
                lanes: vec![Lane::new(others)],
            });
        }
        // Made from now on, while the tests are built: that mostly waits for the mirror and the disk.
        let made = thread::spawn(roots);
        first.push(Check::new("roots of the test nodes", |_| {
            made.join().unwrap_or_else(|_| bail!("making the roots panicked"))
        }));
        let tier = if cmd.all { Tier::All } else { Tier::Commit };
        let mut lanes = vec![Lane::new(others)];
        let mut suites = vec![suites("suites", &tests, tier)];
        if tier == Tier::All {
            suites.push(self::suites("cluster", &tests, tier));
            suites.push(Check::new("fuzz targets", fuzzed));
        }
        lanes.push(Lane {
            checks: suites,
            at_once: true,
        });
        Ok(Self { first, lanes })
    }

    /// Makes all checks, also after one that failed.
    /// `repeats`: a few that failed may pass when they are run again.
    fn run(self, repeats: bool) -> Result<Vec<StageResult>> {
        let mut done = Vec::new();
        for check in self.first {
            println!("\n== {}", check.name);
            done.push(check.run(&mut Output::Terminal)?);
        }
        let lanes = thread::scope(|scope| {
            let lanes = self.lanes.into_iter();
            let workers: Vec<_> = lanes.map(|lane| scope.spawn(|| in_lane(lane))).collect();
            let ends = workers.into_iter().map(|worker| match worker.join() {
                Ok(done) => done,
                Err(_) => bail!("a check panicked"),
            });
            ends.collect::<Result<Vec<_>>>()
        });
        done.extend(lanes?.into_iter().flatten());
        if repeats {
            flaky::again(&mut done)?;
        }
        Ok(done)
    }
}

/// Makes the checks of a lane.
fn in_lane(lane: Lane) -> Result<Vec<StageResult>> {
    let mut done = Vec::new();
    for check in lane.checks {
        println!("== {} begins", check.name);
        let mut out = if lane.at_once {
            Output::Terminal
        } else {
            Output::Buffer(Vec::new())
        };
        let made = check.run(&mut out)?;
        let mut terminal = io::stdout().lock();
        if let Output::Buffer(out) = out {
            writeln!(terminal, "\n== {}", made.name)?;
            terminal.write_all(&out)?;
        }
        done.push(made);
    }
    Ok(done)
}

const LINTS: [&str; 7] = [
    "clippy",
    "--workspace",
    "--all-targets",
    "--locked",
    "--",
    "-D",
    "warnings",
];

/// The check that runs a program of suites, as much of it as the tier has.
fn suites(program: &'static str, tests: &Programs, tier: Tier) -> Check {
    let tests = tests.clone();
    let check = Check::new(program, move |out| {
        let mut suites = tests.named(program)?.command();
        suites
            .arg(format!("--test-threads={}", trials()))
            .env(TIER, tier.as_str());
        through(suites, out)
    });
    check.again(&["--workspace", "--test", program])
}

/// Runs all checks, also after one that failed, and prints a summary.
pub fn run(cmd: &Cmd) -> Result<ExitCode> {
    ensure!(
        geteuid().is_root(),
        "the tests make cgroups, mounts and device nodes and need root\nhint: sudo -E cargo xtask test"
    );
    let begun = Instant::now();
    let done = Plan::new(cmd)?.run(!cmd.all)?;
    print!("\n{}", summary::of(&done, begun.elapsed()));
    let failed = done.iter().any(|done| done.outcome.verdict == Verdict::Failed);
    Ok(exit_code(!failed))
}

/// Format and lints of a workspace of its own.
fn library(out: &mut Output) -> Result<Outcome> {
    const MANIFEST: &str = "interposer/library/Cargo.toml";
    let formatted = cargo(out, &["fmt", "--manifest-path", MANIFEST, "--check"])?;
    if formatted.verdict != Verdict::Passed {
        return Ok(formatted);
    }
    let lints = ["clippy", "--release", "--locked", "--manifest-path", MANIFEST];
    let target = ["--target-dir", "target/interposer", "--", "-D", "warnings"];
    cargo(out, &[lints, target].concat())
}

/// Licences, duplicates and origins of the dependencies, by `deny.toml`.
fn deny(out: &mut Output) -> Result<Outcome> {
    if in_path("cargo-deny").is_none() {
        return Ok(Outcome::skipped(
            "cargo-deny is not installed (cargo install --locked cargo-deny)",
        ));
    }
    let deny = ["deny", "--offline", "--locked", "check"];
    cargo(out, &[&deny, &["bans", "licenses", "sources"][..]].concat())
}

/// Known flaws of the dependencies, by a database of RustSec's that `cargo deny fetch` has put where
/// cargo-deny looks for it. Nothing is fetched here.
fn advisories(out: &mut Output) -> Result<Outcome> {
    if in_path("cargo-deny").is_none() {
        return Ok(Outcome::skipped(
            "cargo-deny is not installed (cargo install --locked cargo-deny)",
        ));
    }
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cargo")));
    let databases = home.context("there is no CARGO_HOME")?.join("advisory-dbs");
    if fs::read_dir(&databases).is_ok_and(|mut found| found.next().is_some()) {
        let deny = [
            "deny",
            "--offline",
            "--locked",
            "check",
            "--disable-fetch",
            "advisories",
        ];
        return cargo(out, &deny);
    }
    Ok(Outcome::skipped(
        "there is no database of advisories in $CARGO_HOME/advisory-dbs (cargo deny fetch)",
    ))
}

/// The tests of the scripts of tests/gpu.
fn scripts(out: &mut Output) -> Result<Outcome> {
    if in_path("python3").is_none() {
        return Ok(Outcome::skipped("there is no python3"));
    }
    let mut python = Command::new("python3");
    python
        .args(["-B", "test_scripts.py", "--quiet"])
        .current_dir(workspace()?.join("tests/gpu"));
    through(python, out)
}

/// Makes the roots before the suites, so that no test has to wait for a root.
fn roots() -> Result<Outcome> {
    let store = Store::open()?;
    for suite in Suite::ALL {
        println!("{}", store.root(suite, &[])?.display());
    }
    Ok(Outcome::new(true))
}

/// Runs every fuzz target for a few seconds.
fn fuzzed(_: &mut Output) -> Result<Outcome> {
    let compiler = fuzz::compiler();
    if in_path(&compiler).is_none() {
        return Ok(Outcome::skipped(format!(
            "there is no C++ compiler {compiler} (apt-get install g++)"
        )));
    }
    let counts = fuzz::all()?;
    let mut outcome = Outcome::new(counts.failed == 0);
    outcome.tests.passed = counts.passed;
    outcome.tests.failed = counts.failed;
    Ok(outcome)
}

fn cargo(out: &mut Output, arguments: &[&str]) -> Result<Outcome> {
    let mut cargo = tools::cargo();
    cargo.args(arguments).current_dir(workspace()?);
    through(cargo, out)
}
