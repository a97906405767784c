//! 1.9: what is published when the kernel kills for want of memory.

use std::time::Duration;

use anyhow::{Context, Result};
use firn_lab::{BUNDLES, Container};
use firn_node::wait_for;

use crate::conformance::client::{Client, ID, Stdio};
use crate::conformance::{On, Place, Point};

pub const POINTS: &[Point] = &[
    Point::same("1.9 OOM: of init", "create start oom exit, code 137", of_init).on(On::Memory),
    // With cgroup v2 the stock shim publishes the exit before it, or loses it.
    Point::same(
        "1.9 OOM: of an exec, before its exit",
        "oom exit, code 137",
        of_exec,
    )
    .on(On::V1),
    Point::same(
        "1.9 OOM: of children, one event each",
        "create start oom oom oom exit\ncodes 137 137 137 \ninit RUNNING",
        of_children,
    )
    .on(On::Memory),
    Point::same("1.9 OOM: after a restore", "oom exit, code 137", after_restore).on(On::Memory),
    Point::same("1.9 OOM: none without one", "create start exit", none).on(On::Memory),
];

/// How long a child may take to end.
const STEP: Duration = Duration::from_secs(60);

const LIMIT: &[&str] = &["--null-io", "--memory-limit", "33554432"];

/// Takes memory until the kernel ends it.
const HOG: &str = "tail /dev/zero";

fn of_init(place: &Place<'_>) -> Result<String> {
    let events = place.host.watch_events()?;
    let container = place.start(ID, LIMIT, &format!("exec {HOG}"))?;
    let topics = short(&events.until_exit(ID)?);
    let code = container.exit_code()?;
    container.forget()?;
    Ok(format!("{topics}, code {code}"))
}

fn short(topics: &str) -> String {
    topics.replace("/tasks/", "").replace('\n', " ")
}

fn none(place: &Place<'_>) -> Result<String> {
    let events = place.host.watch_events()?;
    let container = place.start(ID, LIMIT, "exit 3")?;
    let topics = short(&events.until_exit(ID)?);
    let code = container.exit_code()?;
    container.forget()?;
    Ok(format!("{topics}, code {code}"))
}

fn of_exec(place: &Place<'_>) -> Result<String> {
    let mut events = place.host.watch_events()?;
    let client = Client::start_with(place, LIMIT, "sleep 1000")?;
    client
        .exec("e", &Stdio::default(), &format!("exec {HOG}"))
        .context("exec")?;
    let code = client.finish("e")?;
    let reported = events.of(ID, "/tasks/exit", "e")?;
    let topics: Vec<_> = reported.iter().map(|event| event.topic.as_str()).collect();
    let status = client.container.status()?;
    client.end()?;
    Ok(format!(
        "{}, code {code}, init {status}",
        short(&topics.join(" "))
    ))
}

fn of_children(place: &Place<'_>) -> Result<String> {
    let mut events = place.host.watch_events()?;
    let script = format!(
        "for n in 1 2 3; do {HOG}; echo $? >>/codes; until [ -e /next$n ]; do sleep 0.05; done; done; \
         sleep 1000"
    );
    let container = place.start(ID, LIMIT, &script)?;
    let inside = |file: &str| format!("{BUNDLES}/{ID}/rootfs/{file}");
    for n in 1..=3 {
        wait_for("the end of a child", STEP, || {
            let codes = place.node().read(inside("codes")).unwrap_or_default();
            Ok((codes.lines().count() == n).then_some(()))
        })?;
        // Two that come at once are published as one.
        events.wait_for(ID, "/tasks/oom", n)?;
        place.node().write(inside(&format!("next{n}")), "")?;
    }
    let codes = place.node().read(inside("codes"))?;
    let status = container.status()?;
    container.remove()?;
    let topics = short(&events.until_exit(ID)?);
    Ok(format!(
        "{topics}\ncodes {}\ninit {status}",
        codes.replace('\n', " ")
    ))
}

fn after_restore(place: &Place<'_>) -> Result<String> {
    let script = format!(">/up; until [ -e /go ]; do sleep 0.1; done; exec {HOG}");
    let container = place.start(ID, LIMIT, &script)?;
    place.has_file(ID, "up")?;
    container.checkpoint("checkpoint/oom")?;
    container.remove()?;
    let events = place.host.watch_events()?;
    let (restored, _) = Container::restore(place.host, "d", "checkpoint/oom", 0)?;
    place.node().write(format!("{BUNDLES}/d/rootfs/go"), "")?;
    let topics = short(&events.until_exit("d")?);
    let code = restored.exit_code()?;
    restored.forget()?;
    place.host.remove_image("checkpoint/oom")?;
    Ok(format!("{topics}, code {code}"))
}
