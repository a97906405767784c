//! 1.3: other OCI runtimes than runc, named as `BinaryName`.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::api::{Empty, UpdateTaskRequest};
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use firn_lab::{Container, STOCK, Task, describe, failure, nothing_left};
use firn_node::wait_for;
use serde_json::json;

use crate::conformance::{On, Place, Point};

pub const POINTS: &[Point] = &[
    Point::same(
        "1.3 crun: a container's life",
        "exec 5, PAUSED, RUNNING, exit code 74",
        life_with_crun,
    ),
    Point::same("1.3 crun: limits are updated", "pids.max 71", update_with_crun).on(On::V1),
    Point::same("1.3 crun: errors", "not found in $PATH", errors_of_crun),
    Point::same(
        "1.3 crun: a container whose shim was killed",
        "137",
        killed_shim_with_crun,
    ),
    // crun has CRIU restore also the cgroups of v1, which a lab's v2 host hides; crun 1.28 of forky names no
    // mount of cgroup v1 to CRIU.
    Point::same("1.3 crun: checkpoint and restore", "not ", checkpoint_with_crun)
        .better("restored, continues")
        .on(On::TrixieV1),
    Point::same(
        "1.3 crun: checkpoint of GPU state",
        "crun did not terminate successfully",
        gpu_with_crun,
    )
    .better(
        "FIRN-RUNTIME: cannot checkpoint container c: crun cannot do it. hint: run the container with runc",
    ),
    Point::same("1.3 runc: a program that is not there", "\"no-runc\"", no_runtime),
    Point::same(
        "1.3 runc: a cgroup that it leaves while the kernel is slow",
        "exit code 137, cgroup left",
        delete_of_slow_cgroup,
    )
    .better("exit code 137, cgroup gone"),
];

const LIMIT: Duration = Duration::from_secs(60);

/// Ends with 74 on SIGTERM.
const SCRIPT: &str = "trap 'exit 74' USR1; >/trapped; while :; do sleep 0.05; done";

/// Counts in its memory and writes to its disk.
const COUNT: &str = "n=0; while :; do n=$((n+1)); echo $n >>/n; sleep 0.05; done";

fn life(place: &Place<'_>, runtime: &str) -> Result<String> {
    let container = place.start("c", &["--runc-binary", runtime], SCRIPT)?;
    place.has_file("c", "trapped")?;
    let script = "echo out; echo err >&2; exit 5";
    let output = place.host.exec("c", "e", &["sh", "-c", script])?;
    let mut seen = format!("{}{}", output.stdout, output.stderr);
    let pids = container.pids()?;
    writeln!(
        seen,
        "init is listed: {}",
        pids.contains(&container.pid()?.to_string())
    )?;
    let metrics = container.task(&["metrics"])?;
    let names: Vec<&str> = metrics
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    writeln!(seen, "{names:?}")?;
    container.task(&["pause"])?;
    let paused = container.status()?;
    container.task(&["resume"])?;
    let resumed = container.status()?;
    let killed = Task::of(place.host, "c")?.kill("", 10, false);
    container.becomes("STOPPED")?;
    writeln!(
        seen,
        "exec {}, {paused}, {resumed}, exit code {}, killed: {}",
        output.code.unwrap_or(-1),
        container.exit_code()?,
        describe(&killed, |()| "ok".to_owned())
    )?;
    container.forget()?;
    Ok(seen)
}

fn life_with_crun(place: &Place<'_>) -> Result<String> {
    life(place, "crun")
}

/// Does after runc's first `delete` what a busy kernel does: for a second the cgroup is there, with a
/// process.
const SLOW_CGROUP: &str = r#"#!/bin/sh
runc "$@" || exit
for word; do
    [ "$word" = delete ] && read -r cgroup </tmp/cgroup-of-c || continue
    rm /tmp/cgroup-of-c
    mkdir "$cgroup"
    sh -c 'echo $$ >"$1/cgroup.procs"; exec sleep 1' in "$cgroup" </dev/null >/dev/null 2>&1 &
    until read -r _ <"$cgroup/cgroup.procs"; do sleep 0.01; done
