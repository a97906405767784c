//! Checkpoints of all containers of a pod at one moment.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{Built, LOG, failure};
use firn_node::{Image, wait_for};
use serde_json::{Value, json};

use crate::cri::Point;
use crate::cri::checkpoints::computes;
use crate::cri::client::{Cri, Ctr, Pod};
use crate::cri::named::{FROM, allowed, cold, on_gpu};

/// Found before the node's own.
const CRIU: &str = "/usr/local/sbin/criu";

pub const POINTS: &[Point] = &[
    Point::new(
        "pod checkpoint: two containers with GPUs and one without stand still at one moment",
        "at one moment; all continue; copies on each other's GPU continue with the files",
        whole,
    )
    .firn_only(),
    Point::new(
        "pod checkpoint: one that cannot be checkpointed keeps all from it",
        "lock: FIRN-GPU-UNSUPPORTED; checkpoint: FIRN-GPU-DRIVER; dump of c: FIRN-POD; all continue, \
         nothing is left",
        one_fails,
    )
    .firn_only(),
    Point::new(
        "pod checkpoint: hooks that need the other container",
        "prepare resumed, prepare resumed",
        hooks,
    )
    .firn_only(),
    Point::new(
        "pod checkpoint: one whose GPU state does not come back at first",
        "FIRN-GPU-SUSPENDED, both images are complete, both continue",
        suspended,
    )
    .firn_only(),
    Point::new(
        "pod checkpoint: the CRIU of the container without GPU stands still",
        "FIRN-POD, all continue, nothing is left",
        stopped_criu,
    )
    .firn_only(),
    Point::new(
        "pod checkpoint: the command is interrupted",
        "FIRN-INTERRUPTED, all continue, nothing is left",
        interrupted,
    )
    .firn_only(),
    Point::new(
        "pod checkpoint: what names no pod, and a place that is taken",
        "FIRN-POD, FIRN-NO-CONTAINER, FIRN-POD",
        wrong,
    )
    .firn_only(),
];

const LIMIT: Duration = Duration::from_secs(60);

/// Counts, and notes the time of each number in seconds: what it has noted shows when it ran. In a copy CRIU
/// lets this clock continue where it was.
const CLOCK: &str = "n=0; while :; do n=$((n+1)); read -r now rest </proc/uptime; echo $n $now >>/clock; \
    sleep 0.02; done";

/// A pod with two counters on a GPU each, and a container that has none.
struct Three<'h> {
    pod: Pod<'h>,
    containers: Vec<Ctr<'h>>,
}

impl<'h> Three<'h> {
    fn begin(cri: Cri<'h>) -> Result<Self> {
        let counter = format!(
            "echo text >/written; {CLOCK} & exec /bin/gpu-counter --out {LOG} --interval-ms 20 --mib 8"
        );
        let pod = cri.pod_annotated("three", &json!({}))?;
        let counter = json!(["sh", "-c", counter]);
        let mut containers = Vec::new();
        for (gpu, name) in (0..).zip(["a", "b"]) {
            containers.push(pod.start_with(name, &on_gpu(gpu, &counter))?);
        }
        containers.push(pod.start("c", CLOCK)?);
        let three = Self { pod, containers };
        three.go_on(3)?;
        Ok(three)
    }

    /// Waits until every container has gone on.
    fn go_on(&self, by: u64) -> Result<()> {
        for counter in &self.containers[..2] {
            let now = computes(counter, 0)?;
            computes(counter, now + by)?;
        }
        for container in &self.containers {
            let before = clock(container)?.len();
            wait_for("the clock", LIMIT, || {
                Ok((clock(container)?.len() > before).then_some(()))
            })?;
        }
        Ok(())
    }

    /// The longest time in which none of them ran.
    fn stood_still(&self) -> Result<(f64, f64)> {
        let mut common = vec![(f64::MIN, f64::MAX)];
        for container in &self.containers {
            let times = clock(container)?;
            let gaps: Vec<(f64, f64)> = times.windows(2).map(|pair| (pair[0], pair[1])).collect();
            let of_both = |one: &(f64, f64), other: &(f64, f64)| (one.0.max(other.0), one.1.min(other.1));
            let pairs = common
                .iter()
                .flat_map(|one| gaps.iter().map(move |other| of_both(one, other)));
            common = pairs.filter(|(stopped, went_on)| stopped < went_on).collect();
        }
        let longest = common
            .into_iter()
            .max_by(|a, b| (a.1 - a.0).total_cmp(&(b.1 - b.0)));
        longest.context("one of them ran at every time")
    }

