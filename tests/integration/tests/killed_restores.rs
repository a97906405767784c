//! A restore whose CRIU or runc is killed or stands still: the client gets the cause, nothing of the
//! container is left, no process has run on from half of its state, and the image restores afterwards.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{CommandOutput, Container, FIRN, GpuHost, SHARES_NOTHING, SimGpu, cases, matrix, on};
use firn_node::{Platform, Process, wait_for};

const LIMIT: Duration = Duration::from_secs(60);

/// CRIU runs this script at each of its steps, and waits for it. At the step that /run/step names it stands
/// still.
const STANDING: &str = "#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" = \"$(cat /run/step)\" ] || exit 0\n\
                        touch /run/stuck\nexec sleep 1234\n";

/// A step at which only the first task is made, and one at which all are complete and none has run.
const STEPS: [&str; 2] = ["setup-namespaces", "post-restore"];

/// A container without GPU. A lone sleep would end when it is restored.
const WORK: [&str; 3] = ["sh", "-c", "while :; do sleep 0.1; done"];

/// Puts containers into one shim.
const GROUP: [&str; 4] = [
    "--runtime",
    FIRN,
    "--annotation",
    "io.containerd.runc.v2.group=pod",
];

/// What is done to a restore in its middle.
#[derive(Clone, Copy, Debug)]
struct Blow {
    /// Who is hit.
    program: &'static str,
    signal: &'static str,
    /// What the client's error contains.
    cause: &'static str,
}

const CRIU_KILLED: Blow = Blow {
    program: "criu",
    signal: "KILL",
    cause: "",
};
const RUNC_KILLED: Blow = Blow {
    program: "runc",
    signal: "KILL",
    cause: "ended by signal 9",
};
/// Ended by the deadline of the restore.
const CRIU_STOPPED: Blow = Blow {
    program: "criu",
    signal: "STOP",
    cause: "did not end within",
};

struct Case<'h> {
    host: &'h GpuHost,
    image: &'static str,
    counters: usize,
    /// A container of the same shim.
    neighbour: Option<Container<'h>>,
}

impl Case<'_> {
    /// Hits a restore at this step. Its client gets the error, and nothing is left.
    fn hit(&self, step: &str, blow: Blow) -> Result<()> {
        let node = self.host.node();
        node.run(&["rm", "-f", "/run/stuck"])?;
        node.write("/run/step", step)?;
        let client = Container::begin_restore(self.host, "job", self.image)?;
        wait_for("CRIU to stand still", LIMIT, || {
            Ok(node.path("/run/stuck").exists().then_some(()))
        })?;
        let job = Container::known(self.host, "job");
        let carried = job.lines()?;
        let victim = self.oldest(blow.program)?;
        node.run(&["kill", &format!("-{}", blow.signal), &victim.to_string()])?;
        let output = CommandOutput::wait(client)?.failed()?;
        let code = if self.counters > 0 {
            "FIRN-RESTORE: "
        } else {
            "OCI runtime restore failed: "
        };
        ensure!(output.contains(code) && output.contains(blow.cause), "{output}");
        ensure!(
            self.counters == 0 || job.lines()?.0 == carried.0,
            "a process has run on from half of its state"
        );
        node.write("/run/step", "none")?;
        // Before the client does anything about it.
        self.swept()?;
        node.run(&["ctr", "tasks", "delete", "job"])?;
        job.forget()?;
        self.at_peace()
    }

    /// Hits restores at every step.
    fn hit_everywhere(&self) -> Result<()> {
        for blow in [CRIU_KILLED, RUNC_KILLED] {
            for step in STEPS {
                self.hit(step, blow)
                    .with_context(|| format!("{blow:?} in {step}"))?;
            }
        }
        Ok(())
    }

    /// Nothing works on the node but the neighbour.
    fn at_peace(&self) -> Result<()> {
        match &self.neighbour {
            None => self.host.idle(),
            Some(neighbour) => {
                ensure!(neighbour.status()? == "RUNNING", "the neighbour was hit");
                Ok(())
            }
        }
    }

    /// The first process of this name: the tasks that CRIU makes have its name until they are complete.
    fn oldest(&self, program: &str) -> Result<i32> {
        let mut processes = self.host.node().processes();
        processes.sort_by_key(|process| process.pid);
        let mut named = processes.iter().filter(|process| process.command == program);
        named
            .next()
            .map(|process| process.pid)
            .with_context(|| format!("no {program} in {processes:?}"))
    }

    /// Nothing of the container is left on the node but what its task has: shim, bundle and rootfs.
    fn swept(&self) -> Result<()> {
        let mut left = (Vec::<Process>::new(), firn_node::Remnants::default());
        let waited = wait_for("nothing but the task", LIMIT, || {
            let of_restore = |process: &Process| {
                let sleeps = process.args.first().is_some_and(|program| program == "sleep");
                let for_ever = process.args.get(1).is_some_and(|span| span == "infinity");
                matches!(process.command.as_str(), "criu" | "runc" | "gpu-counter") || sleeps && !for_ever
            };
            left.0 = self
                .host
                .node()
                .processes()
                .into_iter()
                .filter(of_restore)
                .collect();
            left.1 = self.host.node().remnants("job")?;
            left.1
                .processes
                .retain(|process| !process.command.starts_with("containerd-shim"));
            left.1.mounts.retain(|mount| !mount.ends_with("/job/rootfs"));
            left.1
                .state
                .retain(|path| !path.to_string_lossy().contains("io.containerd.runtime.v2.task"));
            Ok((left.0.is_empty() && left.1.is_empty()).then_some(()))
        });
        ensure!(waited.is_ok(), "left: {:?}\n{}", left.0, left.1);
        Ok(())
    }

    fn restores(&self) -> Result<()> {
        let (job, _) = Container::restore(self.host, "job", self.image, self.counters)?;
        match self.counters {
            0 => job.becomes("RUNNING")?,
            _ => drop(job.goes_on(3)?),
        }
        job.remove()?;
        self.at_peace()
    }
}

