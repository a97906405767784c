//! 1.6: the events that a shim publishes.

use anyhow::{Result, ensure};
use firn_lab::Event;
use firn_node::wait_for;

use crate::conformance::raw::{IMAGE, LIMIT, Raw};
use crate::conformance::{Place, Point};

pub const POINTS: &[Point] = &[
    Point::same(
        "1.6 events: topics and fields over a life",
        r#"/tasks/exit {"container_id":"r","exit_status":137,"exited_at":"set","id":"r","pid":"set"}"#,
        over_a_life,
    ),
    Point::same(
        "1.6 events: topics and fields of what ctr runs",
        r#"/tasks/delete {"container_id":"d","#,
        of_ctr,
    ),
    Point::same(
        "1.6 events: a checkpoint is published by containerd alone",
        "checkpoint ok\nnothing but /tasks/exit",
        of_a_checkpoint,
    ),
    Point::same(
        "1.6 events: what failed is not published",
        "/tasks/exec-added /tasks/exit",
        of_failures,
    ),
    Point::same(
        "1.6 events: none but a deletion is lost in fast runs",
        "20 times create start exit",
        of_fast_runs,
    ),
];

const SLEEP: &str = "exec sleep 1000";

fn lines(heard: &[Event]) -> String {
    let lines: Vec<String> = heard.iter().map(Event::without_times).collect();
    lines.join("\n")
}

fn over_a_life(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    let mut events = place.host.watch_events()?;
    raw.run("r", SLEEP)?;
    raw.exec_runs("r", "x", "exit 5")?;
    raw.wait("r", "x")?;
    raw.delete("r", "x");
    raw.pause("r");
    raw.resume("r");
    raw.kill("r", "", 9, false);
    raw.wait("r", "")?;
    raw.delete("r", "");
    let heard = events.of("r", "/tasks/delete", "")?;
    raw.end(&["r"])?;
    Ok(lines(&heard))
}

fn of_ctr(place: &Place<'_>) -> Result<String> {
    let mut events = place.host.watch_events()?;
    let container = place.start("d", &[], "exit 3")?;
    container.becomes("STOPPED")?;
    place.node().run(&["ctr", "tasks", "delete", "d"])?;
    let heard = events.of("d", "/tasks/delete", "")?;
    container.forget()?;
    Ok(lines(&heard))
}

fn of_a_checkpoint(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let mut events = place.host.watch_events()?;
    let done = raw.checkpoint("r", IMAGE);
    raw.kill("r", "", 9, false);
    let heard = events.of("r", "/tasks/exit", "r")?;
    let topics: Vec<&str> = heard.iter().map(|event| event.topic.as_str()).collect();
    raw.end(&["r"])?;
    Ok(format!("checkpoint {done}\nnothing but {}", topics.join(" ")))
}

fn of_failures(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let mut events = place.host.watch_events()?;
    raw.make_bundle("t", "", |spec| {
        spec["process"]["args"] = "/nosuch".split(' ').collect()
    })?;
    let refused = [
        raw.create(&Raw::create_request("t")),
        raw.exec("r", "x", "true"),
        raw.exec("r", "x", "true"),
        raw.start("r", ""),
        raw.resume("r"),
        raw.delete("r", ""),
    ];
    ensure!(
        refused.iter().filter(|reported| *reported == "ok").count() == 1,
        "{refused:?}"
    );
    let mut request = Raw::exec_request("r", "y", "");
    request.spec.mut_or_insert_default().value = br#"{"args": ["/nosuch"], "cwd": "/"}"#.to_vec();
    raw.exec_as(&request);
    raw.start("r", "y");
    raw.kill("r", "", 9, false);
    let heard = events.of("r", "/tasks/exit", "r")?;
    let topics: Vec<&str> = heard.iter().map(|event| event.topic.as_str()).collect();
    raw.end(&["r"])?;
    Ok(topics.join(" "))
}

fn of_fast_runs(place: &Place<'_>) -> Result<String> {
    const RUNS: usize = 20;
    let mut events = place.host.watch_events()?;
    let limits = place.host.limits().join(" ");
    let script = format!(
        "for i in $(seq {RUNS}); do ctr run --rm --runtime {} {limits} {} f$i true & \
         [ $((i % 4)) -ne 0 ] || wait; done; wait",
        firn_lab::STOCK,
        firn_lab::IMAGE,
    );
    place.node().run(&["sh", "-c", &script])?;
    let mut orders = Vec::new();
    for run in 1..=RUNS {
        let id = format!("f{run}");
        // The stock shim loses deletions now and then: they are asked of firn alone.
        let heard = if place.is_firn() {
            events.of(&id, "/tasks/delete", "")?
        } else {
            events.of(&id, "/tasks/exit", &id)?
        };
        let topics = heard.iter().map(Event::name).filter(|name| *name != "delete");
        orders.push(topics.collect::<Vec<_>>().join(" "));
    }
    orders.sort();
    let same = orders.iter().filter(|order| **order == orders[0]).count();
    wait_for("the containers to be gone", LIMIT, || {
        let left = place
            .node()
            .run(&["ctr", "containers", "list", "--quiet"])?
            .stdout;
        Ok(left.trim().is_empty().then_some(()))
    })?;
    Ok(format!("{same} times {}", orders[0]))
}
