//! Whatever one call waits for, nobody else waits with it: a runtime that hangs in any of its verbs, a driver
//! that hangs, a long dump, a reader that does not read. Who asks for state gets it, other containers of the
//! same shim live on, a kill arrives, and what a client has begun ends as it would although that client has
//! gone.
//!
//! "At once" is an order here, never a time: the answer is there while the other call is still stuck.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::api::{
    CheckpointTaskRequest, ConnectRequest, ConnectResponse, Empty, PauseRequest, PidsRequest, PidsResponse,
    StateRequest, StateResponse, StatsRequest, StatsResponse, Status, UpdateTaskRequest, WaitRequest,
    WaitResponse,
};
use containerd_shim_protos::protobuf::MessageField;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use firn_lab::{
    CommandOutput, Container, FIRN, GpuHost, Pending, SimGpu, Task, cases, describe, matrix, nothing_left, on,
};
use firn_node::{Platform, wait_for};

const LIMIT: Duration = Duration::from_secs(60);

/// Puts containers into one shim.
const GROUP: [&str; 2] = ["--annotation", "io.containerd.runc.v2.group=pod"];

/// A runc that stands still in calls of one verb for the container "held".
const HOLDING: &str = r#"#!/bin/sh
verb=$(cat /run/hold 2>/dev/null) || exec /usr/sbin/runc "$@"
case " $* " in *" $verb "*held*)
    touch /run/stuck
    while [ -e /run/hold ]; do sleep 0.05; done
esac
exec /usr/sbin/runc "$@"
"#;

/// The verb in which runc stands still, until this is dropped.
struct Hold(PathBuf);

impl Hold {
    fn on(host: &GpuHost, verb: &str) -> Result<Self> {
        host.node().run(&["rm", "-f", "/run/stuck"])?;
        host.node().write("/run/hold", verb)?;
        Ok(Self(host.node().path("/run")))
    }

    /// Waits until a call stands still.
    fn wait_until_reached(&self) -> Result<()> {
        wait_for("runc to stand still", LIMIT, || {
            Ok(self.0.join("stuck").exists().then_some(()))
        })
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.0.join("hold"));
    }
}

/// Containers of one shim: "other", which always runs, and "held".
struct Pod<'h> {
    host: &'h GpuHost,
    other: Container<'h>,
    task: Task,
}

macro_rules! request {
    ($kind:ident, $id:expr) => {{
        let mut request = $kind::new();
        request.id = $id.to_owned();
        request
    }};
}

impl<'h> Pod<'h> {
    fn start(host: &'h GpuHost) -> Result<Self> {
        host.replace_runc(HOLDING)?;
        let other = run(host, "other")?;
        Ok(Self {
            host,
            other,
            task: Task::of(host, "other")?,
        })
    }

    fn end(self) -> Result<()> {
        drop(self.task);
        self.other.remove()?;
        self.host.idle()
    }

    fn state(&self, id: &str) -> ttrpc::Result<Status> {
        let state: StateResponse = self.task.call("State", &request!(StateRequest, id))?;
        Ok(state.status.enum_value_or_default())
    }

    fn wait(&self, id: &str) -> ttrpc::Result<Pending<WaitResponse>> {
        self.task.begin("Wait", &request!(WaitRequest, id), LIMIT)
    }

    fn kill(&self, id: &str) -> Result<()> {
        let mut request = containerd_shim_protos::api::KillRequest::new();
        request.id = id.to_owned();
        request.signal = 9;
        self.task.call::<Empty>("Kill", &request)?;
        Ok(())
    }

    /// Everything that only looks answers, and who waits for the end of the container waits.
    fn looks_at(&self, id: &str) -> Result<Status> {
        let wait = self.wait(id)?;
        let state = self.state(id).context("State")?;
        let connect: ConnectResponse = self.task.call("Connect", &request!(ConnectRequest, id))?;
        ensure!(connect.shim_pid != 0 && connect.task_pid != 0, "{connect:?}");
        let stats: StatsResponse = self.task.call("Stats", &request!(StatsRequest, id))?;
        ensure!(stats.stats.is_some(), "no stats");
        ensure!(!wait.is_there(), "Wait has answered for {id}: {state:?}");
        Ok(state)
    }

    fn pids(&self, id: &str) -> Result<()> {
        let pids: PidsResponse = self.task.call("Pids", &request!(PidsRequest, id))?;
        ensure!(!pids.processes.is_empty(), "no pids");
        Ok(())
    }

    /// The container is killed, and who waits for it hears of it.
    fn is_killed(&self, id: &str) -> Result<()> {
        let wait = self.wait(id)?;
        self.kill(id).context("Kill")?;
        let exit = self.task.end(wait).context("Wait")?;
        ensure!(exit.exit_status == 137, "{exit:?}");
        ensure!(self.state(id)? == Status::STOPPED, "not stopped");
        Ok(())
    }

