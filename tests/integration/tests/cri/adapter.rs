//! `firn cri-pods`: CheckpointPod and RestorePod of CRI in front of a containerd that has neither.

use std::process::Child;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{LOG, crictl, failure};
use firn_node::{Image, Suite, wait_for};
use serde_json::{Value, json};

use crate::Point;
use crate::checkpoints::computes;
use crate::client::{CLIENT, Cri, Ctr, Pod, SOCKET, annotated, container, text};
use crate::hosts::Way;
use crate::named::{cold, on_gpu};

pub const POINTS: &[Point] = &[
    point(
        "cri-pods: two containers with GPUs continue, and are restored on each other's GPU",
        "containerd: Unimplemented, Unimplemented; CREATED, CREATED; both continue with their files; no link \
         is left",
        whole,
    ),
    point(
        "cri-pods: a checkpoint whose deadline passes, or whose caller is killed, or that is stopped",
        "deadline, killed, stopped, restarted: all continue, nothing is left",
        given_up,
    ),
    point(
        "cri-pods: what CheckpointPod refuses",
        "InvalidArgument: FIRN-POD, InvalidArgument: FIRN-POD, FailedPrecondition: FIRN-POD, \
         FailedPrecondition: FIRN-NOT-RUNNING, NotFound: FIRN-NO-CONTAINER, InvalidArgument: FIRN-POD, \
         InvalidArgument: FIRN-POD, InvalidArgument: FIRN-POD, FailedPrecondition: FIRN-POD, \
         Aborted: FIRN-GPU-UNSUPPORTED; all continue, nothing is left",
        refused,
    ),
    point(
        "cri-pods: what RestorePod refuses",
        "command: FIRN-POD-MISMATCH, variable: FIRN-POD-MISMATCH, directory: FIRN-POD-MISMATCH, \
         image: FIRN-POD-MISMATCH, user: FIRN-POD-MISMATCH, names: FIRN-POD-MISMATCH, handler: FIRN-POD, \
         place: FIRN-POD; no pod is left; a guessed name: FIRN-RESTORE-FROM",
        mismatches,
    ),
    point(
        "cri-pods: crictl and streams see what they see without it",
        "the same: version, info, pods, ps, images, inspectp, inspect, logs, exec, stats; events continue; \
         a restart of containerd is survived",
        others,
    ),
];

const fn point(name: &'static str, expected: &'static str, scenario: fn(Cri<'_>) -> Result<String>) -> Point {
    Point::new(name, expected, scenario)
        .firn_only()
        .ways(&[Way::Adapter])
        .on(|suite| matches!(suite, Suite::Forky))
}

const LIMIT: Duration = Duration::from_secs(60);
const DIR: &str = "/tmp/pod";
const LINKS: &str = "/run/firn/pods";

/// `firn cri-pods` on a node.
struct Adapter<'h> {
    cri: Cri<'h>,
    running: Child,
}

impl<'h> Adapter<'h> {
    fn start(cri: Cri<'h>) -> Result<Self> {
        let node = cri.host.node();
        let running = node.spawn(&["sh", "-c", "exec firn cri-pods >>/var/log/cri-pods.log 2>&1"])?;
        wait_for("the socket", LIMIT, || {
            Ok(node.path(SOCKET).exists().then_some(()))
        })?;
        let mode = node.run(&["stat", "-c", "%a", SOCKET])?.stdout;
        ensure!(mode == "600\n", "the socket has the mode {mode}");
        Ok(Self { cri, running })
    }

    /// Ends it as systemd does.
    fn stop(mut self) -> Result<()> {
        let node = self.cri.host.node();
        node.run(&["sh", "-c", "kill -TERM $(pidof -s firn)"])?;
        let ended = self.running.wait()?;
        ensure!(
            ended.success(),
            "it ends with {ended}: {}",
            node.read("/var/log/cri-pods.log")?
        );
        ensure!(!node.path(SOCKET).exists(), "its socket is left");
        Ok(())
    }
}

/// Runs a story with the adapter, and shows its log if it fails.
fn adapted(cri: Cri<'_>, story: impl FnOnce() -> Result<String>) -> Result<String> {
    let adapter = Adapter::start(cri)?;
    let done = story().with_context(|| cri.host.node().read("/var/log/cri-pods.log").unwrap_or_default())?;
    adapter.stop()?;
    Ok(done)
}

