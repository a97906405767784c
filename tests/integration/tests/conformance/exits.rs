//! 1.5: the end of processes, in the order in which clients have to hear of it.

use anyhow::{Result, ensure};
use firn_lab::describe;
use firn_node::{CgroupMode, Process, wait_for};

use crate::conformance::raw::{LIMIT, Raw, pid};
use crate::conformance::task::without_pid_namespace;
use crate::conformance::{On, Place, Point};

pub const POINTS: &[Point] = &[
    Point::same(
        "1.5 exits: init's is published last, among 72 execs at the same time",
        "72 execs started, 72 ends after their starts\nlast r",
        init_last,
    )
    .on(On::V1),
    Point::same(
        "1.5 exits: init's is published after those of the execs that it takes along",
        "x 137\ny 137\nlast r 137",
        init_after_execs,
    ),
    Point::same(
        "1.5 exits: without a pid namespace the rest is killed, and published before",
        "x 137\nlast r 3\nleft 0",
        rest_is_killed,
    ),
    Point::same(
        "1.5 exits: one that comes before Start has answered is published after the start",
        "20 execs, all of them added, started, ended\ncodes right",
        early_exits,
    ),
    Point::same(
        "1.5 exits: an init that ends at once is published after its start",
        "create start exit",
        early_init,
    ),
    Point::same(
        "1.5 exits: a signal is reported as 128 and its number",
        "init code 137 at set\nexecs 129 134 137 139 143 162",
        by_signal,
    ),
    Point::same(
        "1.5 exits: orphans are reaped and not published",
        "events exec-added exec-started exit exit\nzombies 0",
        orphans,
    ),
    Point::same(
        "1.5 exits: a paused container without a pid namespace ends with all that is in it",
        "x 137\nlast r 137",
        killed_while_paused,
    ),
];

const SLEEP: &str = "exec sleep 1000";

fn init_last(place: &Place<'_>) -> Result<String> {
    const EXECS: usize = 72;
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let mut events = place.host.watch_events()?;
    let execs: Vec<String> = (0..EXECS).map(|number| format!("x{number}")).collect();
    for exec in &execs {
        let added = raw.exec("r", exec, "exit 0");
        ensure!(added == "ok", "exec: {added}");
    }
    let starts = execs.iter().map(|exec| raw.begin_start("r", exec));
    let starts = starts.collect::<Result<Vec<_>>>()?;
    let mut started = 0;
    for start in starts {
        let answer = describe(&raw.task.end(start), |answer| pid(answer.pid));
        ensure!(answer == "pid set", "start: {answer}");
        started += 1;
    }
    raw.kill("r", "", 9, false);
    let heard = events.of("r", "/tasks/exit", "r")?;
    let in_order = execs
        .iter()
        .filter(|exec| {
            let at = |topic: &str| heard.iter().position(|event| event.is(topic, exec));
            matches!((at("/tasks/exec-started"), at("/tasks/exit")), (Some(one), Some(other)) if one < other)
        })
        .count();
    let last = heard.last().map_or("none", |event| event.process());
    let seen = format!("{started} execs started, {in_order} ends after their starts\nlast {last}");
    raw.end(&["r"])?;
    Ok(seen)
}

/// The exits published up to init's: whose, and the code; sorted but for init's.
fn ends(heard: &[firn_lab::Event]) -> String {
    let mut lines: Vec<String> = heard
        .iter()
        .filter(|event| event.topic == "/tasks/exit")
        .map(|event| format!("{} {}", event.process(), event.fields["exit_status"]))
        .collect();
    let last = lines.pop().unwrap_or_default();
    lines.sort();
    lines.push(format!("last {last}"));
    lines.join("\n")
}

fn init_after_execs(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let mut events = place.host.watch_events()?;
    for exec in ["x", "y"] {
        raw.exec_runs("r", exec, SLEEP)?;
    }
    raw.kill("r", "", 9, false);
    let seen = ends(&events.of("r", "/tasks/exit", "r")?);
    let refused = raw.exec("r", "z", "true");
    raw.end(&["r"])?;
    Ok(format!("{seen}\nexec {refused}"))
}

fn rest_is_killed(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    let init = "sleep 4321 & sleep 4321 & until [ -e /tmp/go ]; do sleep 0.02; done; exit 3";
    raw.run_with("r", init, without_pid_namespace)?;
    let mut events = place.host.watch_events()?;
    raw.exec_runs("r", "x", "exec sleep 4321")?;
    place
        .node()
        .write(format!("{}/rootfs/tmp/go", Raw::bundle("r")), "")?;
    let seen = ends(&events.of("r", "/tasks/exit", "r")?);
    let sleeps = || {
        let all = place.node().processes();
        all.iter()
            .filter(|process| process.args.iter().any(|arg| arg == "4321"))
            .count()
    };
    wait_for("the rest to be gone", LIMIT, || Ok((sleeps() == 0).then_some(())))?;
    raw.end(&["r"])?;
    Ok(format!("{seen}\nleft {}", sleeps()))
}

