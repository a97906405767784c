//! 1.2: the files that a shim keeps in a bundle.

use anyhow::Result;
use firn_lab::{BUNDLES, Task};
use firn_node::wait_for;
use serde_json::Value;

use crate::conformance::manual::STEP;
use crate::conformance::{On, Place, Point};

pub const POINTS: &[Point] = &[
    Point::same("1.2 bundle: files of a container", "p 700 log", files),
    Point::same(
        "1.2 bundle: files of a second container of a group",
        "f 600 options.json",
        files_of_a_group,
    ),
    Point::same(
        "1.2 bundle: the address for a daemon that starts again",
        "the socket true",
        address,
    )
    .on(On::Trixie),
    Point::same("1.2 bundle: the address for an older daemon", "no file", address)
        .on(On::Forky)
        .better("the socket true"),
    Point::same(
        "1.2 bundle: options and runtime of a container without",
        "{}\nruntime \"\"",
        no_options,
    ),
    Point::same(
        "1.2 bundle: options and runtime of a container",
        "\"root\": String(\"/run/other\")",
        options,
    ),
    Point::same(
        "1.2 bundle: pids of init and of an exec",
        "init.pid true\ne.pid true",
        pids,
    ),
    Point::same("1.2 bundle: runc's log", "nosuch", log),
    Point::same(
        "1.2 bundle: CRIU's log of a dump that failed",
        "the error true",
        dump_log,
    ),
];

const GROUP: &str = "io.containerd.runc.v2.group=g";

/// What lies in the bundle of a container, but for `address`, which has points of its own.
fn list(place: &Place<'_>, id: &str) -> Result<String> {
    let find = [
        "find",
        &format!("{BUNDLES}/{id}"),
        "-mindepth",
        "1",
        "-maxdepth",
        "1",
    ];
    let output = place
        .node()
        .run(&[&find[..], &["-printf", "%y %m %P\n"]].concat())?
        .stdout;
    let mut lines: Vec<&str> = output
        .lines()
        .filter(|line| !line.ends_with(" address"))
        .collect();
    lines.sort_unstable();
    Ok(lines.join("\n"))
}

fn files(place: &Place<'_>) -> Result<String> {
    let container = place.start("c", &[], "sleep 1000")?;
    let seen = list(place, "c")?;
    container.remove()?;
    Ok(seen)
}

fn files_of_a_group(place: &Place<'_>) -> Result<String> {
    let annotation = ["--annotation", GROUP];
    let first = place.start("c1", &annotation, "sleep 1000")?;
    let second = place.start("c2", &annotation, "sleep 1000")?;
    let seen = list(place, "c2")?;
    second.remove()?;
    first.remove()?;
    Ok(seen)
}

fn address(place: &Place<'_>) -> Result<String> {
    let annotation = ["--annotation", GROUP];
    let first = place.start("c1", &annotation, "sleep 1000")?;
    let second = place.start("c2", &annotation, "sleep 1000")?;
    let mut seen = Vec::new();
    for id in ["c1", "c2"] {
        let read = place.node().read(format!("{BUNDLES}/{id}/address"));
        seen.push(match read {
            Ok(address) => {
                let socket = address.strip_prefix("unix://").unwrap_or_default();
                format!("the socket {}", Task::connect(place.host, socket, id, 2).is_ok())
            }
            Err(_) => "no file".to_owned(),
        });
    }
    second.remove()?;
    first.remove()?;
    Ok(seen.join("\n"))
}

/// Options and runtime that `delete` will find.
fn kept(place: &Place<'_>, options: &[&str]) -> Result<String> {
    let container = place.start("c", options, "sleep 1000")?;
    let read = |name| place.node().read(format!("{BUNDLES}/c/{name}"));
    let json: Value = serde_json::from_str(&read("options.json")?)?;
    let seen = format!("{}\nruntime {:?}", shown(&json), read("runtime")?);
    container.remove()?;
    Ok(seen)
}

/// An object in the order of its keys.
fn shown(json: &Value) -> String {
    json.as_object()
        .map_or_else(String::new, |object| format!("{object:?}"))
}

fn no_options(place: &Place<'_>) -> Result<String> {
    kept(place, &[])
}

fn options(place: &Place<'_>) -> Result<String> {
    kept(
        place,
        &["--runc-binary", "/usr/sbin/runc", "--runc-root", "/run/other"],
    )
}

fn pids(place: &Place<'_>) -> Result<String> {
    let container = place.start("c", &[], "sleep 1000")?;
    let read = |name: &str| place.node().read(format!("{BUNDLES}/c/{name}.pid"));
    let init = read("init")? == container.pid()?.to_string();
    let exec = [
        "tasks",
        "exec",
        "--detach",
        "--exec-id",
        "e",
        "c",
        "sleep",
        "1000",
    ];
    place.host.ctr(&exec, "")?;
    let task = Task::of(place.host, "c")?;
    let exec = read("e")? == task.state("e")?.pid.to_string();
    task.kill("e", 9, false)?;
    drop(task);
    container.remove()?;
    Ok(format!("init.pid {init}\ne.pid {exec}"))
}

/// What runc has logged is what the client gets.
fn log(place: &Place<'_>) -> Result<String> {
    let container = place.start("c", &[], "sleep 1000")?;
    let exec = ["tasks", "exec", "--exec-id", "e", "c", "nosuch"];
    let output = place.host.ctr(&exec, "")?;
    let log = place.node().read(format!("{BUNDLES}/c/log.json"))?;
    let reported = log.lines().filter_map(|line| {
        let line: Value = serde_json::from_str(line).ok()?;
        Some(line["msg"].as_str()?.to_owned())
    });
    let reported: Vec<String> = reported.filter(|message| message.contains("nosuch")).collect();
    let last = reported.last().cloned().unwrap_or_default();
    container.remove()?;
    Ok(format!(
        "{last}\nthe client got it {}",
        output.stderr.contains(&last)
    ))
}

/// A device that CRIU does not know is open.
fn dump_log(place: &Place<'_>) -> Result<String> {
    let device = ["--device", "/dev/loop-control"];
    let script = "exec 3</dev/loop-control; echo >/open; sleep 1000";
    let container = place.start("c", &device, script)?;
    let open = place.node().path(format!("{BUNDLES}/c/rootfs/open"));
    wait_for("the device to be open", STEP, || Ok(open.exists().then_some(())))?;
    let output = place
        .host
        .ctr(&["tasks", "checkpoint", "--image-path", "/tmp/dump", "c"], "")?;
    let log = place.node().read(format!("{BUNDLES}/c/criu-dump.log"))?;
    let names = output.stderr.contains("criu-dump.log");
    place.node().run(&["rm", "-rf", "/tmp/dump"])?;
    container.remove()?;
    Ok(format!(
        "code {:?}, the error {}, the client gets {names}",
        output.code,
        log.contains("Error (criu")
    ))
}
