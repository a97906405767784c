//! The quick part of the fault matrix (`cargo xtask faults` is the whole), and that CRIU's own faults reach
//! it.

use anyhow::{Result, ensure};
use firn_lab::faults::{quick, run};
use firn_lab::{Container, GpuHost, SimGpu, cases, failure, matrix, on};
use firn_node::Platform;

const HOSTS: usize = 2;

fn after_any_fault_the_workload_runs_or_the_image_is_complete(platform: Platform) -> Result<()> {
    let tried = run(platform.suite, &quick(), HOSTS, |tried| {
        let took = tried.took.as_secs_f64();
        println!("{}: {:?}, {took:.1} s", tried.case, tried.outcome);
    })?;
    let outside = tried.iter().filter(|tried| tried.outcome.is_err()).count();
    ensure!(
        outside == 0,
        "{outside} of {} cases are outside of the promise",
        tried.len()
    );
    Ok(())
}

/// `CRIU_FAULT` of the daemon's environment goes through shim and runc: 1 breaks every dump.
fn criu_fault_in_containerds_environment_reaches_criu(platform: Platform) -> Result<()> {
    let host = GpuHost::for_test(platform, "ft-env", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        let daemon_with = |environment: &str| {
            host.node().write("/etc/default/containerd", environment)?;
            host.node().restart_containerd()
        };
        daemon_with("CRIU_FAULT=1\n")?;
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(2)?;
        let output = failure(job.checkpoint("checkpoint/job"))?;
        ensure!(output.contains("FIRN-DUMP:"), "{output}");
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

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        after_any_fault_the_workload_runs_or_the_image_is_complete [TRIXIE];
        criu_fault_in_containerds_environment_reaches_criu [FORKY];
    })
    .first()
}
