//! Hooks of start and delete have no deadline, and Kill ends them; an update waits for a checkpoint, and not
//! for long.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use containerd_shim_protos::api::{Empty, UpdateTaskRequest};
use containerd_shim_protos::protobuf::MessageField;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use firn_lab::{CommandOutput, FIRN, GpuHost, Pending, Task, describe, nothing_left, on};
use firn_node::{Platform, wait_for};

use super::acknowledged::{go_on, hold, wait_until_held};
use super::{AT_ONCE, IMAGE, LIMIT, Stop, checkpoint, host, idle_loop};

/// How long an update waits.
const PATIENCE: Duration = Duration::from_secs(30);

fn kill(host: &GpuHost) -> Result<()> {
    let begun = Instant::now();
    let killed = Task::of(host, "job")?.kill("", 9, false);
    killed.map_err(|error| anyhow::anyhow!("kill: {error}"))?;
    ensure!(begun.elapsed() < AT_ONCE, "only after {:?}", begun.elapsed());
    Ok(())
}

/// The runtime stands still in `verb`, as it does while a hook runs.
fn stands_still(host: &GpuHost) -> Result<()> {
    wait_for("the runtime to stand still", LIMIT, || {
        Ok(host.node().path(super::STUCK).exists().then_some(()))
    })
}

fn a_start_that_hangs_is_ended(host: &GpuHost) -> Result<()> {
    let stop = Stop::Runc("start");
    stop.set(host)?;
    let mut events = host.watch_events()?;
    let run = ["ctr", "run", "--detach", "--runtime", FIRN];
    let run = [
        &run[..],
        host.limits(),
        &[firn_lab::IMAGE, "job", "sleep", "1000"],
    ]
    .concat();
    let client = host.node().spawn(&run)?;
    stands_still(host)?;
    kill(host)?;
    events.wait_for("job", "/tasks/exit", 1)?;
    let stderr = CommandOutput::wait(client)?.stderr;
    ensure!(
        stderr.contains("the container was killed during start"),
        "{stderr}"
    );
    Stop::lift(host)?;
    // ctr has deleted it when it could not be started, or leaves that to the user.
    let _ = host.node().run(&["ctr", "tasks", "delete", "job"]);
    let _ = host.node().run(&["ctr", "containers", "delete", "job"]);
    nothing_left(host, "job")?;
    host.idle()
}

fn a_delete_that_hangs_is_ended(host: &GpuHost) -> Result<()> {
    let job = idle_loop(host)?;
    kill(host)?;
    job.becomes("STOPPED")?;
    Stop::Runc("delete").set(host)?;
    let client = host.node().spawn(&["ctr", "tasks", "delete", "job"])?;
    stands_still(host)?;
    kill(host)?;
    let stderr = CommandOutput::wait(client)?.stderr;
    ensure!(
        stderr.contains("the container was killed during delete"),
        "{stderr}"
    );
    Stop::lift(host)?;
    let _ = host.node().run(&["ctr", "tasks", "delete", "job"]);
    job.forget()?;
    host.idle()
}

fn update(task: &Task) -> Result<Pending<Empty>> {
    let mut update = UpdateTaskRequest::new();
    update.id = "job".to_owned();
    update.resources = MessageField::some(Any {
        type_url: "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources".to_owned(),
        value: b"{}".to_vec(),
        ..Any::default()
    });
    Ok(task.begin_known("Update", &update, LIMIT)?)
}

fn an_update_waits_for_a_dump(host: &GpuHost) -> Result<()> {
    let job = idle_loop(host)?;
    hold(host, "criu-dump")?;
    let task = Task::of(host, "job")?;
    let dump = checkpoint(&task, false)?;
    wait_until_held(host)?;
    let (begun, updated) = (Instant::now(), update(&task)?);
    let output = describe(&task.end(updated), |_| "success".to_owned());
    ensure!(output.contains("FIRN-BUSY: cannot update"), "{output}");
    ensure!(
        begun.elapsed() > PATIENCE - Duration::from_secs(1),
        "{:?}",
        begun.elapsed()
    );
    ensure!(begun.elapsed() < PATIENCE + AT_ONCE, "{:?}", begun.elapsed());
    let updated = update(&task)?;
    ensure!(!updated.is_there(), "it was updated in the middle of its dump");
    go_on(host)?;
    let dumped = describe(&task.end(dump), |_| "success".to_owned());
    let updated = describe(&task.end(updated), |_| "success".to_owned());
    ensure!(dumped == "success" && updated == "success", "{dumped}, {updated}");
    host.node().run(&["rm", "-r", IMAGE])?;
    job.remove()?;
    host.idle()
}

pub fn hooks_have_time_until_a_kill_and_updates_wait(platform: Platform) -> Result<()> {
    on([host(platform, "rc-h", 1)?], |[host]| {
        a_start_that_hangs_is_ended(host)?;
        a_delete_that_hangs_is_ended(host)?;
        an_update_waits_for_a_dump(host)
    })
}
