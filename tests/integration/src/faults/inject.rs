//! How each fault is brought about on a node, and the proof that it was.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use firn_node::wait_for;
use serde_json::Value;

use super::case::{Case, Disk, Fault, FaultAt, Flow, Moment, Often, Phase, Runc, Victim};
use super::disk::Failing;
use super::rules::Halt;
use super::stalls::{Since, Stall};
use super::testbed::{Call, ID};
use super::victims::{fill_dev, kill, kill_counter};
use crate::host::SHIM;
use crate::{GpuHost, StallFs};

const DIR: &str = "/srv/fault";
/// The simulated driver's fault script.
const DRIVER_SCRIPT: &str = "/run/simgpu/faults.json";
/// How long the flow may take to reach the points at which it is disturbed.
const REACHED: Duration = Duration::from_secs(60);
/// How long a driver call is held up for a kill, which comes as soon as the call has begun.
const DELAY_MS: &str = "1000";

const RUNC: &str = include_str!("runc.sh");
const CRIU: &str = include_str!("criu.sh");
const ACTION: &str = include_str!("action.sh");
const WORKER: &str = include_str!("worker.sh");
const HOOK: &str = include_str!("hook.sh");

/// Where the script before firn-hook is.
pub(super) const HOOK_PATH: &str = "/srv/fault/firn-hook";

/// What a shim that is built for tests looks at when it enters a phase, and what it makes when it is held
/// there.
const HOLD_PHASE: &str = "/run/firn-hold";
const HELD_PHASE: &str = "/run/firn-held";
/// Phases in which such a shim panics, and what it makes before it does.
const PANIC_PHASES: &str = "/run/firn-panic";
const PANICKED: &str = "/run/firn-panicked";
/// All of these.
const PHASE_FILES: &str = "/run/firn-hold /run/firn-held /run/firn-panic /run/firn-panicked";
/// How long a flow must be over before nobody expects a second fault any more.
const OVER: Duration = Duration::from_secs(1);

/// Puts the scripts before the node's runc and CRIU. They do nothing until a file orders it.
pub(super) fn prepare(host: &GpuHost) -> Result<()> {
    let node = host.node();
    node.run(&["grep", "--quiet", HOLD_PHASE, SHIM])
        .context("the shim has no failpoints: this is a bundle made with --release")?;
    node.run(&["mkdir", "-p", DIR])?;
    for (script, path) in [
        (RUNC, "/usr/local/sbin/runc".to_owned()),
        (CRIU, "/usr/local/sbin/criu".to_owned()),
        (ACTION, format!("{DIR}/action.sh")),
        (WORKER, format!("{DIR}/firn-gpu")),
        (HOOK, HOOK_PATH.to_owned()),
    ] {
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), script)?;
        node.install(file.path(), path, 0o755)?;
    }
    node.write("/etc/criu/runc.conf", format!("action-script {DIR}/action.sh\n"))
}

/// The faults of a case, set up.
pub(super) struct Injections<'h> {
    host: &'h GpuHost,
    list: Vec<Injection<'h>>,
}

/// A fault that is set up.
struct Injection<'h> {
    host: &'h GpuHost,
    fault: Fault,
    /// Which of the case's faults it is: part of the names of its files.
    number: usize,
    point: Point,
    strike: Strike,
    struck: std::cell::Cell<bool>,
    disk: Option<Failing<'h>>,
    stall: Option<&'h StallFs<'h>>,
}

/// What disturbs the flow, or holds it up for a strike from outside.
enum Point {
    /// A rule of the simulated driver's script, which acts from this matching call on.
    Driver { rule: usize, nth: u64 },
    /// A script before runc, CRIU or the worker, or CRIU's action script.
    Script,
    /// The shim itself, which waits when it enters a phase.
    Held,
    /// The shim itself, which panics when it enters this phase.
    Panic(String),
    /// Nothing: the environment is what fails.
    None,
}

/// What is done when the point is reached.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Strike {
    None,
    Kill(Victim),
    Disk,
    FillDev,
    Stall(Stall),
}

impl<'h> Injections<'h> {
    /// Sets the faults of a case up. `stall` is the file system that can hang, if the case has one.
    pub(super) fn arm(host: &'h GpuHost, case: &Case, stall: Option<&'h StallFs<'h>>) -> Result<Self> {
        let mut injections = Self {
            host,
            list: Vec::new(),
        };
        let mut rules = 0;
        if case.first.phase == Phase::RestoreRollback {
            host.fault(&["--call", "restore", "--error", "CUDA_ERROR_UNKNOWN"])?;
            rules += 1;
        }
        if case.first.phase == Phase::Repark {
            // Two of four processes get their state.
            host.fault(&["--call", "restore", "--nth", "3", "--error", "CUDA_ERROR_UNKNOWN"])?;
            rules += 1;
        }
        for at in case.faults() {
            let mut injection = Injection::arm(host, case, at, injections.list.first(), rules)?;
            injection.stall = stall;
            rules += usize::from(matches!(injection.point, Point::Driver { .. }));
            injections.list.push(injection);
        }
        Ok(injections)
    }

