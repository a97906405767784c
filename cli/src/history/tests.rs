use clap::Parser;
use firn_transaction::history::PhaseTime;

use super::*;
use crate::args::{Args, Command};

fn args(line: &str) -> HistoryArgs {
    let words = ["firn", "history"].into_iter().chain(line.split_whitespace());
    match Args::parse_from(words).command {
        Command::History(args) => args,
        other => panic!("{other:?}"),
    }
}

fn entry(failed: bool) -> Entry {
    let phase = |name: &str, ms, failed| PhaseTime {
        name: name.to_owned(),
        ms,
        failed,
        ..PhaseTime::default()
    };
    Entry {
        time: "2026-01-31T23:59:59.000000000Z".to_owned(),
        at: 1_769_903_999_000,
        container: "job".to_owned(),
        namespace: "default".to_owned(),
        kind: "checkpoint".to_owned(),
        outcome: if failed { "failed" } else { "done" }.to_owned(),
        ms: 1500.0,
        phases: vec![phase("gpu-lock", 1.0, failed), phase("criu-dump", 900.0, false)],
        ..Entry::default()
    }
}

#[test]
fn entries_are_chosen_by_container_time_and_outcome() {
    for (line, expected) in [
        ("", true),
        ("job", true),
        ("other", false),
        ("-n default job", true),
        ("-n k8s.io", false),
        ("--since 2026-01-31Z", true),
        ("--since 2026-02-01Z", false),
        ("--failed", false),
    ] {
        assert_eq!(is_asked_for(&args(line), &entry(false)), expected, "{line}");
    }
    assert!(is_asked_for(&args("--failed"), &entry(true)));
}

#[test]
fn a_row_names_the_phase_that_failed_or_took_longest() {
    assert_eq!(phase(&entry(false)), "criu-dump 0.9 s");
    assert_eq!(phase(&entry(true)), "failed in gpu-lock after 1 ms");
    let row = row(&entry(false));
    assert_eq!(row[0], text::time(1_769_903_999));
    assert_eq!((&*row[5], &*row[6], &*row[7]), ("-", "1.5 s", "-"));
}
