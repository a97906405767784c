//! `cargo xtask test`: everything that CI checks, in one command.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::ops::AddAssign;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use firn_node::{Store, Suite};
use nix::unistd::geteuid;

use crate::{fuzz, workspace};

mod failures;
mod summary;

use failures::{Failure, Failures};

/// Check and test everything, as CI does
///
/// Formatting, lints, licences (where cargo-deny is installed), unit tests of all crates, the scripts of tests/gpu, the
/// fuzz targets (for $FIRN_FUZZ_SECONDS each, 6 by default), and the suites that run containers in test nodes. Needs root.
/// On its first run it installs what it needs with apt-get (debootstrap, iproute2; said before) and makes two Debian
/// roots in target/node from the mirror that apt is configured with. Nothing else of the host is changed.
#[derive(clap::Args)]
pub struct Cmd {
    /// Leave out the fuzz targets (not their corpus) and the suites that need test nodes
    #[arg(long)]
    fast: bool,
}

/// One thing that is checked.
struct Check {
    name: String,
    run: Box<dyn FnOnce() -> Result<Outcome>>,
}

impl Check {
    fn new(name: impl Into<String>, run: impl FnOnce() -> Result<Outcome> + 'static) -> Self {
        Self {
            name: name.into(),
            run: Box::new(run),
        }
    }
}

/// What came of a check.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    verdict: Verdict,
    tests: Tests,
    /// What was left out, and why: the lines `skipped: ...` of a suite.
    skipped: BTreeSet<String>,
    /// The tests that were wrong once and right when they were asked again: the lines `wavered: ...` of a suite.
    wavered: Vec<String>,
    failures: Vec<Failure>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    Failed,
    Skipped,
}

impl Outcome {
    fn new(passed: bool) -> Self {
        Self {
            verdict: if passed { Verdict::Passed } else { Verdict::Failed },
            tests: Tests::default(),
            skipped: BTreeSet::new(),
            wavered: Vec::new(),
            failures: Vec::new(),
        }
    }

    fn skipped(why: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Skipped,
            skipped: BTreeSet::from([why.into()]),
            ..Self::new(true)
        }
    }
}

/// A check that was made.
struct Done {
    name: String,
    outcome: Outcome,
    took: Duration,
}

/// Sum of the lines in which test programs tell how they ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tests {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl AddAssign for Tests {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }
}

impl Tests {
    /// Reads `test result: ok. 3 passed; 0 failed; 1 ignored; ...`; other lines have none.
    fn of_line(line: &str) -> Self {
        let mut tests = Self::default();
        let Some((_, counts)) = line
            .strip_prefix("test result: ")
            .and_then(|result| result.split_once(". "))
        else {
            return tests;
        };
        for count in counts.split("; ") {
            let Some((number, what)) = count.split_once(' ') else {
                continue;
            };
            let number = number.parse().unwrap_or(0);
            match what {
                "passed" => tests.passed = number,
                "failed" => tests.failed = number,
                "ignored" => tests.ignored = number,
                _ => {}
            }
        }
        tests
    }
}

fn fast() -> Vec<Check> {
    vec![
        Check::new("format", || cargo(&["fmt", "--all", "--check"])),
        Check::new("format of the fuzz targets", || {
            cargo(&["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"])
        }),
        Check::new("lints", || {
            let lints = ["--", "-D", "warnings"];
            cargo(
                &[
                    &["clippy", "--workspace", "--all-targets", "--locked"],
                    &lints[..],
                ]
                .concat(),
            )
        }),
        Check::new("dependencies", deny),
        Check::new("unit tests", || {
            let all = ["--workspace", "--exclude", "firn-integration"];
            cargo(&[&["test", "--locked", "--no-fail-fast"], &all[..]].concat())
        }),
        Check::new("unit tests of the lab", || {
            cargo(&["test", "--package", "firn-integration", "--lib", "--locked"])
        }),
        Check::new("scripts for GPU machines", scripts),
    ]
}

