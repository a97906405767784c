//! 1.1: the server process, and the questions `-v` and `-info`.

use std::process::Stdio;

use anyhow::{Context, Result};
use containerd_shim_protos::api::ConnectRequest;
use containerd_shim_protos::shim::oci::Options;
use containerd_shim_protos::types::introspection::RuntimeInfo;
use firn_lab::{Task, any};
use firn_node::wait_for;
use protobuf::Message;
use serde_json::{Value, json};

use crate::conformance::manual::{Bundle, RUNC_OPTIONS, STEP};
use crate::conformance::{On, Place, Point};

pub const POINTS: &[Point] = &[
    Point::same(
        "1.1 server: SIGTERM and SIGINT end it, its socket goes",
        "TERM: socket false",
        ends,
    ),
    Point::same(
        "1.1 server: SIGPIPE and SIGUSR1 do not end it",
        "lives true, answers",
        stays,
    ),
    Point::same(
        "1.1 server: its log is in containerd's",
        "in containerd's log",
        logs,
    ),
    Point::same(
        "1.1 server: it is the parent of what runc leaves",
        "child of the shim true",
        subreaper,
    ),
    Point::same(
        "1.1 server: other users are refused",
        "0: answered\n1000: closed",
        strangers,
    ),
    Point::same("1.1 server: both services are served", "v2 ", services).better("v2 pid, v3 pid"),
    Point::same(
        "1.1 server: at its end the socket of a group goes",
        "left true",
        socket_of_a_group,
    )
    .on(On::Forky)
    .better("left false"),
    Point::same(
        "1.1 server: -socket",
        "is there\na long path: Some(1)",
        own_socket,
    ),
    Point::same(
        "1.1 server: when it ends, containerd ends the container",
        "/tasks/exit",
        ended_under_containerd,
    ),
    Point::same(
        "1.1 -v: name and version",
        "containerd-shim-runc-v2:\n  Version:  X",
        version,
    ),
    Point::same(
        "1.1 -info: name, options and features",
        "io.containerd.runc.v2",
        info,
    )
    .on(On::Forky),
    Point::same("1.1 -info: another runtime", "annotations: true", info_of_crun)
        .on(On::Forky)
        .better("netDevices"),
    Point::same(
        "1.1 -info: a runtime that is not there",
        "code Some(1)",
        info_of_nothing,
    )
    .on(On::Forky),
    Point::same(
        "1.1 -info: a runtime that knows no features",
        "features none",
        info_of_a_plain_runtime,
    )
    .on(On::Forky),
    Point::same(
        "1.1 -info: as ctr shows it",
        "io.containerd.runc.v2",
        info_for_ctr,
    )
    .on(On::Forky),
];

const NONE: Value = Value::Null;

fn ends(place: &Place<'_>) -> Result<String> {
    let mut seen = Vec::new();
    for signal in ["TERM", "INT"] {
        let bundle = Bundle::new(place, "hand", &NONE)?;
        let shim = bundle.start()?;
        shim.signal(signal)?;
        shim.is_gone()?;
        seen.push(format!("{signal}: socket {}", shim.has_socket()));
        bundle.remove()?;
    }
    Ok(seen.join("\n"))
}

fn stays(place: &Place<'_>) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let shim = bundle.start()?;
    shim.signal("PIPE")?;
    shim.signal("USR1")?;
    // The line that the second one asks for.
    let mut log = String::new();
    wait_for("a line of the shim", STEP, || {
        log += &bundle.log();
        Ok(HOW_IT_IS.iter().any(|words| log.contains(words)).then_some(()))
    })?;
    let answer = shim
        .task
        .call::<containerd_shim_protos::api::ConnectResponse>("Connect", &ConnectRequest::new());
    let answers = if answer.is_ok() { "answers" } else { "is silent" };
    let seen = format!("lives {}, {answers}", shim.lives());
    shim.end()?;
    bundle.remove()?;
    Ok(seen)
}

/// The shim and the init of a container that containerd has started.
fn pids(task: &Task, id: &str) -> Result<(u32, u32)> {
    let mut request = ConnectRequest::new();
    request.id = id.to_owned();
    let answer: containerd_shim_protos::api::ConnectResponse = task.call("Connect", &request)?;
    Ok((answer.shim_pid, answer.task_pid))
}

/// What a shim prints when SIGUSR1 asks it how it is: the stock one dumps its goroutines, firn counts its
/// tasks.
const HOW_IT_IS: [&str; 2] = ["goroutine stack dump", " tasks alive"];

