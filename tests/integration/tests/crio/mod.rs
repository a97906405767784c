//! CRI-O with firn-runc as a runtime handler, driven by crictl.
//!
//! Needs root, and Go and a C compiler to build CRI-O.

mod client;
mod host;

use anyhow::{Result, ensure};
use firn_lab::{Claims, IMAGE, Outcome, cases, matrix, on};
use firn_node::{CgroupMode, Platform, Suite};
use serde_json::{Value, json};

use client::{ARCHIVE, Crictl, counter, security};
use host::{VERSION, host};

/// The runtime handler.
const HANDLER: &str = "firn-runc";
const RESTORE: &str = "`CreateContainer` from its archive, onto the GPU of its source";
const NO_CGROUP: &str = "the source's cgroup has to be there ([why](#cri-o))";

fn claims() -> Claims {
    Claims::new("CRI-O", VERSION, HANDLER)
}

/// A counter continues in the container, and in one of another pod that is made from the archive.
fn a_counter_goes_on_and_moves(platform: Platform) -> Result<()> {
    on([host(platform, "co-move", 2)?], |[node]| {
        let crictl = Crictl(node);
        let job = crictl.pod("first", HANDLER)?.count("0")?;
        crictl.checkpoint(&job)?;
        crictl.goes_on(&job, 3)?;
        crictl.uses(&[0])?;
        claims().works("`CheckpointContainer`")?;
        let reached = crictl.lines(&job)?.reached(1);
        let mounts = crictl.mounts()?;
        crictl.clear()?;
        let pod = crictl.pod("second", HANDLER)?;
        let copy = || {
            let image = json!({ "image": ARCHIVE });
            pod.create(&counter(&json!({ "image": image, "mounts": mounts })))
        };
        // The pool is for clients of the node: a pod gets what its spec has.
        let refused = copy()?;
        node.configure("[restore]\ngpus = [\"1\"]\n")?;
        let error = crictl.fails(&["start", &refused])?;
        ensure!(error.contains("FIRN-RESTORE-CRI: "), "{error}");
        // CRI-O itself removes it.
        crictl.uses(&[])?;
        node.configure("[restore]\ngpus = [\"1\"]\ncri = true\n")?;
        let copy = copy()?;
        if node.suite() == Suite::Trixie && node.node().record().cgroup == CgroupMode::V2 {
            // CRIU 4.1 enters the cgroup of the source.
            let error = crictl.fails(&["start", &copy])?;
            ensure!(error.contains("FIRN-RESTORE: "), "{error}");
            claims().saw(
                &format!("{RESTORE}, cgroup v2, CRIU 4.1"),
                Outcome::Limited(NO_CGROUP),
            )?;
            return crictl.clear();
        }
        crictl.run(&["start", &copy])?;
        let from = crictl.goes_on(&copy, 3)?;
        ensure!(from > 0 && from <= reached, "{from} after {reached}");
        crictl.uses(&[0])?;
        claims().works(RESTORE)?;
        crictl.clear()
    })
}

/// A pod's annotation gives it no GPU that its spec does not have.
fn a_pod_maps_itself_onto_no_other_gpu(platform: Platform) -> Result<()> {
    on([host(platform, "co-map", 2)?], |[node]| {
        let crictl = Crictl(node);
        let uuids = node.uuids();
        let pod = crictl.pod("first", HANDLER)?;
        let job = pod.start(&counter(&json!({ "annotations": {
            "cdi.k8s.io/firn-test": "nvidia.com/gpu=0",
            "firn.dev/gpu-map": format!("{}={}", uuids[0], uuids[1]),
        } })))?;
        crictl.goes_on(&job, 3)?;
        crictl.checkpoint(&job)?;
        let mounts = crictl.mounts()?;
        crictl.clear()?;
        node.configure("[restore]\ncri = true\n")?;
        let pod = crictl.pod("second", HANDLER)?;
        // CRI-O gives the copy the annotations of its source.
        let copy = pod.create(&counter(
            &json!({ "image": { "image": ARCHIVE }, "mounts": mounts }),
        ))?;
        let error = crictl.fails(&["start", &copy])?;
        ensure!(error.contains("FIRN-MAP-UNKNOWN-TARGET: "), "{error}");
        crictl.clear()
    })
}

