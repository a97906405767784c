//! The shims alone: their task service is called as containerd calls it, and no archive is made.

use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use containerd_shim_protos::api::{
    CreateTaskRequest, CreateTaskResponse, Mount, StartRequest, StartResponse,
};
use containerd_shim_protos::shim::oci::CheckpointOptions;
use firn_lab::{BUNDLES, Container, Task};
use firn_node::wait_for;
use nix::unistd::syncfs;
use serde_json::Value;

use super::hog::{self, ID};
use super::machine::{Peak, forget};
use super::{Checkpoint, CheckpointPeak, Lab, Memory, Read, Reading, Restore, RestorePeak, Way, Write};
use crate::timed::timed;

/// Where the bundle of the copy is made, and its id.
const BUNDLES_BY_HAND: &str = "/run/by-hand";
const COPY: &str = "copy";
/// Where the image goes.
const IMAGE: &str = "/tmp/bench-image";
const SIGUSR1: u32 = 10;
const SIGKILL: u32 = 9;
/// How long a copy may take to end.
const LIMIT: Duration = Duration::from_secs(60);
/// Size of dd's file, in MiB.
const DD: u32 = 1024;

/// Checkpoint, then Create and Start of a copy in the same shim.
pub(super) fn reading(lab: &Lab, way: Way, memory: Memory) -> Result<Reading> {
    let node = lab.node();
    lab.configure(way)?;
    lab.fill_pool()?;
    let (job, sum) = hog::start(lab, way, memory)?;
    let task = Task::of(&lab.host, ID)?;
    let mut reading = Reading::default();
    let mut take = |what, peak_of, bundles, id, step: &dyn Fn() -> Result<()>| {
        lab.fill_pool()?;
        let peak = Peak::begin(node)?;
        let begun = Instant::now();
        step()?;
        let took = begun.elapsed().as_secs_f64();
        reading.values.extend([(what, took), (peak_of, peak.end()?)]);
        if way != Way::Stock {
            reading.phases.push((what, hog::phases(node, bundles, id)?));
        }
        anyhow::Ok(())
    };
    node.run(&["mkdir", "-m", "700", IMAGE])?;
    take(Checkpoint, CheckpointPeak, BUNDLES, ID, &|| {
        task.end(task.checkpoint(IMAGE, &CheckpointOptions::new())?)?;
        on_disk(lab, way)
    })?;
    hog::verify(&hog::in_bundle(node, BUNDLES, ID), &sum, || {
        job.task(&["kill", "--signal", "SIGUSR1"]).map(drop)
    })?;
    job.task(&["kill", "--signal", "SIGKILL"])?;
    job.becomes("STOPPED")?;
    let create = make_bundle(lab)?;
    let task = task.with_id(COPY);
    if let (Way::Disk, Some(store)) = (way, way.store()) {
        forget(&node.path(store))?;
    }
    take(Restore, RestorePeak, BUNDLES_BY_HAND, COPY, &|| {
        task.call::<CreateTaskResponse>("Create", &create)?;
        let mut start = StartRequest::new();
        start.id = COPY.to_owned();
        task.call::<StartResponse>("Start", &start)?;
        Ok(())
    })?;
    hog::verify(&hog::in_bundle(node, BUNDLES_BY_HAND, COPY), &sum, || {
        Ok(task.kill("", SIGUSR1, false)?)
    })?;
    end(lab, way, task, job)?;
    Ok(reading)
}

/// What is written to a disk counts once it is there.
fn on_disk(lab: &Lab, way: Way) -> Result<()> {
    match (way, way.store()) {
        (Way::Disk, Some(store)) => Ok(syncfs(File::open(lab.node().path(store))?)?),
        _ => Ok(()),
    }
}

/// Makes a bundle like that of the original, on whose root file system the copy runs.
fn make_bundle(lab: &Lab) -> Result<CreateTaskRequest> {
    let node = lab.node();
    let mut spec: Value = serde_json::from_str(&node.read(format!("{BUNDLES}/{ID}/config.json"))?)?;
    spec["linux"]["cgroupsPath"] = format!("/default/{COPY}").into();
    let bundle = format!("{BUNDLES_BY_HAND}/{COPY}");
    node.write(format!("{bundle}/config.json"), spec.to_string())?;
    node.run(&[
        "mkdir",
        "-p",
        &format!("{bundle}/rootfs"),
        &format!("{bundle}/work"),
    ])?;
    let mut rootfs = Mount::new();
    rootfs.type_ = "bind".to_owned();
    rootfs.source = format!("{BUNDLES}/{ID}/rootfs");
    rootfs.options = vec!["rbind".to_owned(), "rw".to_owned()];
    let mut create = CreateTaskRequest::new();
    create.id = COPY.to_owned();
    create.bundle = bundle;
    create.rootfs = vec![rootfs];
    create.checkpoint = IMAGE.to_owned();
    Ok(create)
}

/// Ends the copy, then the shim with the original, and removes what they leave.
fn end(lab: &Lab, way: Way, task: Task, job: Container<'_>) -> Result<()> {
    task.kill("", SIGKILL, true)?;
    wait_for("the end of the copy", LIMIT, || {
        Ok(task.delete("").ok().map(drop))
    })?;
    // The shim ends with its last container: no connection may keep it.
    drop(task);
    job.remove()?;
    lab.node().run(&["rm", "-r", IMAGE, BUNDLES_BY_HAND])?;
    lab.empty_store(way)
}

/// Rates of a store on a disk and, in the place of the stock shim, of dd with O_DIRECT on the same disk.
pub(super) fn disk(lab: &Lab, way: Way, memory: Memory) -> Result<Reading> {
    let values = match way {
        Way::Stock => dd(lab)?,
        way => {
            let taken = reading(lab, way, memory)?;
            let rate = |of, as_rate| {
                let took = taken.values.iter().find(|(measure, _)| *measure == of);
                let took = took.context("no time")?.1;
                anyhow::Ok((as_rate, f64::from(memory.mib) / took))
            };
            let values = vec![rate(Checkpoint, Write)?, rate(Restore, Read)?];
            let renamed = |(measure, phases)| (if measure == Checkpoint { Write } else { Read }, phases);
            let phases = taken.phases.into_iter().map(renamed).collect();
            return Ok(Reading { values, phases });
        }
    };
    Ok(Reading {
        values,
        phases: Vec::new(),
    })
}

fn dd(lab: &Lab) -> Result<Vec<(super::Measure, f64)>> {
    let node = lab.node();
    let (random, file) = ("/tmp/random", "/var/lib/containerd/dd");
    let make = format!("head -c {DD}M /dev/urandom >{random}");
    node.run(&["sh", "-c", &make])?;
    let copy = |from: &str, to: &str, flag: &str| {
        let sync = if to == file { "conv=fsync" } else { "conv=notrunc" };
        let words = [
            "dd",
            "bs=4M",
            sync,
            &format!("if={from}"),
            &format!("of={to}"),
            flag,
        ];
        let took = timed(node, &words.map(str::to_owned))? / 1000.0;
        anyhow::Ok(f64::from(DD) / took)
    };
    let write = copy(random, file, "oflag=direct")?;
    let read = copy(file, "/dev/null", "iflag=direct")?;
    node.run(&["rm", random, file])?;
    Ok(vec![(Write, write), (Read, read)])
}
