//! Pods and their containers, from their start to their removal.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::failure;
use firn_node::{Suite, wait_for};
use serde_json::{Value, json};

use crate::cri::Point;
use crate::cri::client::{BUNDLES, Cri, Ctr, Pod};
use crate::cri::hosts::Way;

pub const POINTS: &[Point] = &[
    Point::new(
        "pod: one shim for the sandbox and two containers, nothing left of them",
        "SANDBOX_READY, 1 shim, CONTAINER_RUNNING CONTAINER_RUNNING",
        one_shim,
    )
    .in_every_way(),
    Point::new(
        "pod: a container is replaced by its next attempt",
        "143 Error, then CONTAINER_RUNNING, the same shim",
        next_attempt,
    ),
    Point::new(
        "pod: a network of its own",
        "SANDBOX_READY 10.88.0.2\n0 out \"lo\\n\"",
        own_network,
    )
    .in_every_way(),
    Point::new(
        "pod: processes that all its containers see",
        "ended 0 \"Completed\", left behind 0",
        shared_processes,
    ),
    Point::new("pod: users of its own", "0 100000 65536", own_users).on(Suite::has_cri_user_namespaces),
    Point::new(
        "pod: a restart of containerd under it",
        "SANDBOX_READY CONTAINER_RUNNING 0 out \"here\\n\" err \"\"\nended 7 \"Error\"",
        restart,
    )
    .in_every_way(),
    Point::new(
        "pod: an end that containerd does not see",
        "ended 255 \"Unknown\"",
        end_unseen,
    ),
    Point::new(
        "pod: the end of what holds its namespaces",
        "SANDBOX_NOTREADY CONTAINER_RUNNING",
        end_of_sandbox,
    ),
    Point::new("pod: the end of its shim", "SANDBOX_NOTREADY", end_of_shim).in_every_way(),
    Point::new(
        "handler: one that the node does not have",
        "no runtime for \"nosuch\" is configured",
        no_handler,
    ),
    Point::new(
        "handler: what the kubelet learns of it",
        "\"userNamespaces\":true",
        features,
    )
    // By another type than the stock runtime's, containerd does not ask for it.
    .ways(&[Way::Path, Way::DropIn])
    .on(Suite::has_cri_user_namespaces),
    Point::new(
        "stop: a container that handles the signal, and one that does not",
        "7 \"Error\" at once\n137 \"Error\" after its grace",
        stop,
    ),
    Point::new(
        "exit: code and reason",
        "0 \"Completed\"\n3 \"Error\"\n139 \"Error\"",
        exits,
    ),
    Point::new(
        "start: a program that is not there",
        "\"/nosuch\": stat /nosuch: no such file or directory",
        no_program,
    )
    .in_every_way(),
];

/// Sleeps, and ends when asked to.
pub const SLEEP: &str = "trap 'exit 143' TERM; while :; do sleep 0.05; done";

const LIMIT: Duration = Duration::from_secs(60);

fn one_shim(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let one = pod.start("one", SLEEP)?;
    let two = pod.start("two", SLEEP)?;
    let shims = pod.shims();
    let shim = cri.host.shim_of(&pod.id)?;
    let program = shim.args.first().map_or("", String::as_str);
    ensure!(program == cri.way.program(), "the shim is {program}");
    let root = format!("{}/k8s.io/{}", cri.way.runc_root(), one.id);
    ensure!(
        cri.host.node().path(root).exists(),
        "runc's state is not where the handler's options put it"
    );
    let spec: Value = serde_json::from_str(
        &cri.host
            .node()
            .read(format!("{BUNDLES}/{}/config.json", one.id))?,
    )?;
    let names = [
        "firn.dev/gpu-map",
        "firn.dev/ipc",
        "firn.dev/exec",
        "other.dev/annotation",
    ];
    let passed = names.map(|name| !spec["annotations"][name].is_null());
    let ours = cri.way == Way::Path;
    ensure!(
        passed == [ours, ours, ours, false],
        "annotations of the pod that reached the container: {passed:?}"
    );
    let (_, audit) = cri
        .host
        .firn_shows(&["audit", "--namespace", "k8s.io", &one.id])?;
    let audit = audit.to_string();
    for (name, is_lost) in [("firn.dev/tcp", true), ("firn.dev/ipc", !ours)] {
        let named = audit.contains(&format!("{name} of the pod does not reach it"));
        ensure!(named == is_lost, "{name}: {audit}");
    }
    let seen = format!(
        "{}, {} shim, {} {}",
        pod.state()?,
        shims.len(),
        one.state()?,
        two.state()?
    );
    pod.remove(&[&one, &two])?;
    Ok(seen)
}

