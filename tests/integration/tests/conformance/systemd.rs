//! 1.3: cgroups made by systemd (`SystemdCgroup`).

use std::fmt::Write as _;

use anyhow::{Result, ensure};
use firn_lab::{Container, STOCK, Task, describe, failure};
use firn_node::wait_for;
use serde_json::Value;

use crate::conformance::manual::Bundle;
use crate::conformance::runtimes::checkpoint_and_restore;
use crate::conformance::{On, Place, Point};

pub const POINTS: &[Point] = &[
    Point::same(
        "1.3 systemd: a container's life in its scope",
        "in /system.slice/firn-c.scope, PAUSED and frozen, RUNNING, exit code 74, scopes: init.scope",
        life,
    )
    .on(On::Systemd),
    Point::same(
        "1.3 systemd: a name without slice and prefix",
        "slice:prefix:name",
        wrong_name,
    )
    .on(On::Systemd),
    Point::same(
        "1.3 systemd: a nested slice",
        "in /firn.slice/firn-test.slice/firn-c.scope",
        nested_slice,
    )
    .on(On::Systemd),
    // What nerdctl does under other runtime names than the stock shim's.
    Point::same(
        "1.3 systemd: slice, prefix and name without options",
        "in system.slice:firn:hand",
        without_options,
    )
    .better("in /system.slice/firn-hand.scope, ends")
    .on(On::Systemd),
    Point::same(
        "1.3 systemd: checkpoint and restore",
        "restored, continues, listed: true",
        checkpoint,
    )
    .on(On::Systemd),
    Point::same(
        "1.3 systemd: checkpoint and restore of GPU state",
        "checkpoint failed",
        gpu_checkpoint,
    )
    .better("restored in /system.slice/firn-c.scope, continues")
    .on(On::Systemd),
    Point::same(
        "1.3 systemd: a container whose shim was killed",
        "scopes: init.scope",
        killed_shim,
    )
    .on(On::Systemd),
];

const SCRIPT: &str = "trap 'exit 74' USR1; >/trapped; while :; do sleep 0.05; done";

const LIMIT: std::time::Duration = std::time::Duration::from_secs(20);

const OPTIONS: [&str; 3] = ["--runc-systemd-cgroup", "--cgroup", "system.slice:firn:c"];

fn scopes(place: &Place<'_>) -> Result<String> {
    let list = [
        "systemctl",
        "list-units",
        "--all",
        "--type=scope",
        "--no-legend",
        "--plain",
    ];
    let listed = place.node().run(&list)?.stdout;
    let names: Vec<&str> = listed
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    Ok(names.join(" "))
}

/// systemd takes scopes without processes away, in its own time.
fn no_scope(place: &Place<'_>) -> Result<String> {
    let waited = wait_for("the end of the scope", LIMIT, || {
        let scopes = scopes(place)?;
        Ok((scopes == "init.scope").then_some(scopes))
    });
    waited
        .or_else(|_| scopes(place))
        .map(|scopes| format!("scopes: {scopes}"))
}

/// The cgroup of its init.
fn cgroup(place: &Place<'_>, container: &Container<'_>) -> Result<String> {
    let table = place.node().read(format!("/proc/{}/cgroup", container.pid()?))?;
    // From outside of the node the path begins above it.
    let path = table
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .unwrap_or_default();
    let inside = path.find(".slice").and_then(|at| path[..at].rfind('/'));
    Ok(path[inside.unwrap_or_default()..].to_owned())
}

fn life(place: &Place<'_>) -> Result<String> {
    let container = place.start("c", &OPTIONS, SCRIPT)?;
    place.has_file("c", "trapped")?;
    let cgroup = cgroup(place, &container)?;
    let exec = container.exec(&["sh", "-c", "cat /proc/self/cgroup"])?;
    let listed = container.pids()?.contains(&container.pid()?.to_string());
    let metrics = container.task(&["metrics"])?;
    let names: Vec<&str> = metrics
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    let mut seen = format!("{names:?}\ninit is listed: {listed}, exec in {exec}");
    container.task(&["pause"])?;
    let events = place
        .node()
        .read(format!("/sys/fs/cgroup{cgroup}/cgroup.events"))?;
    let frozen = if events.contains("frozen 1") {
        "frozen"
    } else {
        "not frozen"
    };
    let paused = container.status()?;
    container.task(&["resume"])?;
    let resumed = container.status()?;
    let killed = Task::of(place.host, "c")?.kill("", 10, false);
    container.becomes("STOPPED")?;
    let code = container.exit_code()?;
    container.forget()?;
    write!(
        seen,
        "killed: {}, in {cgroup}, {paused} and {frozen}, {resumed}, exit code {code}, {}",
        describe(&killed, |()| "ok".to_owned()),
        no_scope(place)?
    )?;
    Ok(seen)
}