done
"#;

fn delete_of_slow_cgroup(place: &Place<'_>) -> Result<String> {
    const WRAPPER: &str = "/usr/local/bin/slow-cgroup";
    let node = place.node();
    node.write(WRAPPER, SLOW_CGROUP)?;
    node.run(&["chmod", "+x", WRAPPER])?;
    let container = place.start("c", &["--runc-binary", WRAPPER], "exec sleep 1000")?;
    let find = "find /sys/fs/cgroup -type d -path '*/default/c' | head -n 1 | tee /tmp/cgroup-of-c";
    let cgroup = node.run(&["sh", "-c", find])?.stdout;
    let cgroup = cgroup.trim();
    ensure!(!cgroup.is_empty(), "there is no cgroup");
    Task::of(place.host, "c")?.kill("", 9, false).context("kill")?;
    container.becomes("STOPPED")?;
    let code = container.exit_code()?;
    let is_left = node.run(&["test", "-d", cgroup]).is_ok();
    node.run(&[
        "sh",
        "-c",
        &format!("while [ -d {cgroup} ]; do rmdir {cgroup}; done; rm {WRAPPER}"),
    ])?;
    container.forget()?;
    let left = if is_left { "left" } else { "gone" };
    Ok(format!("exit code {code}, cgroup {left}"))
}

fn no_runtime(place: &Place<'_>) -> Result<String> {
    let run = place.run("c", &["--runc-binary", "no-runc"], &["true"])?;
    nothing_left(place.host, "c")?;
    // As containerd's own clients look for it; the rest is in Go's words, or in Rust's.
    let name = "\"no-runc\"";
    let named = if run.stderr.contains(name) {
        name
    } else {
        &run.stderr
    };
    Ok(format!("{:?}, {named}", run.code))
}

fn update_with_crun(place: &Place<'_>) -> Result<String> {
    let container = place.start("c", &["--runc-binary", "crun"], SCRIPT)?;
    let request = UpdateTaskRequest {
        id: "c".to_owned(),
        resources: Some(Any {
            type_url: "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources".to_owned(),
            value: json!({ "pids": { "limit": 71 } }).to_string().into_bytes(),
            ..Any::default()
        })
        .into(),
        ..UpdateTaskRequest::default()
    };
    let updated = Task::of(place.host, "c")?.call::<Empty>("Update", &request);
    let limit = place.node().read("/sys/fs/cgroup/pids/default/c/pids.max")?;
    let seen = format!(
        "{}\npids.max {}",
        describe(&updated, |_| "ok".to_owned()),
        limit.trim()
    );
    container.remove()?;
    Ok(seen)
}

fn errors_of_crun(place: &Place<'_>) -> Result<String> {
    let run = place.run("c", &["--runc-binary", "crun"], &["no-such-program"])?;
    nothing_left(place.host, "c")?;
    let container = place.start("c", &["--runc-binary", "crun"], SCRIPT)?;
    let exec = place
        .host
        .ctr(&["tasks", "exec", "--exec-id", "e", "c", "no-such-program"], "")?;
    let deleted = place.host.ctr(&["tasks", "delete", "c"], "")?;
    container.remove()?;
    let dead = place.start("c", &["--runc-binary", "crun"], "exit 0")?;
    dead.becomes("STOPPED")?;
    let killed = describe(&Task::of(place.host, "c")?.kill("", 9, false), |()| {
        "ok".to_owned()
    });
    dead.remove()?;
    // ctr's log lines have times.
    let deleted = deleted.stderr.lines().last().unwrap_or_default().to_owned();
    Ok(format!(
        "{}\n{}\ndelete while it runs: {deleted}\nkill of the dead: {killed}",
        run.stderr, exec.stderr
    ))
}

fn killed_shim_with_crun(place: &Place<'_>) -> Result<String> {
    let container = place.start("c", &["--runc-binary", "crun"], SCRIPT)?;
    place.host.kill_shim("c")?;
    place.is_cleaned_up("c")?;
    let deleted = place.host.ctr(&["tasks", "delete", "c"], "")?;
    container.forget()?;
    Ok(format!("{:?} 137", deleted.code))
}

