//! The ways in which a container can ask for GPUs: each ends in a container that can be checkpointed, and restored on a node
//! with other GPUs.
//!
//! Needs root. The specs are those that the real tools write; only the driver is simulated.

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, FIRN, GpuHost, SimGpu, on};
use firn_node::{Cgroup, Suite};

/// The CDI file of a node.
const CDI: &str = "/etc/cdi/nvidia.yaml";

/// The program that counts, as every container here runs it.
const COUNT: [&str; 7] = [
    "/bin/gpu-counter",
    "--out",
    "/counter.log",
    "--interval-ms",
    "50",
    "--mib",
    "8",
];

/// A node whose CDI file is firn's own.
fn host(name: &str, gpus: &[SimGpu]) -> Result<GpuHost> {
    let host = GpuHost::for_test(Suite::Forky, Cgroup::Auto, name, gpus)?;
    host.node().run(&["rm", "/etc/cdi/nvidia.json"])?;
    host.node().run(&["firn", "cdi", "generate", "--output", CDI])?;
    Ok(host)
}

/// Two nodes whose GPUs have nothing in common: on the second one there is one more before it, so that minor, index and
/// device numbers differ too.
fn pair(name: &str) -> Result<[GpuHost; 2]> {
    let [first, second] = [1, 3].map(SimGpu::h200);
    Ok([
        host(&format!("{name}-a"), &[first])?,
        host(&format!("{name}-b"), &[SimGpu::h200(2), second])?,
    ])
}

/// Runs a counter with these options of `ctr run`.
fn count<'h>(host: &'h GpuHost, id: &str, options: &[&str]) -> Result<Container<'h>> {
    let options = [&["--runtime", FIRN], options].concat();
    Ok(Container::run(host, id, &options, &COUNT)?.counting(1))
}

/// The container runs on the first GPU, lives through a checkpoint, and goes on on another node.
fn moves(a: &GpuHost, b: &GpuHost, options: &[&str], expected: &str) -> Result<()> {
    let source = count(a, "job", options)?;
    source.goes_on(3)?;
    ensure!(
        source.gpus_in_use()? == a.uuids()[..1],
        "not on the GPU that was asked for"
    );
    source.checkpoint("checkpoint/job")?;
    source.goes_on(3)?;
    source.remove()?;
    a.send_image("checkpoint/job", b)?;
    let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
    copy.goes_on(5)?;
    ensure!(copy.gpus_in_use()? == [expected], "not on the other node's GPU");
    copy.remove()?;
    a.idle()?;
    b.idle()
}

#[test]
fn a_node_with_nothing_but_the_driver_gives_its_gpus_by_firns_own_cdi_file() -> Result<()> {
    on(pair("ak-gen")?, |[a, b]| {
        let listed = a.node().run(&["firn", "cdi", "list"])?.stdout;
        ensure!(
            listed.contains(&format!("nvidia.com/gpu={}", a.uuids()[0])),
            "{listed}"
        );
        let refused = a
            .node()
            .run(&["firn", "cdi", "generate", "--output", "/etc/cdi/other.yaml"]);
        let said = format!("{:#}", refused.err().context("a second file was written")?);
        ensure!(said.contains("FIRN-CDI-EXISTS"), "{said}");
        moves(a, b, &["--device", "nvidia.com/gpu=0"], &b.uuids()[0])
    })
}
