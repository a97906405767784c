//! `cargo xtask test`: everything that CI checks, in one command.

mod failures;
mod flaky;
mod outcome;
mod summary;

use std::collections::VecDeque;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use firn_lab::{TIER, Tier};
use firn_node::{Store, Suite};
use nix::unistd::geteuid;

use crate::tools::{self, cargo_program, exit_code, in_path};
use crate::{fuzz, workspace};
use outcome::{Outcome, Output, Verdict, through};

/// Check and test what every commit has to pass, as CI does
///
/// Formatting, lints, licences (where cargo-deny is installed), unit tests of all crates, spelling and words,
/// the scripts of tests/gpu, and the suites that run containers in test nodes. With --all everything: all
/// suites on all platforms, next to the stock shim, and the fuzz targets (for $FIRN_FUZZ_SECONDS each, 6 by
/// default). tests/README.md lists what is left out without it. Needs root. The first run installs
/// debootstrap and iproute2 with apt-get where they are missing, and makes two Debian roots in target/node
/// from the mirror that apt is configured with. Nothing else of the host is changed.
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

/// Trials of a suite that run at the same time: one more than processors, because a trial mostly waits for
/// containerd, runc and CRIU.
fn trials() -> usize {
    thread::available_parallelism().map_or(2, usize::from) + 1
}

/// Suites that run at the same time: one leaves half of the processors idle.
const SUITES: usize = 2;
/// Suites that run one after the other next to them: they take longest, and mostly wait.
const LONGEST: [&str; 3] = ["conformance", "cri", "leaks"];
/// Suites that a commit does not need: of clients that call the same shim or firn-runc in other words, and of
/// what takes long.
const OF_ALL: [&str; 6] = ["cluster", "crio", "docker", "leaks", "package", "podman"];
/// Measures how long a shim takes to answer, so it begins when the rest is almost done.
const LAST: &str = "bounds";

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

    /// A check that runs tests by cargo, with these arguments, as much of them as the tier has.
    fn tests(name: impl Into<String>, arguments: &[&str], tier: Tier) -> Self {
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let once = ["--", "--test-threads=1", "--exact"].map(str::to_owned);
        let before = arguments.iter().take_while(|argument| *argument != "--").cloned();
        let again = before.chain(once).collect();
        let work = move |out: &mut Output| {
            let mut cargo = tools::cargo();
            cargo.args(&arguments).env(TIER, tier.as_str());
            cargo.current_dir(workspace()?);
            through(cargo, out)
        };
        Self {
            again: Some(again),
            ..Self::new(name, work)
        }
    }

    fn run(self, out: &mut Output) -> Result<Done> {
        let begun = Instant::now();
        let outcome = match (self.work)(out) {
            Ok(outcome) => outcome,
            Err(error) => {
                out.line(format!("error: {error:#}").as_bytes())?;
                Outcome::new(false)
            }
        };
        Ok(Done {
            name: self.name,
            outcome,
            took: begun.elapsed(),
            again: self.again,
        })
    }
}

/// A check that was made.
struct Done {
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

/// Checks of which so many are made at the same time, in this order.
struct Lane {
    at_a_time: usize,
    checks: Mutex<VecDeque<Check>>,
}

impl Lane {
    fn new(at_a_time: usize, checks: Vec<Check>) -> Self {
        Self {
            at_a_time,
            checks: Mutex::new(checks.into()),
        }
    }

    fn next(&self) -> Option<Check> {
        self.checks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop_front()
    }
}

impl Plan {
    /// Without `cmd`'s options: with the suites, and without what only a run of all has.
    fn new(cmd: &Cmd) -> Result<Self> {
        let mut first = vec![
            Check::new("format", |out| cargo(out, &["fmt", "--all", "--check"])),
            Check::new("format of the fuzz targets", |out| {
                cargo(out, &["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"])
            }),
            Check::new("dependencies", deny),
            Check::new("advisories", advisories),
        ];
        if cmd.fast {
            first.push(Check::new("lints", |out| cargo(out, &LINTS)));
            first.push(build(&UNIT_TESTS));
            return Ok(Self {
                first,
                lanes: vec![Lane::new(1, unit_tests())],
            });
        }
        // Made from now on, while the tests are built: that mostly waits for the mirror and the disk.
        let made = thread::spawn(roots);
        first.push(build(&UNIT_TESTS));
        first.push(build(&SUITE_TESTS));
        first.push(Check::new("roots of the test nodes", |_| {
            made.join().unwrap_or_else(|_| bail!("making the roots panicked"))
        }));
        let tier = if cmd.all { Tier::All } else { Tier::Commit };
        let mut suites = suites(&workspace()?.join("tests/integration/tests"))?;
        suites.retain(|suite| tier == Tier::All || !OF_ALL.contains(&suite.as_str()));
        let (longest, suites): (Vec<_>, Vec<_>) = suites
            .into_iter()
            .partition(|suite| LONGEST.contains(&suite.as_str()));
        let mut low_priority = vec![Check::new("lints", lints_at_low_priority)];
        if tier == Tier::All {
            low_priority.push(Check::new("fuzz targets", fuzzed));
        }
        let suite = |name| suite(name, tier);
        Ok(Self {
            first,
            lanes: vec![
                Lane::new(1, longest.into_iter().map(suite).collect()),
                Lane::new(SUITES, suites.into_iter().map(suite).collect()),
                Lane::new(1, unit_tests()),
                Lane::new(1, low_priority),
            ],
        })
    }