/// The checks that need test nodes. The roots are made from now on, beside the checks before: this mostly waits for the
/// mirror and the disk.
fn slow() -> Result<Vec<Check>> {
    let made = thread::spawn(roots);
    let mut checks = vec![
        Check::new("fuzz targets", fuzzed),
        Check::new("roots of the test nodes", || {
            made.join().unwrap_or_else(|_| bail!("making the roots panicked"))
        }),
        Check::new("build of the suites", || {
            cargo(&["test", "--package", "firn-integration", "--no-run", "--locked"])
        }),
    ];
    // One check each, so that the summary tells how long it takes.
    for suite in suites(&workspace()?.join("tests/integration/tests"))? {
        checks.push(Check::new(format!("suite {suite}"), move || {
            cargo(&[
                "test",
                "--package",
                "firn-integration",
                "--test",
                &suite,
                "--locked",
            ])
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

/// Runs all checks, also after one that failed, and tells at the end how each went.
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
    let mut done = Vec::new();
    for check in checks {
        println!("\n== {}", check.name);
        let begun = Instant::now();
        let outcome = (check.run)().unwrap_or_else(|error| {
            println!("error: {error:#}");
            Outcome::new(false)
        });
        done.push(Done {
            name: check.name,
            outcome,
            took: begun.elapsed(),
        });
    }
    print!("\n{}", summary::of(&done, begun.elapsed()));
    let failed = done.iter().any(|done| done.outcome.verdict == Verdict::Failed);
    Ok(ExitCode::from(u8::from(failed)))
}

/// Licences, duplicates and origins of the dependencies, by `deny.toml`.
fn deny() -> Result<Outcome> {
    if !in_path("cargo-deny") {
        return Ok(Outcome::skipped(
            "cargo-deny is not installed (cargo install --locked cargo-deny)",
        ));
    }
    cargo(&[
        "deny",
        "--offline",
        "--locked",
        "check",
        "bans",
        "licenses",
        "sources",
    ])
}

/// What the scripts of tests/gpu conclude from what they see.
fn scripts() -> Result<Outcome> {
    if !in_path("python3") {
        return Ok(Outcome::skipped("there is no python3"));
    }
    let mut python = Command::new("python3");
    python
        .args(["-B", "test_scripts.py", "--quiet"])
        .current_dir(workspace()?.join("tests/gpu"));
    through(&mut python, &mut io::stdout())
}

/// Makes the roots before the suites, so that no test waits for the other's.
fn roots() -> Result<Outcome> {
    let store = Store::open()?;
    for suite in Suite::ALL {
        println!("{}", store.root(suite)?.display());
    }
    Ok(Outcome::new(true))
}

/// Lets every fuzz target make up inputs for a while.
fn fuzzed() -> Result<Outcome> {
    let compiler = fuzz::compiler();
    if !in_path(&compiler) {
        return Ok(Outcome::skipped(format!(
            "there is no C++ compiler {compiler} (apt-get install g++)"
        )));
    }
    let held = fuzz::all()?;
    let mut outcome = Outcome::new(held.failed == 0);
    outcome.tests.passed = held.passed;
    outcome.tests.failed = held.failed;
    Ok(outcome)
}

fn cargo(arguments: &[&str]) -> Result<Outcome> {
    // The cargo that runs this; its subcommands are found by it.
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(arguments).current_dir(workspace()?);
    through(&mut cargo, &mut io::stdout())
}

/// Runs a program, passing its output on and counting in it the tests and what it skips.
fn through(command: &mut Command, out: &mut impl Write) -> Result<Outcome> {
    let shown = format!("{command:?}");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("run {shown}"))?;
    let Some(stdout) = child.stdout.take() else {
        bail!("{shown} has no output");
    };
    let (mut outcome, mut failures) = (Outcome::new(true), Failures::default());
    for line in BufReader::new(stdout).split(b'\n') {
        let line = line.with_context(|| format!("read from {shown}"))?;
        out.write_all(&line).and_then(|()| out.write_all(b"\n"))?;
        let line = String::from_utf8_lossy(&line);
        outcome.tests += Tests::of_line(&line);
        failures.line(&line);
        outcome
            .skipped
            .extend(line.strip_prefix("skipped: ").map(str::to_owned));
        outcome
            .wavered
            .extend(line.strip_prefix("wavered: ").map(str::to_owned));
    }
    outcome.failures = failures.told;
    let status = child.wait().with_context(|| format!("wait for {shown}"))?;
    if !status.success() {
        writeln!(out, "{shown}: {status}")?;
        outcome.verdict = Verdict::Failed;
    }
    Ok(outcome)
}

fn in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| Path::new(&dir).join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closing_line_of_a_test_program_is_counted() {
        let line = "test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured; 4 filtered out; finished in 0.02s";
        assert_eq!(
            Tests::of_line(line),
            Tests {
                passed: 3,
                failed: 1,
                ignored: 2
            }
        );
        assert_eq!(Tests::of_line("test moves::one ... ok"), Tests::default());
    }

    #[test]
    fn a_program_that_fails_is_told_from_one_that_does_not() {
        let shell = |script: &str| {
            let mut out = Vec::new();
            let outcome = through(Command::new("sh").args(["-c", script]), &mut out).unwrap();
            (outcome, String::from_utf8(out).unwrap())
        };
        let one = "echo 'test result: ok. 1 passed; 0 failed; 0 ignored'";
        let (outcome, printed) = shell(one);
        assert_eq!((outcome.verdict, outcome.tests.passed), (Verdict::Passed, 1));
        assert!(printed.starts_with("test result: ok. 1 passed"), "{printed}");
        let (outcome, printed) = shell(&format!("{one}; exit 3"));
        assert_eq!((outcome.verdict, outcome.tests.passed), (Verdict::Failed, 1));
        assert!(printed.contains("exit status: 3"), "{printed}");
        let (outcome, _) = shell(
            "printf '%s\\n' 'test a ... FAILED' '' failures: '' '---- a stdout ----' 'panicked at b:' '' 'left: 1' \
             '---- c: d ----' 'not so' '' failures: a 'c: d'; exit 1",
        );
        let told: Vec<String> = outcome.failures.iter().map(Failure::short).collect();
        assert_eq!(told, ["a: panicked at b: | left: 1", "c: d: not so"]);
        let (outcome, _) = shell("echo 'wavered: a: -1 | +2'");
        assert_eq!(outcome.wavered, ["a: -1 | +2"]);
        let (outcome, _) = shell("for i in 1 2; do echo 'skipped: no Go here'; done");
        assert_eq!(outcome.verdict, Verdict::Passed);
        assert_eq!(outcome.skipped, BTreeSet::from(["no Go here".to_owned()]));
    }

    #[test]
    fn every_suite_is_run() {
        let dir = workspace().unwrap().join("tests/integration/tests");
        let suites = suites(&dir).unwrap();
        assert!(
            ["conformance", "moves"]
                .iter()
                .all(|name| suites.iter().any(|suite| suite == name))
        );
        assert!(suites.is_sorted(), "{suites:?}");
    }
}
