//! The quick part of the fault matrix (`cargo xtask faults` is the whole), and that CRIU's own faults reach it.

use anyhow::{Result, ensure};
use firn_lab::faults::{quick, run};
use firn_lab::{Container, GpuHost, SimGpu, failure, on};
use firn_node::{Cgroup, Suite};

const HOSTS: usize = 2;

#[test]
fn whatever_fails_the_workload_goes_on_or_its_image_is_complete() -> Result<()> {
    let tried = run(Suite::Trixie, &quick(), HOSTS, |tried| {
        let took = tried.took.as_secs_f64();
        println!("{}: {:?}, {took:.1} s", tried.cell, tried.outcome);
    })?;
    let outside = tried.iter().filter(|tried| tried.outcome.is_err()).count();
    ensure!(
        outside == 0,
        "{outside} of {} cells are outside of the promise",
        tried.len()
    );
    Ok(())
}

/// `CRIU_FAULT` of the daemon's environment goes through shim and runc: 1 breaks every dump.
#[test]
fn a_fault_of_criu_is_asked_for_in_the_daemons_environment() -> Result<()> {
    let host = GpuHost::for_test(Suite::Forky, Cgroup::Auto, "ft-env", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        let daemon_with = |environment: &str| {
            host.node().write("/etc/default/containerd", environment)?;
            host.node().restart_containerd()
        };
        daemon_with("CRIU_FAULT=1\n")?;
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(2)?;
        let said = failure(job.checkpoint("checkpoint/job"))?;
        ensure!(said.contains("FIRN-DUMP:"), "{said}");
        job.goes_on(2)?;
        job.remove()?;
        daemon_with("")?;
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(2)?;
        job.checkpoint("checkpoint/job")?;
        job.goes_on(2)?;
        job.remove()?;
        host.idle()
    })
}
