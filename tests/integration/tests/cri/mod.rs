//! What Kubernetes sees of a pod: with firn the same as with containerd's own shim.
//!
//! Every point is done with containerd's own shim first, whose answer must be the expected one, and then with
//! firn in the ways in which a node can be given it. Calls are the kubelet's, by a client of this repository
//! that is written in Go: where Go is missing, all points are skipped. Pods are in the host's network, so
//! that no network plugin is needed.
//!
//! `cargo suites "cri:: stop"` runs a part.
#![allow(clippy::unwrap_used, reason = "a failed invariant fails the test")]

mod checkpoints;
mod client;
mod hosts;
mod images;
mod named;
mod pods;
mod resources;
mod shm;
mod streams;
mod together;

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use firn_lab::{Claims, Outcome, Skip, Tier, matrix};
use firn_node::{Suite, go_lacks};

use crate::cri::client::Cri;
use crate::cri::hosts::{Hosts, PLATFORMS, Way};

/// Something that Kubernetes relies on.
#[derive(Clone, Copy)]
pub struct Point {
    name: &'static str,
    /// Part of what is seen with the stock shim.
    expected: &'static str,
    /// Where it can be seen.
    on: fn(Suite) -> bool,
    /// With firn in each of these ways.
    ways: &'static [Way],
    /// Whether the stock shim can do it at all.
    stock: bool,
    /// What is done, and what a client sees of it, without times, pids and the like.
    scenario: fn(Cri<'_>) -> Result<String>,
    /// What docs/guide/clients.md has of it.
    claim: Option<(&'static str, Outcome<'static>)>,
}

impl Point {
    /// Seen everywhere, with firn as Kubernetes should be given it.
    pub const fn new(
        name: &'static str,
        expected: &'static str,
        scenario: fn(Cri<'_>) -> Result<String>,
    ) -> Self {
        Self {
            name,
            expected,
            on: |_| true,
            ways: &[Way::Path],
            stock: true,
            scenario,
            claim: None,
        }
    }

    /// Has a row in docs/guide/clients.md.
    pub const fn claims(self, operation: &'static str, outcome: Outcome<'static>) -> Self {
        Self {
            claim: Some((operation, outcome)),
            ..self
        }
    }

    /// With firn in every way.
    pub const fn in_every_way(self) -> Self {
        Self {
            ways: &Way::FIRN,
            ..self
        }
    }

    /// With firn alone, which shows what is expected.
    pub const fn firn_only(self) -> Self {
        Self { stock: false, ..self }
    }

    /// With firn in these ways.
    pub const fn ways(self, ways: &'static [Way]) -> Self {
        Self { ways, ..self }
    }

    /// Only there.
    pub const fn on(self, on: fn(Suite) -> bool) -> Self {
        Self { on, ..self }
    }
}

fn points() -> Vec<Point> {
    [
        pods::POINTS,
        streams::POINTS,
        resources::POINTS,
        checkpoints::POINTS,
        named::POINTS,
        shm::POINTS,
        images::POINTS,
        together::POINTS,
    ]
    .concat()
}

pub(crate) fn suite() -> matrix::Suite {
    let tier = Tier::current();
    let hosts: Vec<_> = tier
        .platforms(&PLATFORMS)
        .map(|platform| Arc::new(Hosts::new(platform)))
        .collect();
    let mut trials = Vec::new();
    // Neighbours are of different platforms, so that tests that run at the same time do not wait for each
    // other's hosts.
    for point in points() {
        for hosts in hosts.iter().filter(|hosts| (point.on)(hosts.platform.suite)) {
            let (name, hosts) = (matrix::name(point.name, hosts.platform), Arc::clone(hosts));
            trials.push(matrix::trial(name, move || match go_lacks() {
                Some(reason) => Err(Skip::new(format!("the client is not built: {reason}")).into()),
                None => prove(&hosts, point).and_then(|()| claim(&hosts, point)),
            }));
        }
    }
    matrix::Suite::new(&[]).with(trials)
}

/// Reports what was seen of a point that has a row.
fn claim(hosts: &Hosts, point: Point) -> Result<()> {
    let Some((operation, outcome)) = point.claim else {
        return Ok(());
    };
    for way in point.ways {
        let report =
            |cri: Cri<'_>| Claims::of_containerd(cri.host, "CRI", way.runtime())?.saw(operation, outcome);
        hosts.with(*way, report)?;
    }
    Ok(())
}

/// Runs the scenario of a point with the stock shim and with firn.
fn prove(hosts: &Hosts, point: Point) -> Result<()> {
    let scenario = |cri: Cri<'_>| (point.scenario)(cri).map(|seen| nameless(&seen));
    let shows = |seen: &str, part: &str| {
        ensure!(seen.contains(part), "not shown is {part:?}:\n{seen}");
        Ok(())
    };
    if !point.stock {
        for way in point.ways {
            shows(&hosts.with(*way, scenario)?, point.expected).with_context(|| format!("with {way}"))?;
        }
        return Ok(());
    }
    let stock = hosts.with(Way::Stock, scenario)?;
    shows(&stock, point.expected).context("with the stock shim")?;
    for way in point.ways {
        let firn = hosts
            .with(*way, scenario)
            .with_context(|| format!("the stock shim shows\n{stock}"))?;
        ensure!(
            firn == stock,
            "with {way} is seen\n{firn}\nwith the stock shim\n{stock}"
        );
    }
    Ok(())
}

/// Without the ids that CRI gives to pods and containers.
fn nameless(seen: &str) -> String {
    let id = |word: &str| word.len() == 64 && word.bytes().all(|c| c.is_ascii_hexdigit());
    seen.split_inclusive(|c: char| !c.is_ascii_alphanumeric())
        .map(|part| match part.get(..64) {
            Some(word) if id(word) => part.replace(word, "ID"),
            _ => part.to_owned(),
        })
        .collect()
}
