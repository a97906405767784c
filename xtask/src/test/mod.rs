//! `cargo xtask test`: everything that CI checks, in one command.

mod failures;
mod outcome;
mod summary;

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use firn_node::{Store, Suite};
use nix::unistd::geteuid;

use crate::{fuzz, workspace};
use outcome::{Outcome, Output, Verdict, through};

/// Check and test everything, as CI does
///
/// Formatting, lints, licences (where cargo-deny is installed), unit tests of all crates, spelling and words,
/// the scripts of tests/gpu, the suites that run containers in test nodes, and the fuzz targets (for
/// $FIRN_FUZZ_SECONDS each, 6 by default). Needs root. The first run installs debootstrap and iproute2 with
/// apt-get where they are missing, and makes two Debian roots in target/node from the mirror that apt is
/// configured with. Nothing else of the host is changed.
#[derive(clap::Args)]
pub struct Cmd {
    /// Leave out the fuzz targets (not their corpus) and the suites that need test nodes
    #[arg(long)]
    fast: bool,
}

/// Trials of a suite that run at the same time: one more than processors, because a trial mostly waits for
/// containerd, runc and CRIU.
fn trials() -> usize {
    thread::available_parallelism().map_or(2, usize::from) + 1
}

type Work = Box<dyn FnOnce(&mut Output) -> Result<Outcome> + Send>;

/// A check that is still to be made.
struct Check {
    name: String,
    work: Work,
    /// Whether the checks that follow are made at the same time.
    background: bool,
}

impl Check {
    fn new(
        name: impl Into<String>,
        work: impl FnOnce(&mut Output) -> Result<Outcome> + Send + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            work: Box::new(work),
            background: false,
        }
    }

    fn in_background(name: &str, work: impl FnOnce(&mut Output) -> Result<Outcome> + Send + 'static) -> Self {
        Self {
            background: true,
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
        })
    }
}

/// A check that was made.
struct Done {
    name: String,
    outcome: Outcome,
    took: Duration,
}

/// Of all crates but the suites.
const UNIT_TESTS: &[&str] = &["test", "--workspace", "--exclude", "firn-integration", "--locked"];

/// The checks that need no test nodes. The unit tests run in the background: they mostly wait.
fn fast() -> Vec<Check> {
    vec![
        Check::new("format", |out| cargo(out, &["fmt", "--all", "--check"])),
        Check::new("format of the fuzz targets", |out| {
            cargo(out, &["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"])
        }),
        Check::new("lints", |out| {
            let lints = ["--", "-D", "warnings"];
            let clippy = ["clippy", "--workspace", "--all-targets", "--locked"];
            cargo(out, &[&clippy, &lints[..]].concat())
        }),
        Check::new("dependencies", deny),
        Check::new("build of the unit tests", |out| {
            cargo(out, &[UNIT_TESTS, &["--no-run"]].concat())
        }),
        Check::in_background("unit tests", |out| {
            cargo(out, &[UNIT_TESTS, &["--no-fail-fast"]].concat())
        }),
        Check::new("unit tests of the lab", |out| {
            cargo(
                out,
                &["test", "--package", "firn-integration", "--lib", "--locked"],
            )
        }),
        Check::new("words", |out| {
            cargo(out, &["run", "--quiet", "--package", "firn-words", "--locked"])
        }),
        Check::new("scripts for GPU machines", scripts),
    ]
}

/// The checks that need test nodes.
///
/// The roots are made from now on, while the checks before run: that mostly waits for the mirror and the
/// disk. The fuzz targets are built and run at a low priority while the suites run: these leave a third of
/// the processors idle.
fn slow() -> Result<Vec<Check>> {
    let made = thread::spawn(roots);
    let mut checks = vec![
        Check::new("roots of the test nodes", |_| {
            made.join().unwrap_or_else(|_| bail!("making the roots panicked"))
        }),
        Check::new("build of the suites", |out| {
            cargo(
                out,
                &["test", "--package", "firn-integration", "--no-run", "--locked"],
            )
        }),
        Check::in_background("fuzz targets", fuzzed),
    ];
    // A check per suite, so that the summary shows how long each takes.
    for suite in suites(&workspace()?.join("tests/integration/tests"))? {
        let trials = format!("--test-threads={}", trials());
        checks.push(Check::new(format!("suite {suite}"), move |out| {
            let package = ["test", "--package", "firn-integration", "--locked"];
            cargo(out, &[&package, &["--test", &suite, "--", &trials][..]].concat())
        }));
    }
    Ok(checks)
}

/// The test programs in a crate's directory `tests`: files, and directories with a `main.rs`.
fn suites(dir: &Path) -> Result<Vec<String>> {
    let mut suites = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "rs") || path.join("main.rs").is_file() {
            suites.extend(path.file_stem().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    suites.sort();
    Ok(suites)
}

/// Runs all checks, also after one that failed, and prints a summary.
pub fn run(cmd: &Cmd) -> Result<ExitCode> {
    ensure!(
        geteuid().is_root(),
        "the tests make cgroups, mounts and device nodes and need root\nhint: sudo -E cargo xtask test"
    );
    let begun = Instant::now();
    let mut checks = fast();
    if !cmd.fast {
        checks.extend(slow()?);
    }
    let (mut done, mut background) = (Vec::new(), Vec::new());
    for check in checks {
        if check.background {
            println!("\n== {} (in the background)", check.name);
            background.push(thread::spawn(|| {
                let mut out = Output::Buffer(Vec::new());
                (check.run(&mut out), out)
            }));
        } else {
            println!("\n== {}", check.name);
            done.push(check.run(&mut Output::Terminal)?);
        }
    }
    for thread in background {
        let (check, out) = thread.join().ok().context("a check panicked")?;
        let check = check?;
        println!("\n== {}", check.name);
        if let Output::Buffer(out) = out {
            io::stdout().write_all(&out)?;
        }
        done.push(check);
    }
    print!("\n{}", summary::of(&done, begun.elapsed()));
    let failed = done.iter().any(|done| done.outcome.verdict == Verdict::Failed);
    Ok(ExitCode::from(u8::from(failed)))
}

/// Licences, duplicates and origins of the dependencies, by `deny.toml`.
fn deny(out: &mut Output) -> Result<Outcome> {
    if !in_path("cargo-deny") {
        return Ok(Outcome::skipped(
            "cargo-deny is not installed (cargo install --locked cargo-deny)",
        ));
    }
    let deny = ["deny", "--offline", "--locked", "check"];
    cargo(out, &[&deny, &["bans", "licenses", "sources"][..]].concat())
}

/// The tests of the scripts of tests/gpu.
fn scripts(out: &mut Output) -> Result<Outcome> {
    if !in_path("python3") {
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
        println!("{}", store.root(suite)?.display());
    }
    Ok(Outcome::new(true))
}

/// Runs every fuzz target for a few seconds.
fn fuzzed(_: &mut Output) -> Result<Outcome> {
    let compiler = fuzz::compiler();
    if !in_path(&compiler) {
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
    // The cargo that runs this; its subcommands are found by it.
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(arguments).current_dir(workspace()?);
    through(cargo, out)
}

fn in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| Path::new(&dir).join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_suite_is_run() {
        let dir = workspace().unwrap().join("tests/integration/tests");
        let suites = suites(&dir).unwrap();
        let has = |name: &str| suites.iter().any(|suite| suite == name);
        assert!(has("conformance"), "{suites:?}");
        assert!(suites.is_sorted(), "{suites:?}");
    }
}
