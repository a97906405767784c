//! 1.4: how a container is made and deleted.

use anyhow::{Context, Result};
use firn_lab::describe;
use serde_json::Value;

use crate::conformance::raw::{Raw, deleted};
use crate::conformance::{On, Place, Point};

pub const POINTS: &[Point] = &[
    Point::same(
        "1.4 create: a refusal is reported in the runtime's words, and nothing stays mounted",
        "create UNKNOWN: OCI runtime create failed: runc create failed:",
        create_refused,
    ),
    Point::same(
        "1.4 create: without mounts no root directory is made, with mounts one of mode 0711",
        "with mounts 711\nwithout mounts absent",
        create_makes_rootfs,
    ),
    Point::same(
        "1.4 create: a bundle that is not there or not readable is refused",
        "no bundle NOT_FOUND",
        create_without_bundle,
    ),
    Point::same(
        "1.4 create: an id is taken once",
        "create again UNKNOWN: OCI runtime create failed",
        create_twice,
    )
    .better("create again ALREADY_EXISTS: container r: already exists\nroot file system mounted true"),
    Point::same(
        "1.4 start: every controller of cgroup v2 is on, down to the container",
        "0 of them are off",
        controllers,
    )
    .on(On::V2),
    Point::same(
        "1.4 delete: a created container ends and reports how",
        "delete pid set code 0 at zero",
        delete_created,
    )
    .better("wait code 137 at set\ndelete pid set code 137 at set"),
    Point::same(
        "1.4 delete: of two at the same time one finds it deleted",
        DELETED,
        delete_twice,
    ),
    Point::same(
        "1.4 delete: what keeps the root file system busy is reported, and it can be tried again",
        "delete UNKNOWN: failed rootfs umount",
        delete_busy,
    ),
];

const SLEEP: &str = "exec sleep 1000";

/// What a Delete returns during another one.
const DELETED: &str = "NOT_FOUND: cannot delete a deleted process: not found";

/// Whether something is mounted below the bundle of a raw container.
fn is_mounted(place: &Place<'_>, id: &str) -> Result<bool> {
    let mounts = place.node().run(&["cat", "/proc/self/mounts"])?.stdout;
    Ok(mounts.contains(&format!("{}/rootfs", Raw::bundle(id))))
}

fn create_refused(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.make_bundle("r", "", |spec| {
        spec["process"]["args"] = "/nosuch".split(' ').collect()
    })?;
    let mut seen = vec![format!("create {}", raw.create(&Raw::create_request("r")))];
    seen.push(format!("mounted {}", is_mounted(place, "r")?));
    seen.push(raw.state("r", ""));
    raw.make_bundle("r", SLEEP, |_| {})?;
    let mut request = Raw::create_request("r");
    request.rootfs[0].source = "/nosuch".to_owned();
    let refused = raw.create(&request);
    let words: Vec<&str> = refused.split(": ").take(2).collect();
    seen.push(format!("no such mount {}", words.join(": ")));
    seen.push(format!(
        "its id is free {}",
        raw.create(&Raw::create_request("r"))
    ));
    raw.end(&["r"])?;
    Ok(seen.join("\n"))
}

fn create_makes_rootfs(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    let rootfs = format!("{}/rootfs", Raw::bundle("r"));
    let mode = || {
        place
            .node()
            .run(&["stat", "--format=%a", &rootfs])
            .map_or("absent".to_owned(), |output| output.stdout.trim().to_owned())
    };
    let none = |spec: &mut Value| spec["process"]["args"] = "/nosuch".split(' ').collect();
    raw.make_bundle("r", "", none)?;
    raw.create(&Raw::create_request("r"));
    let with = mode();
    place.node().run(&["rm", "-r", &rootfs])?;
    let mut request = Raw::create_request("r");
    request.rootfs.clear();
    raw.create(&request);
    let seen = format!("with mounts {with}\nwithout mounts {}", mode());
    raw.end(&["r"])?;
    Ok(seen)
}

