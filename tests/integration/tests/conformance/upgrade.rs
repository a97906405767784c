//! `delete`, and shims that are replaced under running containers.
//!
//! With the stock shim's place nothing is swapped: it shows what a host shows whose shim stays. On firn's
//! place the program changes between the two under the same path, as a package manager does it.

use std::fs;

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::api::{ConnectRequest, ConnectResponse, DeleteResponse, Empty, PauseRequest};
use containerd_shim_protos::shim::oci::Options;
use firn_lab::{Container, Task, any};
use protobuf::Message;
use serde_json::Value;

use crate::conformance::hosts::Shim;
use crate::conformance::manual::{Bundle, RUNC_OPTIONS};
use crate::conformance::{On, Place, Point};

pub const POINTS: &[Point] = &[
    Point::same(
        "1.1 delete: of a container that runs",
        "pid of init true, 137, now true",
        delete_running,
    ),
    Point::same(
        "1.1 delete: with the bundle as a flag",
        "pid of init true, 137, now true",
        delete_with_flag,
    ),
    Point::same(
        "1.1 delete: without runtime and options",
        "pid of init true, 137, now true",
        delete_without_options,
    ),
    Point::same(
        "1.1 delete: runc's state in another root",
        "pid of init true, 137, now true",
        delete_in_root,
    ),
    Point::same(
        "1.1 delete: of a paused container",
        "pid of init true, 137, now true",
        delete_paused,
    ),
    Point::same(
        "1.1 delete: of one that was never created",
        "pid 4294967295, 137, now true",
        delete_nothing,
    )
    .on(On::Forky)
    .better("pid 0, 137, now true"),
    Point::same("1.1 delete: a shim is killed", "/tasks/exit 137", killed),
    Point::same(
        "1.1 delete: a shim is killed, its program has been replaced",
        "/tasks/exit 137",
        killed_after_swap,
    ),
    Point::same(
        "1.1 delete: the shim of a group is killed",
        "/tasks/exit 137",
        group_killed,
    ),
    Point::same(
        "1.1 upgrade: containers live on, whichever shim made them",
        "u3: out of exec",
        swapped,
    ),
    Point::same(
        "1.1 upgrade: pods take more containers, whichever shim made them",
        "q2: out of exec",
        pods,
    ),
];

const NONE: Value = Value::Null;
const LIVE: &str = "trap 'exit 7' TERM; >/trapped; while :; do sleep 0.05; done";

/// Kills the shim of a container, changes the bundle, and has `delete` clean up.
fn delete(
    place: &Place<'_>,
    options: Options,
    words: &[&str],
    prepare: impl FnOnce(&Bundle<'_>, &Task) -> Result<()>,
) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let shim = bundle.start()?;
    let init = bundle.run(&shim, Some(any(&options, RUNC_OPTIONS)?))?;
    prepare(&bundle, &shim.task)?;
    shim.signal("KILL")?;
    shim.is_gone()?;
    let words: Vec<String> = words
        .iter()
        .map(|word| word.replace("BUNDLE", &bundle.dir))
        .collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let begun = now();
    let done = bundle.act(&words, &[], b"")?;
    ensure!(done.code == Some(0), "{done:?}");
    let answer = DeleteResponse::parse_from_bytes(&done.stdout)?;
    let mounts = place.node().read("/proc/1/mountinfo")?;
    let seen = format!(
        "pid of init {}, {}, now {}\ninit lives {}, mounted {}",
        answer.pid == init,
        answer.exit_status,
        (begun..=now()).contains(&answer.exited_at.seconds),
        place.has_process(init),
        mounts.contains(&format!("{}/rootfs", bundle.dir)),
    );
    place.node().run(&["rm", "-f", &shim.socket])?;
    bundle.remove()?;
    Ok(seen)
}

fn now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or_default())
}

fn delete_running(place: &Place<'_>) -> Result<String> {
    delete(place, Options::default(), &["delete"], |_, _| Ok(()))
}

fn delete_with_flag(place: &Place<'_>) -> Result<String> {
    delete(
        place,
        Options::default(),
        &["-bundle", "BUNDLE", "delete"],
        |_, _| Ok(()),
    )
}

