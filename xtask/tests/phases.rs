//! A phase that was added is everywhere where phases are listed, and a deadline in all of its three places.
//! What the compiler or another test names is not looked at here.
#![allow(
    clippy::unwrap_used,
    reason = "a workspace that cannot be read is a test that fails"
)]

use std::fs;
use std::path::Path;

/// A phase, as transaction/src/phase.rs has it.
struct Phase {
    name: String,
    /// Its code may panic, hang or be killed by itself: it is in the journal.
    is_journalled: bool,
}

fn text(file: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// `GpuLock` as `gpu-lock`, `gpu_lock` too.
fn kebab(name: &str) -> String {
    let mut out = String::new();
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && !out.is_empty() {
            out.push('-');
        }
        out.push(if letter == '_' {
            '-'
        } else {
            letter.to_ascii_lowercase()
        });
    }
    out
}

/// The lines of the item that begins with `head`, which ends with a brace of the same indentation.
fn item<'t>(text: &'t str, head: &str) -> Vec<&'t str> {
    let mut lines = text
        .lines()
        .skip_while(|line| !line.trim_start().starts_with(head));
    let first = lines.next().unwrap_or_else(|| panic!("there is no {head}"));
    let indent = first.len() - first.trim_start().len();
    let ends = |line: &str| line.len() == indent + 1 && line.ends_with('}');
    lines.take_while(|line| !ends(line)).collect()
}

fn phases() -> Vec<Phase> {
    let text = text("transaction/src/phase.rs");
    let (mut phases, mut comment) = (Vec::new(), String::new());
    for line in item(&text, "pub enum Phase {") {
        let line = line.trim();
        if let Some(more) = line.strip_prefix("///") {
            comment.push_str(more);
        } else if let Some(name) = line.strip_suffix(',') {
            phases.push(Phase {
                name: kebab(name),
                is_journalled: !comment.contains("A phase of the timings only"),
            });
            comment.clear();
        }
    }
    assert!(phases.len() > 20, "the phases are elsewhere");
    phases
}

/// Fails with all of `names` that `file` lacks. `as_written`: how it writes one.
fn expect(file: &str, names: impl Iterator<Item = String>, as_written: fn(&str) -> String) {
    let text = text(file);
    let missing: Vec<_> = names.filter(|name| !text.contains(&as_written(name))).collect();
    assert!(missing.is_empty(), "{file} lacks {missing:?}");
}

fn quoted(name: &str) -> String {
    format!("\"{name}\"")
}

#[test]
fn a_phase_is_in_the_drawing_at_the_head_of_its_file() {
    let text = text("transaction/src/phase.rs");
    let head = text.lines().take_while(|line| line.starts_with("//!"));
    let words: Vec<&str> = head.flat_map(|line| line.split([' ', '[', ']'])).collect();
    let has = |name: &str| words.contains(&name);
    let missing: Vec<_> = phases().into_iter().filter(|phase| !has(&phase.name)).collect();
    let missing: Vec<_> = missing.iter().map(|phase| &phase.name).collect();
    assert!(missing.is_empty(), "the drawing lacks {missing:?}");
}

/// In a row of one of its tables, or where it is emphasised as a term.
#[test]
fn the_architecture_explains_every_phase() {
    let text = text("docs/design/architecture.md");
    let rows = text
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let in_rows: Vec<&str> = rows.flat_map(|cell| cell.split(", ")).collect();
    let is_there = |name: &str| in_rows.contains(&name) || text.contains(&format!("*{name}*"));
    let missing: Vec<_> = phases().into_iter().map(|phase| phase.name).collect();
    let missing: Vec<_> = missing.iter().filter(|name| !is_there(name)).collect();
    assert!(
        missing.is_empty(),
        "docs/design/architecture.md lacks {missing:?}"
    );
}

/// The demo explains those that it has: no hooks, no store, no library, no other GPUs for one that runs.
#[test]
fn the_demo_explains_every_phase() {
    const NOT_SHOWN: [&str; 9] = [
        "prepare",
        "gpu-detach",
        "gpu-attach",
        "copy-memory",
        "fill-memory",
        "grant",
        "resumed",
        "restored",
        "rollback",
    ];
    let names = phases().into_iter().map(|phase| phase.name);
    let names = names.filter(|name| !NOT_SHOWN.contains(&name.as_str()));
    expect("tests/demo/src/figures.rs", names, quoted);
}

/// The suites stand still, kill and panic in every phase that a journal names.
#[test]
fn the_fault_matrix_and_the_suite_recovery_have_every_phase_of_the_journal() {
    let journalled = || phases().into_iter().filter(|phase| phase.is_journalled);
    expect(
        "tests/integration/src/faults/names.rs",
        journalled().map(|phase| phase.name),
        quoted,
    );
    // Grant is one of pauses and moves, rollback of what has failed.
    let stands_still = |name: &String| !["grant", "rollback"].contains(&name.as_str());
    expect(
        "tests/integration/tests/recovery/acknowledged.rs",
        journalled().map(|phase| phase.name).filter(stands_still),
        quoted,
    );
}

#[test]
fn every_phase_of_the_fault_matrix_is_in_a_flow() {
    let text = text("tests/integration/src/faults/phases.rs");
    let variants = item(&text, "pub enum Phase {").into_iter().map(str::trim);
    // That of a checkpoint is only the second of a pair.
    let variants = variants.filter(|line| *line != "CheckpointRollback,");
    for variant in variants.filter_map(|line| line.strip_suffix(',')) {
        assert!(
            text.contains(&format!("Phase::{variant},")),
            "PHASES lacks {variant}"
        );
    }
}

/// `10m`, as the configuration and its page write a time.
fn shown(seconds: u64) -> String {
    match seconds {
        _ if seconds.is_multiple_of(60) => format!("{}m", seconds / 60),
        _ => format!("{seconds}s"),
    }
}

#[test]
fn a_deadline_is_in_the_shipped_file_and_on_its_page() {
    let (code, file) = (text("config/src/file.rs"), text("config/config.toml"));
    let page = text("docs/reference/configuration.md");
    let mut found = 0;
    for line in item(&code, "pub struct Deadlines {") {
        let Some((name, seconds)) = line
            .trim()
            .strip_prefix("pub ")
            .and_then(|line| line.strip_suffix("),"))
            .and_then(|line| line.split_once(": Duration = Duration::from_secs("))
        else {
            continue;
        };
        let (name, default) = (kebab(name), shown(seconds.parse().unwrap()));
        let (key, row) = (
            format!("\n#{name} = \"{default}\"\n"),
            format!("\n| `{name}` | `{default}` |"),
        );
        assert!(file.contains(&key), "config/config.toml lacks{key}");
        assert!(page.contains(&row), "docs/reference/configuration.md lacks{row}");
        found += 1;
    }
    assert!(found > 15, "the deadlines are elsewhere");
}
