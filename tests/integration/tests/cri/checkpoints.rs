//! CheckpointContainer, and containers that are created from its archive.

use std::io::{BufRead, BufReader};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use firn_lab::{LOG, Lines, Outcome, SimGpu, failure, numbers};
use firn_node::{Suite, wait_for};
use serde_json::json;

use crate::cri::Point;
use crate::cri::client::{BUNDLES, CLIENT, Cri, Ctr, IMAGE, Pod};
use crate::cri::hosts::Way;

pub const POINTS: &[Point] = &[
    Point::new(
        "checkpoint: into an archive, and a container from it",
        "continues in another pod",
        plain,
    )
    .ways(&[Way::Path, Way::DropIn])
    .claims(
        "`CheckpointContainer`, and `CreateContainer` from it",
        Outcome::Works,
    )
    .on(Suite::has_cri_checkpoint),
    // To another name than the stock runtime's, containerd passes no work directory, where CRIU's log would
    // be.
    Point::new(
        "checkpoint: by firn's own runtime name",
        "config.dump container.log rootfs-diff.tar spec.dump status status.dump\ncontinues in another pod",
        plain,
    )
    .firn_only()
    .ways(&[Way::Named])
    .claims(
        "`CheckpointContainer`, and `CreateContainer` from it",
        Outcome::Works,
    )
    .on(Suite::has_cri_checkpoint),
    Point::new(
        "checkpoint: a container with a GPU, and one from it on another GPU",
        "continues in another pod on GPU 2",
        gpu,
    )
    .firn_only()
    .claims(
        "`CheckpointContainer`, and `CreateContainer` from it on another GPU",
        Outcome::Works,
    )
    .on(Suite::has_cri_checkpoint),
    Point::new(
        "checkpoint: ids of processes in a pod's PID namespace",
        "refused: FIRN-PID-TAKEN, then it continues",
        shared_ids,
    )
    .firn_only()
    .on(Suite::has_cri_checkpoint),
    Point::new(
        "checkpoint: no container from one where the operator has not allowed it",
        "FIRN-RESTORE-CRI",
        off,
    )
    .firn_only()
    .on(Suite::has_cri_checkpoint),
    Point::new("checkpoint: containerd 1.7 has none", "Unimplemented", none)
        .claims(
            "`CheckpointContainer`",
            Outcome::Broken("containerd 1.7 does not have it"),
        )
        .on(|suite| !suite.has_cri_checkpoint()),
];

pub const ARCHIVE: &str = "/tmp/checkpoint.tar";
const BLOBS: &str = "/var/lib/containerd/io.containerd.content.v1.content/blobs/sha256";
const LIMIT: Duration = Duration::from_secs(60);
const COUNT: &str = "i=0; while :; do i=$((i+1)); echo $i >>/count; echo $i; sleep 0.05; done";

/// Calls CheckpointContainer as the kubelet does.
pub fn checkpoint(container: &Ctr<'_>) -> Result<()> {
    let request = json!({ "containerId": container.id, "location": ARCHIVE, "timeout": "60" });
    container.cri.call("CheckpointContainer", &request).map(drop)
}

/// A container whose image is the archive.
///
/// containerd 2.1 pulls the image of the source again, whether it is there or not: its own content is the
/// registry.
fn restore<'h>(pod: &Pod<'h>, special: &serde_json::Value) -> Result<Ctr<'h>> {
    pod.cri.host.configure("[restore]\ncri = true\n")?;
    let restored = restore_as_configured(pod, special);
    pod.cri.host.configure("")?;
    restored
}

fn restore_as_configured<'h>(pod: &Pod<'h>, special: &serde_json::Value) -> Result<Ctr<'h>> {
    let mut registry = pod.cri.host.node().spawn(&[CLIENT, "registry", BLOBS])?;
    let mut ready = String::new();
    let output = registry.stdout.take().context("no output")?;
    BufReader::new(output).read_line(&mut ready)?;
    let restored = pod.start_with("c", special).with_context(|| ready);
    registry.kill().and_then(|()| registry.wait().map(drop))?;
    restored
}

/// The last number that a counting container has written.
fn counted(container: &Ctr<'_>) -> Result<u64> {
    let log = container
        .cri
        .host
        .node()
        .read(format!("{BUNDLES}/{}/rootfs/count", container.id))?;
    let mut last = 0;
    for line in log.lines() {
        let number: u64 = line.parse().with_context(|| format!("{line:?}"))?;
        // The files are copied before the processes are dumped.
        ensure!(number > last, "{number} after {last}");
        last = number;
    }
    Ok(last)
}