    fn remove(self) -> Result<()> {
        self.pod.remove(&self.containers.iter().collect::<Vec<_>>())
    }
}

/// The times that it has noted. A file that is older or newer than the memory of its process lacks a number
/// or has one twice.
fn clock(container: &Ctr<'_>) -> Result<Vec<f64>> {
    let noted = container.exec("cat /clock")?;
    // The shell shows the output in quotes.
    let words: Vec<&str> = noted
        .split(|c: char| !c.is_ascii_digit() && c != '.')
        .filter(|word| !word.is_empty())
        .collect();
    let begin = words
        .iter()
        .position(|word| word.contains('.'))
        .context(noted.clone())?;
    let pairs = words[begin.saturating_sub(1)..].chunks_exact(2);
    let mut times = Vec::new();
    for (number, pair) in (1..).zip(pairs) {
        ensure!(
            pair[0] == format!("{number}"),
            "{} in the place of {number}",
            pair[0]
        );
        times.push(pair[1].parse().with_context(|| format!("{pair:?}"))?);
    }
    Ok(times)
}

fn checkpoint(cri: Cri<'_>, pod: &str, dir: &str) -> Result<String> {
    let done = cri.host.node().run(&["firn", "checkpoint", "--pod", pod, dir])?;
    Ok(done.stdout)
}

/// The same, by the object that a program reads.
fn images(cri: Cri<'_>, pod: &str, dir: &str) -> Result<Value> {
    let done = cri.host.firn(&["checkpoint", "--pod", pod, dir])?;
    Ok(done["images"].clone())
}

fn whole(cri: Cri<'_>) -> Result<String> {
    allowed(cri, || {
        let node = cri.host.node();
        let dir = format!("{FROM}/default");
        node.run(&["mkdir", "-p", FROM])?;
        let three = Three::begin(cri)?;
        let shown = checkpoint(cri, "default/three", &dir)?;
        ensure!(shown.contains("three continues, after"), "{shown}");
        three.go_on(3)?;
        let (stopped, went_on) = three.stood_still()?;
        ensure!(
            went_on - stopped > 0.1,
            "they stood still from {stopped} to {went_on}"
        );
        let mode = node.run(&["stat", "-c", "%a", &dir])?.stdout;
        ensure!(mode == "700\n", "the directory has the mode {mode}");
        three.remove()?;

        let annotations = json!({ "firn.dev/restore-from": "a=a,b=b,c=c" });
        let copies = cri.pod_annotated("copies", &annotations)?;
        let a = copies.start_with("a", &on_gpu(1, &cold()))?;
        let b = copies.start_with("b", &on_gpu(0, &cold()))?;
        let c = copies.start_with("c", &json!({ "command": cold() }))?;
        for counter in [&a, &b] {
            let reached = computes(counter, 0)?;
            computes(counter, reached + 3)?;
            let written = counter.exec("cat /written")?;
            ensure!(written.contains("text"), "the written file has {written:?}");
        }
        for copy in [&a, &b, &c] {
            let before = clock(copy)?;
            wait_for("the clock", LIMIT, || {
                Ok((clock(copy)?.len() > before.len()).then_some(()))
            })?;
            ensure!(before[0] < stopped, "a copy begins at {}", before[0]);
        }
        copies.remove(&[&a, &b, &c])?;
        Ok("at one moment; all continue; copies on each other's GPU continue with the files".to_owned())
    })
}

/// A GPU's container fails in each step of the driver.
fn one_fails(cri: Cri<'_>) -> Result<String> {
    let node = cri.host.node();
    let three = Three::begin(cri)?;
    let mut codes = Vec::new();
    for (call, error) in [
        ("lock", "CUDA_ERROR_NOT_SUPPORTED"),
        ("checkpoint", "CUDA_ERROR_UNKNOWN"),
    ] {
        cri.host
            .fault(&["--call", call, "--error", error, "--times", "1"])?;
        let output = failure(checkpoint(cri, "default/three", "/tmp/pod"))?;
        cri.host.no_faults()?;
        codes.push(format!("{call}: {}", code(&output)?));
        ensure!(!output.contains("another container of its pod"), "{output}");
        ensure!(!node.path("/tmp/pod").exists(), "{call}: something is left");
        three.go_on(3)?;
    }
    // The runtime fails to dump the container without GPU.
    let id = &three.containers[2].id;
    let fails = format!(
        "#!/bin/sh\ncase \"$*\" in *' checkpoint '*{id}*) echo 'no dump' >&2; exit 1;; esac\n\
         exec /usr/sbin/runc \"$@\"\n"
    );
    cri.host.replace_runc(&fails)?;
    let output = failure(checkpoint(cri, "default/three", "/tmp/pod"));
    node.run(&["rm", "/usr/local/sbin/runc"])?;
    let output = output?;
    ensure!(
        output.contains(&**id),
        "the error names another container: {output}"
    );
    ensure!(!node.path("/tmp/pod").exists(), "something is left");
    codes.push(format!("dump of c: {}", code(&output)?));
    three.go_on(3)?;
    three.remove()?;
    Ok(format!("{}; all continue, nothing is left", codes.join("; ")))
}