fn wrong_name(place: &Place<'_>) -> Result<String> {
    let output = place.run("c", &["--runc-systemd-cgroup", "--cgroup", "/plain/c"], &["true"])?;
    Ok(output.stderr)
}

fn without_options(place: &Place<'_>) -> Result<String> {
    let bundle = Bundle::new(place, "hand", &Value::Null)?;
    let file = format!("{}/config.json", bundle.dir);
    let mut spec: Value = serde_json::from_str(&place.node().read(&file)?)?;
    spec["linux"]["cgroupsPath"] = "system.slice:firn:hand".into();
    place.node().write(&file, spec.to_string())?;
    let shim = bundle.start()?;
    let pid = bundle.run(&shim, None)?;
    let table = place.node().read(format!("/proc/{pid}/cgroup"))?;
    let path = table
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .unwrap_or_default();
    let inside = path.find("system.slice").unwrap_or_default();
    let slash = if path[inside..].starts_with("system.slice/") {
        "/"
    } else {
        ""
    };
    let seen = format!("in {slash}{}", &path[inside..]);
    bundle.kill(&shim)?;
    shim.end()?;
    bundle.remove()?;
    Ok(format!("{seen}, ends, {}", no_scope(place)?))
}

fn nested_slice(place: &Place<'_>) -> Result<String> {
    let options = ["--runc-systemd-cgroup", "--cgroup", "firn-test.slice:firn:c"];
    let container = place.start("c", &options, SCRIPT)?;
    let cgroup = cgroup(place, &container)?;
    let metrics = container.task(&["metrics"])?.lines().count();
    container.remove()?;
    let seen = format!("in {cgroup}, {metrics} lines of metrics, {}", no_scope(place)?);
    place
        .node()
        .run(&["systemctl", "stop", "firn-test.slice", "firn.slice"])?;
    Ok(seen)
}

fn checkpoint(place: &Place<'_>) -> Result<String> {
    let seen = checkpoint_and_restore(place, &OPTIONS)?;
    Ok(format!("{seen}\n{}", no_scope(place)?))
}

fn gpu_checkpoint(place: &Place<'_>) -> Result<String> {
    let options = [&["--runtime", STOCK], &OPTIONS[..]].concat();
    let job = Container::count_with(place.host, "c", &["0"], 1, &options, &[])?;
    job.goes_on(3)?;
    let image = "checkpoint/c";
    let seen = match job.checkpoint(image) {
        Err(error) => {
            let output = failure::<()>(Err(error))?;
            ensure!(!place.host.has_image(image)?, "there is an image");
            job.remove()?;
            format!("checkpoint failed: {output}")
        }
        Ok(_) => {
            job.goes_on(3)?;
            job.remove()?;
            let (copy, _) = Container::restore(place.host, "c", image, 1)?;
            copy.goes_on(3)?;
            let cgroup = cgroup(place, &copy)?;
            copy.remove()?;
            place.host.remove_image(image)?;
            format!("restored in {cgroup}, continues")
        }
    };
    Ok(format!("{seen}\n{}", no_scope(place)?))
}

fn killed_shim(place: &Place<'_>) -> Result<String> {
    let container = place.start("c", &OPTIONS, SCRIPT)?;
    place.host.kill_shim("c")?;
    place.is_cleaned_up("c")?;
    let deleted = place.host.ctr(&["tasks", "delete", "c"], "")?;
    container.forget()?;
    Ok(format!("{:?}, {}", deleted.code, no_scope(place)?))
}