fn logs(place: &Place<'_>) -> Result<String> {
    let container = place.start("c", &[], "sleep 1000")?;
    let task = Task::of(place.host, "c")?;
    let (shim, _) = pids(&task, "c")?;
    let before = place.host.log_length()?;
    place.node().run(&["kill", "-s", "USR1", &shim.to_string()])?;
    let pid = format!("pid={shim}");
    // containerd and the shim log other things meanwhile, and the end of what is there may be half a line.
    let line = wait_for("a line of the shim in containerd's log", STEP, || {
        let log = place.host.log_since(before)?;
        let lines = log.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let asked_for = |line: &&str| {
            HOW_IT_IS.iter().any(|words| line.contains(words))
                && line.split_whitespace().any(|word| word == pid)
        };
        Ok(lines.into_iter().find(asked_for).map(str::to_owned))
    })?;
    let fields = ["level=info", "namespace=default"].map(|field| line.contains(field));
    drop(task);
    container.remove()?;
    Ok(format!("in containerd's log {fields:?}"))
}

fn subreaper(place: &Place<'_>) -> Result<String> {
    let container = place.start("c", &[], "sleep 1000")?;
    let task = Task::of(place.host, "c")?;
    let (shim, init) = pids(&task, "c")?;
    let status = place.node().read(format!("/proc/{init}/status"))?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:\t"));
    let seen = format!("child of the shim {}", parent == Some(&shim.to_string()));
    drop(task);
    container.remove()?;
    Ok(seen)
}

/// Sends the request on stdin to a socket, and prints whether there was an answer before the end.
const ASK: &str = r#"
    use Socket; my ($path) = @ARGV; local $/; my $request = <STDIN>;
    socket(my $s, AF_UNIX, SOCK_STREAM, 0) or die $!;
    connect($s, pack_sockaddr_un($path)) or die "connect: $!";
    $SIG{PIPE} = "IGNORE"; syswrite($s, $request); my $got = sysread($s, my $answer, 1);
    print $got ? "answered" : "closed";
"#;

fn strangers(place: &Place<'_>) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let shim = bundle.start()?;
    let call = ttrpc::Request {
        service: "containerd.task.v2.Task".into(),
        method: "Connect".into(),
        ..ttrpc::Request::default()
    };
    let call = call.write_to_bytes()?;
    // Length, stream, type (request), flags.
    let mut frame = u32::try_from(call.len())?.to_be_bytes().to_vec();
    frame.extend([0, 0, 0, 1, 1, 0]);
    frame.extend(call);
    // The modes of the socket and of its directory would stop a stranger before the shim does.
    let open = format!(
        "chmod o+x /run/containerd /run/containerd/s; chmod o+rw {}",
        shim.socket
    );
    place.node().run(&["sh", "-euc", &open])?;
    let ask = |user: &str| -> Result<String> {
        let mut command = place.node().command("timeout");
        let identity = [
            format!("--reuid={user}"),
            format!("--regid={user}"),
            "--clear-groups".into(),
        ];
        command
            .args(["60", "setpriv"])
            .args(identity)
            .args(["perl", "-e", ASK, &shim.socket]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut stdin = child.stdin.take().context("perl has no stdin")?;
        std::io::Write::write_all(&mut stdin, &frame)?;
        drop(stdin);
        let output = child.wait_with_output()?;
        Ok(format!("{user}: {}", String::from_utf8_lossy(&output.stdout)))
    };
    let seen = [ask("0")?, ask("1000")?].join("\n");
    place.node().run(&["chmod", "o-x", "/run/containerd/s"])?;
    shim.end()?;
    bundle.remove()?;
    Ok(seen)
}

fn services(place: &Place<'_>) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let shim = bundle.start()?;
    let ask = |version: u8| {
        let service = format!("containerd.task.v{version}.Task");
        let answer = shim.task.call_of::<containerd_shim_protos::api::ConnectResponse>(
            &service,
            "Connect",
            &ConnectRequest::new(),
        );
        format!("v{version} {}", firn_lab::describe(&answer, |_| "pid".into()))
    };
    let seen = format!("{}, {}", ask(2), ask(3));
    shim.end()?;
    bundle.remove()?;
    Ok(seen)
}

fn socket_of_a_group(place: &Place<'_>) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &json!({"io.containerd.runc.v2.group": "group"}))?;
    let shim = bundle.start()?;
    shim.signal("TERM")?;
    shim.is_gone()?;
    let left = shim.has_socket();
    place.node().run(&["rm", "-f", &shim.socket])?;
    bundle.remove()?;
    Ok(format!("left {left}"))
}

fn own_socket(place: &Place<'_>) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let node = place.node();
    let mut command = node.command("sh");
    let flags = ["-namespace", "default", "-id", "hand", "-socket"];
    let serve = r#"cd "$1"; shift; exec "$@""#;
    command
        .args(["-c", serve, "serve", &bundle.dir, place.program()])
        .args(flags)
        .arg("own");
    let quiet = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut server = quiet.spawn()?;
    let socket = format!("{}/own", bundle.dir);
    wait_for("the socket", STEP, || {
        Ok(node.path(&socket).exists().then_some(()))
    })?;
    // Who runs the server runs it until it ends.
    server.kill()?;
    server.wait()?;
    let long = format!("/run/{}", "x".repeat(110));
    let refused = bundle.call(&[&flags[..], &[&long]].concat(), &[], b"")?;
    bundle.remove()?;
    Ok(format!("is there\na long path: {:?}", refused.code))
}

/// A shim that gets SIGTERM leaves its container to containerd, which has `delete` kill it.
fn ended_under_containerd(place: &Place<'_>) -> Result<String> {
    let events = place.host.watch_events()?;
    let container = place.start("c", &[], "sleep 1000")?;
    let task = Task::of(place.host, "c")?;
    let (shim, _) = pids(&task, "c")?;
    place.node().run(&["kill", &shim.to_string()])?;
    drop(task);
    let topics = events.until_exit("c")?;
    wait_for("the end of the task", STEP, || {
        Ok(container.status().is_err().then_some(()))
    })?;
    container.forget()?;
    Ok(topics)
}

fn version(place: &Place<'_>) -> Result<String> {
    let output = place.host.output_of(&[place.program(), "-v"], "")?;
    let mut lines = output.stdout.lines();
    let name = lines.next().unwrap_or_default();
    let version = lines.next().unwrap_or_default();
    let number = version.trim_start_matches("  Version:  ");
    Ok(format!(
        "{:?} {name}\n{}",
        output.code,
        version.replace(number, "X")
    ))
}

/// Asks a shim what its runtime can do.
fn ask_info(place: &Place<'_>, binary: &str) -> Result<(Option<i32>, RuntimeInfo)> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let options = Options {
        binary_name: binary.to_owned(),
        ..Options::default()
    };
    let stdin = match binary {
        "" => Vec::new(),
        _ => any(&options, RUNC_OPTIONS)?.write_to_bytes()?,
    };
    let done = bundle.call(&["-info"], &[], &stdin)?;
    bundle.remove()?;
    Ok((done.code, RuntimeInfo::parse_from_bytes(&done.stdout)?))
}