fn beyond(container: &Ctr<'_>, number: u64) -> Result<u64> {
    wait_for(&format!("more than {number}"), LIMIT, || {
        let now = counted(container).unwrap_or(0);
        Ok((now > number).then_some(now))
    })
    .with_context(|| format!("status {:?}", container.status()))
}

/// Names in the archive, CRIU's own left out.
fn names(cri: Cri<'_>) -> Result<String> {
    let listed = cri.host.node().run(&["tar", "-tf", ARCHIVE])?.stdout;
    let mut names: Vec<&str> = listed
        .lines()
        .filter(|name| !name.starts_with("checkpoint/"))
        .collect();
    names.sort_unstable();
    ensure!(
        listed.contains("checkpoint/inventory.img"),
        "no processes in the archive"
    );
    Ok(names.join(" "))
}

/// Names the image by its digest too, as it would be if it had been pulled.
fn pull(cri: Cri<'_>) -> Result<()> {
    let node = cri.host.node();
    let ctr = ["ctr", "--namespace", "k8s.io", "images"];
    let list = node.run(&[&ctr[..], &["list"]].concat())?.stdout;
    let row = list
        .lines()
        .find(|row| row.starts_with(IMAGE))
        .context("no image")?;
    let digest = row.split_whitespace().nth(2).context("no digest")?;
    let (name, _) = IMAGE.rsplit_once(':').context("no tag")?;
    let named = format!("{name}@{digest}");
    node.run(&[&ctr[..], &["tag", "--force", IMAGE, &named]].concat())?;
    wait_for("the image by its digest", LIMIT, || {
        let status = cri.call("ImageStatus", &json!({ "image": { "image": IMAGE } }))?;
        Ok(status["image"]["repoDigests"][0].is_string().then_some(()))
    })
}

/// The numbers in the log of container `c`, each once and in order, as soon as this one is there.
fn written(pod: &Pod<'_>, number: u64) -> Result<Vec<u64>> {
    let log = pod.logs("c", &format!("stdout F {number}\n"))?;
    let written = numbers(log.lines().map(|line| line.trim_start_matches("stdout F ")))?;
    let is_next = written.windows(2).all(|pair| pair[1] == pair[0] + 1);
    ensure!(is_next, "{written:?}");
    Ok(written)
}

fn plain(cri: Cri<'_>) -> Result<String> {
    pull(cri)?;
    let pod = cri.pod("pod")?;
    let container = pod.start("c", COUNT)?;
    let before = beyond(&container, 3)?;
    checkpoint(&container)?;
    let seen = names(cri)?;
    let reached = beyond(&container, before + 2).context("after the checkpoint")?;
    let state = container.state()?;
    let of_source = written(&pod, reached)?;
    let last = of_source[of_source.len() - 1];
    ensure!(of_source[0] == 1, "{of_source:?}");
    pod.remove(&[&container])?;
    let other = cri.pod("other")?;
    let copy = restore(&other, &json!({ "image": { "image": ARCHIVE } }))?;
    let reached = beyond(&copy, last).context("after the restore")?;
    // What the source had written is in its own log.
    let first = written(&other, reached)?[0];
    ensure!(first >= before && first <= last, "{first} of {before} to {last}");
    let shims = other.shims().len();
    let exec = copy.exec("echo here")?;
    copy.stop(1)?;
    let how = copy.ended()?;
    other.remove(&[&copy])?;
    std::fs::remove_file(cri.host.node().path(ARCHIVE))?;
    Ok(format!(
        "{state}\n{seen}\ncontinues in another pod, {shims} shim, {exec}, ended {how}"
    ))
}