/// What firn notes for itself is not taken from a pod: CRIU runs nothing that the pod's author names.
fn a_pod_names_no_file_for_criu(platform: Platform) -> Result<()> {
    on([host(platform, "co-criu", 1)?], |[node]| {
        const RAN: &str = "/srv/ran";
        let (crictl, node) = (Crictl(node), node.node());
        node.write("/srv/x.sh", format!("#!/bin/sh\ntouch {RAN}\n"))?;
        node.run(&["chmod", "755", "/srv/x.sh"])?;
        node.write("/srv/x.conf", "action-script /srv/x.sh\n")?;
        let pod = crictl.pod("pod", HANDLER)?;
        let job = pod.start(&counter(&json!({ "annotations": {
            "cdi.k8s.io/firn-test": "nvidia.com/gpu=0",
            "firn.dev/criu-config": "/srv/x.conf",
            "firn.dev/parked": "x",
            "firn.dev/tcp": "close",
        } })))?;
        crictl.goes_on(&job, 3)?;
        crictl.checkpoint(&job)?;
        crictl.goes_on(&job, 3)?;
        ensure!(
            !node.path(RAN).exists(),
            "CRIU has run a script of the pod's author"
        );
        let spec = ["tar", "--extract", "--to-stdout", "--file", ARCHIVE, "spec.dump"];
        let spec: Value = serde_json::from_str(&node.run(&spec)?.stdout)?;
        let spec = &spec["annotations"];
        for (name, is_kept) in [
            ("firn.dev/criu-config", false),
            ("firn.dev/parked", false),
            ("firn.dev/tcp", true),
        ] {
            ensure!(spec.get(name).is_some() == is_kept, "{name} in {spec}");
        }
        // The operator's file is CRIU's, and the script runs.
        node.run(&["mkdir", "-p", "/etc/criu"])?;
        node.run(&["mv", "/srv/x.conf", "/etc/criu/runc.conf"])?;
        crictl.checkpoint(&job)?;
        ensure!(node.path(RAN).exists(), "the script does not run at all");
        crictl.clear()
    })
}

/// A checkpoint that fails in the driver leaves the container running.
fn a_failed_checkpoint_costs_nothing(platform: Platform) -> Result<()> {
    on([host(platform, "co-fail", 1)?], |[node]| {
        let crictl = Crictl(node);
        let job = crictl.pod("pod", HANDLER)?.count("0")?;
        for call in ["lock", "checkpoint"] {
            node.fault(&["--call", call, "--error", "CUDA_ERROR_UNKNOWN"])?;
            let error = crictl.fails(&["checkpoint", "--export", ARCHIVE, &job])?;
            ensure!(error.contains("FIRN-GPU-DRIVER: "), "{error}");
            node.no_faults()?;
            ensure!(!node.node().path(ARCHIVE).exists(), "{call}: there is an archive");
            crictl.goes_on(&job, 3)?;
            let state = crictl.state(&job)?;
            ensure!(state == "CONTAINER_RUNNING", "{call}: {state}");
        }
        crictl.checkpoint(&job)?;
        crictl.goes_on(&job, 3)?;
        crictl.clear()
    })
}

/// What a container without GPU shows, by its handler.
fn day(crictl: Crictl<'_>, handler: &str) -> Result<Vec<String>> {
    let script = "echo begun; trap 'echo ended; exit 3' TERM; while :; do sleep 0.1; done";
    let pod = crictl.pod(handler, handler)?;
    let id = pod.start(&json!({
        "metadata": { "name": "day", "attempt": 0 },
        "image": { "image": IMAGE },
        "command": ["sh", "-c", script],
        "log_path": "day.log",
        "linux": { "security_context": security() },
    }))?;
    let mut seen = vec![
        crictl.state(&id)?,
        crictl.run(&["exec", &id, "sh", "-c", "echo in; exit 0"])?,
    ];
    seen.push(
        crictl
            .fails(&["exec", &id, "sh", "-c", "exit 5"])?
            .replace(&id, "ID"),
    );
    crictl.checkpoint(&id)?;
    seen.push(crictl.state(&id)?);
    crictl.run(&["stop", "--timeout", "20", &id])?;
    seen.push(crictl.state(&id)?);
    seen.push(crictl.run(&["logs", &id])?);
    crictl.clear()?;
    Ok(seen)
}

fn without_gpu_it_is_runc(platform: Platform) -> Result<()> {
    on([host(platform, "co-day", 0)?], |[node]| {
        let shown = day(Crictl(node), "runc")?;
        ensure!(shown[4..] == ["CONTAINER_EXITED", "begun\nended"], "{shown:?}");
        assert_eq!(day(Crictl(node), HANDLER)?, shown);
        claims().works("without a GPU: `RunPodSandbox`, `ExecSync`, `CheckpointContainer`, `StopContainer`")
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        a_counter_goes_on_and_moves [FORKY, TRIXIE, FORKY_V2, TRIXIE_V2];
        a_failed_checkpoint_costs_nothing [FORKY];
        a_pod_maps_itself_onto_no_other_gpu [FORKY];
        a_pod_names_no_file_for_criu [FORKY];
        without_gpu_it_is_runc [FORKY];
    })
    .only_in_all()
}