    /// Other containers of the shim come and go.
    fn others_live(&self) -> Result<()> {
        let other = &self.other;
        ensure!(self.looks_at("other")? == Status::RUNNING);
        self.pids("other")?;
        ensure!(other.exec(&["echo", "out"])? == "out\n", "no output of an exec");
        other.task(&["pause"])?;
        other.task(&["resume"])?;
        let third = run(self.host, "third")?;
        self.is_killed("third")?;
        third.remove()
    }

    /// Runs a client whose call stands still in a verb of runc; meanwhile `look` and the lives of others go
    /// on. Gives what the client printed.
    fn stuck(&self, verb: &str, client: &[&str], look: impl FnOnce() -> Result<()>) -> Result<CommandOutput> {
        let hold = Hold::on(self.host, verb)?;
        let mut client = self.host.node().spawn(client)?;
        hold.wait_until_reached()?;
        look().with_context(|| format!("while runc {verb} is stuck"))?;
        self.others_live()
            .with_context(|| format!("another container while runc {verb} is stuck"))?;
        ensure!(client.try_wait()?.is_none(), "runc {verb} was not stuck");
        drop(hold);
        CommandOutput::wait(client)
    }

    /// As [`Pod::stuck`], but `kill` has the call end while runc stands still.
    fn cut_off(
        &self,
        verb: &str,
        client: &[&str],
        kill: impl FnOnce() -> Result<()>,
    ) -> Result<CommandOutput> {
        let hold = Hold::on(self.host, verb)?;
        let client = self.host.node().spawn(client)?;
        hold.wait_until_reached()?;
        kill().with_context(|| format!("while runc {verb} is stuck"))?;
        let ended = CommandOutput::wait(client)?;
        drop(hold);
        Ok(ended)
    }
}

/// Sleeps on when a dump has interrupted its sleep.
const SLEEP: [&str; 3] = ["sh", "-c", "while :; do sleep 1000; done"];

/// A container of the group that sleeps.
fn run<'h>(host: &'h GpuHost, id: &str) -> Result<Container<'h>> {
    let options = [&["--runtime", FIRN], &GROUP[..]].concat();
    Container::run(host, id, &options, &SLEEP)
}

/// `ctr run --detach` of a container of the group.
fn ctr_run<'a>(host: &GpuHost, options: &[&'a str]) -> Vec<&'a str> {
    let start = ["ctr", "run", "--detach", "--runtime", FIRN];
    let command = [&[firn_lab::IMAGE, "held"], &SLEEP[..]].concat();
    [&start[..], host.limits(), options, &command].concat()
}

/// The verbs that make, change and end a container.
fn stuck_verbs(pod: &Pod<'_>) -> Result<()> {
    let host = pod.host;
    let start = ctr_run(host, &GROUP);
    pod.stuck("create", &start, || {
        let state = describe(&pod.state("held"), |state| format!("{state:?}"));
        ensure!(state.contains("NOT_FOUND"), "{state}");
        Ok(())
    })?
    .expect_success()?;
    ensure!(pod.looks_at("held")? == Status::RUNNING);
    let held = Container::known(host, "held");
    held.remove()?;

    let looks = |expected: Status| {
        move || {
            pod.pids("held")?;
            let state = pod.looks_at("held")?;
            ensure!(state == expected, "{state:?}");
            Ok(())
        }
    };
    pod.stuck("start", &start, looks(Status::CREATED))?
        .expect_success()?;
    let held = Container::known(host, "held");
    let exec = ["ctr", "tasks", "exec", "--exec-id", "e", "held", "true"];
    pod.stuck("exec", &exec, looks(Status::RUNNING))?
        .expect_success()?;
    pod.stuck(
        "pause",
        &["ctr", "tasks", "pause", "held"],
        looks(Status::PAUSING),
    )?
    .expect_success()?;
    held.becomes("PAUSED")?;
    pod.stuck(
        "resume",
        &["ctr", "tasks", "resume", "held"],
        looks(Status::PAUSED),
    )?
    .expect_success()?;
    held.becomes("RUNNING")?;
    pod.stuck("ps", &["ctr", "tasks", "ps", "held"], || {
        ensure!(pod.looks_at("held")? == Status::RUNNING);
        Ok(())
    })?
    .expect_success()?;
    let dump = ["ctr", "tasks", "checkpoint", "--image-path", "/tmp/image", "held"];
    pod.stuck("checkpoint", &dump, looks(Status::PAUSED))?
        .expect_success()?;
    host.node().run(&["rm", "-r", "/tmp/image"])?;
    let kill = ["ctr", "tasks", "kill", "--signal", "SIGKILL", "held"];
    pod.stuck("kill", &kill, looks(Status::RUNNING))?
        .expect_success()?;
    held.becomes("STOPPED")?;
    // ctr warns of the exit code by its own.
    pod.stuck("delete", &["ctr", "tasks", "delete", "held"], || {
        ensure!(pod.state("held")? == Status::STOPPED);
        let wait = pod.wait("held")?;
        ensure!(pod.task.end(wait)?.exit_status == 137);
        Ok(())
    })?;
    held.forget()
}

