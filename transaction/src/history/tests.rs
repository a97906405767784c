use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use serde_json::Value;

use super::*;
use crate::journal::{Begin, Journal, Operation, Outcome};
use crate::phase::Phase;
use crate::recording;

const FILE: &str = "transactions.jsonl";

fn place() -> (tempfile::TempDir, HistoryDir) {
    let dir = tempfile::tempdir().unwrap();
    let place = HistoryDir::new(dir.path().join("history"));
    (dir, place)
}

fn entry(id: &str) -> Entry {
    Entry {
        id: id.to_owned(),
        kind: "checkpoint".to_owned(),
        outcome: "done".to_owned(),
        ms: 250.0,
        phases: vec![PhaseTime {
            name: "criu-dump".to_owned(),
            ms: 200.0,
            ..PhaseTime::default()
        }],
        ..Entry::default()
    }
}

fn json(entry: &Entry) -> Value {
    serde_json::to_value(entry).unwrap()
}

fn ids(place: &HistoryDir) -> Vec<String> {
    let history = place.read().unwrap();
    history.entries.into_iter().map(|entry| entry.id).collect()
}

fn count(place: &HistoryDir) -> u64 {
    place.read().unwrap().totals.transactions.values().sum()
}

#[test]
fn entries_are_read_as_they_were_written_and_by_root_alone() {
    let (dir, place) = place();
    assert_eq!(ids(&place), [""; 0]);
    let hostile = Entry {
        container: "a\"b\n{}\u{1b}]0;".to_owned(),
        ..entry("1")
    };
    place.append(&hostile).unwrap();
    place.append(&entry("2")).unwrap();
    assert_eq!(place.read().unwrap().entries, [hostile, entry("2")]);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    let at = dir.path().join("history");
    assert_eq!((mode(&at), mode(&at.join(FILE))), (0o700, 0o600));
}

#[test]
fn a_line_that_was_cut_short_costs_nothing_else() {
    let (dir, place) = place();
    place.append(&entry("1")).unwrap();
    let path = dir.path().join("history").join(FILE);
    let mut text = fs::read(&path).unwrap();
    text.extend_from_slice(b"{\"id\":\"2\",\"con");
    fs::write(&path, text).unwrap();
    place.append(&entry("3")).unwrap();
    assert_eq!(ids(&place), ["1", "3"]);
}

#[test]
fn a_link_in_the_place_of_the_file_is_not_followed() {
    let (dir, place) = place();
    place.append(&entry("1")).unwrap();
    let (path, other) = (dir.path().join("history").join(FILE), dir.path().join("other"));
    fs::remove_file(&path).unwrap();
    fs::write(&other, "other").unwrap();
    symlink(&other, &path).unwrap();
    place.append(&entry("2")).unwrap_err();
    assert_eq!(fs::read(&other).unwrap(), b"other");
}

#[test]
fn the_files_are_bounded_and_the_counts_go_on() {
    let (dir, place) = place();
    let at = dir.path().join("history");
    for nth in 0..100_u64 {
        let large = Entry {
            container: "c".repeat(64 << 10),
            ..entry(&nth.to_string())
        };
        place.append(&large).unwrap();
        let size = |entry: fs::DirEntry| entry.metadata().unwrap().len();
        let all: u64 = fs::read_dir(&at).unwrap().map(|found| size(found.unwrap())).sum();
        assert!(all < 2 * LIMIT + 8192, "{all} bytes after {nth}");
        assert_eq!(count(&place), nth + 1);
    }
    let left = ids(&place);
    assert!(left.len() < 40 && left.last().unwrap() == "99", "{left:?}");
    let Totals {
        durations, phases, ..
    } = place.read().unwrap().totals;
    let (all, dumps) = (&durations["checkpoint"], &phases["checkpoint/criu-dump"]);
    assert_eq!((all.counts[3], dumps.counts[3]), (100, 100));
    assert!((all.seconds - 25.0).abs() < 1e-6, "{all:?}");
}

