//! What clients rely on of containerd's own shim, point by point: firn shows the same.
//!
//! One test per point, kind of daemon and cgroup version. Each runs its scenario with the stock shim first, whose answer
//! must be the expected one, and then with firn, installed under the stock shim's name. Both must tell the same, unless
//! the point says in what firn is better; docs/design/parity.md lists and argues these points, and a test holds it to them.
//!
//! `cargo test -p firn-integration --test conformance -- "forky v1: 1.4"` runs a part.
#![allow(clippy::unwrap_used, reason = "a failed invariant fails the test")]

mod bundle;
mod byhand;
mod client;
mod events;
mod execs;
mod exits;
mod hosts;
mod lives;
mod logging;
mod mounts;
mod oom;
mod options;
mod raw;
mod runtimes;
mod serve;
mod start;
mod states;
mod stats;
mod stdio;
mod systemd;
mod task;
mod upgrade;
mod wavering;

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use firn_node::{CgroupMode, Suite};
use libtest_mimic::{Arguments, Failed, Trial};
use similar::TextDiff;

use crate::hosts::{Kind, Pair};
use crate::wavering::Wavered;

pub use crate::hosts::Place;

/// A point of the checklist.
#[derive(Clone, Copy)]
pub struct Point {
    /// Number of its section in the checklist, and what it is about.
    name: &'static str,
    /// Part of what the stock shim shows.
    expected: &'static str,
    /// Where it can be seen.
    on: On,
    /// Part of what firn shows instead; docs/design/parity.md says why.
    better: Option<&'static str>,
    scenario: Scenario,
}

/// What is done with a shim, and what a client sees of it, without times, pids and the like.
type Scenario = fn(&Place<'_>) -> Result<String>;

impl Point {
    /// Firn shows what the stock shim shows, everywhere.
    pub const fn same(name: &'static str, expected: &'static str, scenario: Scenario) -> Self {
        Self {
            name,
            expected,
            on: On::Everywhere,
            better: None,
            scenario,
        }
    }

    /// Firn shows this instead.
    pub const fn better(self, shown: &'static str) -> Self {
        Self {
            better: Some(shown),
            ..self
        }
    }

    /// Only there.
    pub const fn on(self, on: On) -> Self {
        Self { on, ..self }
    }
}

/// Kinds of hosts on which a point can be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// All.
    Everywhere,
    /// containerd 1.7.
    Trixie,
    /// containerd 2.1.
    Forky,
    /// cgroup v1, the only version that has limits on a hybrid host.
    V1,
    /// cgroup v2.
    V2,
    /// containerd 1.7 with cgroup v1.
    TrixieV1,
    /// Where systemd makes the cgroups.
    Systemd,
    /// The cgroup version that has the memory controller on this machine.
    Memory,
    /// cgroup v2 with the memory controller, which no hybrid host has.
    UnifiedMemory,
    /// Any one cgroup version: what is shown has nothing to do with it.
    EachDaemon,
    /// containerd 2.1, with any one cgroup version: what takes long.
    Once,
}

impl On {
    fn includes(self, kind: Kind) -> bool {
        match self {
            _ if kind.systemd => self == Self::Systemd,
            Self::Systemd => false,
            Self::Everywhere => true,
            Self::Trixie => kind.suite == Suite::Trixie,
            Self::Forky => kind.suite == Suite::Forky,
            Self::TrixieV1 => Self::Trixie.includes(kind) && Self::V1.includes(kind),
            Self::V1 => kind.cgroup == CgroupMode::V1,
            Self::V2 => kind.cgroup == CgroupMode::V2,
            Self::Memory | Self::EachDaemon => kind.has_controller("memory"),
            Self::UnifiedMemory => kind.cgroup == CgroupMode::V2 && kind.has_controller("memory"),
            Self::Once => kind.suite == Suite::Forky && kind.has_controller("memory"),
        }
    }
}

