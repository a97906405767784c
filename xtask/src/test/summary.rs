//! The summary at the end of `cargo xtask test`.
//!
//! A CI service may show only the last lines of a log. So the failures come first, one line each, then the
//! checks that passed, in few lines, and the details last.

use std::fmt::Write as _;
use std::time::Duration;

use super::StageResult;
use super::outcome::{Tests, Verdict};

/// Width of the lines that list the checks that passed.
const WIDTH: usize = 110;
/// Failures that are shown in detail.
const DETAILED: usize = 5;

/// The summary of these checks, which took `took` together.
pub fn of(done: &[StageResult], took: Duration) -> String {
    let mut text = "== summary\n".to_owned();
    let mut line = |words: &str| {
        text.push_str(words);
        text.push('\n');
    };
    let with = |verdict| {
        done.iter()
            .filter(move |done: &&StageResult| done.outcome.verdict == verdict)
    };
    for failed in with(Verdict::Failed) {
        line(&format!("FAILED {}", counted(failed)));
        for failure in &failed.outcome.failures {
            line(&format!("  {}", failure.short()));
        }
    }
    for check in done {
        for flaky in &check.outcome.flaky {
            let flaky: String = flaky.chars().take(300).collect();
            line(&format!("FLAKY {}: {flaky}", check.name));
        }
    }
    let passed: Vec<String> = with(Verdict::Passed).map(counted).collect();
    wrapped("ok: ", &passed).iter().for_each(|words| line(words));
    for check in done {
        for why in &check.outcome.skipped {
            line(&format!("skipped in {}: {why}", check.name));
        }
    }
    let failures: Vec<_> = done.iter().flat_map(|done| &done.outcome.failures).collect();
    for failure in failures.iter().take(DETAILED) {
        line(&format!("failed: {}", failure.long()));
    }
    if failures.len() > DETAILED {
        line(&format!(
            "details of {} more are in the log",
            failures.len() - DETAILED
        ));
    }
    let mut all = Tests::default();
    done.iter().for_each(|done| all += done.outcome.tests);
    let word = match with(Verdict::Failed).count() {
        0 => "ok",
        _ => "FAILED",
    };
    line(&format!(
        "\ntest result: {word}. {} passed; {} failed; {} ignored; finished in {:.2}s",
        all.passed,
        all.failed,
        all.ignored,
        took.as_secs_f64()
    ));
    text
}

/// A check with its duration and the number of its tests.
fn counted(done: &StageResult) -> String {
    let Tests {
        passed,
        failed,
        ignored,
    } = done.outcome.tests;
    let mut text = format!("{} {:.1} s", done.name, done.took.as_secs_f64());
    let counts = [(passed, "passed"), (failed, "failed"), (ignored, "ignored")];
    for (count, what) in counts.iter().filter(|(count, _)| *count > 0) {
        let _ = write!(text, ", {count} {what}");
    }
    text
}

/// The items in as few lines as possible.
fn wrapped(before: &str, items: &[String]) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for item in items {
        match lines.last_mut() {
            Some(last) if last.chars().count() + item.chars().count() < WIDTH => {
                last.push_str("; ");
                last.push_str(item);
            }
            _ => lines.push(format!("{before}{item}")),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test::failures::Failures;
    use crate::test::outcome::Outcome;

    fn done(name: &str, output: &str, passed: bool) -> StageResult {
        let mut failures = Failures::default();
        output.lines().for_each(|line| failures.line(line));
        let mut outcome = Outcome::new(passed);
        outcome.tests = Tests {
            passed: 2,
            failed: failures.found.len() as u64,
            ignored: 0,
        };
        outcome.failures = failures.found;
        StageResult {
            name: name.into(),
            outcome,
            took: Duration::from_millis(1500),
            again: None,
        }
    }

    #[test]
    fn failures_come_first() {
        let many: String = (0..9)
            .map(|n| format!("---- t{n} ----\nwhy {n}\nmore {n}\n"))
            .collect();
        let mut flaky = done("suite two", "", true);
        flaky.outcome.flaky.push("x: -1 | +2".into());
        let all = [done("format", "", true), done("suite one", &many, false), flaky];
        let text = of(&all, Duration::from_secs(3));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[..3],
            [
                "== summary",
                "FAILED suite one 1.5 s, 2 passed, 9 failed",
                "  t0: why 0 | more 0"
            ]
        );
        assert_eq!(
            lines[10..13],
            [
                "  t8: why 8 | more 8",
                "FLAKY suite two: x: -1 | +2",
                "ok: format 1.5 s, 2 passed; suite two 1.5 s, 2 passed"
            ]
        );
        assert!(text.contains("details of 4 more"), "{text}");
        assert!(text.ends_with("test result: FAILED. 6 passed; 9 failed; 0 ignored; finished in 3.00s\n"));
    }

    #[test]
    fn checks_that_passed_share_lines() {
        let items: Vec<String> = (0..30).map(|n| format!("check {n} 10.0 s")).collect();
        let lines = wrapped("ok: ", &items);
        assert!(lines.len() < 8, "{lines:?}");
        assert!(lines.iter().all(|line| line.chars().count() <= WIDTH + 2));
    }
}