/// The first code in an error.
fn code(output: &str) -> Result<String> {
    let code = output.split(' ').find(|word| word.starts_with("FIRN-"));
    Ok(code.context(output.to_owned())?.trim_end_matches(':').to_owned())
}

/// Each container's hook waits until the other's has been called in the same moment of the checkpoint.
fn hooks(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod_annotated("hooks", &json!({}))?;
    let shared = "/tmp/shared";
    cri.host.node().run(&["mkdir", "-p", shared])?;
    // Hooks of pods are in labels of their images.
    let image = Image::new("localhost/firn-hooks:latest")
        .program(Built::for_tests()?.program("gpu-counter"), "/bin/gpu-counter")
        .label("firn.dev/hook-prepare", "exec: /hook")
        .label("firn.dev/hook-resumed", "exec: /hook");
    image.import_into(cri.host.node(), "k8s.io")?;
    let script = format!(
        "cat >/hook <<'E'\n#!/bin/sh\necho $FIRN_HOOK >>/calls; : >/shared/$FIRN_HOOK-$NAME\n\
         until [ -e /shared/$FIRN_HOOK-$OTHER ]; do sleep 0.05; done\nE\n\
         chmod +x /hook; exec /bin/gpu-counter --out {LOG} --interval-ms 20 --mib 8"
    );
    let mut containers = Vec::new();
    // Values of variables are bytes in CRI, and those are base64 in JSON: a and b.
    for (gpu, name, value, other) in [(0, "a", "YQ==", "Yg=="), (1, "b", "Yg==", "YQ==")] {
        let mut special = on_gpu(gpu, &json!(["sh", "-c", script]));
        special["mounts"] = json!([{ "containerPath": "/shared", "hostPath": shared }]);
        special["envs"] = json!([{ "key": "NAME", "value": value }, { "key": "OTHER", "value": other }]);
        special["image"] = json!({ "image": image.name() });
        containers.push(pod.start_with(name, &special)?);
    }
    for container in &containers {
        computes(container, 2)?;
    }
    let images = images(cri, "default/hooks", "/tmp/pod")?;
    let wanted = json!({"a": "/tmp/pod/a/checkpoint", "b": "/tmp/pod/b/checkpoint"});
    ensure!(images == wanted, "{images}");
    let mut calls = Vec::new();
    for container in &containers {
        let reached = computes(container, 0)?;
        computes(container, reached + 3)?;
        let noted = container.exec("echo $(cat /calls)")?;
        let noted = noted.split('"').nth(1).context(noted.clone())?;
        calls.push(noted.trim_end_matches("\\n").to_owned());
    }
    cri.host.node().run(&["rm", "-rf", "/tmp/pod", shared])?;
    pod.remove(&containers.iter().collect::<Vec<_>>())?;
    Ok(calls.join(", "))
}

/// The driver does not restore one container's GPU state after the dump, until its client resumes it.
fn suspended(cri: Cri<'_>) -> Result<String> {
    let node = cri.host.node();
    let three = Three::begin(cri)?;
    cri.host
        .fault(&["--call", "restore", "--error", "CUDA_ERROR_NOT_SUPPORTED"])?;
    let output = failure(checkpoint(cri, "default/three", "/tmp/pod"))?;
    cri.host.no_faults()?;
    ensure!(output.contains("is complete"), "{output}");
    for (container, name) in three.containers.iter().zip(["a", "b", "c"]) {
        for part in ["checkpoint/inventory.img", "rootfs-diff.tar"] {
            let path = format!("/tmp/pod/{name}/{part}");
            ensure!(node.path(&path).exists(), "{path} is gone: {output}");
        }
        if name != "c" {
            node.run(&["ctr", "--namespace", "k8s.io", "tasks", "resume", &container.id])?;
        }
    }
    three.go_on(3)?;
    node.run(&["rm", "-r", "/tmp/pod"])?;
    three.remove()?;
    Ok(format!(
        "{}, both images are complete, both continue",
        code(&output)?
    ))
}

