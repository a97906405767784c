//! containerd is killed and started again under running containers: none is lost, nor is what they do
//! meanwhile.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::api::{
    Empty, ExecProcessRequest, PauseRequest, ResumeRequest, StartRequest, StartResponse,
};
use firn_lab::{Container, FIRN, GpuHost, SimGpu, Task, cases, matrix, on};
use firn_node::{Node, Platform, wait_for};

const CONTAINERS: usize = 20;
const RESTARTS: usize = 5;
const LIMIT: Duration = Duration::from_secs(60);

/// Ends with 7 on SIGUSR1.
const SCRIPT: &str = "trap 'exit 7' USR1; while :; do sleep 0.2; done";

/// Has containerd write a line to its log for each event that a shim hands to it.
const TRACE: &str = "[debug]\nlevel = \"trace\"\n";

fn containers_survive_restarts_of_containerd(platform: Platform) -> Result<()> {
    let host = GpuHost::for_test(platform, "restarts", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        host.node().write("/etc/containerd/conf.d/trace.toml", TRACE)?;
        host.node().restart_containerd()?;
        let ids: Vec<String> = (0..CONTAINERS).map(|number| format!("c{number}")).collect();
        let mut running = Vec::new();
        for id in &ids {
            let command = ["sh", "-c", SCRIPT];
            running.push(Container::run(host, id, &["--runtime", FIRN], &command)?);
        }
        let shims = shims(host);
        let pids = pids(&running)?;
        ensure!(shims.len() == CONTAINERS, "shims {shims:?}");
        for round in 0..RESTARTS {
            restart(host, &running, round).with_context(|| format!("restart {round}"))?;
            ensure!(self::shims(host) == shims, "other shims than {shims:?}");
            ensure!(self::pids(&running)? == pids, "other processes than {pids:?}");
        }
        // A containerd that comes back deletes tasks that have ended without it; it hears of their ends all
        // the same.
        host.node().kill_containerd()?;
        let before = heard(host)?.len();
        let (ending, staying) = running.split_at(CONTAINERS / 2);
        for container in ending {
            ends_by_signal(&Task::of(host, container.id())?, "", 10, 7)?;
        }
        host.node().start_containerd()?;
        wait_for("the ends of the meantime", LIMIT, || {
            let reported = heard(host)?.split_off(before);
            let reported = reported.iter().filter(|topic| *topic == "/tasks/exit").count();
            Ok((reported >= ending.len()).then_some(()))
        })?;
        for container in ending {
            container.nothing_left()?;
        }
        for container in staying {
            ensure!(container.status()? == "RUNNING", "{} has ended", container.id());
        }
        for container in running.drain(..CONTAINERS / 2) {
            container.forget()?;
        }
        running.into_iter().try_for_each(Container::remove)?;
        host.idle()
    })
}

