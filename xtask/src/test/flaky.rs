//! Tests that fail next to all others, and pass alone.
//!
//! Suites run concurrently on a busy machine, and a limit of time may be missed there. So the few tests that
//! failed are run once more when everything else has ended. One that passes then is shown as flaky in the
//! summary, with why it had failed: it is to be looked at, but it does not fail the run.

use anyhow::Result;

use super::StageResult;
use super::outcome::{Outcome, Output, Verdict, through};
use super::programs::Compiler;
use crate::{tools, workspace};

/// Tests that are run once more. When more have failed it is the change, not the machine.
const ALLOWED: usize = 3;

/// Runs the tests that failed once more, one after the other.
pub(super) fn again(done: &mut [StageResult]) -> Result<()> {
    let failed = done.iter().filter(|done| done.outcome.verdict == Verdict::Failed);
    if failed.map(|done| done.outcome.failures.len()).sum::<usize>() > ALLOWED {
        return Ok(());
    }
    for done in done.iter_mut().filter(|done| repeatable(done)) {
        let Some(arguments) = &done.again else { continue };
        println!("\n== {}: what failed, once more", done.name);
        let names = done.outcome.failures.iter().map(|failure| failure.name());
        if all_pass(arguments, names, repeat)? {
            done.outcome.pass_as_flaky();
        }
    }
    Ok(())
}

/// Runs a test by these arguments of cargo, in the programs of the tier for every commit.
fn repeat(arguments: &[&str]) -> Result<Outcome> {
    let mut cargo = tools::cargo();
    cargo.args(arguments).current_dir(workspace()?);
    Compiler::Clippy.choose_for(&mut cargo);
    through(cargo, &mut Output::Terminal)
}

/// Whether each of these tests passes in a call of its own: the harness of the suites takes one filter.
fn all_pass<'n>(
    arguments: &[String],
    names: impl Iterator<Item = &'n str>,
    mut run: impl FnMut(&[&str]) -> Result<Outcome>,
) -> Result<bool> {
    for name in names {
        let call: Vec<&str> = arguments.iter().map(String::as_str).chain([name]).collect();
        let repeated = run(&call)?;
        if repeated.verdict != Verdict::Passed || repeated.tests.passed == 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether the check failed by tests alone, all of which are known by name.
fn repeatable(done: &StageResult) -> bool {
    let failed = done.outcome.tests.failed;
    done.outcome.verdict == Verdict::Failed && failed > 0 && failed == done.outcome.failures.len() as u64
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use super::*;

    fn done(script: &str) -> StageResult {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]);
        StageResult {
            name: "suite a".into(),
            outcome: through(shell, &mut Output::Buffer(Vec::new())).unwrap(),
            took: Duration::ZERO,
            again: None,
        }
    }

    #[test]
    fn each_test_is_repeated_in_a_call_of_its_own() {
        let before = ["test".to_owned(), "--exact".to_owned()];
        let mut calls = Vec::new();
        let mut repeat = |script: &str| {
            let run = |call: &[&str]| {
                calls.push(call.join(" "));
                Ok(done(script).outcome)
            };
            all_pass(&before, ["a [forky]", "b"].into_iter(), run).unwrap()
        };
        assert!(repeat("echo 'test result: ok. 1 passed; 0 failed; 0 ignored'"));
        assert!(
            !repeat("echo 'test result: ok. 0 passed; 0 failed; 0 ignored'"),
            "it was not found"
        );
        assert!(!repeat("exit 1"));
        assert_eq!(calls[..2], ["test --exact a [forky]", "test --exact b"]);
    }

    #[test]
    fn only_tests_that_are_known_by_name_are_repeated() {
        let one = "printf '%s\\n' '---- a b ----' 'only after 9 s' '' \
                   'test result: FAILED. 2 passed; 1 failed; 0 ignored'; exit 1";
        assert!(repeatable(&done(one)));
        assert!(!repeatable(&done("exit 1")), "a build that failed");
        let unnamed = "echo 'test result: FAILED. 2 passed; 1 failed; 0 ignored'; exit 1";
        assert!(!repeatable(&done(unnamed)));
        let mut passes = done(one).outcome;
        passes.pass_as_flaky();
        assert_eq!(passes.flaky, ["a b: only after 9 s"]);
        let counts = (passes.tests.passed, passes.tests.failed);
        assert_eq!((passes.verdict, counts), (Verdict::Passed, (3, 0)));
        assert_eq!(passes.failures, Outcome::new(true).failures);
    }
}