fn shown(code: Option<i32>, info: &RuntimeInfo) -> Result<String> {
    let options = info.options.as_ref();
    let options = options.map_or("none".into(), |any| format!("{} {:?}", any.type_url, any.value));
    let features = match info.features.as_ref() {
        None => "none".to_owned(),
        Some(any) => {
            let json: Value = serde_json::from_slice(&any.value)?;
            let idmap = json.pointer("/linux/mountExtensions/idmap/enabled");
            format!(
                "{}\nannotations: {}\nidmap {idmap:?}\n{json}",
                any.type_url,
                json["annotations"].is_object()
            )
        }
    };
    let has_version = info
        .version
        .as_ref()
        .is_some_and(|version| !version.version.is_empty());
    Ok(format!(
        "code {code:?}\n{}\nversion {has_version}\nannotations {:?}\noptions {options}\nfeatures {features}",
        info.name, info.annotations
    ))
}

fn info(place: &Place<'_>) -> Result<String> {
    let (code, info) = ask_info(place, "")?;
    shown(code, &info)
}

fn info_of_crun(place: &Place<'_>) -> Result<String> {
    let (code, info) = ask_info(place, "crun")?;
    shown(code, &info)
}

fn info_of_nothing(place: &Place<'_>) -> Result<String> {
    let (code, info) = ask_info(place, "/nosuch/runc")?;
    shown(code, &info)
}

fn info_of_a_plain_runtime(place: &Place<'_>) -> Result<String> {
    let (code, info) = ask_info(place, "/bin/false")?;
    shown(code, &info)
}

fn info_for_ctr(place: &Place<'_>) -> Result<String> {
    let asked = ["plugins", "inspect-runtime", "--runtime=io.containerd.runc.v2"];
    let output = place.host.ctr(&asked, "")?;
    let mut json: Value = serde_json::from_str(&output.stdout).with_context(|| output.to_string())?;
    json["Version"] = Value::Null;
    Ok(format!("{:?} {json:#}", output.code))
}