/// A counter that has written a file before.
fn counter() -> Value {
    let count = format!("echo text >/written; exec /bin/gpu-counter --out {LOG} --interval-ms 20 --mib 8");
    json!(["sh", "-c", count])
}

fn on(gpu: u32) -> Value {
    on_gpu(gpu, &counter())
}

/// Two counters on a GPU each.
struct Two<'h> {
    pod: Pod<'h>,
    containers: [Ctr<'h>; 2],
}

impl<'h> Two<'h> {
    fn begin(cri: Cri<'h>) -> Result<Self> {
        let pod = cri.pod_annotated("two", &json!({}))?;
        let containers = [pod.start_with("a", &on(0))?, pod.start_with("b", &on(1))?];
        let two = Self { pod, containers };
        two.go_on()?;
        Ok(two)
    }

    fn ids(&self) -> [&str; 2] {
        [&self.containers[0].id, &self.containers[1].id]
    }

    /// What CheckpointPod is called with.
    fn request(&self) -> Value {
        json!({ "podSandboxId": self.pod.id, "outputPath": DIR, "containerIds": self.ids() })
    }

    fn checkpoint(&self) -> Result<()> {
        empty(self.pod.cri)?;
        self.pod.cri.call("CheckpointPod", &self.request()).map(drop)
    }

    /// Returns how far both are.
    fn go_on(&self) -> Result<u64> {
        let mut reached = u64::MAX;
        for container in &self.containers {
            let now = computes(container, 0)?;
            reached = reached.min(computes(container, now + 3)?);
        }
        Ok(reached)
    }

    fn remove(self) -> Result<()> {
        let [a, b] = &self.containers;
        self.pod.remove(&[a, b])
    }
}

/// The directory of a checkpoint, as the kubelet makes it.
fn empty(cri: Cri<'_>) -> Result<()> {
    let make = format!("rm -rf {DIR} && mkdir -m 700 {DIR}");
    cri.host.node().run(&["sh", "-c", &make]).map(drop)
}

fn nothing_left(cri: Cri<'_>) -> Result<()> {
    let found = cri.host.node().run(&["find", DIR, "-mindepth", "1"])?.stdout;
    ensure!(found.is_empty(), "left are {found}");
    Ok(())
}

/// The request for a copy of the pod on each other's GPU.
fn copies(special: impl Fn(&str, u32) -> Value) -> (Value, Value) {
    let config = annotated("copies", &json!({}));
    let containers = [("a", 1), ("b", 0)].map(|(name, gpu)| container(&config, name, &special(name, gpu)));
    let request = json!({
        "checkpointPath": DIR, "config": config, "runtimeHandler": Way::Adapter.handler(),
        "containerConfigs": containers,
    });
    (config, request)
}

fn whole(cri: Cri<'_>) -> Result<String> {
    let direct = Cri {
        way: Way::Path,
        ..cri
    };
    let mut codes = Vec::new();
    for call in ["CheckpointPod", "RestorePod"] {
        codes.push(code(&failure(direct.call(call, &json!({})))?));
    }
    let adapter = Adapter::start(cri)?;
    let two = Two::begin(cri)?;
    let before = two.go_on()?;
    two.checkpoint()?;
    two.go_on()?;
    two.remove()?;

    let (config, request) = copies(|_, gpu| on(gpu));
    let answer = cri.call("RestorePod", &request)?;
    let pod = cri.found(text(&answer["podSandboxId"])?, config);
    let mut copies = Vec::new();
    for (restored, name) in answer["restoredContainers"]
        .as_array()
        .context("none")?
        .iter()
        .zip(["a", "b"])
    {
        ensure!(restored["name"] == name, "{restored}");
        copies.push(Ctr {
            cri,
            id: text(&restored["containerId"])?,
        });
    }
    let mut states = Vec::new();
    for copy in &copies {
        states.push(copy.state()?.replace("CONTAINER_", ""));
        ensure!(copy.status()?["startedAt"] == "0", "it was started");
    }
    let used = || -> Result<Vec<bool>> { Ok(cri.host.gpu_memory()?.iter().map(|mib| *mib > 0).collect()) };
    ensure!(!used()?.contains(&true), "a process runs");
    let name = expect_own(cri)?;
    for (copy, gpus) in copies.iter().zip([[false, true], [true, true]]) {
        copy.start()?;
        // What the log of a process has that began again is a fault.
        let reached = computes(copy, before)?;
        computes(copy, reached + 3)?;
        let written = copy.exec("cat /written")?;
        ensure!(written.contains("text"), "the written file has {written:?}");
        ensure!(used()? == gpus, "GPUs in use: {:?}", used()?);
    }
    expect_used(cri, &name)?;
    pod.remove(&copies.iter().collect::<Vec<_>>())?;
    adapter.stop()?;
    // What is stale goes when it starts.
    Adapter::start(cri)?.stop()?;
    let left = cri.host.node().run(&["ls", "-A", LINKS])?.stdout;
    ensure!(left.is_empty(), "links are left: {left}");
    cri.host.node().run(&["rm", "-r", DIR])?;
    Ok(format!(
        "containerd: {}; {}; both continue with their files; no link is left",
        codes.join(", "),
        states.join(", ")
    ))
}

