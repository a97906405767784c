use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use firn_transaction::history::{Entry, HistoryDir, PhaseTime};

use super::*;

/// Totals of a done checkpoint and a failed restore.
fn totals() -> Totals {
    let dir = tempfile::tempdir().unwrap();
    let place = HistoryDir::new(dir.path());
    let phase = |name: &str, ms| PhaseTime {
        name: name.to_owned(),
        ms,
        ..PhaseTime::default()
    };
    let done = Entry {
        id: "1".to_owned(),
        kind: "checkpoint".to_owned(),
        outcome: "done".to_owned(),
        ms: 1500.0,
        phases: vec![phase("gpu-lock", 20.0), phase("criu-dump", 901_000.0)],
        gpu_bytes: 1 << 40,
        ..Entry::default()
    };
    let failed = Entry {
        id: "2".to_owned(),
        kind: "restore".to_owned(),
        outcome: "failed".to_owned(),
        code: "FIRN-GPU-DRIVER".to_owned(),
        ms: 5.0,
        ..Entry::default()
    };
    let text = [done, failed].map(|entry| serde_json::to_string(&entry).unwrap() + "\n");
    std::fs::write(dir.path().join("transactions.jsonl"), text.concat()).unwrap();
    place.read().unwrap().totals
}

/// A checkpoint in progress and a suspended container, whose ids would be something else in the text.
const HOSTILE: &str = "a\"} 1\n# HELP x\\";

fn now() -> Now {
    let dir = tempfile::tempdir().unwrap();
    let bundle = |id: &str, lines: &[String]| {
        let bundles = dir.path().join("io.containerd.runtime.v2.task/default");
        let bundle = bundles.join(id);
        std::fs::create_dir_all(&bundle).unwrap();
        std::fs::write(bundle.join("firn-journal"), lines.concat()).unwrap();
    };
    let begin = serde_json::json!({
        "event": "begin", "version": 1, "boot": "", "shim": 1, "at": 1, "op": "checkpoint",
        "container": HOSTILE, "gpu": true, "exit": false, "image": "/i", "work": "/w",
        "work_is_ours": true, "was_frozen": false,
    });
    let begin = begin.to_string() + "\n";
    bundle("running", std::slice::from_ref(&begin));
    let end = "{\"event\":\"end\",\"outcome\":\"suspended\"}\n".to_owned();
    bundle("suspended", &[begin, end]);
    Now {
        containers: crate::metrics::containers(dir.path()).unwrap(),
        leases: Vec::new(),
    }
}

/// A sample: its name, the labels, the value.
fn sample(line: &str) -> (String, BTreeMap<String, String>, f64) {
    let (head, value) = line.rsplit_once(' ').unwrap();
    let value = value.parse().unwrap();
    let Some((name, labels)) = head.split_once('{') else {
        return (head.to_owned(), BTreeMap::new(), value);
    };
    let mut rest = labels.strip_suffix('}').unwrap();
    let mut found = BTreeMap::new();
    while !rest.is_empty() {
        let (label, after) = rest.split_once("=\"").unwrap();
        let mut text = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next().expect("a label has an end") {
                (at, '"') => break at,
                (_, '\\') => match chars.next().unwrap().1 {
                    'n' => text.push('\n'),
                    c @ ('\\' | '"') => text.push(c),
                    c => panic!("\\{c} in {line}"),
                },
                (_, c) => text.push(c),
            }
        };
        assert!(
            found
                .insert(label.trim_start_matches(',').to_owned(), text)
                .is_none()
        );
        rest = &after[end + 1..];
    }
    (name.to_owned(), found, value)
}