fn delete_without_options(place: &Place<'_>) -> Result<String> {
    delete(place, Options::default(), &["delete"], |bundle, _| {
        // containerd 1.7's shim wants the former.
        let files = ["runtime", "options.json"].map(|name| format!("{}/{name}", bundle.dir));
        place.node().write(&files[0], "")?;
        place.node().run(&["rm", &files[1]]).map(drop)
    })
}

fn delete_in_root(place: &Place<'_>) -> Result<String> {
    let options = Options {
        root: "/run/by-hand-runc".into(),
        binary_name: "/usr/sbin/runc".into(),
        ..Options::default()
    };
    let seen = delete(place, options, &["delete"], |_, _| Ok(()))?;
    let left = place
        .node()
        .run(&["find", "/run/by-hand-runc", "-name", "hand"])?
        .stdout;
    place.node().run(&["rm", "-r", "/run/by-hand-runc"])?;
    Ok(format!("{seen}\nstate left {left:?}"))
}

fn delete_paused(place: &Place<'_>) -> Result<String> {
    delete(place, Options::default(), &["delete"], |bundle, task| {
        let mut pause = PauseRequest::new();
        pause.id = bundle.id.to_owned();
        task.call::<Empty>("Pause", &pause).map(drop).context("pause")
    })
}

fn delete_nothing(place: &Place<'_>) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &NONE)?;
    let begun = now();
    let done = bundle.act(&["delete"], &[], b"")?;
    bundle.remove()?;
    let seen = match DeleteResponse::parse_from_bytes(&done.stdout) {
        Ok(answer) if done.code == Some(0) => format!(
            "pid {}, {}, now {}",
            answer.pid,
            answer.exit_status,
            (begun..=now()).contains(&answer.exited_at.seconds)
        ),
        _ => format!("failed {:?}", done.code),
    };
    Ok(seen)
}

impl Place<'_> {
    /// Replaces the program of the shim. The place of the stock shim keeps it.
    fn swap(&self, to: Shim) -> Result<()> {
        let from = match (self.shim, to) {
            (Shim::Stock, _) => return Ok(()),
            (Shim::Firn, Shim::Stock) => "/usr/bin/containerd-shim-runc-v2",
            (Shim::Firn, Shim::Firn) => "/usr/local/bin/containerd-shim-firn-v2",
        };
        self.node().install(self.node().path(from), self.program(), 0o755)
    }

    /// Starts a container, and makes sure that the shim that serves it is a new one of this kind, or, if
    /// `shim` is given, that one.
    fn start_under(&self, id: &str, kind: Shim, shim: Option<u32>) -> Result<(Container<'_>, u32)> {
        let annotation = format!("io.containerd.runc.v2.group={}", &id[..1]);
        let options: &[&str] = if id.starts_with('u') {
            &[]
        } else {
            &["--annotation", &annotation]
        };
        let container = self.start(id, options, LIVE)?;
        self.has_file(id, "trapped")?;
        let pid = shim_pid(self, id)?;
        match shim {
            Some(shim) => ensure!(pid == shim, "{id} has a shim of its own"),
            None => {
                let program = fs::metadata(self.node().path(format!("/proc/{pid}/exe")))?.len();
                let stock = fs::metadata(self.node().path("/usr/bin/containerd-shim-runc-v2"))?.len();
                let expected = self.shim == Shim::Stock || kind == Shim::Stock;
                ensure!((program == stock) == expected, "{id} is not served by {kind:?}");
            }
        }
        Ok((container, pid))
    }
}

fn shim_pid(place: &Place<'_>, id: &str) -> Result<u32> {
    let mut request = ConnectRequest::new();
    request.id = id.to_owned();
    let answer: ConnectResponse = Task::of(place.host, id)?.call("Connect", &request)?;
    Ok(answer.shim_pid)
}

