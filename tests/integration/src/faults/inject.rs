//! How each fault is brought about on a node, and the proof that it was.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use firn_node::{Node, wait_for};
use serde_json::Value;

use super::cell::{Cell, Fault, Flow, Moment, Often, Phase, Runc, Victim};
use super::disk::Failing;
use super::ground::{Call, ID};
use crate::GpuHost;

const DIR: &str = "/srv/fault";
/// The simulated driver's fault script.
const DRIVER_SCRIPT: &str = "/run/simgpu/faults.json";
/// How long the flow may take to reach the point at which it is disturbed.
const REACHED: Duration = Duration::from_secs(60);
/// How long a driver call is held up for a kill, which comes as soon as the call has begun.
const DELAY_MS: &str = "1000";

const RUNC: &str = include_str!("runc.sh");
const CRIU: &str = include_str!("criu.sh");
const ACTION: &str = include_str!("action.sh");
const WORKER: &str = include_str!("worker.sh");

/// What a shim that is built for tests looks at when it enters a phase, and what it makes when it is held there.
const HOLD_PHASE: &str = "/run/firn-hold";
const HELD_PHASE: &str = "/run/firn-held";

/// Leaves the /dev of a restored container, run in it, without nodes of GPUs and without a free inode.
const FILL_DEV: &str = "set -e; rm -f /dev/nvidia[0-9]; mount -t tmpfs -o remount,nr_inodes=200 tmpfs /dev
    i=0; while touch /dev/fill$i; do i=$((i + 1)); [ $i -lt 200 ]; done 2>/dev/null";

/// Puts the scripts before the node's runc and CRIU. They do nothing until they are told to.
pub(super) fn prepare(host: &GpuHost) -> Result<()> {
    let node = host.node();
    node.run(&["mkdir", "-p", DIR])?;
    for (script, path) in [
        (RUNC, "/usr/local/sbin/runc".to_owned()),
        (CRIU, "/usr/local/sbin/criu".to_owned()),
        (ACTION, format!("{DIR}/action.sh")),
        (WORKER, format!("{DIR}/firn-gpu")),
    ] {
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), script)?;
        node.install(file.path(), path, 0o755)?;
    }
    node.write("/etc/criu/runc.conf", format!("action-script {DIR}/action.sh\n"))
}

/// A fault that is set up.
pub(super) struct Injection<'h> {
    host: &'h GpuHost,
    point: Point,
    strike: Strike,
    pub(super) disk: Option<Failing<'h>>,
}

/// What disturbs the flow, or holds it up for a strike from outside.
enum Point {
    /// A script of the simulated driver, which acts from this matching call on.
    Driver { nth: u64 },
    /// A script before runc, CRIU or the worker, or CRIU's action script.
    Script,
    /// The shim itself, which waits when it enters a phase.
    Held,
    /// Nothing: the surroundings are what fails.
    None,
}

/// What is done when the point is reached.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Strike {
    None,
    Kill(Victim),
    Disk,
    FillDev,
}

impl<'h> Injection<'h> {
    /// Sets the fault of a cell up.
    pub(super) fn arm(host: &'h GpuHost, cell: &Cell) -> Result<Self> {
        let mut injection = Self {
            host,
            point: Point::Script,
            strike: Strike::None,
            disk: None,
        };
        let verb = match cell.flow {
            Flow::Checkpoint => "checkpoint",
            Flow::Restore => "restore",
        };
        let runc = |when: Runc, action: &str| {
            let when = match when {
                Runc::Before => "before",
                Runc::After => "after",
            };
            tell(host, "runc", &format!("{verb} {when} {action}"))
        };
        let at = |moment: Moment, action: &str| tell(host, "action", &format!("{} {action}", moment.name()));
        match cell.fault {
            Fault::DriverError(often) => {
                injection.driver(cell, often, &["--error", "CUDA_ERROR_UNKNOWN"])?;
            }
            Fault::DriverHang(often) => injection.driver(cell, often, &["--hang"])?,
            Fault::WorkerCrash(often) => injection.driver(cell, often, &["--crash"])?,
            Fault::Kill(victim) => {
                injection.strike = Strike::Kill(victim);
                match cell.phase {
                    Phase::Dump => at(Moment::PreDump, "hold")?,
                    Phase::CriuRestore => at(Moment::PreResume, "hold")?,
                    Phase::Prepare => tell(host, "worker", "hold")?,
                    Phase::Finish | Phase::Continue | Phase::Abandon => {
                        if cell.phase == Phase::Abandon {
                            host.fault(&["--call", "restore", "--error", "CUDA_ERROR_UNKNOWN"])?;
                        }
                        host.node().write(HOLD_PHASE, cell.phase.to_string())?;
                        injection.point = Point::Held;
                    }
                    _ => {
                        // Who dies with its call in the driver dies in the worst moment.
                        let stuck = matches!(victim, Victim::Worker | Victim::Shim);
                        let action = if stuck {
                            &["--hang"][..]
                        } else {
                            &["--delay-ms", DELAY_MS]
                        };
                        injection.driver(cell, Often::Once, action)?;
                    }
                }
            }
            Fault::RuncError(when) => runc(when, "error")?,
            Fault::RuncHang(when) => runc(when, "stop")?,
            Fault::RuncKill(when) => runc(when, "kill")?,
            Fault::RuncKillAt(moment) => at(moment, "kill-runc")?,
            Fault::RuncHangAt(moment) => at(moment, "stop-runc")?,
            Fault::CriuErrorAt(moment) => at(moment, "error")?,
            Fault::CriuHangAt(moment) => at(moment, "stop-criu")?,
            Fault::CriuKillAt(moment) => at(moment, "kill-criu")?,
            Fault::Mknod => {
                injection.strike = Strike::FillDev;
                runc(Runc::After, "hold")?;
            }
            Fault::CriuError => tell(host, "criu", "error")?,
            Fault::CriuFault(number) => tell(host, "criu", &format!("fault {number}"))?,
            Fault::NoSpace(_) | Fault::Io(_) | Fault::ReadOnly(_) | Fault::NoSpaceForManifest => {
                injection.disk = Some(Failing::new(host, cell)?);
                injection.strike = Strike::Disk;
                match (cell.flow, cell.fault) {
                    (Flow::Restore, _) => runc(Runc::Before, "hold")?,
                    (_, Fault::NoSpaceForManifest) => runc(Runc::After, "hold")?,
                    _ => {
                        injection.point = Point::None;
                        injection.strike = Strike::None;
                    }
                }
            }
        }
        Ok(injection)
    }