/// What promtool's `check metrics` looks for.
fn lint(text: &str) -> Vec<(String, BTreeMap<String, String>, f64)> {
    assert!(text.ends_with('\n'));
    let (mut samples, mut seen) = (Vec::new(), BTreeSet::new());
    let (mut name, mut kind, mut help) = ("", "", "");
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            (name, help) = rest.split_once(' ').unwrap();
            assert!(seen.insert(name.to_owned()), "{name} has two places");
            assert!(help.ends_with('.') && name.starts_with("firn_"), "{line}");
            let is_plain = |c: char| c.is_ascii_lowercase() || c == '_';
            assert!(name.chars().all(is_plain), "{name}");
            continue;
        }
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (of, which) = rest.split_once(' ').unwrap();
            assert_eq!(of, name, "TYPE does not follow HELP");
            kind = which;
            let has_unit = ["_seconds", "_bytes", "_seconds_total", "_bytes_total"];
            let is_number = [
                "firn_gpu_containers",
                "firn_transactions_running",
                "firn_build_info",
            ];
            let ends = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
            assert!(
                ends(&has_unit) || ends(&is_number) || name == "firn_transactions_total",
                "{name}"
            );
            continue;
        }
        let (of, labels, value) = sample(line);
        let of_histogram = ["_bucket", "_sum", "_count"].map(|part| format!("{name}{part}"));
        let is_its = if kind == "histogram" {
            of_histogram.contains(&of)
        } else {
            of == name
        };
        assert!(is_its && !help.is_empty(), "{line} below {name}");
        assert!(value >= 0.0, "{line}");
        samples.push((of, labels, value));
    }
    let keys: BTreeSet<_> = samples.iter().map(|(name, labels, _)| (name, labels)).collect();
    assert_eq!(keys.len(), samples.len(), "a series is there twice:\n{text}");
    samples
}

#[test]
fn the_text_is_as_prometheus_wants_it() {
    let samples = lint(&of(&totals(), &now()).unwrap());
    let value = |name: &str, labels: &[(&str, &str)]| {
        let is = |of: &BTreeMap<String, String>| {
            let has = |(label, value): &(&str, &str)| of.get(*label).is_some_and(|has| has == value);
            labels.iter().all(has)
        };
        let found: Vec<_> = samples
            .iter()
            .filter(|(of, has, _)| of == name && is(has))
            .collect();
        assert_eq!(found.len(), 1, "{name} {labels:?}: {found:?}");
        found[0].2
    };
    let failed = [
        ("kind", "restore"),
        ("outcome", "failed"),
        ("code", "FIRN-GPU-DRIVER"),
    ];
    assert_eq!(value("firn_transactions_total", &failed), 1.0);
    let done = [("kind", "checkpoint"), ("outcome", "done"), ("code", "")];
    assert_eq!(value("firn_transactions_total", &done), 1.0);
    let checkpoint = [("kind", "checkpoint")];
    assert_eq!(
        value("firn_transaction_gpu_memory_bytes_total", &checkpoint),
        1_099_511_627_776.0
    );
    assert_eq!(value("firn_transaction_duration_seconds_sum", &checkpoint), 1.5);
    let phases = "firn_transaction_phase_duration_seconds_bucket";
    for (phase, bound, count) in [
        ("gpu-lock", "0.01", 0.0),
        ("gpu-lock", "0.03", 1.0),
        ("gpu-lock", "900", 1.0),
        ("criu-dump", "900", 0.0),
        ("criu-dump", "+Inf", 1.0),
    ] {
        assert_eq!(
            value(phases, &[("phase", phase), ("le", bound)]),
            count,
            "{phase} {bound}"
        );
    }
    assert_eq!(value("firn_gpu_containers", &[("state", "parked")]), 0.0);
    // The id of the container is a label and makes no line of its own.
    assert!(value("firn_container_suspended_seconds", &[("container", HOSTILE)]) > 1.0);
}

#[test]
fn a_node_on_which_nothing_happened_has_metrics() {
    let nothing = Now {
        containers: crate::metrics::containers(Path::new("/nonexistent")).unwrap(),
        leases: Vec::new(),
    };
    let samples = lint(&of(&Totals::default(), &nothing).unwrap());
    let names: BTreeSet<_> = samples.iter().map(|(name, ..)| name.as_str()).collect();
    let expected = [
        "firn_build_info",
        "firn_gpu_containers",
        "firn_transactions_running",
    ];
    assert_eq!(names, BTreeSet::from(expected));
}