#[test]
fn nothing_is_counted_twice_when_a_rotation_was_cut_off() {
    let (dir, place) = place();
    let at = dir.path().join("history");
    for id in ["1", "2"] {
        place.append(&entry(id)).unwrap();
    }
    fs::rename(at.join(FILE), at.join("transactions.1.jsonl")).unwrap();
    place.append(&entry("3")).unwrap();
    // As a shim leaves it that is killed between the totals and the rename.
    let mut totals = Value::Null;
    assert!(totals::add_all(
        &mut totals,
        &[json(&entry("1")), json(&entry("2"))]
    ));
    fs::write(at.join("totals.json"), serde_json::to_vec(&totals).unwrap()).unwrap();
    assert_eq!(count(&place), 3);
    let large = Entry {
        container: "c".repeat(1 << 20),
        ..entry("4")
    };
    place.append(&large).unwrap();
    assert_eq!(
        (ids(&place), count(&place)),
        (vec!["3".to_owned(), "4".to_owned()], 4)
    );
}

#[test]
fn a_phase_that_was_entered_twice_is_counted_once() {
    let mut twice = entry("1");
    twice.phases.push(twice.phases[0].clone());
    let mut totals = Value::Null;
    totals::add_all(&mut totals, &[json(&twice)]);
    let totals: Totals = serde_json::from_value(totals).unwrap();
    let dumps = &totals.phases["checkpoint/criu-dump"];
    assert_eq!(dumps.counts.iter().sum::<u64>(), 1);
    assert!((dumps.seconds - 0.4).abs() < 1e-9, "{dumps:?}");
}

#[test]
fn durations_are_in_the_bucket_of_their_bound() {
    let mut totals = Value::Null;
    for ms in [10.0, 10.1, 900_000.0, 900_001.0] {
        let entry = Entry {
            ms,
            ..entry(&ms.to_string())
        };
        totals::add_all(&mut totals, &[json(&entry)]);
    }
    let totals: Totals = serde_json::from_value(totals).unwrap();
    let counts = totals.durations["checkpoint"].counts;
    assert_eq!((counts[0], counts[1], counts[11], counts[12]), (1, 1, 1, 1));
}

/// What a checkpoint does with its journal, up to the dump.
async fn begin(bundle: &Path) -> Journal {
    let begin = Begin {
        op: Operation::Checkpoint,
        container: "job".to_owned(),
        gpu: true,
        exit: false,
        image: "/image".into(),
        work: bundle.join("work"),
        work_is_ours: true,
        was_frozen: false,
        checkpoint: String::new(),
    };
    let journal = Journal::begin(bundle, begin).await.unwrap();
    for phase in [Phase::Inspect, Phase::GpuLock, Phase::CriuDump] {
        journal.enter(phase).await.unwrap();
    }
    journal
}

#[tokio::test]
async fn a_killed_shim_is_written_once_by_its_journal() {
    let (dir, place) = place();
    let id = recording::within_call(async {
        let recording = recording::begin(Operation::Checkpoint, "job", "default");
        drop(begin(dir.path()).await);
        recording.id.clone()
    });
    let id = id.await;
    for _ in 0..2 {
        write_killed(&place, dir.path()).await;
    }
    let history = place.read().unwrap();
    let [killed] = history.entries.as_slice() else {
        panic!("{:?}", history.entries);
    };
    let names: Vec<_> = killed
        .phases
        .iter()
        .map(|phase| (&*phase.name, phase.failed))
        .collect();
    assert_eq!(
        names,
        [("inspect", false), ("gpu-lock", false), ("criu-dump", true)]
    );
    let of = (
        &*killed.id,
        &*killed.outcome,
        &*killed.container,
        &*killed.namespace,
    );
    assert_eq!(of, (&*id, "killed", "job", "default"));
}

#[tokio::test]
async fn a_transaction_that_has_ended_was_not_killed() {
    let (dir, place) = place();
    let call = recording::within_call(async {
        recording::begin(Operation::Checkpoint, "job", "default");
        begin(dir.path()).await.end(Outcome::Suspended).await;
    });
    call.await;
    write_killed(&place, dir.path()).await;
    assert_eq!(ids(&place), [""; 0]);
}

