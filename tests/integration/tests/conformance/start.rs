//! 1.1: `start`, and what its server is to the host.

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::bootstrap_api::BootstrapParams;
use containerd_shim_protos::shim::oci::Options;
use firn_lab::any;
use firn_node::{CgroupMode, wait_for};
use protobuf::Message;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::conformance::manual::{ADDRESS, Bundle, Done, RUNC_OPTIONS, STEP};
use crate::conformance::{On, Place, Point};

pub const POINTS: &[Point] = &[
    Point::same(
        "1.1 start: the reply to a daemon that sends options",
        "/run/containerd/s/",
        reply_to_options,
    ),
    Point::same(
        "1.1 start: the reply to a daemon that sends nothing",
        "/run/containerd/s/",
        reply_to_nothing,
    ),
    Point::same(
        "1.1 start: the reply to containerd 2.3",
        "code Some(0)",
        reply_to_bootstrap,
    )
    .better("BootstrapResult 3 unix:///run/containerd/s/"),
    Point::same(
        "1.1 start: containerd 2.3 chooses the socket directory",
        "link none",
        chosen_directory,
    )
    .better("link /run/hand-s"),
    Point::same(
        "1.1 start: name and mode of the socket",
        "named after the group\n600 socket\n600 directory",
        socket,
    )
    .better("named after the group\n600 socket\n700 directory"),
    Point::same("1.1 start: a group has one shim", "[0, 0, 0, 1]", group),
    Point::same(
        "1.1 start: a live shim is found",
        "same address true, same shim true",
        found,
    ),
    Point::same(
        "1.1 start: the socket of a dead shim is replaced",
        "left true, same address true",
        replaced,
    ),
    Point::same(
        "1.1 start: what cannot start leaves nothing",
        "no spec: Some(1), left \"\"",
        refused,
    ),
    Point::same(
        "1.1 start: options that are garbage do not hinder it",
        "code Some(0)",
        garbage,
    ),
    Point::same("1.1 start: a shim cgroup", "/shims", shim_cgroup),
    Point::same(
        "1.1 start: a shim cgroup that is not there",
        "code Some(1), left \"\"",
        no_shim_cgroup,
    ),
    Point::same(
        "1.1 start: out of memory, the shim goes before its parent",
        "7 -> 8\n1000 -> 1000",
        oom_score,
    ),
    Point::same("1.1 start: core scheduling", "code Some(", core_scheduling),
    Point::same("1.1 start: the server's process", "stderr log", process),
    Point::same("1.1 start: debug is passed on", "-debug\nlevel=debug", debug),
    Point::same(
        "1.1 start: sockets with debug on",
        "2 sockets, 0 left",
        debug_socket,
    )
    .on(On::Forky)
    .better("1 sockets, 0 left"),
];

/// No annotations.
const NONE: Value = Value::Null;
const GROUP: &str = "io.containerd.runc.v2.group";
const SANDBOX: &str = "io.kubernetes.cri.sandbox-id";

/// What `start` needs of its options.
fn options(shim_cgroup: &str) -> Result<Vec<u8>> {
    let options = Options {
        shim_cgroup: shim_cgroup.to_owned(),
        ..Options::default()
    };
    Ok(any(&options, RUNC_OPTIONS)?.write_to_bytes()?)
}

fn reply(place: &Place<'_>, stdin: &[u8]) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let done = bundle.act(&["start"], &[], stdin)?;
    bundle.connect(&done)?.end()?;
    bundle.remove()?;
    Ok(done.reply())
}

fn reply_to_options(place: &Place<'_>) -> Result<String> {
    reply(place, &options("")?)
}

fn reply_to_nothing(place: &Place<'_>) -> Result<String> {
    reply(place, b"")
}

fn garbage(place: &Place<'_>) -> Result<String> {
    let mut seen = String::new();
    for stdin in [
        &b"\xff\xff\xff"[..],
        b"\x0a\x1acontainerd.runc.v1.Options\x12\x02\xff\xff",
    ] {
        seen += &reply(place, stdin)?;
    }
    Ok(seen)
}

fn bootstrap(socket_dir: Option<&str>) -> Result<Vec<u8>> {
    let params = BootstrapParams {
        instance_id: "hand".into(),
        namespace: "default".into(),
        containerd_grpc_address: ADDRESS.into(),
        containerd_ttrpc_address: format!("{ADDRESS}.ttrpc"),
        socket_dir: socket_dir.map(str::to_owned),
        ..BootstrapParams::default()
    };
    Ok(params.write_to_bytes()?)
}

fn reply_to_bootstrap(place: &Place<'_>) -> Result<String> {
    reply(place, &bootstrap(None)?)
}

fn chosen_directory(place: &Place<'_>) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let done = bundle.act(&["start"], &[], &bootstrap(Some("/run/hand-s"))?)?;
    let shim = bundle.connect(&done)?;
    let link = std::fs::read_link(place.node().path(format!("{}/s", bundle.dir)));
    let link = link.map_or("none".into(), |link| link.display().to_string());
    let seen = format!("{}\nlink {link}", done.reply());
    shim.end()?;
    bundle.remove()?;
    Ok(seen)
}