/// Kills the shim of these containers, made by one shim and cleaned up after by another. What a client sees.
fn kill_shim(place: &Place<'_>, ids: &[&str], made: Shim, cleaned: Shim) -> Result<String> {
    let mut seen = Vec::new();
    place.swap(made)?;
    let (mut containers, mut shim) = (Vec::new(), None);
    for id in ids {
        let (container, pid) = place.start_under(id, made, shim)?;
        containers.push(container);
        shim = Some(pid);
    }
    let events = place.host.watch_events()?;
    place.swap(cleaned)?;
    let pid = shim.context("no container")?.to_string();
    place.node().run(&["kill", "-KILL", &pid])?;
    for line in events.until_deleted(ids)? {
        let Some((head, json)) = line.split_once('{') else {
            continue;
        };
        let topic = head.split_whitespace().last().unwrap_or_default();
        let json: Value = serde_json::from_str(&format!("{{{json}"))?;
        if topic.starts_with("/tasks/") {
            seen.push(format!(
                "{} {topic} {}",
                json["container_id"], json["exit_status"]
            ));
        }
    }
    // Those of a group end in any order.
    seen.sort();
    containers.into_iter().try_for_each(Container::forget)?;
    place.swap(Shim::Firn)?;
    Ok(seen.join("\n"))
}

fn killed(place: &Place<'_>) -> Result<String> {
    kill_shim(place, &["u1"], Shim::Firn, Shim::Firn)
}

fn killed_after_swap(place: &Place<'_>) -> Result<String> {
    let one = kill_shim(place, &["u1"], Shim::Stock, Shim::Firn)?;
    let other = kill_shim(place, &["u1"], Shim::Firn, Shim::Stock)?;
    Ok(format!("{one}\n{other}"))
}

fn group_killed(place: &Place<'_>) -> Result<String> {
    let one = kill_shim(place, &["p1", "p2"], Shim::Firn, Shim::Firn)?;
    let other = kill_shim(place, &["p1", "p2"], Shim::Stock, Shim::Firn)?;
    Ok(format!("{one}\n{other}"))
}

/// Everything that a client does with a container that runs, up to its end.
fn lived(place: &Place<'_>, container: Container<'_>) -> Result<String> {
    let id = container.id().to_owned();
    let (mut seen, reported) = (Vec::new(), "out of exec");
    let exec = [
        "tasks",
        "exec",
        "--exec-id",
        "e",
        &id,
        "sh",
        "-c",
        &format!("echo {reported}; exit 5"),
    ];
    let output = place.host.ctr(&exec, "")?;
    seen.push(format!("{} code {:?}", output.stdout.trim(), output.code));
    container.task(&["pause"])?;
    seen.push(container.status()?);
    container.task(&["resume"])?;
    seen.push(container.status()?);
    container.task(&["kill"])?;
    container.becomes("STOPPED")?;
    seen.push(format!("exit code {}", container.exit_code()?));
    container.forget()?;
    Ok(format!("{id}: {}", seen.join(", ")))
}

fn swapped(place: &Place<'_>) -> Result<String> {
    let mut containers = Vec::new();
    for (id, shim) in [
        ("u1", Shim::Stock),
        ("u2", Shim::Firn),
        ("u3", Shim::Stock),
        ("u4", Shim::Firn),
    ] {
        place.swap(shim)?;
        containers.push(place.start_under(id, shim, None)?.0);
        if id == "u2" || id == "u3" {
            place.node().restart_containerd()?;
        }
        for container in &containers {
            container.exec(&["true"])?;
        }
    }
    // With firn's program in place, and with the stock shim's.
    let mut seen = Vec::new();
    for (container, shim) in containers
        .into_iter()
        .zip([Shim::Firn, Shim::Stock, Shim::Stock, Shim::Firn])
    {
        place.swap(shim)?;
        seen.push(lived(place, container)?);
    }
    place.swap(Shim::Firn)?;
    Ok(seen.join("\n"))
}

fn pods(place: &Place<'_>) -> Result<String> {
    let mut seen = Vec::new();
    for (ids, first, then) in [
        (["p1", "p2", "p3"], Shim::Stock, Shim::Firn),
        (["q1", "q2", "q3"], Shim::Firn, Shim::Stock),
    ] {
        place.swap(first)?;
        let (one, shim) = place.start_under(ids[0], first, None)?;
        place.swap(then)?;
        let (two, _) = place.start_under(ids[1], then, Some(shim))?;
        place.node().restart_containerd()?;
        let (three, _) = place.start_under(ids[2], then, Some(shim))?;
        // The shim is named after the first.
        for container in [two, three, one] {
            seen.push(lived(place, container)?);
        }
    }
    place.swap(Shim::Firn)?;
    Ok(seen.join("\n"))
}