    fn driver(&mut self, cell: &Cell, often: Often, action: &[&str]) -> Result<()> {
        let call = cell.phase.call().context("a phase without driver call")?;
        // Of several processes a late one, so that some have been through it.
        let nth: u64 = if cell.subject.processes > 1 { 3 } else { 1 };
        let (nth_text, mut arguments) = (nth.to_string(), vec!["--call", call]);
        if often != Often::Always {
            arguments.extend(["--nth", &nth_text, "--times", "1"]);
        }
        arguments.extend((often == Often::OnceAfter).then_some("--after"));
        arguments.extend(action);
        self.host.fault(&arguments)?;
        self.point = Point::Driver {
            nth: if often == Often::Always { 1 } else { nth },
        };
        Ok(())
    }

    /// Waits until the flow has come to the point, if something is to be done to it there, and does it.
    pub(super) fn strike(&self, call: &mut Call) -> Result<()> {
        if self.strike == Strike::None {
            return Ok(());
        }
        wait_for("the fault's point", REACHED, || {
            if self.has_struck()? {
                return Ok(Some(()));
            }
            ensure!(!call.is_over()?, "the flow was over before the fault's point");
            Ok(None)
        })?;
        let node = self.host.node();
        match self.strike {
            Strike::None => {}
            Strike::Disk => self.disk.as_ref().context("no disk")?.begin()?,
            Strike::FillDev => fill_dev(node)?,
            Strike::Kill(Victim::Client) => call.kill()?,
            Strike::Kill(Victim::Containerd) => node.kill_containerd()?,
            Strike::Kill(Victim::Worker) => kill(node, |process| process.command == "firn-gpu")?,
            Strike::Kill(Victim::Shim) => kill(node, |process| {
                let mut pairs = process.args.windows(2);
                process.command.starts_with("containerd-shim")
                    && pairs.any(|pair| pair[0] == "-id" && pair[1] == ID)
            })?,
        }
        node.run(&["rm", "-f", HOLD_PHASE])?;
        remove(node, "hold")
    }

    /// Whether the fault has happened.
    pub(super) fn has_struck(&self) -> Result<bool> {
        let node = self.host.node();
        match self.point {
            Point::None => Ok(true),
            Point::Script => Ok(node.path(DIR).join("struck").exists()),
            Point::Held => Ok(node.path(HELD_PHASE).exists()),
            Point::Driver { nth } => {
                let script = match std::fs::read(node.path(DRIVER_SCRIPT)) {
                    Ok(script) => script,
                    Err(error) => bail!("{DRIVER_SCRIPT}: {error}"),
                };
                // It is replaced as a whole.
                let script: Value = serde_json::from_slice(&script)?;
                Ok(script["rules"][0]["seen"]
                    .as_u64()
                    .is_some_and(|seen| seen >= nth))
            }
        }
    }

    /// Ends every disturbance but that of a file system.
    pub(super) fn disarm(&self) -> Result<()> {
        self.host.no_faults()?;
        self.host.node().run(&["rm", "-f", HOLD_PHASE, HELD_PHASE])?;
        for file in ["runc", "criu", "action", "worker", "struck", "hold"] {
            remove(self.host.node(), file)?;
        }
        Ok(())
    }
}

/// Tells a script what to do.
fn tell(host: &GpuHost, name: &str, text: &str) -> Result<()> {
    let node = host.node();
    // Order matters: who is told to hold looks for this file.
    node.write(format!("{DIR}/hold"), "")?;
    node.write(format!("{DIR}/{name}"), format!("{text}\n"))
}

fn remove(node: &Node, name: &str) -> Result<()> {
    match std::fs::remove_file(node.path(Path::new(DIR).join(name))) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {DIR}/{name}"))
        }
        _ => Ok(()),
    }
}

fn fill_dev(node: &Node) -> Result<()> {
    let processes = node.processes();
    let task = processes.iter().find(|process| process.command == "gpu-counter");
    let pid = task.context("no restored task")?.pid.to_string();
    let shell = ["nsenter", "--target", &pid, "--mount", "/bin/sh", "-c", FILL_DEV];
    node.run(&shell).map(drop)
}

fn kill(node: &Node, who: impl Fn(&firn_node::Process) -> bool) -> Result<()> {
    let pids: Vec<String> = node
        .processes()
        .iter()
        .filter(|process| who(process))
        .map(|process| process.pid.to_string())
        .collect();
    ensure!(!pids.is_empty(), "who is to be killed is not there");
    let mut command = vec!["kill", "-KILL"];
    command.extend(pids.iter().map(String::as_str));
    node.run(&command).map(drop)
}
