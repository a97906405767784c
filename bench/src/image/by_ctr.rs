//! Checkpoints and restores as a user makes them: `ctr`, containerd, the shim and CRIU.

use anyhow::Result;
use firn_lab::{BUNDLES, Container};

use super::hog::{self, ID};
use super::machine::{Peak, size};
use super::{Checkpoint, CheckpointPeak, Content, Extents, Lab, Memory, Reading, Restore, RestorePeak, Way};
use crate::timed::timed;

const IMAGE: &str = "localhost/hog:latest";
/// Where containerd keeps the content of images.
const CONTENT: &str = "/var/lib/containerd/io.containerd.content.v1.content";

/// `ctr containers checkpoint --task` and `ctr containers restore --live`.
pub(super) fn reading(lab: &Lab, way: Way, memory: Memory) -> Result<Reading> {
    let node = lab.node();
    lab.configure(way)?;
    lab.fill_pool()?;
    let (job, sum) = hog::start(lab, way, memory)?;
    let before = size(node, CONTENT)?;
    let mut reading = Reading::default();
    let checkpoint = ["ctr", "containers", "checkpoint", "--task", ID, IMAGE];
    let restore = ["ctr", "containers", "restore", "--live", ID, IMAGE];
    let mut take = |argv: [&str; 6], what, peak_of| {
        lab.fill_pool()?;
        let peak = Peak::begin(node)?;
        let took = timed(node, &argv.map(str::to_owned))? / 1000.0;
        reading.values.extend([(what, took), (peak_of, peak.end()?)]);
        if way != Way::Stock {
            reading.phases.push((what, hog::phases(node, BUNDLES, ID)?));
        }
        anyhow::Ok(())
    };
    take(checkpoint, Checkpoint, CheckpointPeak)?;
    verify(lab, &job, &sum)?;
    job.remove()?;
    let content = size(node, CONTENT)? - before;
    let extents = way.store().map_or(Ok(0.0), |store| size(node, store))?;
    take(restore, Restore, RestorePeak)?;
    reading.values.extend([(Content, content), (Extents, extents)]);
    let copy = Container::known(&lab.host, ID);
    verify(lab, &copy, &sum)?;
    copy.remove()?;
    lab.host.remove_image(IMAGE)?;
    // containerd leaves what it has unpacked for a restore.
    node.run(&["sh", "-c", "rm -rf /tmp/ctrd-checkpoint*"])?;
    lab.empty_store(way)?;
    Ok(reading)
}

fn verify(lab: &Lab, job: &Container<'_>, sum: &str) -> Result<()> {
    let lines = hog::in_bundle(lab.node(), BUNDLES, ID);
    hog::verify(&lines, sum, || {
        job.task(&["kill", "--signal", "SIGUSR1"]).map(drop)
    })
}