fn early_exits(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let mut events = place.host.watch_events()?;
    let execs: Vec<(String, u32)> = (0..20).map(|code| (format!("x{code}"), code)).collect();
    for (exec, code) in &execs {
        raw.exec_runs("r", exec, &format!("exit {code}"))?;
    }
    let mut right = true;
    for (exec, code) in &execs {
        right &= raw.wait("r", exec)? == format!("code {code} at set");
    }
    raw.kill("r", "", 9, false);
    let heard = events.of("r", "/tasks/exit", "r")?;
    let in_order = execs.iter().all(|(exec, _)| {
        let topics: Vec<&str> = heard
            .iter()
            .filter(|event| event.process() == exec)
            .map(|event| event.topic.as_str())
            .collect();
        topics == ["/tasks/exec-added", "/tasks/exec-started", "/tasks/exit"]
    });
    raw.end(&["r"])?;
    let order = if in_order {
        "all of them added, started, ended"
    } else {
        "out of order"
    };
    let codes = if right { "right" } else { "wrong" };
    Ok(format!("20 execs, {order}\ncodes {codes}"))
}

fn early_init(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    let mut events = place.host.watch_events()?;
    let mut orders = Vec::new();
    for round in 0..5 {
        let id = format!("r{round}");
        raw.run(&id, "exit 6")?;
        let heard = events.of(&id, "/tasks/exit", &id)?;
        let topics: Vec<&str> = heard.iter().map(|event| event.name()).collect();
        orders.push(topics.join(" "));
        raw.end_of(&id)?;
    }
    orders.dedup();
    raw.end(&["r0", "r1", "r2", "r3", "r4"])?;
    Ok(orders.join("\n"))
}

fn by_signal(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run(
        "r",
        "trap 'trap - TERM; kill -TERM $$' TERM; while :; do sleep 0.02; done",
    )?;
    let mut codes = Vec::new();
    for signal in [1, 6, 9, 11, 15, 34] {
        let exec = format!("x{signal}");
        let seconds = format!("{}", 1000 + signal);
        raw.exec_runs("r", &exec, &format!("exec sleep {seconds}"))?;
        // A signal that reaches the shell in the middle of its exec may be lost, with any shim.
        wait_for(&format!("{exec} to sleep"), LIMIT, || {
            let sleeps = |process: &Process| process.command == "sleep" && process.args.contains(&seconds);
            Ok(place.node().processes().iter().any(sleeps).then_some(()))
        })?;
        let killed = raw.kill("r", &exec, signal, false);
        ensure!(killed == "ok", "signal {signal}: {killed}");
        let waited = raw.wait("r", &exec)?;
        ensure!(waited.starts_with("code "), "after signal {signal}: {waited}");
        codes.push(waited.split(' ').nth(1).unwrap_or_default().to_owned());
    }
    raw.kill("r", "", 9, false);
    let killed = raw.wait("r", "")?;
    raw.end(&["r"])?;
    Ok(format!("init {killed}\nexecs {}", codes.join(" ")))
}

fn orphans(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run_with("r", SLEEP, without_pid_namespace)?;
    let shim = raw.shim_pid()?;
    let mut events = place.host.watch_events()?;
    // Each of them outlives its parent, and so becomes the shim's child.
    let script = "for i in 1 2 3 4 5 6 7 8; do (sleep 0.2; exit 9) & done; exit 0";
    raw.exec_runs("r", "x", script)?;
    raw.wait("r", "x")?;
    let children = |state: Option<char>| {
        let of_shim = |status: &str| {
            let has = |name: &str, value: &str| {
                let mut lines = status.lines().filter_map(|line| line.strip_prefix(name));
                lines.any(|rest| rest.trim_start().starts_with(value))
            };
            let parent = format!("{shim}");
            let is_child = status
                .lines()
                .filter_map(|line| line.strip_prefix("PPid:"))
                .any(|rest| rest.trim() == parent);
            is_child && state.is_none_or(|state| has("State:", &state.to_string()))
        };
        let all = place.node().processes();
        let statuses = all
            .iter()
            .filter_map(|process| place.node().read(format!("/proc/{}/status", process.pid)).ok());
        statuses.filter(|status| of_shim(status)).count()
    };
    // Its own container's init, and that of the host container.
    wait_for("the orphans to end", LIMIT, || {
        Ok((children(None) == 2).then_some(()))
    })?;
    let zombies = children(Some('Z'));
    raw.kill("r", "", 9, false);
    let heard = events.of("r", "/tasks/exit", "r")?;
    let topics: Vec<&str> = heard.iter().map(|event| event.name()).collect();
    raw.end(&["r"])?;
    Ok(format!("events {}\nzombies {zombies}", topics.join(" ")))
}

fn killed_while_paused(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run_with("r", SLEEP, without_pid_namespace)?;
    let mut events = place.host.watch_events()?;
    raw.exec_runs("r", "x", SLEEP)?;
    raw.pause("r");
    let killed = raw.kill("r", "", 9, false);
    if place.node().record().cgroup == CgroupMode::V1 {
        // A frozen process of v1 takes no signal, and not every runc thaws one that shares the host's pid
        // namespace.
        raw.resume("r");
    }
    let seen = ends(&events.of("r", "/tasks/exit", "r")?);
    let state = raw.state("r", "");
    raw.end(&["r"])?;
    Ok(format!("{killed}\n{seen}\n{state}"))
}
