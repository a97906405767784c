//! 1.4: the task service, but for its states, execs, and how containers are made and deleted.

use std::time::Duration;

use anyhow::{Context, Result};
use containerd_shim_protos::api::{
    ConnectRequest, ConnectResponse, Empty, ShutdownRequest, StateRequest, StateResponse, WaitRequest,
    WaitResponse,
};
use firn_lab::{BUNDLES, Task, describe};
use firn_node::wait_for;
use serde_json::Value;

use crate::conformance::raw::{LIMIT, Raw, at, ok, pid, request};
use crate::conformance::{On, Place, Point};

pub const POINTS: &[Point] = &[
    Point::same(
        "1.4 kill: a signal goes by its number",
        "exit code 74",
        kill_by_number,
    ),
    Point::same(
        "1.4 kill: what does not run is not found",
        "process already finished",
        kill_of_the_dead,
    ),
    Point::same(
        "1.4 kill: real-time signals",
        "init code 7 at set\nexec code 168 at set",
        kill_in_real_time,
    ),
    Point::same(
        "1.4 kill: signals that do not exist",
        "init UNKNOWN: unknown error after kill: runc did not terminate successfully: exit status 1:",
        kill_with_no_signal,
    ),
    Point::same(
        "1.4 kill: all, in a pid namespace of its own",
        "init code 137 at set",
        kill_all,
    ),
    Point::same(
        "1.4 kill: all, in the host's pid namespace",
        "init code 137 at set",
        kill_all_of_host,
    ),
    Point::same(
        "1.4 kill: a paused container ends by SIGKILL",
        "wait code 137 at set",
        kill_paused,
    ),
    Point::same(
        "1.4 wait: it lasts while the container is paused, and ends for every client",
        "while paused: one waits, the other waits\none code 137 at set\nthe other code 137 at set",
        wait_while_paused,
    ),
    Point::same(
        "1.4 connect: the shim's pid and the task's, or none",
        "task right\nother task pid 0",
        connect,
    ),
    Point::same(
        "1.4 pids: those of execs are named",
        "3 processes, execs [\"containerd.runc.v1.ProcessDetails \\\"\\\\n\\\\u{1}x\\\"\"]",
        pids,
    ),
    Point::same(
        "1.4 update: limits reach the cgroup and the runtime",
        "limit 67108864",
        update,
    )
    .on(On::V1),
    Point::same(
        "1.4 update: what the runtime refuses is reported in its words",
        "limits UNKNOWN: runc did not terminate successfully: exit status 1:",
        update_refused,
    ),
    Point::same(
        "1.4 shutdown: not while there is a container",
        "shutdown ok\nshutdown now ok\nstate RUNNING",
        shutdown,
    ),
    Point::same(
        "1.4 services: a method that is not there is not implemented",
        "UNIMPLEMENTED",
        no_such_method,
    ),
    // The shim of containerd 1.7 has a sandbox service for tests.
    Point::same(
        "1.4 services: the sandbox service is not implemented",
        "UNIMPLEMENTED",
        no_sandbox,
    )
    .on(On::Forky),
];

const SLEEP: &str = "exec sleep 1000";

const TRAP: &str = "trap 'exit 74' USR1; touch /tmp/trapped; while :; do sleep 0.05; done";

fn kill_by_number(place: &Place<'_>) -> Result<String> {
    let container = place.start("c", &[], TRAP)?;
    let trapped = place.node().path(format!("{BUNDLES}/c/rootfs/tmp/trapped"));
    wait_for("the handler", LIMIT, || Ok(trapped.exists().then_some(())))?;
    let task = Task::of(place.host, "c")?;
    let killed = task.kill("", 10, false);
    container.becomes("STOPPED")?;
    let seen = format!(
        "{}\nexit code {}",
        describe(&killed, |()| "ok".into()),
        container.exit_code()?
    );
    container.forget()?;
    Ok(seen)
}

fn kill_of_the_dead(place: &Place<'_>) -> Result<String> {
    let container = place.start("c", &[], "exit 0")?;
    container.becomes("STOPPED")?;
    let task = Task::of(place.host, "c")?;
    let init = describe(&task.kill("", 9, false), |()| "ok".into());
    let exec = describe(&task.kill("nosuch", 9, false), |()| "ok".into());
    drop(task);
    container.remove()?;
    Ok(format!("init {init}\nexec {exec}"))
}