#[tokio::test]
async fn the_phase_that_failed_is_marked_and_its_time_is_not_the_rollbacks() {
    let (dir, place) = place();
    let call = recording::within_call(async {
        let recording = recording::begin(Operation::Checkpoint, "job", "default");
        for phase in [Phase::Inspect, Phase::Freeze, Phase::CriuDump] {
            recording.enter(phase);
        }
        recording.fail(Phase::CriuDump);
        recording.enter(Phase::Rollback);
        recording.enter(Phase::GpuRestore);
        let code = Some("FIRN-DUMP".to_owned());
        write(&place, recording.entry("failed", code), None).await;
    });
    call.await;
    let history = place.read().unwrap();
    let entry = &history.entries[0];
    let phases: Vec<_> = entry
        .phases
        .iter()
        .map(|phase| (&*phase.name, phase.failed))
        .collect();
    let expected = [
        ("inspect", false),
        ("freeze", false),
        ("criu-dump", true),
        ("rollback", false),
        ("gpu-restore", false),
    ];
    assert_eq!(phases, expected);
    assert_eq!((&*entry.outcome, &*entry.code), ("failed", "FIRN-DUMP"));
    assert_eq!(history.totals.transactions["checkpoint/failed/FIRN-DUMP"], 1);
    drop(dir);
}

/// The phases of a transaction that has failed: each with whether it is the one that has failed.
async fn failed_after(phases: impl FnOnce(&recording::Recording)) -> Vec<(String, bool)> {
    let call = recording::within_call(async {
        let recording = recording::begin(Operation::Checkpoint, "job", "default");
        phases(&recording);
        recording.entry("failed", None).phases
    });
    let phases = call.await.into_iter();
    phases.map(|phase| (phase.name, phase.failed)).collect()
}

#[tokio::test]
async fn a_rollback_begins_because_of_the_phase_before() {
    // Code that has panicked reports no failure.
    let panicked = failed_after(|recording| {
        for phase in [
            Phase::CriuDump,
            Phase::Rollback,
            Phase::GpuRestore,
            Phase::GpuUnlock,
        ] {
            recording.enter(phase);
        }
    });
    let failed: Vec<_> = panicked.await.into_iter().filter(|(_, failed)| *failed).collect();
    assert_eq!(failed, [("criu-dump".to_owned(), true)]);
    // A phase that only divides the time of another has its name.
    let divided = failed_after(|recording| {
        recording.enter(Phase::GpuCheckpoint);
        recording.enter(Phase::Inspect);
        recording.fail(Phase::GpuCheckpoint);
        recording.enter(Phase::Rollback);
    });
    let names = [
        ("gpu-checkpoint", false),
        ("gpu-checkpoint", true),
        ("rollback", false),
    ];
    assert_eq!(
        divided.await,
        names.map(|(name, failed)| (name.to_owned(), failed))
    );
    // What makes up for a failure has not failed.
    let made_up = failed_after(|recording| {
        recording.enter(Phase::GpuRestore);
        recording.fail_open();
        recording.enter(Phase::GpuUnlock);
    });
    let names = [("gpu-restore", true), ("gpu-unlock", false)];
    assert_eq!(
        made_up.await,
        names.map(|(name, failed)| (name.to_owned(), failed))
    );
}

#[tokio::test]
async fn a_history_that_cannot_be_written_is_no_failure() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    write(
        &HistoryDir::new(dir.path().join("file/history")),
        entry("1"),
        None,
    )
    .await;
}

#[tokio::test]
async fn work_on_another_thread_knows_its_transaction() {
    let call = recording::within_call(async {
        let id = recording::begin(Operation::Restore, "job", "default").id.clone();
        let there = blocking(|| recording::current().map(|recording| recording.fields())).await;
        assert_eq!(there, Some(format!("container=job transaction={id}")));
    });
    call.await;
    assert!(recording::current().is_none());
}

#[test]
fn codes_are_those_of_firn() {
    assert_eq!(code_of(&"FIRN-DUMP: cannot").as_deref(), Some("FIRN-DUMP"));
    assert_eq!(code_of(&"runc: FIRN-DUMP: cannot"), None);
    assert_eq!(code_of(&"not found"), None);
}
