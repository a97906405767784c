//! What clients rely on of containerd's own shim, point by point: firn shows the same.
//!
//! One test per point, kind of daemon and cgroup version. Each runs its scenario with the stock shim first,
//! whose answer must be the expected one, and then with firn, installed under the stock shim's name. Both
//! must show the same, unless the point names in what firn is better; docs/design/parity.md lists and argues
//! these points, and a test holds it to them. For a commit (`FIRN_TIER=commit`) firn alone runs, whose answer
//! must have the part that the point has in writing.
//!
//! `cargo suites "conformance:: 1.4"` runs a part, `cargo suites "conformance:: [forky v1]"` all on one
//! platform.
#![allow(clippy::unwrap_used, reason = "a failed invariant fails the test")]

mod bundle;
mod client;
mod events;
mod execs;
mod exits;
mod flaky;
mod hosts;
mod lifecycle;
mod logging;
mod manual;
mod mount_lab;
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
mod stdio_files;
mod systemd;
mod task;
mod upgrade;

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use firn_lab::{Tier, matrix};
use firn_node::{Cgroup, Platform, Suite};
use similar::TextDiff;

use crate::conformance::flaky::FlakyTrials;
use crate::conformance::hosts::{PLATFORMS, Pair, has_controller};

pub use crate::conformance::hosts::Place;

/// A point of the checklist.
#[derive(Clone, Copy)]
pub struct Point {
    /// Number of its section in the checklist, and what it is about.
    name: &'static str,
    /// Part of what the stock shim shows.
    expected: &'static str,
    /// Where it can be seen.
    on: On,
    /// Part of what firn shows instead; docs/design/parity.md gives the reason.
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
    /// For a commit one cgroup version does where both show the same.
    fn in_tier(self, tier: Tier) -> Self {
        match (tier, self) {
            (Tier::Commit, Self::Everywhere) => Self::EachDaemon,
            (Tier::Commit, Self::Forky) => Self::Once,
            (_, on) => on,
        }
    }

    fn includes(self, platform: Platform) -> bool {
        match self {
            _ if platform.systemd => self == Self::Systemd,
            Self::Systemd => false,
            Self::Everywhere => true,
            Self::Trixie => platform.suite == Suite::Trixie,
            Self::Forky => platform.suite == Suite::Forky,
            Self::TrixieV1 => Self::Trixie.includes(platform) && Self::V1.includes(platform),
            Self::V1 => platform.cgroup == Cgroup::V1,
            Self::V2 => platform.cgroup == Cgroup::V2,
            Self::Memory | Self::EachDaemon => has_memory(platform),
            Self::UnifiedMemory => platform.cgroup == Cgroup::V2 && has_memory(platform),
            Self::Once => platform.suite == Suite::Forky && has_memory(platform),
        }
    }
}

/// Whether the platform's cgroups have the memory controller on this machine.
fn has_memory(platform: Platform) -> bool {
    has_controller(platform, "memory")
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
        lifecycle::POINTS,
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

pub(crate) fn suite() -> matrix::Suite {
    let tier = Tier::current();
    let pairs: Vec<_> = tier
        .platforms(&PLATFORMS)
        .map(|platform| Arc::new(Pair::new(platform, tier)))
        .collect();
    let flaky_trials = Arc::new(FlakyTrials::default());
    let mut trials = vec![
        matrix::without_node("docs/design/parity.md lists the differences", compare_list),
        matrix::without_node("a difference that stays fails its trial", flaky::is_strict),
    ];
    // Neighbours are of different platforms, so that tests that run at the same time do not wait for each
    // other's hosts.
    for point in points() {
        let on = point.on.in_tier(tier);
        for pair in pairs.iter().filter(|pair| on.includes(pair.platform())) {
            let (pair, flaky_trials) = (Arc::clone(pair), Arc::clone(&flaky_trials));
            let name = matrix::name(point.name, pair.platform());
            trials.push(matrix::trial(name.clone(), move || {
                flaky_trials.prove(&name, || prove(&pair, point))
            }));
        }
    }
    matrix::Suite::new(&[])
        .with(trials)
        .at_end(move || flaky_trials.report())
}

/// How often the stock shim is asked: where its answer depends on a race of its own, another one of its
/// answers counts too.
const REFERENCES: usize = 3;

/// Runs a point's scenario with both shims, with firn once; or with firn alone, for a commit.
fn prove(pair: &Pair, point: Point) -> Result<()> {
    let mut shown: Option<Result<String>> = None;
    let mut asked = 0;
    loop {
        asked += 1;
        // Whether it can be the stock shim's fault.
        let mut doubted = true;
        let proved = pair.with(|stock, firn| {
            let Some(stock) = stock else {
                doubted = false;
                return shows(point, &answer(point, firn)?);
            };
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

/// Whether firn shows what the point has in writing.
fn shows(point: Point, firn: &str) -> Result<()> {
    let expected = point.better.unwrap_or(point.expected);
    ensure!(
        firn.contains(expected),
        "firn does not show {expected:?}:\n{firn}"
    );
    Ok(())
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

/// Whether firn shows what it has to, compared with what the stock shim shows.
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
        Some(_) => {
            shows(point, firn)?;
            ensure!(firn != stock, "there is no difference any more:\n{firn}");
        }
    }
    Ok(())
}

/// Whether docs/design/parity.md has a row for every point in which firn differs, and for no other.
fn compare_list() -> Result<()> {
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
            "no point differs as docs/design/parity.md lists: {row:?}"
        );
    }
    Ok(())
}