fn kill_in_real_time(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run(
        "r",
        "trap 'exit 7' 40; touch /tmp/trapped; while :; do sleep 0.05; done",
    )?;
    raw.exec_is_up("r", "x", SLEEP)?;
    raw.exec_runs("r", "y", "until [ -e /tmp/trapped ]; do sleep 0.02; done")?;
    raw.wait("r", "y")?;
    let wait = raw.begin_wait("r", "x")?;
    let mut seen = vec![format!("kill of exec {}", raw.kill("r", "x", 40, false))];
    let exec = raw.waited(wait);
    seen.push(format!("kill {}", raw.kill("r", "", 40, false)));
    seen.push(format!("init {}", raw.wait("r", "")?));
    seen.push(format!("exec {exec}"));
    raw.end(&["r"])?;
    Ok(seen.join("\n"))
}

fn kill_with_no_signal(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    raw.exec_runs("r", "x", SLEEP)?;
    let seen: Vec<String> = [999, u32::MAX]
        .iter()
        .map(|signal| {
            format!(
                "init {}\nexec {}",
                raw.kill("r", "", *signal, false),
                raw.kill("r", "x", *signal, false)
            )
        })
        .chain([raw.state("r", ""), raw.state("r", "x")])
        .collect();
    raw.end(&["r"])?;
    Ok(seen.join("\n"))
}

/// SIGTERM to all, in a container whose init takes no notice of it.
fn term_all(place: &Place<'_>, edit: impl FnOnce(&mut Value)) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run_with(
        "r",
        "trap '' TERM; touch /tmp/trapped; while :; do sleep 0.05; done",
        edit,
    )?;
    raw.exec_is_up("r", "x", SLEEP)?;
    let trapped = place
        .node()
        .path(format!("{}/rootfs/tmp/trapped", Raw::bundle("r")));
    wait_for("init to ignore SIGTERM", LIMIT, || {
        Ok(trapped.exists().then_some(()))
    })?;
    let wait = raw.begin_wait("r", "x")?;
    let mut seen = vec![format!("kill of exec {}", raw.kill("r", "x", 0, true))];
    // runc has an opinion of its own on what "all" is; a process that it does reach ends by this signal.
    seen.push(format!("kill of all {}", raw.kill("r", "", 15, true)));
    // If it reaches the exec, that has to end by it before the next signal comes.
    let _not_reached = wait_for("the end of the exec", Duration::from_secs(1), || {
        Ok(raw.state("r", "x").contains("STOPPED").then_some(()))
    });
    seen.push(raw.state("r", ""));
    seen.push(format!("kill {}", raw.kill("r", "", 9, true)));
    seen.push(format!("exec {}", raw.waited(wait)));
    seen.push(format!("init {}", raw.wait("r", "")?));
    raw.end(&["r"])?;
    Ok(seen.join("\n"))
}

fn kill_all(place: &Place<'_>) -> Result<String> {
    term_all(place, |_| {})
}

fn kill_all_of_host(place: &Place<'_>) -> Result<String> {
    term_all(place, without_pid_namespace)
}

/// Has a container share the host's pid namespace.
pub fn without_pid_namespace(spec: &mut Value) {
    if let Some(namespaces) = spec["linux"]["namespaces"].as_array_mut() {
        namespaces.retain(|namespace| namespace["type"] != "pid");
    }
}

fn kill_paused(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    raw.exec_runs("r", "x", SLEEP)?;
    let mut seen = vec![format!("pause {}", raw.pause("r"))];
    let wait = raw.begin_wait("r", "")?;
    seen.push(format!("kill {}", raw.kill("r", "", 9, false)));
    seen.push(format!("wait {}", raw.waited(wait)));
    raw.becomes("r", "", "STOPPED")?;
    seen.push(raw.state("r", "x"));
    seen.push(format!("resume {}", raw.resume("r")));
    seen.push(format!("delete {}", raw.delete("r", "")));
    raw.end(&["r"])?;
    Ok(seen.join("\n"))
}

fn wait_while_paused(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let other = Task::of(place.host, "c")?;
    let one = raw.begin_wait("r", "")?;
    let request = request!(WaitRequest { id: "r" });
    let two = other.begin_known::<WaitResponse>("Wait", &request, LIMIT)?;
    // A client that goes away takes no other's answer along.
    let gone = Task::of(place.host, "c")?;
    drop(gone.begin::<WaitResponse>("Wait", &request, LIMIT)?);
    drop(gone);
    raw.pause("r");
    // An answer to Wait would have come before one to a later call.
    let state = request!(StateRequest { id: "r" });
    let frozen = describe(&other.call("State", &state), |state: &StateResponse| {
        format!("{:?}", state.status.enum_value_or_default())
    });
    let waits = |there| if there { "is published" } else { "waits" };
    let mut seen = vec![
        frozen,
        format!(
            "while paused: one {}, the other {}",
            waits(one.is_there()),
            waits(two.is_there())
        ),
    ];
    raw.resume("r");
    raw.kill("r", "", 9, false);
    seen.push(format!("one {}", raw.waited(one)));
    let two = describe(&other.end(two), |answer| {
        format!("code {} at {}", answer.exit_status, at(&answer.exited_at))
    });
    seen.push(format!("the other {two}"));
    drop(other);
    raw.end(&["r"])?;
    Ok(seen.join("\n"))
}

