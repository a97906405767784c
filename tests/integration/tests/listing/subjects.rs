//! One checkpoint as an image, a tar file and a directory, and the container that it is of.

use anyhow::{Context, Result, ensure};
use firn_lab::{GpuHost, IMAGE, failure, on};
use firn_node::Platform;
use serde_json::Value;

use super::{MIB, counter, host};

/// The inventory of the node, as if it were another one.
const HERE: &str = "/srv/inventory.json";

/// Who made it, and what it holds, in each form.
fn is_described(host: &GpuHost, what: &str) -> Result<Value> {
    let shown = host.firn(&["inspect", what, "--processes"])?;
    let origin = &shown["manifest"]["origin"];
    ensure!(shown["failure"].is_null(), "{what}: {shown}");
    ensure!(
        origin["container"] == "job" && origin["time"].as_str() > Some("2023-11-14T22:13:20Z"),
        "{what}: {origin}"
    );
    let command = origin["command"].as_str().context("no command")?;
    ensure!(command.starts_with("/bin/gpu-counter --out"), "{what}: {command}");
    let host_name = host.node().run(&["cat", "/proc/sys/kernel/hostname"])?.stdout;
    ensure!(origin["host"] == host_name.trim(), "{what}: {origin}");
    let sizes = &shown["sizes"];
    ensure!(sizes["gpu"].as_u64() >= Some(MIB << 20), "{what}: {sizes}");
    ensure!(sizes["files"].as_u64() > Some(0), "{what}: {sizes}");
    let processes = shown["processes"].as_array().context("no processes")?;
    let has_gpu = |one: &&Value| one["gpu"] == true && one["comm"] == "gpu-counter";
    ensure!(
        processes.iter().filter(has_gpu).count() == 1,
        "{what}: {processes:?}"
    );
    Ok(shown)
}

pub fn every_form_of_a_checkpoint_is_looked_at(platform: Platform) -> Result<()> {
    on([host(platform, "li-forms")?], |[host]| {
        let (node, gpus) = (host.node(), host.uuids());
        let job = counter(host, "job", "0")?;
        // What ctr makes has the same manifest. First: ctr 1.7 fails if containerd has the spec already.
        job.checkpoint("checkpoint/ctr")?;
        node.run(&["sh", "-c", &format!("firn-gpu inventory >{HERE}")])?;
        is_described(host, "checkpoint/ctr")?;
        for to in ["checkpoint/job", "/srv/job.tar", "/srv/image"] {
            host.firn(&["checkpoint", "job", to])?;
            let shown = is_described(host, to)?;
            // Its memory is read of a directory alone.
            let is_dir = to == "/srv/image";
            ensure!((shown["unread"] == 0) == is_dir, "{to}: {}", shown["unread"]);
            // The image of a directory is not known.
            ensure!(is_dir || shown["image"] == IMAGE, "{to}: {}", shown["image"]);
            let audit = host.firn(&["audit", to])?;
            ensure!(audit["verdict"] == "can", "{to}: {audit}");
            let dry_run = |more: [&str; 2]| {
                let words = ["restore", to, "--dry-run"];
                host.firn_shows(&[&words[..], &more[..]].concat())
            };
            let (_, given) = dry_run(["--inventory", HERE])?;
            let (_, known) = dry_run(["--name", "twin"])?;
            if is_dir {
                ensure!(given["failure"]["code"] == "FIRN-NO-SPEC", "{given}");
                ensure!(known["failure"]["code"] == "FIRN-NO-CONTAINER", "{known}");
            } else {
                for planned in [given, known] {
                    ensure!(planned["map"][0]["new"] == *gpus[0], "{to}: {planned}");
                }
            }
        }
        // The container itself.
        let status = host.firn(&["ps", "job"])?;
        ensure!(status["containers"][0]["state"] == "running", "{status}");
        let refused = failure(node.run(&["firn", "inspect", "job"]))?;
        ensure!(refused.contains("hint: `firn ps job` shows it"), "{refused}");
        let planned = host.firn(&["restore", "job", "--dry-run", "--inventory", HERE])?;
        ensure!(
            planned["accepted"] == true && planned["map"][0]["new"] == *gpus[0],
            "{planned}"
        );
        ensure!(host.firn(&["audit", "job"])?["verdict"] == "can");
        let short = node.run(&["firn", "audit", "job"])?.stdout;
        ensure!(
            short.starts_with("verdict    can") && !short.contains("none of"),
            "{short}"
        );
        // An image that is none, one that is not there, and one in another namespace.
        for (what, code) in [
            (IMAGE, "FIRN-NO-CHECKPOINT"),
            ("checkpoint/none", "FIRN-NO-IMAGE"),
            ("/etc/passwd", "FIRN-NO-CHECKPOINT"),
        ] {
            let error = failure(node.run(&["firn", "inspect", what]))?;
            ensure!(error.contains(code), "{what}: {error}");
        }
        let other = ["firn", "inspect", "checkpoint/job", "-n", "other"];
        ensure!(failure(node.run(&other))?.contains("FIRN-NO-IMAGE"));
        let left = node.run(&["sh", "-c", "ls /tmp | grep firn-view; true"])?.stdout;
        ensure!(left.is_empty(), "left: {left}");
        job.remove()?;
        host.idle()
    })
}