    /// Waits until the flow has come to each point at which something is to be done to it, and does it.
    /// `is_quiet` returns that a flow is over whose client has gone.
    pub(super) fn strike(&self, call: &mut Call, is_quiet: impl Fn() -> bool) -> Result<()> {
        let strikes = |injection: &&Injection<'_>| injection.strike != Strike::None;
        let mut pending: Vec<&Injection<'_>> = self.list.iter().filter(strikes).collect();
        let mut over = None;
        wait_for("the fault's point", REACHED, || {
            for injection in &pending {
                if injection.is_reached()? {
                    injection.strike(call)?;
                }
            }
            pending.retain(|injection| !injection.struck.get());
            // Of a pair one may keep the other from happening.
            let surely = self.list.len() == 1;
            if !(call.is_over()? && is_quiet()) {
                over = None;
            } else if over.get_or_insert_with(Instant::now).elapsed() > OVER {
                ensure!(!surely, "the flow was over before the fault's point");
                pending.clear();
            }
            Ok(pending.is_empty().then_some(()))
        })
    }

    /// The faults that have happened.
    pub(super) fn happened(&self) -> Result<Vec<Fault>> {
        let mut happened = Vec::new();
        for injection in &self.list {
            let struck = match injection.strike {
                Strike::None => injection.is_reached()?,
                _ => injection.struck.get(),
            };
            if struck {
                happened.push(injection.fault);
            }
        }
        Ok(happened)
    }

    /// Where the image goes, if a file system fails there.
    pub(super) fn image(&self) -> Option<String> {
        self.disks().find_map(Failing::image)
    }

    /// Where CRIU works, if a file system fails there.
    pub(super) fn work(&self) -> Option<String> {
        self.disks().find_map(Failing::work)
    }

    fn disks(&self) -> impl Iterator<Item = &Failing<'h>> {
        self.list.iter().filter_map(|injection| injection.disk.as_ref())
    }

    /// Ends every disturbance but those of file systems.
    pub(super) fn disarm(&self) -> Result<()> {
        self.host.no_faults()?;
        let node = self.host.node();
        let rm = format!(
            "rm -f {PHASE_FILES} {DIR}/runc-* {DIR}/action-* {DIR}/criu {DIR}/worker {DIR}/hook \
             {DIR}/struck-* {DIR}/hold-*"
        );
        node.run(&["sh", "-c", &rm]).map(drop)
    }

    /// Leaves of the failing file systems what is on their disks.
    pub(super) fn forget_caches(&self) -> Result<()> {
        self.disks().try_for_each(Failing::forget_cache)
    }

    /// Takes the failing file systems away.
    pub(super) fn end_disks(self) -> Result<()> {
        let mut disks = self.list.into_iter().filter_map(|injection| injection.disk);
        disks.try_for_each(Failing::end)
    }
}

impl<'h> Injection<'h> {
    /// Sets a fault of a case up, which follows `first` if that is there; the driver's script has so many
    /// rules already.
    fn arm(host: &'h GpuHost, case: &Case, at: FaultAt, first: Option<&Self>, rules: usize) -> Result<Self> {
        let number = usize::from(first.is_some());
        let mut injection = Self {
            host,
            fault: at.fault,
            number,
            point: Point::Script,
            strike: Strike::None,
            struck: std::cell::Cell::new(false),
            disk: None,
            stall: None,
        };
        let arming = Arming {
            host,
            case,
            at,
            first,
            rules,
            number,
        };
        match at.fault {
            Fault::DriverError(often) => {
                injection.point = arming.driver(often, &["--error", "CUDA_ERROR_UNKNOWN"])?
            }
            Fault::DriverHang(often) => injection.point = arming.driver(often, &["--hang"])?,
            Fault::WorkerCrash(often) => injection.point = arming.driver(often, &["--crash"])?,
            Fault::Kill(victim) => arming.kill(&mut injection, victim)?,
            Fault::Panic => injection.point = arming.panic()?,
            Fault::RuncError(when) => arming.runc(when, "error")?,
            Fault::RuncHang(when) => arming.runc(when, "stop")?,
            Fault::RuncKill(when) => arming.runc(when, "kill")?,
            Fault::RuncKillAt(at) => arming.moment(at, "kill-runc")?,
            Fault::RuncHangAt(at) => arming.moment(at, "stop-runc")?,
            Fault::CriuErrorAt(at) => arming.moment(at, "error")?,
            Fault::CriuHangAt(at) => arming.moment(at, "stop-criu")?,
            Fault::CriuKillAt(at) => arming.moment(at, "kill-criu")?,
            Fault::Thawed => arming.runc(Runc::After, "thaw")?,
            Fault::Stall(stall) => arming.stall(&mut injection, stall)?,
            Fault::Mknod => {
                injection.strike = Strike::FillDev;
                arming.runc(Runc::After, "hold")?;
            }
            Fault::NoMemory | Fault::GpuBusy | Fault::GpuOccupied | Fault::GpuGone => {
                injection.point = Point::None;
            }
            Fault::CriuError => arming.order("criu", "error -")?,
            Fault::CriuFault(fault) => arming.order("criu", &format!("fault {fault}"))?,
            Fault::NoSpace(_)
            | Fault::Io(_)
            | Fault::ReadOnly(_)
            | Fault::NoSpaceForManifest
            | Fault::StoreGone => {
                arming.disk(&mut injection)?;
            }
        }
        Ok(injection)
    }