fn next_attempt(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let first = pod.start(
        "c",
        "trap 'exit 143' TERM; echo ready; while :; do sleep 0.05; done",
    )?;
    let shims = pod.shims();
    pod.logs("c", "ready")?;
    first.stop(30)?;
    let how = first.ended()?.replace('"', "");
    let second = pod.start_with(
        "c",
        &json!({ "metadata": { "attempt": 1 }, "command": ["sh", "-c", SLEEP] }),
    )?;
    first.remove()?;
    let same = if pod.shims() == shims {
        "the same"
    } else {
        "another"
    };
    let seen = format!("{how}, then {}, {same} shim", second.state()?);
    pod.remove(&[&first, &second])?;
    Ok(seen)
}

fn own_network(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod_with("pod", &json!({ "network": "POD" }))?;
    let container = pod.start("c", SLEEP)?;
    let status = cri.call("PodSandboxStatus", &json!({ "podSandboxId": pod.id }))?;
    let seen = format!(
        "{} {}\n{}",
        pod.state()?,
        status["status"]["network"]["ip"].as_str().unwrap_or_default(),
        container.exec("ls /sys/class/net")?
    );
    pod.remove(&[&container])?;
    Ok(seen)
}

fn shared_processes(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod_with("pod", &json!({ "pid": "POD" }))?;
    let other = pod.start("other", SLEEP)?;
    let left = "sleep 987654 & sleep 987654 & while [ ! -e /end ]; do sleep 0.05; done";
    let container = pod.start("c", left)?;
    let behind = "ps -o args | grep -c '[s]leep 987654'";
    let mut before = String::new();
    // Its own shell names them too.
    wait_for("what it leaves behind", LIMIT, || {
        before = other.exec(behind)?;
        Ok(before.contains("\"3\\n\"").then_some(()))
    })?;
    container.touch("end")?;
    let how = container.ended()?;
    // Its container has ended, and so must they: nobody else would end them.
    wait_for("the end of what it has left", LIMIT, || {
        Ok(other.exec(behind)?.contains("\"0\\n\"").then_some(()))
    })?;
    let seen = format!("before {before}\nended {how}, left behind 0");
    pod.remove(&[&other, &container])?;
    Ok(seen)
}

fn own_users(cri: Cri<'_>) -> Result<String> {
    let ids = json!([{ "hostId": 100_000, "containerId": 0, "length": 65_536 }]);
    let pod = cri.pod_with(
        "pod",
        &json!({ "network": "POD", "usernsOptions": { "mode": "POD", "uids": ids, "gids": ids } }),
    )?;
    let container = pod.start("c", SLEEP)?;
    let seen = container.exec(
        "echo $(cat /proc/self/uid_map); id -u; stat -c %u:%g /bin/busybox; touch /new && stat -c %u /new",
    )?;
    pod.remove(&[&container])?;
    Ok(seen)
}

/// Waits until containerd's CRI services serve again.
fn serves(cri: Cri<'_>) -> Result<()> {
    wait_for("CRI to serve", LIMIT, || {
        Ok(cri.call("ListPodSandbox", &json!({})).ok())
    })
    .map(drop)
}

fn restart(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let container = pod.start("c", "while [ ! -e /end ]; do sleep 0.05; done; exit 7")?;
    cri.host.node().restart_containerd()?;
    serves(cri)?;
    let alive = format!(
        "{} {} {}",
        pod.state()?,
        container.state()?,
        container.exec("echo here")?
    );
    container.touch("end")?;
    let seen = format!("{alive}\nended {}", container.ended()?);
    pod.remove(&[&container])?;
    Ok(seen)
}

