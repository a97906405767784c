//! Containers of another namespace of containerd's.

use anyhow::{Context, Result, bail, ensure};
use firn_lab::{FIRN, GpuHost, IMAGE, LOG, Lines, nothing_left, on};
use firn_node::{Platform, wait_for};

use super::failures::refused;
use super::{LIMIT, copy, host};

const BUNDLE: &str = "/run/containerd/io.containerd.runtime.v2.task/other/job";

/// The counter continues. Gives how far it was at first.
fn goes_on(host: &GpuHost) -> Result<u64> {
    let lines = || {
        let log = host.node().read(format!("{BUNDLE}/rootfs{LOG}"));
        Lines::parse(&log.unwrap_or_default())
    };
    let from = lines().reached(1);
    wait_for("the counter to continue", LIMIT, || {
        let lines = lines();
        match lines.fault_if_carried(1) {
            Some(fault) => bail!("{fault}"),
            None => Ok((lines.reached(1) >= from + 3).then_some(from)),
        }
    })
}

fn begin(host: &GpuHost) -> Result<()> {
    let (from, to) = ("ctr images export --local", "ctr -n other images import --local");
    let copy = format!("{from} /srv/image.tar {IMAGE} && {to} /srv/image.tar");
    host.node().run(&["sh", "-c", &copy])?;
    let grant = host.ctr_gpu_options(&["0"])?;
    let run = ["ctr", "-n", "other", "run", "--detach", "--runtime", FIRN];
    let count = [
        "job",
        "/bin/gpu-counter",
        "--out",
        LOG,
        "--interval-ms",
        "50",
        "--mib",
        "8",
    ];
    let grant: Vec<&str> = grant.iter().map(String::as_str).collect();
    host.node()
        .run(&[&run[..], host.limits(), &grant, &[IMAGE], &count].concat())?;
    goes_on(host).map(drop)
}

pub fn a_container_of_another_namespace_is_as_any_other(platform: Platform) -> Result<()> {
    on([host(platform, "to-ns", 1)?], |[host]| {
        let node = host.node();
        begin(host)?;
        refused(
            host,
            &["checkpoint", "job", "checkpoint/job"],
            "FIRN-NO-CONTAINER",
        )?;
        let done = host.firn(&["checkpoint", "job", "checkpoint/job", "-n", "other"])?;
        ensure!(done["namespace"] == "other", "{done}");
        goes_on(host)?;
        ensure!(
            !host.has_image("checkpoint/job")?,
            "it is in the default namespace"
        );
        refused(host, &["restore", "checkpoint/job"], "FIRN-NO-IMAGE")?;
        refused(host, &["restore", "checkpoint/job", "-n", "other"], "FIRN-EXISTS")?;
        let before = goes_on(host)?;
        host.firn(&["checkpoint", "job", "/srv/job.tar", "--exit", "-n", "other"])?;
        node.run(&["ctr", "-n", "other", "containers", "delete", "job"])?;
        for from in ["checkpoint/job", "/srv/job.tar"] {
            let done = host.firn(&["restore", from, "-n", "other"])?;
            ensure!(
                done["namespace"] == "other" && done["pid"].as_u64() > Some(1),
                "{done}"
            );
            let reached = goes_on(host)?;
            ensure!(
                from != "/srv/job.tar" || reached > before,
                "{reached} after {before}"
            );
            let shown = host.firn(&["ps"])?["containers"][0].take();
            ensure!(
                shown["namespace"] == "other" && shown["gpus"][0]["index"] == 0,
                "{shown}"
            );
            let status = node.run(&["firn", "ps", "job", "-n", "other"])?.stdout;
            ensure!(status.contains("job in namespace other"), "{status}");
            let end = "ctr -n other tasks delete --force job; ctr -n other containers delete job";
            node.run(&["sh", "-c", end])?;
            nothing_left(host, "job")?;
        }
        // Where the image of its root file system is.
        let output = refused(host, &["restore", "/srv/job.tar", "-n", "third"], "FIRN-NO-IMAGE")?;
        ensure!(output.contains(IMAGE), "{output}");
        host.firn(&["restore", "/srv/job.tar"])?;
        copy(host, "job", &host.uuids()[..1])?.remove()?;
        node.run(&["ctr", "-n", "other", "images", "rm", "--sync", "checkpoint/job"])?;
        super::nothing_left(host)?;
        host.idle().context("the node is not idle")
    })
}