/// Stands in for CRIU: that of this container stands still before it has begun.
fn stopping_criu(id: &str) -> String {
    format!(
        "#!/bin/sh
         case $(tr '\\0' ' ' </proc/$PPID/cmdline) in
             *' checkpoint '*{id}*) echo $$ >/tmp/stopped; kill -STOP $$ ;;
         esac
         exec /usr/sbin/criu \"$@\"\n"
    )
}

/// The containers with GPUs do not wait for it without end.
fn stopped_criu(cri: Cri<'_>) -> Result<String> {
    let node = cri.host.node();
    let three = Three::begin(cri)?;
    cri.host.configure("[deadlines]\ncriu-dump = \"8s\"\n")?;
    node.write(CRIU, stopping_criu(&three.containers[2].id))?;
    node.run(&["chmod", "755", CRIU])?;
    let begin = "timeout 90 firn checkpoint --pod default/three /tmp/pod";
    let output = failure(node.run(&["sh", "-c", begin]));
    node.run(&["rm", CRIU])?;
    cri.host.configure("")?;
    let was_stopped = node.path("/tmp/stopped").exists();
    node.run(&[
        "sh",
        "-c",
        "kill -KILL $(cat /tmp/stopped); rm -f /tmp/stopped; true",
    ])?;
    ensure!(was_stopped, "no CRIU was stopped");
    let output = output?;
    three.go_on(3)?;
    let (stopped, went_on) = three.stood_still()?;
    // The deadline, and what the kill of CRIU and the rollback take on a loaded machine.
    ensure!(
        (7.0..45.0).contains(&(went_on - stopped)),
        "they stood still from {stopped} to {went_on}"
    );
    ensure!(!node.path("/tmp/pod").exists(), "something is left");
    three.remove()?;
    Ok(format!("{}, all continue, nothing is left", code(&output)?))
}

/// While the dump of the container without GPU does not end.
fn interrupted(cri: Cri<'_>) -> Result<String> {
    let node = cri.host.node();
    let three = Three::begin(cri)?;
    let id = &three.containers[2].id;
    let hangs = format!(
        "#!/bin/sh\ncase \"$*\" in *' checkpoint '*{id}*) >/tmp/hangs; exec sleep 1000;; esac\n\
         exec /usr/sbin/runc \"$@\"\n"
    );
    cri.host.replace_runc(&hangs)?;
    let running = node.spawn(&["firn", "checkpoint", "--pod", "default/three", "/tmp/pod"])?;
    wait_for("the dump", LIMIT, || {
        Ok(node.path("/tmp/hangs").exists().then_some(()))
    })?;
    node.run(&["sh", "-c", "kill -INT $(pidof -s firn)"])?;
    let output = running.wait_with_output()?;
    node.run(&["rm", "/tmp/hangs", "/usr/local/sbin/runc"])?;
    ensure!(output.status.code() == Some(1), "{output:?}");
    three.go_on(3)?;
    ensure!(!node.path("/tmp/pod").exists(), "something is left");
    three.remove()?;
    let shown = String::from_utf8_lossy(&output.stderr);
    let line = shown.lines().find(|line| line.contains("FIRN-"));
    let code = code(line.context(shown.clone().into_owned())?)?;
    Ok(format!("{code}, all continue, nothing is left"))
}

fn wrong(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod_annotated("one", &json!({}))?;
    let container = pod.start("c", CLOCK)?;
    let node = cri.host.node();
    node.run(&["mkdir", "-p", "/tmp/taken/c"])?;
    let mut codes = Vec::new();
    for (pod, dir) in [
        ("one", "/tmp/new"),
        ("default/other", "/tmp/new"),
        ("default/one", "/tmp/taken"),
    ] {
        let output = failure(checkpoint(cri, pod, dir))?;
        codes.push(code(&output)?);
        ensure!(!node.path("/tmp/new").exists(), "a directory is left");
    }
    node.run(&["rm", "-r", "/tmp/taken"])?;
    pod.remove(&[&container])?;
    Ok(codes.join(", "))
}
