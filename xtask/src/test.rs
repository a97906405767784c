//! `cargo xtask test`: everything that CI checks, in one command.

use std::io::{self, BufRead, BufReader, Write};
use std::ops::AddAssign;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use firn_node::{Store, Suite};
use nix::unistd::geteuid;

use crate::workspace;

/// Check and test everything, as CI does
///
/// Formatting, lints, licences (where cargo-deny is installed), unit tests of all crates, the scripts of tests/gpu, and
/// the suites that run containers in test nodes. Needs root. On its first run it installs what it needs with apt-get
/// (debootstrap, iproute2; said before) and makes two Debian roots in target/node from the mirror that apt is configured
/// with. Nothing else of the host is changed.
#[derive(clap::Args)]
pub struct Cmd {
    /// Leave out the suites that need test nodes
    #[arg(long)]
    fast: bool,
}

/// One thing that is checked.
struct Check {
    name: &'static str,
    run: fn() -> Result<Outcome>,
}

enum Outcome {
    Passed(Tests),
    Failed(Tests),
    Skipped(String),
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

    fn total(self) -> u64 {
        self.passed + self.failed + self.ignored
    }
}

const FAST: &[Check] = &[
    Check {
        name: "format",
        run: || cargo(&["fmt", "--all", "--check"]),
    },
    Check {
        name: "lints",
        run: || {
            cargo(&[
                "clippy",
                "--workspace",
                "--all-targets",
                "--locked",
                "--",
                "-D",
                "warnings",
            ])
        },
    },
    Check {
        name: "dependencies",
        run: deny,
    },
    Check {
        name: "unit tests",
        run: || {
            cargo(&[
                "test",
                "--workspace",
                "--exclude",
                "firn-integration",
                "--locked",
                "--no-fail-fast",
            ])
        },
    },
    Check {
        name: "unit tests of the lab",
        run: || cargo(&["test", "--package", "firn-integration", "--lib", "--locked"]),
    },
    Check {
        name: "scripts for GPU machines",
        run: scripts,
    },
];

const NODES: &[Check] = &[
    Check {
        name: "roots of the test nodes",
        run: roots,
    },
    Check {
        name: "suites in test nodes",
        run: || {
            cargo(&[
                "test",
                "--package",
                "firn-integration",
                "--test",
                "*",
                "--locked",
                "--no-fail-fast",
            ])
        },
    },
];

/// Runs all checks, also after one that failed, and tells at the end how each went.
pub fn run(cmd: &Cmd) -> Result<ExitCode> {
    ensure!(
        geteuid().is_root(),
        "the tests make cgroups, mounts and device nodes and need root\nhint: sudo -E cargo xtask test"
    );
    let begun = Instant::now();
    let nodes = if cmd.fast { &[] } else { NODES };
    let mut done = Vec::new();
    for check in FAST.iter().chain(nodes) {
        println!("\n== {}", check.name);
        let begun = Instant::now();
        let outcome = (check.run)().unwrap_or_else(|error| {
            println!("error: {error:#}");
            Outcome::Failed(Tests::default())
        });
        done.push((check.name, outcome, begun.elapsed()));
    }
    Ok(summarize(&done, begun.elapsed()))
}

fn summarize(done: &[(&str, Outcome, Duration)], took: Duration) -> ExitCode {
    println!("\n== summary");
    let (mut all, mut failed) = (Tests::default(), Vec::new());
    for (name, outcome, took) in done {
        let (word, rest) = match outcome {
            Outcome::Passed(tests) => ("ok", counted(*tests)),
            Outcome::Failed(tests) => ("FAILED", counted(*tests)),
            Outcome::Skipped(why) => ("skipped", format!(": {why}")),
        };
        if let Outcome::Passed(tests) | Outcome::Failed(tests) = outcome {
            all += *tests;
        }
        if matches!(outcome, Outcome::Failed(_)) {
            failed.push(*name);
        }
        println!("{word:>8} {:>7.1} s  {name}{rest}", took.as_secs_f64());
    }
    if !failed.is_empty() {
        println!("\nfailed: {}", failed.join(", "));
    }
    println!(
        "\ntest result: {}. {} passed; {} failed; {} ignored; finished in {:.2}s",
        if failed.is_empty() { "ok" } else { "FAILED" },
        all.passed,
        all.failed,
        all.ignored,
        took.as_secs_f64()
    );
    match failed.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

fn counted(tests: Tests) -> String {
    match tests.total() {
        0 => String::new(),
        _ => format!(
            ": {} passed, {} failed, {} ignored",
            tests.passed, tests.failed, tests.ignored
        ),
    }
}

/// Licences, duplicates and origins of the dependencies, by `deny.toml`.
fn deny() -> Result<Outcome> {
    if !in_path("cargo-deny") {
        return Ok(Outcome::Skipped(
            "cargo-deny is not installed (cargo install --locked cargo-deny)".into(),
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
        return Ok(Outcome::Skipped("there is no python3".into()));
    }
    let mut python = Command::new("python3");
    python
        .args(["-B", "test_scripts.py", "--quiet"])
        .current_dir(workspace()?.join("tests/gpu"));
    through(&mut python, &mut io::stdout())
}

/// Makes the roots first, so that no test waits for the other's.
fn roots() -> Result<Outcome> {
    let store = Store::open()?;
    for suite in Suite::ALL {
        println!("{}", store.root(suite)?.display());
    }
    Ok(Outcome::Passed(Tests::default()))
}

fn cargo(arguments: &[&str]) -> Result<Outcome> {
    // The cargo that runs this; its subcommands are found by it.
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(arguments).current_dir(workspace()?);
    through(&mut cargo, &mut io::stdout())
}

/// Runs a program, passing its output on and counting the tests in it.
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
    let mut tests = Tests::default();
    for line in BufReader::new(stdout).split(b'\n') {
        let line = line.with_context(|| format!("read from {shown}"))?;
        out.write_all(&line).and_then(|()| out.write_all(b"\n"))?;
        tests += Tests::of_line(&String::from_utf8_lossy(&line));
    }
    let status = child.wait().with_context(|| format!("wait for {shown}"))?;
    if !status.success() {
        writeln!(out, "{shown}: {status}")?;
        return Ok(Outcome::Failed(tests));
    }
    Ok(Outcome::Passed(tests))
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
        assert!(matches!(outcome, Outcome::Passed(Tests { passed: 1, .. })));
        assert!(printed.starts_with("test result: ok. 1 passed"), "{printed}");
        let (outcome, printed) = shell(&format!("{one}; exit 3"));
        assert!(matches!(outcome, Outcome::Failed(Tests { passed: 1, .. })));
        assert!(printed.contains("exit status: 3"), "{printed}");
    }
}