/// Ends the container through its shim's end: what crun does not know any more the stock shim does not
/// delete.
fn end_shim(place: &Place<'_>) -> Result<()> {
    if place.host.kill_shim("c").is_ok() {
        place.is_cleaned_up("c")?;
    }
    for left in ["tasks", "containers"] {
        place.host.ctr(&[left, "delete", "c"], "")?;
    }
    Ok(())
}

/// How far a counter of [`COUNT`] is. One that began again does not continue where its file ends.
fn count(container: &Container<'_>) -> Result<u64> {
    let text = container.exec(&["cat", "/n"])?;
    // The last line may be on its way.
    let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
    let mut counted = 0;
    for line in whole.lines() {
        counted += 1;
        ensure!(line == counted.to_string(), "{line} in place of {counted}");
    }
    Ok(counted)
}

fn reaches(container: &Container<'_>, least: u64) -> Result<u64> {
    wait_for("a count", LIMIT, || {
        let count = count(container)?;
        Ok((count >= least).then_some(count))
    })
}

fn counts<'p>(place: &'p Place<'_>, options: &[&str]) -> Result<Container<'p>> {
    let container = place.start("c", options, COUNT)?;
    reaches(&container, 3)?;
    Ok(container)
}

/// Checkpoints a running counter and restores it from there.
pub fn checkpoint_and_restore(place: &Place<'_>, options: &[&str]) -> Result<String> {
    let container = counts(place, options)?;
    let image = "checkpoint/c";
    if let Err(error) = container.checkpoint(image) {
        let from = count(&container)?;
        reaches(&container, from + 2)?;
        ensure!(container.status()? == "RUNNING", "it does not continue");
        container.remove()?;
        return Ok(format!("not checkpointed, continues: {error:#}"));
    }
    let from = reaches(&container, 3)?;
    reaches(&container, from + 2)?;
    container.remove()?;
    let copy = match Container::restore(place.host, "c", image, 0) {
        Ok((copy, _)) => copy,
        Err(error) => {
            end_shim(place)?;
            nothing_left(place.host, "c")?;
            place.host.remove_image(image)?;
            return Ok(format!("not restored: {error:#}"));
        }
    };
    let restored = reaches(&copy, 3)?;
    reaches(&copy, restored + 2)?;
    let pids = !copy.pids()?.is_empty();
    let exec = copy.exec(&["echo", "exec"])?;
    copy.remove()?;
    place.host.remove_image(image)?;
    Ok(format!("restored, continues, listed: {pids}, {exec}"))
}

fn checkpoint_with_crun(place: &Place<'_>) -> Result<String> {
    let seen = checkpoint_and_restore(place, &["--runc-binary", "crun"])?;
    // A container that ends with its checkpoint can be deleted.
    let container = counts(place, &["--runc-binary", "crun"])?;
    let ended = match container.checkpoint_and_exit("/tmp/crun-image") {
        Ok(_) => {
            container.becomes("STOPPED")?;
            match container.exit_code() {
                Ok(code) => {
                    container.forget()?;
                    format!("exit code {code}")
                }
                Err(error) => {
                    end_shim(place)?;
                    format!("not deleted: {error:#}")
                }
            }
        }
        Err(error) => {
            container.remove()?;
            format!("{error:#}")
        }
    };
    place.node().run(&["rm", "-rf", "/tmp/crun-image"])?;
    Ok(format!("{seen}\nwith --exit: {ended}"))
}

fn gpu_with_crun(place: &Place<'_>) -> Result<String> {
    let options = ["--runtime", STOCK, "--runc-binary", "crun"];
    let job = Container::count_with(place.host, "c", &["0"], 1, &options, &[])?;
    job.goes_on(3)?;
    let output = failure(job.checkpoint("checkpoint/failed")).context("checkpoint")?;
    ensure!(!place.host.has_image("checkpoint/failed")?, "there is an image");
    ensure!(job.status()? == "RUNNING", "the task is {}", job.status()?);
    job.goes_on(3)?;
    job.remove()?;
    Ok(output)
}
