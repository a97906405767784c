//! 1.3: the options that a client sends with a container.

use anyhow::{Context, Result};
use containerd_shim_protos::api::{
    CreateTaskResponse, DeleteRequest, DeleteResponse, StartRequest, StartResponse,
};
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::shim::oci::Options;
use firn_lab::{Task, any, describe};
use serde_json::Value;

use crate::conformance::manual::{Bundle, RUNC_OPTIONS};
use crate::conformance::{Place, Point};

pub const POINTS: &[Point] = &[
    Point::same("1.3 options: all that runc is called with", "--no-pivot", calls),
    Point::same("1.3 options: kept in the bundle", "no_new_keyring", kept),
    Point::same("1.3 options: owner of the pipes", "0:4321", owner_of_pipes),
    Point::same(
        "1.3 options: CRIU's work directory",
        "-work-path /run/by-hand-work",
        criu_work_path,
    )
    .better("-file-locks"),
    Point::same(
        "1.3 options: another root for runc's state",
        "/run/by-hand-runc/default/hand",
        root,
    ),
    Point::same("1.3 options: of an unknown type", "UNKNOWN: ", unknown_type).better("INVALID_ARGUMENT: "),
    Point::same("1.3 options: garbage", "UNKNOWN: ", garbage).better("INVALID_ARGUMENT: "),
    Point::same(
        "1.3 options: as CRI sends them for other runtime names",
        "UNKNOWN: ",
        runtime_options,
    )
    .better("created, runtime \"/run/by-hand-runtime\""),
];

const NONE: Value = Value::Null;
/// A runtime that notes what it is called for, and does it without systemd, which nodes lack.
const RUNTIME: &str = "/run/by-hand-runtime";
const CALLS: &str = "/run/by-hand-calls";
const SCRIPT: &str = r#"#!/bin/sh
echo "$*" >>/run/by-hand-calls
for word; do
    shift
    [ "$word" = --systemd-cgroup ] || set -- "$@" "$word"
done
exec /usr/sbin/runc "$@"
"#;

/// Options with that runtime.
fn options(place: &Place<'_>) -> Result<Options> {
    place.node().write(RUNTIME, SCRIPT)?;
    place.node().run(&["chmod", "755", RUNTIME])?;
    place.node().write(CALLS, "")?;
    Ok(Options {
        binary_name: RUNTIME.into(),
        ..Options::default()
    })
}

/// What the runtime was called for, without the names of temporary files.
fn called(place: &Place<'_>, bundle: &Bundle<'_>) -> Result<String> {
    let calls = place.node().read(CALLS)?;
    let lines = calls.lines().map(|line| {
        let words = line
            .split(' ')
            .map(|word| if word.starts_with("/tmp/") { "TMP" } else { word });
        let shown = words.collect::<Vec<_>>().join(" ").replace(&bundle.dir, "BUNDLE");
        without_number(&shown)
    });
    let calls = lines.collect::<Vec<_>>().join("\n");
    place.node().run(&["rm", CALLS, RUNTIME])?;
    Ok(calls)
}

/// Firn gives a call that other calls may overlap a log of its own, whose lines it then adds to the one that
/// all share.
fn without_number(call: &str) -> String {
    let Some((before, rest)) = call.split_once("BUNDLE/log.") else {
        return call.to_owned();
    };
    let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit());
    format!("{before}BUNDLE/log.{}", rest.trim_start_matches('.'))
}

fn all(options: Options) -> Result<Any> {
    let options = Options {
        no_pivot_root: true,
        no_new_keyring: true,
        io_uid: 1234,
        io_gid: 4321,
        systemd_cgroup: true,
        criu_image_path: "/run/by-hand-image".into(),
        criu_work_path: "/run/by-hand-work".into(),
        ..options
    };
    any(&options, RUNC_OPTIONS)
}

fn calls(place: &Place<'_>) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let shim = bundle.start()?;
    bundle.run(&shim, Some(all(options(place)?)?))?;
    bundle.kill(&shim)?;
    shim.end()?;
    let seen = called(place, &bundle)?;
    bundle.remove()?;
    Ok(seen)
}

fn kept(place: &Place<'_>) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let shim = bundle.start()?;
    bundle.run(&shim, Some(all(options(place)?)?))?;
    let json: Value = serde_json::from_str(&place.node().read(format!("{}/options.json", bundle.dir))?)?;
    bundle.kill(&shim)?;
    shim.end()?;
    called(place, &bundle)?;
    bundle.remove()?;
    Ok(format!("{json:#}"))
}