    /// Makes all checks, also after one that failed.
    /// `repeats`: a few that failed may pass when they are run again.
    fn run(self, repeats: bool) -> Result<Vec<Done>> {
        let mut done = Vec::new();
        for check in self.first {
            println!("\n== {}", check.name);
            done.push(check.run(&mut Output::Terminal)?);
        }
        let lanes = thread::scope(|scope| {
            let workers: Vec<_> = self
                .lanes
                .iter()
                .flat_map(|lane| (0..lane.at_a_time).map(move |_| lane))
                .map(|lane| scope.spawn(|| in_lane(lane)))
                .collect();
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

/// Makes checks of the lane until none is left. What each prints is shown at its end.
fn in_lane(lane: &Lane) -> Result<Vec<Done>> {
    let mut done = Vec::new();
    while let Some(check) = lane.next() {
        println!("== {} begins", check.name);
        let mut out = Output::Buffer(Vec::new());
        let made = check.run(&mut out)?;
        let mut terminal = io::stdout().lock();
        writeln!(terminal, "\n== {}", made.name)?;
        if let Output::Buffer(out) = out {
            terminal.write_all(&out)?;
        }
        done.push(made);
    }
    Ok(done)
}

/// Of all crates but the suites.
const UNIT_TESTS: [&str; 5] = ["test", "--workspace", "--exclude", "firn-integration", "--locked"];
const SUITE_TESTS: [&str; 4] = ["test", "--package", "firn-integration", "--locked"];
const LINTS: [&str; 7] = [
    "clippy",
    "--workspace",
    "--all-targets",
    "--locked",
    "--",
    "-D",
    "warnings",
];

/// Separate from running the tests, so that the summary shows how long the build takes.
fn build(tests: &'static [&str]) -> Check {
    let what = if tests == SUITE_TESTS {
        "suites"
    } else {
        "unit tests"
    };
    Check::new(format!("build of the {what}"), move |out| {
        cargo(out, &[tests, &["--no-run"]].concat())
    })
}

/// The checks that need no test nodes.
fn unit_tests() -> Vec<Check> {
    vec![
        Check::tests(
            "unit tests",
            &[&UNIT_TESTS[..], &["--no-fail-fast"]].concat(),
            Tier::All,
        ),
        Check::tests(
            "unit tests of the lab",
            &[&SUITE_TESTS[..], &["--lib"]].concat(),
            Tier::All,
        ),
        Check::new("words", |out| {
            cargo(out, &["run", "--quiet", "--package", "firn-words", "--locked"])
        }),
        Check::new("scripts for GPU machines", scripts),
    ]
}

/// In a target directory of its own: cargo runs one build at a time in each.
fn lints_at_low_priority(out: &mut Output) -> Result<Outcome> {
    let dir = workspace()?.join("target/lints");
    let mut cargo = fuzz::Priority::Low.command(cargo_program());
    cargo
        .args(LINTS)
        .env("CARGO_TARGET_DIR", dir)
        .current_dir(workspace()?);
    through(cargo, out)
}

/// A check per suite, so that the summary shows how long each takes.
fn suite(suite: String, tier: Tier) -> Check {
    let trials = format!("--test-threads={}", trials());
    let arguments = [&SUITE_TESTS[..], &["--test", &suite, "--", &trials]].concat();
    Check::tests(format!("suite {suite}"), &arguments, tier)
}

/// The test programs in a crate's directory `tests`: files, and directories with a `main.rs`. In the order in
/// which they begin.
fn suites(dir: &Path) -> Result<Vec<String>> {
    let mut suites = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "rs") || path.join("main.rs").is_file() {
            suites.extend(path.file_stem().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    suites.sort_by_key(|suite| {
        let longest = LONGEST.iter().position(|long| long == suite);
        (longest.unwrap_or(LONGEST.len()), suite == LAST, suite.clone())
    });
    Ok(suites)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_suite_is_run() {
        let dir = workspace().unwrap().join("tests/integration/tests");
        let suites = suites(&dir).unwrap();
        assert!(suites.iter().any(|suite| suite == "moves"), "{suites:?}");
        assert!(suites.starts_with(&LONGEST.map(str::to_owned)), "{suites:?}");
        assert_eq!(suites.last().map(String::as_str), Some(LAST));
    }
}