/// The name by which the pod's containers find their checkpoints: it counts for no other pod.
fn expect_own(cri: Cri<'_>) -> Result<String> {
    let name = cri.host.node().run(&["ls", LINKS])?.stdout.trim().to_owned();
    // Somebody who has read the annotation.
    let known = json!({ "firn.dev/restore-from": format!("pod:{name}") });
    let other = cri.pod_annotated("other", &known)?;
    let code = crate::named::refused_as(&other, "a", &on(1))?;
    ensure!(code == "FIRN-RESTORE-FROM", "another pod: {code}");
    Ok(name)
}

/// Nothing is left of that name when the containers are started, and nobody has logged it.
fn expect_used(cri: Cri<'_>, name: &str) -> Result<()> {
    let node = cri.host.node();
    let links = node.run(&["ls", &format!("{LINKS}/{name}")])?.stdout;
    ensure!(links.is_empty(), "links of started containers: {links}");
    let log = node.read("/var/log/containerd.log")?;
    ensure!(
        log.contains("is restored from a pod's checkpoint") && !log.contains(&format!("{LINKS}/{name}")),
        "the log has the name {name}"
    );
    Ok(())
}

/// Without what follows the code of gRPC.
fn code(output: &str) -> String {
    output.split(':').next().unwrap_or_default().to_owned()
}

/// The codes of gRPC and of firn.
fn codes(output: &str) -> Result<String> {
    let own = output.split([' ', '\n']).find(|word| word.starts_with("FIRN-"));
    let own = own.with_context(|| output.to_owned())?.trim_end_matches(':');
    Ok(format!("{}: {own}", code(output)))
}

/// A checkpoint whose dump of the second container never ends.
fn given_up(cri: Cri<'_>) -> Result<String> {
    let node = cri.host.node();
    let first = Adapter::start(cri)?;
    let two = Two::begin(cri)?;
    first.stop()?;
    let hangs = format!(
        "#!/bin/sh\ncase \"$*\" in *' checkpoint '*{}*) >/tmp/hangs; exec sleep 1000;; esac\n\
         exec /usr/sbin/runc \"$@\"\n",
        two.ids()[1]
    );
    let mut seen = Vec::new();
    for how in ["deadline", "killed", "stopped", "restarted"] {
        empty(cri)?;
        cri.host.replace_runc(&hangs)?;
        give_up(cri, &two, how).with_context(|| how.to_owned())?;
        node.run(&["rm", "/tmp/hangs", "/usr/local/sbin/runc"])?;
        seen.push(how);
    }
    let last = Adapter::start(cri)?;
    // The same containers can be checkpointed.
    two.checkpoint()?;
    two.go_on()?;
    two.remove()?;
    last.stop()?;
    node.run(&["rm", "-r", DIR])?;
    Ok(format!("{}: all continue, nothing is left", seen.join(", ")))
}