fn connect(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    let ask = |id: &str| {
        raw.task
            .call::<ConnectResponse>("Connect", &request!(ConnectRequest { id }))
    };
    let shim = raw.shim_pid()?;
    let init = raw.host_pid()?;
    let seen = describe(&ask("c"), |answer| {
        let right = |one: u32, other: i32| {
            if i64::from(one) == i64::from(other) {
                "right"
            } else {
                "wrong"
            }
        };
        format!(
            "shim {}\ntask {}",
            right(answer.shim_pid, shim),
            right(answer.task_pid, init)
        )
    });
    let other = describe(&ask("nosuch"), |answer| pid(answer.task_pid));
    raw.make("r", SLEEP)?;
    let made = describe(&ask("r"), |answer| pid(answer.task_pid));
    raw.end(&["r"])?;
    Ok(format!("{seen}\nother task {other}\ncreated task {made}"))
}

fn pids(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", "sleep 1000 & exec sleep 1000")?;
    raw.exec_runs("r", "x", SLEEP)?;
    let mut seen = String::new();
    wait_for("three processes", LIMIT, || {
        seen = raw.pids("r");
        Ok(seen.starts_with('3').then_some(()))
    })?;
    raw.end(&["r"])?;
    Ok(seen)
}

fn update(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let limits = r#"{"memory": {"limit": 67108864}, "cpu": {"shares": 512}, "pids": {"limit": 77}}"#;
    let mut seen = vec![format!("update {}", raw.update("r", limits))];
    let init = raw.pid_of("r")?;
    let own = place
        .node()
        .run(&["cat", &format!("/proc/{init}/cgroup")])?
        .stdout;
    for (controller, file) in [
        ("memory", "memory.limit_in_bytes"),
        ("cpu", "cpu.shares"),
        ("pids", "pids.max"),
    ] {
        let path = own
            .lines()
            .find_map(|line| {
                let (_, rest) = line.split_once(':')?;
                let (controllers, path) = rest.split_once(':')?;
                controllers
                    .split(',')
                    .any(|name| name == controller)
                    .then_some(path)
            })
            .with_context(|| format!("no controller {controller} in\n{own}"))?;
        let value = place
            .node()
            .run(&["cat", &format!("/sys/fs/cgroup/{controller}{path}/{file}")])?;
        seen.push(format!("{file} {}", value.stdout.trim()));
    }
    let state = place.node().read("/run/containerd/runc/default/r/state.json")?;
    let state: Value = serde_json::from_str(&state)?;
    let known = &state["config"]["cgroups"];
    seen.push(format!(
        "limit {} shares {} pids {}",
        known["memory"], known["cpu_shares"], known["pids_limit"]
    ));
    raw.end(&["r"])?;
    Ok(seen.join("\n"))
}

fn update_refused(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let mut seen = vec![format!("nothing {}", raw.update("r", "{}"))];
    // A period that the kernel does not have; where there is no such controller, there is no such file.
    let limits = r#"{"cpu": {"quota": -7, "period": 1}}"#;
    seen.push(format!("limits {}", raw.update("r", limits)));
    let code = |answer: String| answer.split(':').next().unwrap_or_default().to_owned();
    seen.push(format!("no JSON {}", code(raw.update("r", "{"))));
    raw.end(&["r"])?;
    Ok(seen.join("\n"))
}

fn shutdown(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let ask = |now: bool| {
        let request = request!(ShutdownRequest { id: "r", now });
        describe(&raw.task.call::<Empty>("Shutdown", &request), ok)
    };
    let seen = format!(
        "shutdown {}\nshutdown now {}\nstate {}",
        ask(false),
        ask(true),
        raw.state("r", "")
    );
    raw.end(&["r"])?;
    Ok(seen)
}

/// The code of the answer to a call.
fn code(answer: &ttrpc::Result<Empty>) -> String {
    let answer = describe(answer, ok);
    answer.split(':').next().unwrap_or_default().to_owned()
}

fn no_such_method(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    let seen = code(&raw.task.call("Nosuch", &request!(StateRequest { id: "c" })));
    raw.end(&[])?;
    Ok(seen)
}

fn no_sandbox(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    let request = request!(StateRequest { id: "c" });
    let service = "containerd.runtime.sandbox.v1.Sandbox";
    let seen = code(&raw.task.call_of(service, "SandboxStatus", &request));
    raw.end(&[])?;
    Ok(seen)
}