fn owner_of_pipes(place: &Place<'_>) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let shim = bundle.start()?;
    let options = Options {
        io_uid: 1234,
        io_gid: 4321,
        ..Options::default()
    };
    let node = place.node();
    let fifo = |name: &str| format!("{}/{name}", bundle.dir);
    node.run(&["mkfifo", &fifo("in"), &fifo("out"), &fifo("err")])?;
    let mut request = bundle.create_request(Some(any(&options, RUNC_OPTIONS)?));
    (request.stdin, request.stdout, request.stderr) = (fifo("in"), fifo("out"), fifo("err"));
    // A daemon has its ends open.
    let ends = ["in", "out", "err"].map(|name| {
        let mut both = std::fs::OpenOptions::new();
        both.read(true).write(true).open(node.path(fifo(name)))
    });
    let created: CreateTaskResponse = shim.task.call("Create", &request).context("create")?;
    let files = [0, 1, 2].map(|fd| format!("/proc/{}/fd/{fd}", created.pid));
    let mut stat = vec!["stat", "--dereference", "--format", "%u:%g %F"];
    stat.extend(files.iter().map(String::as_str));
    let seen = node.run(&stat)?.stdout;
    bundle.kill(&shim)?;
    drop(ends);
    shim.end()?;
    bundle.remove()?;
    Ok(seen)
}

fn criu_work_path(place: &Place<'_>) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let shim = bundle.start()?;
    let mut request = bundle.create_request(Some(all(options(place)?)?));
    place.node().run(&["mkdir", "/run/by-hand-image"])?;
    request.checkpoint = "/run/by-hand-image".into();
    let created: CreateTaskResponse = shim.task.call("Create", &request).context("create")?;
    let mut start = StartRequest::new();
    start.id = "hand".into();
    let started = shim.task.call::<StartResponse>("Start", &start);
    let mut delete = DeleteRequest::new();
    delete.id = "hand".into();
    let _ = shim.task.call::<DeleteResponse>("Delete", &delete);
    shim.end()?;
    place.node().run(&["rm", "-r", "/run/by-hand-image"])?;
    place.node().run(&["rm", "-rf", "/run/by-hand-work"])?;
    let calls = called(place, &bundle)?;
    bundle.remove()?;
    let restore = calls.lines().find(|line| line.contains(" restore "));
    // Flags go with one dash or two, in any order.
    let restore = restore.unwrap_or_default().replace(" --", " -");
    let mut flags: Vec<&str> = restore.split(" -").collect();
    flags.sort_unstable();
    Ok(format!(
        "pid {}, started {}\n{}",
        created.pid,
        started.is_ok(),
        flags.join("\n-")
    ))
}

fn root(place: &Place<'_>) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let shim = bundle.start()?;
    let options = Options {
        root: "/run/by-hand-runc".into(),
        ..Options::default()
    };
    bundle.run(&shim, Some(any(&options, RUNC_OPTIONS)?))?;
    let seen = place
        .node()
        .run(&["find", "/run/by-hand-runc", "-mindepth", "1"])?
        .stdout;
    bundle.kill(&shim)?;
    shim.end()?;
    place.node().run(&["rm", "-r", "/run/by-hand-runc"])?;
    bundle.remove()?;
    Ok(seen)
}

/// How a create with options that it cannot use goes.
fn refused(place: &Place<'_>, type_url: &str, value: &[u8]) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let shim = bundle.start()?;
    let options = Any {
        type_url: type_url.into(),
        value: value.into(),
        ..Any::default()
    };
    let created = bundle.create(&shim, Some(options));
    let seen = describe(&created, |_| {
        let runtime = place.node().read(format!("{}/runtime", bundle.dir));
        format!("created, runtime {:?}", runtime.unwrap_or_default())
    });
    match created {
        Ok(_) => bundle.kill(&shim).map(drop)?,
        // The shim of another container could be in this state too: it must live on.
        Err(_) => drop(Task::connect(place.host, &shim.socket, "hand", 2)?.state("")),
    }
    shim.end()?;
    bundle.remove()?;
    Ok(seen)
}

fn unknown_type(place: &Place<'_>) -> Result<String> {
    refused(place, "some.Thing", b"\x0a\x01x")
}

fn garbage(place: &Place<'_>) -> Result<String> {
    refused(place, RUNC_OPTIONS, b"\xff\xff")
}

fn runtime_options(place: &Place<'_>) -> Result<String> {
    options(place)?;
    let body = format!("BinaryName = \"{RUNTIME}\"\nSystemdCgroup = true\n");
    // type_url, config_path and config_body are fields 1 to 3.
    let mut value = vec![0x1a, u8::try_from(body.len())?];
    value.extend(body.as_bytes());
    let seen = refused(place, "runtimeoptions.v1.Options", &value);
    place.node().run(&["rm", CALLS, RUNTIME])?;
    seen
}