    /// Makes a rule of the driver's script wait for this fault.
    fn followed(&self) -> Vec<String> {
        let (option, what) = match &self.point {
            Point::None => return Vec::new(),
            Point::Driver { rule, .. } => ("--follows-rule", rule.to_string()),
            Point::Script => ("--follows-file", format!("{DIR}/struck-{}", self.number)),
            Point::Held => ("--follows-file", HELD_PHASE.to_owned()),
            Point::Panic(_) => ("--follows-file", PANICKED.to_owned()),
        };
        vec![option.to_owned(), what]
    }

    /// Does to the flow what is to be done. Nothing is done when who is to be killed is not there.
    fn strike(&self, call: &mut Call) -> Result<()> {
        let node = self.host.node();
        let done = match self.strike {
            Strike::None => true,
            Strike::Disk => self.disk.as_ref().context("no disk")?.begin().map(|()| true)?,
            Strike::Stall(stall) => stall
                .begin(self.stall.context("no file system")?)
                .map(|()| true)?,
            Strike::FillDev => fill_dev(node).map(|()| true)?,
            Strike::Kill(Victim::Client) => call.kill().map(|()| true)?,
            Strike::Kill(Victim::Containerd) => node.kill_containerd().map(|()| true)?,
            Strike::Kill(Victim::Worker) => kill(node, |process| process.command == "firn-gpu")?,
            Strike::Kill(Victim::Hook) => kill(node, |process| process.command == "firn-hook")?,
            Strike::Kill(Victim::Task) => {
                node.run(&["ctr", "tasks", "kill", "--signal", "SIGKILL", ID])?;
                true
            }
            Strike::Kill(Victim::Process) => kill_counter(node)?,
            Strike::Kill(Victim::Shim) => kill(node, |process| {
                let mut pairs = process.args.windows(2);
                process.command.starts_with("containerd-shim")
                    && pairs.any(|pair| pair[0] == "-id" && pair[1] == ID)
            })?,
        };
        self.struck.set(done);
        let hold = match self.point {
            Point::Held => HOLD_PHASE.to_owned(),
            _ => format!("{DIR}/hold-{}", self.number),
        };
        node.run(&["rm", "-f", &hold]).map(drop)
    }

    /// Whether the flow has come to the fault's point.
    fn is_reached(&self) -> Result<bool> {
        let node = self.host.node();
        match &self.point {
            Point::None => Ok(true),
            Point::Script => Ok(node.path(DIR).join(format!("struck-{}", self.number)).exists()),
            Point::Held => Ok(node.path(HELD_PHASE).exists()),
            Point::Panic(phase) => {
                let phases = node.read(PANIC_PHASES)?;
                Ok(!phases.split_whitespace().any(|named| named == phase))
            }
            Point::Driver { rule, nth } => {
                let script = match std::fs::read(node.path(DRIVER_SCRIPT)) {
                    Ok(script) => script,
                    Err(error) => bail!("{DRIVER_SCRIPT}: {error}"),
                };
                // It is replaced as a whole.
                let script: Value = serde_json::from_slice(&script)?;
                Ok(script["rules"][rule]["seen"]
                    .as_u64()
                    .is_some_and(|seen| seen >= *nth))
            }
        }
    }
}

/// How an injection is prepared on the host.
struct Arming<'a, 'h> {
    host: &'h GpuHost,
    case: &'a Case,
    at: FaultAt,
    /// The injection that this one follows.
    first: Option<&'a Injection<'h>>,
    /// Rules of the simulated driver so far.
    rules: usize,
    number: usize,
}

