//! `firn doctor` and `firn config check` on nodes that are broken and repaired in every way that they look
//! for.
#![allow(clippy::unwrap_used, reason = "a failed invariant fails the test")]

mod breaks;
mod leftovers;
mod mistakes;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{GpuHost, SimGpu, answer, cases, matrix, on};
use firn_node::Platform;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

fn host(platform: Platform, name: &str) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(1), SimGpu::h200(2)])
}

/// What `firn doctor` reports, with these options, called by `through`.
fn doctor_through(host: &GpuHost, through: &str, options: &str) -> Result<Vec<Value>> {
    // Its exit status depends on what else is wrong.
    let command = format!("{through} firn doctor --json {options} || true");
    let shown = host.node().run(&["sh", "-c", &command])?.stdout;
    let shown = answer(&["doctor"], &shown)?;
    Ok(shown["checks"].as_array().context("no checks")?.clone())
}

fn doctor(host: &GpuHost, options: &str) -> Result<Vec<Value>> {
    doctor_through(host, "", options)
}

/// A check that is not good.
#[derive(Clone, Copy, Debug)]
struct Line {
    name: &'static str,
    status: &'static str,
    found: &'static str,
    remedy: &'static str,
}

impl Line {
    fn is(&self, check: &Value) -> bool {
        let has = |key: &str, part: &str| check[key].as_str().is_some_and(|text| text.contains(part));
        check["name"] == self.name
            && check["status"] == self.status
            && has("found", self.found)
            && has("remedy", self.remedy)
    }

    fn is_among(&self, checks: &[Value]) -> bool {
        checks.iter().any(|check| self.is(check))
    }

    fn expect(&self, checks: &[Value]) -> Result<()> {
        let bad: Vec<&Value> = checks.iter().filter(|check| check["status"] != "ok").collect();
        ensure!(self.is_among(checks), "{self:?} is not among {bad:#?}");
        Ok(())
    }
}

/// A container moves by the calls of clients, and nothing is left of it, also where it cannot.
fn the_deep_check_moves_a_container_of_its_own(platform: Platform) -> Result<()> {
    on([host(platform, "dr-d")?], |[host]| {
        let deep = |part: &str, status: &str| -> Result<()> {
            let checks = doctor(host, "--deep")?;
            let deep = checks
                .iter()
                .find(|check| check["name"] == "deep")
                .context("no check")?;
            let found = deep["found"].as_str().unwrap_or_default();
            ensure!(found.contains(part) && deep["status"] == status, "{deep:#}");
            let left =
                "ctr tasks list -q; ctr containers list -q; ctr leases list -q; ls /var/lib/firn/restore";
            let left = host.node().run(&["sh", "-c", left])?.stdout;
            ensure!(left.is_empty(), "left: {left}");
            Ok(())
        };
        deep("a container with GPU GPU-", "ok")?;
        host.fault(&["--call", "checkpoint", "--error", "CUDA_ERROR_UNKNOWN"])?;
        deep("FIRN-", "fail")?;
        host.no_faults()?;
        deep("was checkpointed", "ok")?;
        host.idle()?;
        host.node().run(&["simgpu", "teardown"])?;
        deep("a container without GPU was checkpointed", "ok")
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        breaks::each_broken_part_is_named_with_its_remedy [FORKY];
        breaks::what_containerd_starts_is_seen_through_its_configuration [FORKY, TRIXIE];
        leftovers::what_failures_leave_is_named_and_removed [FORKY, FORKY_V2];
        leftovers::what_a_living_transaction_uses_stays [FORKY];
        the_deep_check_moves_a_container_of_its_own [FORKY, TRIXIE];
        mistakes::a_mistake_fails_what_goes_by_it_and_no_start [FORKY, TRIXIE];
    })
}