/// containerd is killed, an exec of every container ends meanwhile, and containerd hears of all when it is
/// back.
fn restart(host: &GpuHost, running: &[Container<'_>], round: usize) -> Result<()> {
    let exec = format!("x{round}");
    // Added before, ends after: containerd has the start on record and not the end.
    let tasks = running
        .iter()
        .map(|container| Task::of(host, container.id()))
        .collect::<Result<Vec<_>>>()?;
    let begun = heard(host)?.len();
    for (task, container) in tasks.iter().zip(running) {
        start_exec(task, container.id(), &exec).map_err(failed("exec"))?;
    }
    let mut before = 0;
    wait_for("the starts of all execs", LIMIT, || {
        let reported = heard(host)?;
        before = reported.len();
        let starts = reported[begun..]
            .iter()
            .filter(|topic| *topic == "/tasks/exec-started");
        Ok((starts.count() >= CONTAINERS).then_some(()))
    })?;
    host.node().kill_containerd()?;
    for task in &tasks {
        ends_by_signal(task, &exec, 9, 137)?;
    }
    let (one, id) = (&tasks[0], running[0].id());
    start_exec(one, id, &format!("y{round}")).map_err(failed("exec"))?;
    pause_and_resume(one, id).map_err(failed("pause and resume"))?;
    drop(tasks);
    host.node().start_containerd()?;
    let mut last = Vec::new();
    wait_for("the events of the meantime", LIMIT, || {
        last = heard(host)?.split_off(before);
        let exits = last.iter().filter(|topic| *topic == "/tasks/exit").count();
        Ok((exits >= CONTAINERS && last.iter().any(|topic| topic == "/tasks/resumed")).then_some(()))
    })
    .with_context(|| format!("heard {last:?}"))?;
    // An event may be forwarded twice when the connection breaks behind it; nothing else was done meanwhile.
    last.retain(|topic| topic != "/tasks/exit");
    last.dedup();
    let order = ["exec-added", "exec-started", "paused", "resumed"].map(|name| format!("/tasks/{name}"));
    ensure!(last == order, "published in the order {last:?}");
    for container in running {
        ensure!(container.status()? == "RUNNING", "{} has ended", container.id());
        let output = container.exec(&["echo", "here"])?;
        ensure!(output.trim() == "here", "exec in {}: {output:?}", container.id());
    }
    Ok(())
}

/// An exec that sleeps.
fn start_exec(task: &Task, id: &str, exec: &str) -> ttrpc::Result<()> {
    let spec = r#"{"args": ["sleep", "1000"], "cwd": "/", "env": ["PATH=/bin"]}"#;
    let mut request = ExecProcessRequest::new();
    request.id = id.to_owned();
    request.exec_id = exec.to_owned();
    request.spec.mut_or_insert_default().value = spec.as_bytes().to_vec();
    task.call::<Empty>("Exec", &request)?;
    let mut request = StartRequest::new();
    request.id = id.to_owned();
    request.exec_id = exec.to_owned();
    task.call::<StartResponse>("Start", &request).map(drop)
}

fn failed(what: &'static str) -> impl Fn(ttrpc::Error) -> anyhow::Error {
    move |error| anyhow::anyhow!("{what}: {error}")
}

fn pause_and_resume(task: &Task, id: &str) -> ttrpc::Result<()> {
    let mut request = PauseRequest::new();
    request.id = id.to_owned();
    task.call::<Empty>("Pause", &request)?;
    let mut request = ResumeRequest::new();
    request.id = id.to_owned();
    task.call::<Empty>("Resume", &request).map(drop)
}

/// Signals init, or an exec, and waits for its end, without containerd.
fn ends_by_signal(task: &Task, exec: &str, signal: u32, code: u32) -> Result<()> {
    task.kill(exec, signal, false).map_err(failed("kill"))?;
    let ended = task.wait(exec).and_then(|wait| task.end(wait));
    let status = ended.map_err(failed("wait"))?.exit_status;
    ensure!(status == code, "{exec:?} ended with {status}");
    Ok(())
}

/// Topics of the events that containerd has taken from shims.
fn heard(host: &GpuHost) -> Result<Vec<String>> {
    let log = host.node().read(Node::CONTAINERD_LOG)?;
    let forwarded = log.lines().filter(|line| line.contains("event forwarded"));
    let topics = forwarded.filter_map(|line| {
        let topic = line.split_once("topic=")?.1;
        Some(topic.split(' ').next()?.trim_matches('"').to_owned())
    });
    Ok(topics.collect())
}

/// The shims: pid and id.
fn shims(host: &GpuHost) -> Vec<(i32, String)> {
    let shims = host.shims().map(|shim| (shim.pid, shim.args.join(" ")));
    let mut shims: Vec<(i32, String)> = shims.collect();
    shims.sort();
    shims
}

fn pids(running: &[Container<'_>]) -> Result<Vec<i32>> {
    running.iter().map(Container::pid).collect()
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        containers_survive_restarts_of_containerd [TRIXIE, FORKY];
    })
}