/// The containers of a pod may share its PID namespace, where a copy has the ids that it had.
fn shared_ids(cri: Cri<'_>) -> Result<String> {
    let shared = json!({ "pid": "POD" });
    pull(cri)?;
    let node = cri.host.node();
    let id_of = |container: &Ctr<'_>| {
        let pid = node.read(format!("{BUNDLES}/{}/init.pid", container.id))?;
        let status = node.run(&["cat", &format!("/proc/{pid}/status")])?.stdout;
        let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        let id = ids.and_then(|ids| ids.split_whitespace().last());
        Ok::<_, anyhow::Error>(id.context("no id")?.to_owned())
    };
    let inside = |pod: &Pod<'_>, script: &str| {
        let pause = node.read(format!("{BUNDLES}/{}/init.pid", pod.id))?;
        node.run(&["nsenter", "--target", &pause, "--pid", "sh", "-c", script])
    };
    let pod = cri.pod_with("pod", &shared)?;
    // Far from those of what makes a pod's containers.
    inside(&pod, "echo 20000 >/proc/sys/kernel/ns_last_pid")?;
    let container = pod.start("c", COUNT)?;
    let id = id_of(&container)?;
    ensure!(id.parse::<u32>()? > 20_000, "{id}");
    beyond(&container, 3)?;
    checkpoint(&container)?;
    let reached = beyond(&container, 0)?;
    pod.remove(&[&container])?;
    let other = cri.pod_with("other", &shared)?;
    let take = format!(
        "for _ in $(seq 100); do
             echo $(({id} - 1)) >/proc/sys/kernel/ns_last_pid
             sleep 1000 >/dev/null 2>&1 &
             [ $! -eq {id} ] && exit
             kill $!
         done
         exit 1"
    );
    inside(&other, &take)?;
    let archive = json!({ "image": { "image": ARCHIVE } });
    let refused = failure(restore(&other, &archive).map(drop))?;
    other.remove(&[])?;
    let other = cri.pod_with("third", &shared)?;
    let copy = restore(&other, &archive)?;
    beyond(&copy, reached)?;
    ensure!(id_of(&copy)? == id, "it has another id");
    other.remove(&[&copy])?;
    std::fs::remove_file(node.path(ARCHIVE))?;
    ensure!(refused.contains("FIRN-PID-TAKEN"), "{refused}");
    Ok("refused: FIRN-PID-TAKEN, then it continues".to_owned())
}

/// Whoever may make a pod could restore an image of theirs.
fn off(cri: Cri<'_>) -> Result<String> {
    pull(cri)?;
    let pod = cri.pod("pod")?;
    let container = pod.start("c", COUNT)?;
    beyond(&container, 3)?;
    checkpoint(&container)?;
    pod.remove(&[&container])?;
    let other = cri.pod("other")?;
    let output = failure(restore_as_configured(&other, &json!({ "image": { "image": ARCHIVE } })).map(drop))?;
    other.remove(&[])?;
    std::fs::remove_file(cri.host.node().path(ARCHIVE))?;
    ensure!(output.contains("hint: cri = true under [restore]"), "{output}");
    Ok(output)
}

fn gpu(cri: Cri<'_>) -> Result<String> {
    pull(cri)?;
    let counter = [
        "/bin/gpu-counter",
        "--out",
        LOG,
        "--interval-ms",
        "50",
        "--mib",
        "8",
    ];
    let pod = cri.pod("pod")?;
    let container = pod.start_with(
        "c",
        &json!({ "command": counter, "CDIDevices": [{ "name": "nvidia.com/gpu=0" }] }),
    )?;
    let before = computes(&container, 3)?;
    checkpoint(&container)?;
    let seen = names(cri)?;
    computes(&container, before + 2).context("after the checkpoint")?;
    pod.remove(&[&container])?;
    let other = cri.pod("other")?;
    let copy = restore(
        &other,
        &json!({
            "image": { "image": ARCHIVE },
            "CDIDevices": [{ "name": "nvidia.com/gpu=1" }],
        }),
    )?;
    computes(&copy, before + 2).context("after the restore")?;
    let memory = cri.host.gpu_memory()?;
    let gpus = cri.host.uuids();
    ensure!(gpus == [1, 2].map(|number| SimGpu::h200(number).uuid), "{gpus:?}");
    let used: Vec<usize> = (1..)
        .zip(memory)
        .filter_map(|(number, mib)| (mib > 0).then_some(number))
        .collect();
    other.remove(&[&copy])?;
    std::fs::remove_file(cri.host.node().path(ARCHIVE))?;
    Ok(format!(
        "{seen}\ncontinues in another pod on GPU {}",
        used.iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(", ")
    ))
}

/// Waits until the counter has gone further than this, every element of its memory right.
pub fn computes(container: &Ctr<'_>, iteration: u64) -> Result<u64> {
    let log = format!("{BUNDLES}/{}/rootfs{LOG}", container.id);
    wait_for(&format!("iteration {iteration}"), LIMIT, || {
        let lines = Lines::parse(&container.cri.host.node().read(&log).unwrap_or_default());
        if let Some(fault) = lines.fault_if_carried(1) {
            bail!("{fault}");
        }
        let reached = lines.reached(1);
        Ok((reached > iteration).then_some(reached))
    })
    .with_context(|| format!("status {:?}", container.status()))
}

fn none(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let container = pod.start("c", COUNT)?;
    let output = failure(checkpoint(&container))?;
    pod.remove(&[&container])?;
    Ok(output)
}
