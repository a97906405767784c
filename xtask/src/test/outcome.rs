//! The result of a check, read from the output of the program that makes it.

use std::collections::{BTreeSet, VecDeque};
use std::io::{self, BufRead, BufReader, Write};
use std::ops::AddAssign;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::failures::{Failure, Failures};

/// The result of a check.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) verdict: Verdict,
    pub(super) tests: Tests,
    /// What a suite left out, and why: its lines `skipped: ...`.
    pub(super) skipped: BTreeSet<String>,
    /// Tests that failed once and passed when they were repeated, with why: a suite's lines `flaky: ...`, and
    /// those that are run again at the end.
    pub(super) flaky: Vec<String>,
    pub(super) failures: Vec<Failure>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Passed,
    Failed,
    Skipped,
}

impl Outcome {
    pub(super) fn new(passed: bool) -> Self {
        Self {
            verdict: if passed { Verdict::Passed } else { Verdict::Failed },
            tests: Tests::default(),
            skipped: BTreeSet::new(),
            flaky: Vec::new(),
            failures: Vec::new(),
        }
    }

    pub(super) fn skipped(why: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Skipped,
            skipped: BTreeSet::from([why.into()]),
            ..Self::new(true)
        }
    }

    /// Takes the tests that failed as ones that are flaky.
    pub(super) fn pass_as_flaky(&mut self) {
        self.verdict = Verdict::Passed;
        self.tests.passed += self.tests.failed;
        self.tests.failed = 0;
        let failures = self.failures.drain(..);
        self.flaky.extend(failures.map(|failure| failure.short()));
    }
}

/// Sum of the counts in the closing lines of test programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tests {
    pub(super) passed: u64,
    pub(super) failed: u64,
    pub(super) ignored: u64,
}

impl AddAssign for Tests {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }
}

impl Tests {
    /// Reads `test result: ok. 3 passed; 0 failed; 1 ignored; ...`; other lines count no tests.
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

/// Where the output of a check goes.
pub(super) enum Output {
    /// To standard output, as it is written. Standard error is not read.
    Terminal,
    /// Into memory, with standard error: of a check in the background.
    Buffer(Vec<u8>),
}

impl Output {
    pub(super) fn line(&mut self, line: &[u8]) -> io::Result<()> {
        match self {
            Self::Terminal => {
                let mut out = io::stdout().lock();
                out.write_all(line).and_then(|()| out.write_all(b"\n"))
            }
            Self::Buffer(buffer) => {
                buffer.extend_from_slice(line);
                buffer.push(b'\n');
                Ok(())
            }
        }
    }
}

/// Lines of a program's output that are shown when it fails without a test that failed.
const LAST: usize = 5;

/// Runs a program, copies its output to `out`, and reads the result from it.
pub(super) fn through(mut command: Command, out: &mut Output) -> Result<Outcome> {
    let shown = format!("{command:?}");
    let (reader, writer) = io::pipe().context("make a pipe")?;
    if matches!(out, Output::Buffer(_)) {
        command.stderr(writer.try_clone().context("make a pipe")?);
    }
    command.stdin(Stdio::null()).stdout(writer);
    let mut child = command.spawn().with_context(|| format!("run {shown}"))?;
    // It holds the pipe open for writing.
    drop(command);
    let (mut outcome, mut failures) = (Outcome::new(true), Failures::default());
    let mut last = VecDeque::new();
    for line in BufReader::new(reader).split(b'\n') {
        let line = line.with_context(|| format!("read from {shown}"))?;
        out.line(&line)?;
        let line = String::from_utf8_lossy(&line);
        outcome.tests += Tests::of_line(&line);
        failures.line(&line);
        last.push_back(line.clone().into_owned());
        if last.len() > LAST {
            last.pop_front();
        }
        outcome
            .skipped
            .extend(line.strip_prefix("skipped: ").map(str::to_owned));
        outcome
            .flaky
            .extend(line.strip_prefix("flaky: ").map(str::to_owned));
    }
    outcome.failures = failures.found;
    let status = child.wait().with_context(|| format!("wait for {shown}"))?;
    if !status.success() {
        out.line(format!("{shown}: {status}").as_bytes())?;
        outcome.verdict = Verdict::Failed;
        if outcome.failures.is_empty() && outcome.tests.failed == 0 {
            // Killed, or no program of tests: the summary shows what there is.
            let failure = Failure::of_program(format!("{shown}: {status}"), last.into());
            outcome.failures.push(failure);
        }
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closing_line_of_a_test_program_is_counted() {
        let line = "test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured; 4 filtered out; \
                    finished in 0.02s";
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
    fn the_result_is_read_from_status_and_output() {
        let shell = |script: &str| {
            let mut out = Output::Buffer(Vec::new());
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            let outcome = through(command, &mut out).unwrap();
            let Output::Buffer(out) = out else { unreachable!() };
            (outcome, String::from_utf8(out).unwrap())
        };
        let one = "echo 'test result: ok. 1 passed; 0 failed; 0 ignored'";
        let (outcome, printed) = shell(one);
        assert_eq!((outcome.verdict, outcome.tests.passed), (Verdict::Passed, 1));
        assert!(printed.starts_with("test result: ok. 1 passed"), "{printed}");
        let (outcome, printed) = shell(&format!("{one}; exit 3"));
        assert_eq!((outcome.verdict, outcome.tests.passed), (Verdict::Failed, 1));
        assert!(printed.contains("exit status: 3"), "{printed}");
        let failures: Vec<String> = outcome.failures.iter().map(Failure::short).collect();
        assert!(failures[0].starts_with("\"sh\" \"-c\""), "{failures:?}");
        assert!(
            failures[0].ends_with("exit status: 3: test result: ok. 1 passed; 0 failed; 0 ignored"),
            "{failures:?}"
        );
        let (outcome, _) = shell(
            "printf '%s\\n' 'test a ... FAILED' '' failures: '' '---- a stdout ----' 'panicked at b:' '' \
             'left: 1' \
             '---- c: d ----' 'not so' '' failures: a 'c: d'; exit 1",
        );
        let failures: Vec<String> = outcome.failures.iter().map(Failure::short).collect();
        assert_eq!(failures, ["a: panicked at b: | left: 1", "c: d: not so"]);
        let (outcome, _) = shell("echo 'flaky: a: -1 | +2'");
        assert_eq!(outcome.flaky, ["a: -1 | +2"]);
        let (outcome, _) = shell("for i in 1 2; do echo 'skipped: no Go here'; done");
        assert_eq!(outcome.verdict, Verdict::Passed);
        assert_eq!(outcome.skipped, BTreeSet::from(["no Go here".to_owned()]));
    }
}