fn give_up(cri: Cri<'_>, two: &Two<'_>, how: &str) -> Result<()> {
    let node = cri.host.node();
    let adapter = Adapter::start(cri)?;
    if how == "deadline" {
        let output = failure(cri.call_within("5s", "CheckpointPod", &two.request()))?;
        ensure!(code(&output) == "DeadlineExceeded", "{output}");
    }
    let call = format!(
        "exec env {} {CLIENT} CheckpointPod <<< '{}'",
        cri.endpoint(),
        two.request()
    );
    let client = match how {
        "deadline" => None,
        _ => Some(node.spawn(&["bash", "-c", &call])?),
    };
    let begun = || Ok(node.path("/tmp/hangs").exists().then_some(()));
    wait_for("the dump", LIMIT, begun)?;
    let last = match how {
        "stopped" => {
            // It has ended when the pod continues.
            adapter.stop()?;
            nothing_left(cri)?;
            None
        }
        "killed" => {
            node.run(&["sh", "-c", "kill -KILL $(pidof cri-client)"])?;
            Some(adapter)
        }
        "restarted" => {
            // Nobody gets the shim's answer any more.
            node.restart_containerd()?;
            Some(adapter)
        }
        _ => Some(adapter),
    };
    if let Some(mut client) = client {
        ensure!(!client.wait()?.success(), "the client has succeeded");
    }
    two.go_on()?;
    wait_for("an empty directory", LIMIT, || Ok(nothing_left(cri).ok()))?;
    last.map_or(Ok(()), Adapter::stop)
}

fn refused(cri: Cri<'_>) -> Result<String> {
    adapted(cri, || {
        let two = Two::begin(cri)?;
        let other = cri.pod_annotated("other", &json!({}))?;
        let ended = two.pod.start("c", "exit 0")?;
        ended.ended()?;
        let [a, b] = two.ids();
        let mut seen = Vec::new();
        for (deadline, change) in [
            ("2m", json!({ "containerIds": [] })),
            ("2m", json!({ "containerIds": [a, b, a] })),
            ("2m", json!({ "containerIds": [a] })),
            ("2m", json!({ "containerIds": [a, b, ended.id] })),
            ("2m", json!({ "podSandboxId": a })),
            ("2m", json!({ "options": { "x": "y" } })),
            ("2m", json!({ "outputPath": "tmp/pod" })),
            ("0", json!({})),
            ("2m", json!({ "outputPath": "/etc" })),
        ] {
            empty(cri)?;
            let mut request = two.request();
            for (key, value) in change.as_object().context("no change")? {
                request[key] = value.clone();
            }
            let output = failure(cri.call_within(deadline, "CheckpointPod", &request))?;
            seen.push(codes(&output).with_context(|| change.to_string())?);
            nothing_left(cri).with_context(|| change.to_string())?;
        }
        cri.host.fault(&[
            "--call",
            "checkpoint",
            "--error",
            "CUDA_ERROR_NOT_SUPPORTED",
            "--times",
            "1",
        ])?;
        let output = failure(two.checkpoint())?;
        cri.host.no_faults()?;
        seen.push(codes(&output)?);
        nothing_left(cri)?;
        two.go_on()?;
        other.remove(&[])?;
        two.remove()?;
        cri.host.node().run(&["rm", "-r", DIR])?;
        Ok(format!("{}; all continue, nothing is left", seen.join(", ")))
    })
}