fn stand_still(host: &GpuHost) -> Result<()> {
    let node = host.node();
    node.write("/run/action", STANDING)?;
    node.run(&["chmod", "755", "/run/action"])?;
    node.write("/run/step", "none")?;
    node.run(&["mkdir", "-p", "/etc/criu"])?;
    node.write("/etc/criu/runc.conf", "action-script /run/action\n")
}

fn a_gpu_restore_whose_criu_or_runc_dies_leaves_nothing(platform: Platform) -> Result<()> {
    on(
        [GpuHost::for_test(platform, "kill-gpu", &[SimGpu::h200(1)])?],
        |[host]| {
            let image = "checkpoint/job";
            let job = Container::count_with(host, "job", &["0"], 2, &SHARES_NOTHING, &["--procs", "2"])?;
            job.goes_on(3)?;
            job.checkpoint(image)?;
            job.remove()?;
            stand_still(host)?;
            let case = Case {
                host,
                image,
                counters: 2,
                neighbour: None,
            };
            case.hit_everywhere()?;
            host.configure("[deadlines]\ncriu-restore = \"3s\"\n")?;
            case.hit("post-restore", CRIU_STOPPED).context("CRIU stopped")?;
            host.configure("")?;
            case.restores()
        },
    )
}

fn a_restore_without_gpu_whose_criu_or_runc_dies_leaves_nothing(platform: Platform) -> Result<()> {
    on(
        [GpuHost::for_test(platform, "kill", &[SimGpu::h200(1)])?],
        |[host]| {
            let image = "checkpoint/job";
            let neighbour = Container::run(host, "neighbour", &GROUP, &["sleep", "infinity"])?;
            let job = Container::run(host, "job", &GROUP, &WORK)?;
            job.checkpoint(image)?;
            job.remove()?;
            stand_still(host)?;
            let case = Case {
                host,
                image,
                counters: 0,
                neighbour: Some(neighbour),
            };
            case.hit_everywhere()?;
            case.restores()?;
            case.neighbour.map_or(Ok(()), Container::remove)?;
            host.idle()
        },
    )
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        a_gpu_restore_whose_criu_or_runc_dies_leaves_nothing [FORKY, FORKY_V2, TRIXIE_V2];
        a_restore_without_gpu_whose_criu_or_runc_dies_leaves_nothing [FORKY, FORKY_V2, TRIXIE];
    })
}