fn socket(place: &Place<'_>) -> Result<String> {
    clear(place)?;
    let bundle = Bundle::new(place, "hand", &json!({GROUP: "a/../group"}))?;
    let shim = bundle.start()?;
    let digest = Sha256::digest(format!("{ADDRESS}/default/group"));
    let name: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let named = shim.socket == format!("/run/containerd/s/{name}");
    let stat = place
        .node()
        .run(&["stat", "--format", "%a %F", &shim.socket, "/run/containerd/s"])?
        .stdout;
    shim.end()?;
    bundle.remove()?;
    let named = if named {
        "named after the group"
    } else {
        "named otherwise"
    };
    Ok(format!("{named}\n{stat}"))
}

/// Which of several shims each of several bundles gets.
fn group(place: &Place<'_>) -> Result<String> {
    let bundles = [
        ("ga", json!({SANDBOX: "one"})),
        ("gb", json!({SANDBOX: "one", "other": "two"})),
        ("gc", json!({SANDBOX: "two", GROUP: "one"})),
        ("gd", json!({SANDBOX: "two"})),
    ];
    let (mut kept, mut shims, mut pids, mut seen) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (id, annotations) in &bundles {
        let bundle = Bundle::new(place, id, annotations)?;
        let shim = bundle.start()?;
        match pids.iter().position(|pid| *pid == shim.pid) {
            Some(at) => seen.push(at),
            None => {
                seen.push(pids.len());
                pids.push(shim.pid);
                shims.push(shim);
            }
        }
        kept.push(bundle);
    }
    shims.into_iter().try_for_each(|shim| shim.end())?;
    kept.into_iter().try_for_each(Bundle::remove)?;
    Ok(format!("{seen:?}"))
}

fn found(place: &Place<'_>) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let (one, other) = (bundle.start()?, bundle.start()?);
    let seen = format!(
        "same address {}, same shim {}",
        one.socket == other.socket,
        one.pid == other.pid
    );
    drop(other);
    one.end()?;
    bundle.remove()?;
    Ok(seen)
}

fn replaced(place: &Place<'_>) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let dead = bundle.start()?;
    dead.signal("KILL")?;
    dead.is_gone()?;
    let left = dead.has_socket();
    let shim = bundle.start()?;
    let seen = format!("left {left}, same address {}", dead.socket == shim.socket);
    shim.end()?;
    bundle.remove()?;
    Ok(seen)
}

/// Removes the sockets that other containers' shims have left.
fn clear(place: &Place<'_>) -> Result<()> {
    place.node().run(&["rm", "-rf", "/run/containerd/s"]).map(drop)
}

/// Shims that run on the place, and their sockets.
fn left(place: &Place<'_>) -> Result<String> {
    let processes = place.node().processes().into_iter();
    let shims = processes
        .filter(|process| process.command.starts_with("containerd-shim"))
        .count();
    let list = "find /run/containerd/s -type s 2>/dev/null || true";
    let sockets = place.node().run(&["sh", "-c", list])?.stdout;
    Ok(format!("{sockets}{}", "shim\n".repeat(shims)))
}

/// How a `start` that must fail went, and what was left of it.
fn failed(place: &Place<'_>, done: &Done) -> Result<String> {
    ensure!(done.stdout.is_empty() && !done.stderr.is_empty(), "{done:?}");
    // The server is killed, and not waited for by everybody.
    let mut seen = String::new();
    let gone = wait_for("nothing to be left", STEP, || {
        seen = left(place)?;
        Ok(seen.is_empty().then_some(()))
    });
    ensure!(gone.is_ok(), "left: {seen}");
    Ok(format!("{:?}, left {seen:?}", done.code))
}

fn refused(place: &Place<'_>) -> Result<String> {
    clear(place)?;
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let spec = format!("{}/config.json", bundle.dir);
    place.node().write(&spec, "{")?;
    let damaged = failed(place, &bundle.act(&["start"], &[], b"")?)?;
    place.node().run(&["rm", &spec])?;
    let missing = failed(place, &bundle.act(&["start"], &[], b"")?)?;
    let nameless = failed(place, &bundle.call(&["-id", "hand", "start"], &[], b"")?)?;
    let unknown = bundle.act(&["-nosuch", "start"], &[], b"")?;
    let unknown = failed(place, &unknown)?;
    bundle.remove()?;
    Ok(format!(
        "damaged spec: {damaged}\nno spec: {missing}\nno namespace: {nameless}\nunknown flag: {unknown}"
    ))
}

/// The directories that are a cgroup of this name on the node.
fn cgroup_dirs(place: &Place<'_>, name: &str) -> String {
    match place.node().record().cgroup {
        CgroupMode::V1 => format!("/sys/fs/cgroup/memory/{name} /sys/fs/cgroup/pids/{name}"),
        CgroupMode::V2 => format!("/sys/fs/cgroup/{name}"),
    }
}