fn stuck_update(pod: &Pod<'_>) -> Result<()> {
    let held = run(pod.host, "held")?;
    let mut update = request!(UpdateTaskRequest, "held");
    update.resources = MessageField::some(Any {
        type_url: "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources".to_owned(),
        value: b"{}".to_vec(),
        ..Any::default()
    });
    let hold = Hold::on(pod.host, "update")?;
    let updated = pod.task.begin::<Empty>("Update", &update, LIMIT)?;
    hold.wait_until_reached()?;
    pod.pids("held")?;
    ensure!(pod.looks_at("held")? == Status::RUNNING);
    pod.others_live()?;
    pod.is_killed("held")?;
    ensure!(!updated.is_there(), "runc update was not stuck");
    drop(hold);
    let _ = pod.task.end(updated);
    held.remove()
}

/// A kill reaches a container in the middle of a pause, which then fails, and of a dump, which is not waited
/// for.
fn kills(pod: &Pod<'_>) -> Result<()> {
    let held = run(pod.host, "held")?;
    let pause = ["ctr", "tasks", "pause", "held"];
    let ended = pod.stuck("pause", &pause, || pod.is_killed("held"))?;
    ensure!(!ended.is_ok(), "pause of a dead container: {}", ended.text());
    held.remove()?;

    let held = run(pod.host, "held")?;
    let dump = ["ctr", "tasks", "checkpoint", "--image-path", "/tmp/image", "held"];
    let ended = pod.cut_off("checkpoint", &dump, || pod.is_killed("held"))?;
    ensure!(!ended.is_ok(), "checkpoint of a dead container: {}", ended.text());
    held.remove()?;
    pod.host.node().run(&["rm", "-rf", "/tmp/image"]).map(drop)
}

/// A kill reaches a container while the runtime of an exec hangs; its exit is published after that exec's.
fn kill_during_an_exec(pod: &Pod<'_>) -> Result<()> {
    let held = run(pod.host, "held")?;
    let exec = ["ctr", "tasks", "exec", "--exec-id", "e", "held", "true"];
    let ended = pod.stuck("exec", &exec, || {
        let pid = held.pid()?;
        pod.kill("held")?;
        wait_for("the end of init", LIMIT, || {
            let processes = pod.host.node().processes();
            Ok((!processes.iter().any(|process| process.pid == pid)).then_some(()))
        })
    })?;
    ensure!(!ended.is_ok(), "exec in a dead container: {}", ended.text());
    held.becomes("STOPPED")?;
    held.remove()
}

/// What a client has begun ends as it would when its deadline passes, and when it closes its connection.
fn clients_go(pod: &Pod<'_>) -> Result<()> {
    let host = pod.host;
    let held = run(host, "held")?;
    let hold = Hold::on(host, "pause")?;
    let pause = request!(PauseRequest, "held");
    let paused = pod
        .task
        .begin::<Empty>("Pause", &pause, Duration::from_millis(500))?;
    hold.wait_until_reached()?;
    let seen = describe(&pod.task.end(paused), |_| "ok".to_owned());
    println!("a deadline that passes: {seen}");
    ensure!(seen != "ok", "the deadline did not pass");
    ensure!(pod.state("held")? == Status::PAUSING);
    drop(hold);
    held.becomes("PAUSED")?;
    held.task(&["resume"])?;

    let hold = Hold::on(host, "checkpoint")?;
    let mut dump = request!(CheckpointTaskRequest, "held");
    dump.path = "/tmp/image".to_owned();
    let client = Task::of(host, "other")?;
    let dumped = client.begin::<Empty>("Checkpoint", &dump, LIMIT)?;
    hold.wait_until_reached()?;
    drop((client, dumped));
    // Its connection is gone by the time that an exec, which a dump holds up, is asked for.
    pod.others_live()?;
    drop(hold);
    held.task(&["exec", "--exec-id", "e"]).ok();
    wait_for("the image", LIMIT, || {
        Ok(host
            .node()
            .path("/tmp/image/inventory.img")
            .exists()
            .then_some(()))
    })?;
    // A dump that is over lets the next one begin.
    host.node()
        .run(&["ctr", "tasks", "checkpoint", "--image-path", "/tmp/next", "held"])?;
    host.node().run(&["rm", "-r", "/tmp/image", "/tmp/next"])?;
    ensure!(pod.looks_at("held")? == Status::RUNNING);
    held.remove()
}