fn end_unseen(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let container = pod.start("c", "while [ ! -e /end ]; do sleep 0.05; done; exit 9")?;
    let node = cri.host.node();
    node.kill_containerd()?;
    container.touch("end")?;
    let pid: i32 = node
        .read(format!("{BUNDLES}/{}/init.pid", container.id))?
        .parse()?;
    wait_for("its end", LIMIT, || {
        Ok((!node.processes().iter().any(|process| process.pid == pid)).then_some(()))
    })?;
    node.start_containerd()?;
    serves(cri)?;
    let seen = format!("ended {}", container.ended()?);
    pod.remove(&[&container])?;
    Ok(seen)
}

fn end_of_sandbox(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let container = pod.start("c", SLEEP)?;
    let node = cri.host.node();
    let pid = node.read(format!("{BUNDLES}/{}/init.pid", pod.id))?;
    node.run(&["kill", "-KILL", pid.trim()])?;
    not_ready(&pod)?;
    let seen = format!("{} {}", pod.state()?, container.state()?);
    Ok(format!("{seen}, left {}", pod.remove_and_list(&[&container])?))
}

fn end_of_shim(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let container = pod.start("c", SLEEP)?;
    let shims: Vec<String> = pod.shims().iter().map(ToString::to_string).collect();
    cri.host
        .node()
        .run(&[&["kill".to_owned(), "-KILL".to_owned()][..], &shims].concat())?;
    not_ready(&pod)?;
    let seen = format!("{} {}", pod.state()?, container.ended()?);
    Ok(format!("{seen}, left {}", pod.remove_and_list(&[&container])?))
}

fn not_ready(pod: &Pod<'_>) -> Result<()> {
    wait_for("a pod that is not ready", LIMIT, || {
        Ok((pod.state()? == "SANDBOX_NOTREADY").then_some(()))
    })
}

fn no_handler(cri: Cri<'_>) -> Result<String> {
    let config = json!({ "metadata": { "name": "pod", "namespace": "default", "uid": "uid", "attempt": 0 } });
    let request = json!({ "config": config, "runtimeHandler": "nosuch" });
    failure(cri.call("RunPodSandbox", &request))
}

fn features(cri: Cri<'_>) -> Result<String> {
    let status = cri.call("Status", &json!({}))?;
    let handlers = status["runtimeHandlers"].as_array().context("no handlers")?;
    let own = handlers
        .iter()
        .find(|handler| handler["name"] == cri.way.handler());
    let features = &own.context("the handler is not listed")?["features"];
    Ok(features.to_string())
}

fn stop(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let handles = pod.start(
        "handles",
        "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done",
    )?;
    let ignores = pod.start(
        "ignores",
        "trap '' TERM; echo ready; while :; do sleep 0.05; done",
    )?;
    pod.logs("handles", "ready")?;
    pod.logs("ignores", "ready")?;
    let begun = std::time::Instant::now();
    handles.stop(30)?;
    let took = begun.elapsed();
    ensure!(took < Duration::from_secs(20), "stopped after {took:?}");
    let handled = handles.ended()?;
    let begun = std::time::Instant::now();
    ignores.stop(1)?;
    let took = begun.elapsed();
    ensure!(took > Duration::from_secs(1), "killed after {took:?}");
    let seen = format!("{handled} at once\n{} after its grace", ignores.ended()?);
    pod.remove(&[&handles, &ignores])?;
    Ok(seen)
}

fn exits(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    // The first process of a container gets no signal that it has no handler for, so a child takes it.
    let scripts = ["exit 0", "exit 3", "sh -c 'kill -SEGV $$'; exit $?"];
    let containers: Vec<Ctr<'_>> = scripts
        .iter()
        .enumerate()
        .map(|(number, script)| pod.start(&format!("c{number}"), script))
        .collect::<Result<_>>()?;
    let ends: Vec<String> = containers.iter().map(Ctr::ended).collect::<Result<_>>()?;
    pod.remove(&containers.iter().collect::<Vec<_>>())?;
    Ok(ends.join("\n"))
}

fn no_program(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let container = pod.create("c", &json!({ "command": ["/nosuch"] }))?;
    let output = failure(container.start())?;
    let status = container.status()?;
    let seen = format!(
        "{output}\n{} {} {}",
        status["state"], status["exitCode"], status["reason"]
    );
    container.remove()?;
    pod.remove(&[&container])?;
    Ok(seen)
}