fn shim_cgroup(place: &Place<'_>) -> Result<String> {
    let dirs = cgroup_dirs(place, "shims");
    place.node().run(&["sh", "-euc", &format!("mkdir {dirs}")])?;
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let done = bundle.act(&["start"], &[], &options("/shims")?)?;
    let shim = bundle.connect(&done)?;
    let joined = shim.proc("cgroup")?;
    let joined: Vec<&str> = joined.lines().filter(|line| line.ends_with("/shims")).collect();
    let controllers: Vec<&str> = joined.iter().filter_map(|line| line.split(':').nth(1)).collect();
    let seen = format!("{controllers:?} in /shims");
    shim.end()?;
    bundle.remove()?;
    // The last threads of the shim leave it after its first one.
    let remove = format!("rmdir {dirs}");
    wait_for("an empty cgroup", STEP, || {
        Ok(place.node().run(&["sh", "-euc", &remove]).ok())
    })?;
    ensure!(!controllers.is_empty(), "in no cgroup: {seen}");
    Ok(seen)
}

fn no_shim_cgroup(place: &Place<'_>) -> Result<String> {
    clear(place)?;
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let done = bundle.act(&["start"], &[], &options("/nosuch")?)?;
    let seen = failed(place, &done)?;
    bundle.remove()?;
    Ok(format!("code {seen}"))
}

fn oom_score(place: &Place<'_>) -> Result<String> {
    let mut seen = Vec::new();
    for daemon in ["7", "1000"] {
        let bundle = Bundle::new(place, "hand", &NONE)?;
        let shim = bundle.connect(&bundle.act(&["start"], &[("OOM", daemon)], b"")?)?;
        seen.push(format!("{daemon} -> {}", shim.proc("oom_score_adj")?.trim()));
        shim.end()?;
        bundle.remove()?;
    }
    Ok(seen.join("\n"))
}

fn core_scheduling(place: &Place<'_>) -> Result<String> {
    clear(place)?;
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let done = bundle.act(&["start"], &[("SCHED_CORE", "1")], b"")?;
    let seen = if done.code == Some(0) {
        bundle.connect(&done)?.end()?;
        "code Some(0)".to_owned()
    } else {
        format!("code {}", failed(place, &done)?)
    };
    bundle.remove()?;
    Ok(seen)
}

fn process(place: &Place<'_>) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let shim = bundle.start()?;
    let proc = |link: &str| -> Result<String> {
        let path = place.node().path(format!("/proc/{}/{link}", shim.pid));
        let target = std::fs::read_link(&path).with_context(|| format!("read {}", path.display()))?;
        Ok(target.display().to_string().replace(&bundle.dir, "BUNDLE"))
    };
    let stat = shim.proc("stat")?;
    // After the name: state, parent, process group.
    let stat: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    let args = shim.proc("cmdline")?.replace('\0', " ");
    let seen = format!(
        "{args}\nin {}\nparent {}\nleads its group {}\nstdin {}\nstdout {}\nstderr {}\nignores PIPE {}",
        proc("cwd")?,
        stat[1],
        stat[2] == shim.pid.to_string(),
        proc("fd/0")?,
        proc("fd/1")?,
        proc("fd/2")?.rsplit('/').next().unwrap_or_default(),
        survives(&shim.proc("status")?, 13),
    );
    shim.end()?;
    bundle.remove()?;
    Ok(seen.replace(place.program(), "SHIM"))
}

/// Whether a process ignores or handles a signal.
fn survives(status: &str, signal: u32) -> bool {
    let mask = |name: &str| {
        let hex = status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap_or("0");
        u64::from_str_radix(hex.trim(), 16).unwrap_or_default()
    };
    (mask("SigIgn:") | mask("SigCgt:")) >> (signal - 1) & 1 == 1
}

fn debug(place: &Place<'_>) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let shim = bundle.connect(&bundle.act(&["-debug", "start"], &[], b"")?)?;
    let args = shim.proc("cmdline")?;
    let flag = args.split('\0').find(|arg| *arg == "-debug").unwrap_or("none");
    let mut log = String::new();
    wait_for("a line of debugging", STEP, || {
        log += &bundle.log();
        Ok(log.contains("level=debug").then_some(()))
    })?;
    shim.end()?;
    bundle.remove()?;
    Ok(format!("{flag}\nlevel=debug"))
}

fn debug_socket(place: &Place<'_>) -> Result<String> {
    clear(place)?;
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let shim = bundle.connect(&bundle.act(&["-debug", "start"], &[], b"")?)?;
    let sockets = left(place)?.lines().filter(|line| line.starts_with('/')).count();
    shim.end()?;
    bundle.remove()?;
    // A zombie is counted until it is reaped.
    let mut lines = 0;
    let _left = wait_for("nothing to be left", STEP, || {
        lines = left(place)?.lines().count();
        Ok((lines == 0).then_some(()))
    });
    Ok(format!("{sockets} sockets, {lines} left"))
}