/// All points, in the order of the checklist.
fn points() -> Vec<Point> {
    [
        start::POINTS,
        serve::POINTS,
        bundle::POINTS,
        options::POINTS,
        upgrade::POINTS,
        runtimes::POINTS,
        systemd::POINTS,
        task::POINTS,
        lives::POINTS,
        states::POINTS,
        execs::POINTS,
        exits::POINTS,
        events::POINTS,
        mounts::POINTS,
        stdio::POINTS,
        logging::POINTS,
        oom::POINTS,
        stats::POINTS,
    ]
    .concat()
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Hosts are made when they are wanted first, and one is used by one test at a time.
    arguments.test_threads.get_or_insert(2);
    let pairs = Kind::all().map(|kind| Arc::new(Pair::new(kind)));
    let wavered = Arc::new(Wavered::default());
    let mut trials = vec![
        Trial::test("docs/design/parity.md lists the differences", || {
            listed().map_err(failed)
        }),
        Trial::test("a difference that stays fails its trial", || {
            wavering::is_strict().map_err(failed)
        }),
    ];
    // Neighbours are of different kinds, so that tests that run at the same time do not wait for each other's hosts.
    for point in points() {
        for pair in pairs.iter().filter(|pair| point.on.includes(pair.kind())) {
            let (pair, wavered) = (Arc::clone(pair), Arc::clone(&wavered));
            let name = format!("{}: {}", pair.kind(), point.name);
            trials.push(Trial::test(name.clone(), move || {
                wavered.prove(&name, || prove(&pair, point)).map_err(failed)
            }));
        }
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    match wavered.tell() {
        true => conclusion.exit_code(),
        false => ExitCode::FAILURE,
    }
}

fn failed(error: anyhow::Error) -> Failed {
    Failed::from(format!("{error:#}"))
}

/// How often the stock shim is asked: where its answer depends on a race of its own, another one of its answers counts too.
const REFERENCES: usize = 3;

/// Runs a point's scenario with both shims, with firn once.
fn prove(pair: &Pair, point: Point) -> Result<()> {
    let mut shown: Option<Result<String>> = None;
    let mut asked = 0;
    loop {
        asked += 1;
        // Whether it can be the stock shim's fault.
        let mut doubted = true;
        let proved = pair.with_both(|stock, firn| {
            let expected = reference(point, stock)?;
            doubted = false;
            let firn = match shown.get_or_insert_with(|| answer(point, firn)) {
                Ok(firn) => firn,
                Err(error) => bail!("with firn: {error:#}\nthe stock shim shows\n{expected}"),
            };
            compare(point, &expected, firn).inspect_err(|_| doubted = true)
        });
        match proved {
            Err(error) if doubted && asked < REFERENCES => {
                eprintln!("{}: asking the stock shim again: {error:#}", point.name);
            }
            proved => return proved,
        }
    }
}

/// What a shim shows, which leaves nothing on its host.
fn answer(point: Point, place: &Place<'_>) -> Result<String> {
    let shown = (point.scenario)(place)?;
    place.host.idle()?;
    Ok(shown)
}

/// What the stock shim shows.
fn reference(point: Point, stock: &Place<'_>) -> Result<String> {
    let shown = answer(point, stock).context("with the stock shim")?;
    ensure!(
        shown.contains(point.expected),
        "the stock shim does not show {:?}:\n{shown}",
        point.expected
    );
    Ok(shown)
}

/// Whether firn shows what it has to, beside what the stock shim shows.
fn compare(point: Point, stock: &str, firn: &str) -> Result<()> {
    match point.better {
        None => {
            let difference = TextDiff::from_lines(stock, firn);
            ensure!(
                firn == stock,
                "-: only the stock shim shows it, +: only firn\n{}",
                difference.unified_diff().context_radius(2)
            );
        }
        Some(better) => {
            ensure!(firn.contains(better), "firn does not show {better:?}:\n{firn}");
            ensure!(firn != stock, "there is no difference any more:\n{firn}");
        }
    }
    Ok(())
}

/// Whether docs/design/parity.md has a row for every point in which firn differs, and for no other.
fn listed() -> Result<()> {
    let text = include_str!("../../../../docs/design/parity.md");
    let rows: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split(" | ").next())
        .filter(|name| name.starts_with(|c: char| c.is_ascii_digit()))
        .collect();
    let differ: Vec<&str> = points()
        .iter()
        .filter(|point| point.better.is_some())
        .map(|point| point.name)
        .collect();
    for name in &differ {
        ensure!(rows.contains(name), "docs/design/parity.md has no row {name:?}");
    }
    for row in &rows {
        ensure!(
            differ.contains(row),
            "no point differs as docs/design/parity.md says: {row:?}"
        );
    }
    Ok(())
}