fn create_without_bundle(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    let code = |answer: String| answer.split(':').next().unwrap_or_default().to_owned();
    let mut request = Raw::create_request("r");
    request.bundle = "/run/raw/nosuch".to_owned();
    let mut seen = vec![format!("no bundle {}", code(raw.create(&request)))];
    let config = format!("{}/config.json", Raw::bundle("r"));
    for text in ["", "{", "[]"] {
        place.node().write(&config, text)?;
        let answer = raw.create(&Raw::create_request("r"));
        let words: Vec<&str> = answer.split(": ").take(2).collect();
        seen.push(format!("config {text:?} {}", words.join(": ")));
        seen.push(format!("mounted {}", is_mounted(place, "r")?));
    }
    raw.end(&["r"])?;
    Ok(seen.join("\n"))
}

fn create_twice(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let seen = format!(
        "create again {}\nroot file system mounted {}",
        raw.create(&Raw::create_request("r")),
        is_mounted(place, "r")?
    );
    raw.end(&["r"])?;
    Ok(seen)
}

/// To be seen on hosts that have controllers in v2: a hybrid one has them in v1.
fn controllers(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let read = |path: &str| Ok::<_, anyhow::Error>(place.node().run(&["cat", path])?.stdout);
    let own = read(&format!("/proc/{}/cgroup", raw.pid_of("r")?))?;
    // Hosts that also have v1 report that too.
    let own = own.lines().find_map(|line| line.strip_prefix("0::"));
    let own = own.context("no cgroup v2")?.to_owned();
    let all = read("/sys/fs/cgroup/cgroup.controllers")?;
    let given = read(&format!("/sys/fs/cgroup{own}/cgroup.controllers"))?;
    let given: Vec<&str> = given.split_whitespace().collect();
    let off = all
        .split_whitespace()
        .filter(|name| !given.contains(name))
        .count();
    raw.end(&["r"])?;
    Ok(format!("of {all}{off} of them are off in {own}"))
}

fn delete_created(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.make("r", SLEEP)?;
    let wait = raw.begin_wait("r", "")?;
    let waits = raw.state("r", "");
    let delete = raw.delete("r", "");
    let waited = if wait.is_there() || place.is_firn() {
        raw.waited(wait)
    } else {
        "never ends".to_owned()
    };
    let seen = format!("{waits}\nwait {waited}\ndelete {delete}");
    raw.end(&["r"])?;
    Ok(seen)
}

fn delete_twice(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    raw.kill("r", "", 9, false);
    raw.becomes("r", "", "STOPPED")?;
    let pending = [raw.begin_delete("r")?, raw.begin_delete("r")?];
    let mut answers = pending.map(|pending| describe(&raw.task.end(pending), deleted));
    for answer in &mut answers {
        // The one that comes when the other is through.
        if answer.starts_with("NOT_FOUND: container not created") {
            *answer = DELETED.to_owned();
        }
    }
    answers.sort();
    raw.end(&["r"])?;
    Ok(answers.join("\n"))
}

fn delete_busy(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let inside = format!("cd {}/rootfs && echo in && exec sleep 1000", Raw::bundle("r"));
    let mut busy = place.node().spawn(&["sh", "-c", &inside])?;
    let mut output = [0; 3];
    std::io::Read::read_exact(busy.stdout.as_mut().context("no output")?, &mut output)?;
    raw.kill("r", "", 9, false);
    raw.becomes("r", "", "STOPPED")?;
    let refused = raw.delete("r", "");
    let words: Vec<&str> = refused.split(": ").take(2).collect();
    let state = raw.state("r", "");
    busy.kill()?;
    busy.wait()?;
    let seen = format!(
        "delete {}\n{state}\nagain {}",
        words.join(": "),
        raw.delete("r", "")
    );
    raw.end(&["r"])?;
    Ok(seen)
}