/// A client that goes in the middle of a create leaves nothing, in a shim of its own as in one of others.
fn creator_goes(pod: &Pod<'_>) -> Result<()> {
    let host = pod.host;
    for options in [&GROUP[..], &[]] {
        let hold = Hold::on(host, "create")?;
        let mut client = host.node().spawn(&ctr_run(host, options))?;
        hold.wait_until_reached()?;
        client.kill()?;
        client.wait()?;
        pod.others_live()?;
        drop(hold);
        // containerd removes the task that its client no longer waits for; ctr's container is still known to
        // it.
        wait_for("the container to be free", LIMIT, || {
            Ok(host.node().run(&["ctr", "containers", "delete", "held"]).ok())
        })?;
        nothing_left(host, "held").with_context(|| format!("{options:?}"))?;
        run(host, "held")?.remove().context("the same id again")?;
    }
    Ok(())
}

/// A GPU container under checkpoint: while CRIU's runtime is stuck, and while the driver is.
fn gpu_checkpoint(pod: &Pod<'_>) -> Result<()> {
    let host = pod.host;
    let count = || {
        let held = Container::count_with(host, "held", &["0"], 1, &GROUP, &[])?;
        held.goes_on(2)?;
        Ok::<_, anyhow::Error>(held)
    };
    let dump = ["ctr", "tasks", "checkpoint", "--image-path", "/tmp/image", "held"];
    let looks = || {
        pod.pids("held")?;
        let state = pod.looks_at("held")?;
        ensure!(state == Status::PAUSED, "{state:?}");
        Ok(())
    };
    let held = count()?;
    pod.stuck("checkpoint", &dump, looks)?.expect_success()?;
    held.goes_on(2)?;
    host.node().run(&["rm", "-r", "/tmp/image"])?;
    let ended = pod.cut_off("checkpoint", &dump, || pod.is_killed("held"))?;
    ensure!(ended.text().contains("FIRN-ENDED:"), "{}", ended.text());
    ensure!(
        !host.node().path("/tmp/image").exists(),
        "an image of a dead container"
    );
    held.remove()?;

    for killed in [false, true] {
        let held = count()?;
        host.fault(&["--call", "checkpoint", "--hang"])?;
        let mut client = host.node().spawn(&dump)?;
        let worker = wait_for("the driver to be asked", LIMIT, || {
            let mut processes = host.node().processes().into_iter();
            let worker = processes.find(|process| process.command == "firn-gpu");
            let taking = host.node().run(&["simgpu", "fault", "list"])?.stdout;
            Ok(worker.filter(|_| taking.contains("\"seen\": 1")))
        })?;
        looks()?;
        pod.others_live()?;
        ensure!(client.try_wait()?.is_none(), "the driver was not stuck");
        if killed {
            pod.is_killed("held")?;
        } else {
            host.no_faults()?;
            host.node().run(&["kill", "-KILL", &worker.pid.to_string()])?;
        }
        let ended = CommandOutput::wait(client)?;
        host.no_faults()?;
        let code = if killed { "FIRN-ENDED:" } else { "FIRN-WORKER:" };
        ensure!(ended.text().contains(code), "{}", ended.text());
        if !killed {
            held.goes_on(2)?;
        }
        held.remove()?;
    }
    Ok(())
}

/// What is reported, and done.
type Story = (&'static str, fn(&Pod<'_>) -> Result<()>);

const STORIES: &[Story] = &[
    ("stuck verbs", stuck_verbs),
    ("a stuck update", stuck_update),
    ("kills", kills),
    ("a kill during an exec", kill_during_an_exec),
    ("clients that go", clients_go),
    ("a creator that goes", creator_goes),
    ("a checkpoint of a GPU container", gpu_checkpoint),
];

fn calls_do_not_wait_for_others(platform: Platform) -> Result<()> {
    let host = GpuHost::for_test(platform, "responsive", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        let pod = Pod::start(host)?;
        let chosen = std::env::var("FIRN_STORY").unwrap_or_default();
        for (what, story) in STORIES.iter().filter(|(what, _)| what.contains(&chosen)) {
            let begun = std::time::Instant::now();
            story(&pod).with_context(|| (*what).to_owned())?;
            println!("{platform}: {what}: {:.1} s", begun.elapsed().as_secs_f64());
        }
        pod.end()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        calls_do_not_wait_for_others [FORKY, FORKY_V2];
    })
}