fn mismatches(cri: Cri<'_>) -> Result<String> {
    adapted(cri, || {
        let node = cri.host.node();
        let other = Image::new("localhost/firn-other:latest").command(&["true"]);
        other.import_into(node, "k8s.io")?;
        let two = Two::begin(cri)?;
        two.checkpoint()?;
        two.remove()?;
        let changes: [(&str, Value); 6] = [
            ("command", json!({ "command": cold() })),
            ("variable", json!({ "envs": [{ "key": "A", "value": "Yg==" }] })),
            ("directory", json!({ "workingDir": "/tmp" })),
            ("image", json!({ "image": { "image": other.name() } })),
            (
                "user",
                json!({ "linux": { "securityContext": { "runAsUser": { "value": 7 } } } }),
            ),
            ("names", json!({ "metadata": { "name": "c" } })),
        ];
        let mut requests = Vec::new();
        for (what, change) in &changes {
            let (config, mut request) = copies(|_, gpu| on(gpu));
            let mut special = on(0);
            for (key, value) in change.as_object().context("no change")? {
                special[key] = value.clone();
            }
            request["containerConfigs"][1] = container(&config, "b", &special);
            requests.push((*what, request));
        }
        let mut handler = copies(|_, gpu| on(gpu)).1;
        handler["runtimeHandler"] = json!("runc");
        let mut place = copies(|_, gpu| on(gpu)).1;
        place["checkpointPath"] = json!("/etc");
        requests.extend([("handler", handler), ("place", place)]);
        let mut seen = Vec::new();
        for (what, request) in requests {
            let output = failure(cri.call("RestorePod", &request)).context(what)?;
            let codes = codes(&output).context(what)?;
            ensure!(codes.starts_with("FailedPrecondition: "), "{what}: {output}");
            seen.push(format!("{what}: {}", codes.split(' ').nth(1).unwrap_or_default()));
            let pods = cri.call("ListPodSandbox", &json!({}))?;
            ensure!(pods["items"] == json!([]), "{what}: left are {pods}");
        }
        let guessed = json!({ "firn.dev/restore-from": format!("pod:{}", "0".repeat(32)) });
        let guess = crate::named::refused(cri, &guessed, &on(0))?;
        node.run(&["rm", "-r", DIR])?;
        Ok(format!(
            "{}; no pod is left; a guessed name: {guess}",
            seen.join(", ")
        ))
    })
}

/// The commands of crictl whose output is compared, with the pod and the container as P and C.
const COMMANDS: [(&str, &str); 10] = [
    ("version", "version"),
    ("info", "info"),
    ("pods", "pods -o json"),
    ("ps", "ps -a -o json"),
    ("images", "images -o json"),
    ("inspectp", "inspectp P"),
    ("inspect", "inspect C"),
    ("logs", "logs --tail 2 C"),
    ("exec", "exec C sh -c 'echo out; exit 3'"),
    ("stats", "stats -o json --id C"),
];

fn others(cri: Cri<'_>) -> Result<String> {
    let node = cri.host.node();
    node.install(crictl()?, "/usr/local/bin/crictl", 0o755)?;
    adapted(cri, || {
        let pod = cri.pod_annotated("one", &json!({}))?;
        let container = pod.start("c", "echo line; exec sleep 1000")?;
        pod.logs("c", "line")?;
        let mut same = Vec::new();
        for (name, command) in COMMANDS {
            let command = command
                .replace(" C", &format!(" {}", container.id))
                .replace(" P", &format!(" {}", pod.id));
            let shown = |socket: &str| {
                let all = format!("crictl --runtime-endpoint unix://{socket} {command}; echo \"code $?\"");
                let all = format!("{{ {all}; }} 2>&1 | sed 's/time=\"[^\"]*\"//'");
                let output = node.run(&["sh", "-c", &all])?.stdout;
                // Of one moment: the times and numbers of statistics.
                let kept = |line: &&str| name != "stats" || line.contains(&container.id);
                Ok::<_, anyhow::Error>(output.lines().filter(kept).collect::<Vec<_>>().join("\n"))
            };
            let (with, without) = (shown(SOCKET)?, shown("/run/containerd/containerd.sock")?);
            ensure!(with == without, "{name}: with it\n{with}\nwithout\n{without}");
            ensure!(
                with.contains("code 0") || name == "exec" || name == "stats",
                "{with}"
            );
            same.push(name);
        }
        let record = format!(
            "exec env {} {CLIENT} GetContainerEvents <<< '{{}}' >/tmp/events",
            cri.endpoint()
        );
        let mut events = node.spawn(&["bash", "-c", &record])?;
        // Events have no beginning that a client sees.
        sleep(Duration::from_millis(500));
        container.stop(1)?;
        wait_for("the event of its end", LIMIT, || {
            let seen = node.read("/tmp/events")?;
            let of_end =
                |line: &str| line.contains(&container.id) && line.contains("CONTAINER_STOPPED_EVENT");
            Ok(seen.lines().any(of_end).then_some(()))
        })?;
        node.restart_containerd()?;
        ensure!(
            !events.wait()?.success(),
            "the stream continues without containerd"
        );
        pod.remove(&[&container])?;
        Ok(format!(
            "the same: {}; events continue; a restart of containerd is survived",
            same.join(", ")
        ))
    })
}