impl<'h> Arming<'_, 'h> {
    /// A file system fails: from the beginning, or when the flow has come to a point.
    fn disk(&self, injection: &mut Injection<'h>) -> Result<()> {
        let (flow, fault) = (self.case.flow, self.at.fault);
        injection.disk = Some(Failing::new(self.host, flow, self.at, self.number)?);
        injection.strike = Strike::Disk;
        match (flow, fault) {
            (_, Fault::NoSpace(Disk::Store)) => self.copy(),
            (Flow::Restore, _) => self.runc(Runc::Before, "hold"),
            (_, Fault::NoSpaceForManifest) => self.runc(Runc::After, "hold"),
            _ => {
                injection.point = Point::None;
                injection.strike = Strike::None;
                Ok(())
            }
        }
    }

    /// A fault of the simulated driver in the phase's call.
    fn driver(&self, often: Often, action: &[&str]) -> Result<Point> {
        let call = self.at.phase.call().context("a phase without driver call")?;
        // Of several processes a late one, so that some have been through it.
        let repark = self.at.phase == Phase::Repark;
        let several = self.case.subject.processes > 1 && !repark;
        let late = several && self.first.is_none() && often != Often::Always;
        let nth: u64 = if late { 3 } else { 1 };
        let nth_text = nth.to_string();
        let mut arguments = vec!["--call", call, "--nth", &nth_text];
        if often != Often::Always {
            arguments.extend(["--times", "1"]);
        }
        let follows = self.first.map_or_else(Vec::new, Injection::followed);
        arguments.extend(follows.iter().map(String::as_str));
        if repark {
            arguments.extend(["--follows-rule", "0"]);
        }
        arguments.extend((often == Often::OnceAfter).then_some("--after"));
        arguments.extend(action);
        self.host.fault(&arguments)?;
        Ok(Point::Driver {
            rule: self.rules,
            nth,
        })
    }

    fn order(&self, name: &str, text: &str) -> Result<()> {
        order(self.host, name, text, self.number)
    }

    /// An action before or after the runtime's verb.
    fn runc(&self, when: Runc, action: &str) -> Result<()> {
        let verb = match self.case.flow {
            Flow::Restore => "restore",
            _ => "checkpoint",
        };
        let when = match when {
            Runc::Before => "before",
            Runc::After => "after",
        };
        self.order(&format!("runc-{when}"), &format!("{verb} {action}"))
    }

    /// An action at a moment of CRIU's script.
    fn moment(&self, moment: Moment, action: &str) -> Result<()> {
        self.order(&format!("action-{}", moment.name()), action)
    }

    /// Lets a copy of memory stand still.
    fn copy(&self) -> Result<()> {
        let what = match self.case.flow {
            Flow::Restore => "fill",
            _ => "save",
        };
        self.order("hook", what)
    }

    fn kill(&self, injection: &mut Injection<'_>, victim: Victim) -> Result<()> {
        injection.strike = Strike::Kill(victim);
        match self.at.phase.halt() {
            Halt::Dump => self.moment(Moment::PreDump, "hold")?,
            Halt::Restore => self.moment(Moment::PreResume, "hold")?,
            Halt::Copy => self.copy()?,
            Halt::Worker => self.order("worker", "hold")?,
            Halt::None => injection.point = Point::None,
            Halt::Shim => {
                self.host.node().write(HOLD_PHASE, self.at.phase.to_string())?;
                injection.point = Point::Held;
            }
            Halt::Driver => {
                // Who dies with its call in the driver dies in the worst moment.
                let stuck = matches!(victim, Victim::Worker | Victim::Shim);
                let action = if stuck {
                    &["--hang"][..]
                } else {
                    &["--delay-ms", DELAY_MS]
                };
                injection.point = self.driver(Often::Once, action)?;
            }
        }
        Ok(())
    }

    fn stall(&self, injection: &mut Injection<'_>, stall: Stall) -> Result<()> {
        match stall.since {
            Since::Begin => injection.point = Point::None,
            Since::Dump => self.runc(Runc::Before, "hold")?,
            Since::Manifest => self.runc(Runc::After, "hold")?,
            Since::Cleanup => self.runc(Runc::After, "hold-error")?,
        }
        if stall.since != Since::Begin {
            injection.strike = Strike::Stall(stall);
        }
        Ok(())
    }

    fn panic(&self) -> Result<Point> {
        let phase = self.at.phase.to_string();
        let node = self.host.node();
        let others = node.read(PANIC_PHASES).unwrap_or_default();
        node.write(PANIC_PHASES, format!("{others} {phase}"))?;
        Ok(Point::Panic(phase))
    }
}

/// Orders a script to do something, in the name of a fault.
fn order(host: &GpuHost, name: &str, text: &str, number: usize) -> Result<()> {
    let node = host.node();
    // Order matters: a script that is to hold looks for this file.
    node.write(format!("{DIR}/hold-{number}"), "")?;
    node.write(format!("{DIR}/{name}"), format!("{text} {number}\n"))
}
