//! `firn doctor`: whether this node can checkpoint and restore GPU containers.

mod clients;
mod deep;
mod driver;
mod host;
mod images;
mod programs;
mod remains;
mod space;

use std::ops::ControlFlow;
use std::path::Path;

use anyhow::Result;
use firn_config::{Config, Mistake};
use firn_host::Problem;
use serde::Serialize;

use crate::args::DoctorArgs;
use crate::config;
use crate::daemon::Daemon;
use crate::output::{self, Tone, line, printed};
use crate::text;

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Status {
    /// In order.
    Ok,
    /// Works, with a limit.
    Warn,
    /// Checkpoints or restores will fail.
    Fail,
}

/// One line of the report.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Check {
    /// What was looked at. Several checks may have one name.
    pub name: &'static str,
    /// How the check ended.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// What to do about it; absent if it is in order.
    pub remedy: Option<String>,
}

/// The checks of a node.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Checks<'a> {
    /// One for each line of the report.
    checks: &'a [Check],
}

printed! { Checks<'_>: "doctor" }

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self {
            name,
            status: Status::Ok,
            found: found.into(),
            remedy: None,
        }
    }

    fn warn(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            status: Status::Warn,
            remedy: Some(remedy.into()),
            ..Self::ok(name, found)
        }
    }

    fn fail(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            status: Status::Fail,
            ..Self::warn(name, found, remedy)
        }
    }

    fn failed(name: &'static str, error: &impl Problem) -> Self {
        let failure = error.report();
        Self::fail(
            name,
            format!("{}: {}", failure.code, failure.message),
            failure.hint,
        )
    }
}

/// What to do about programs of several releases.
const ONE_RELEASE: &str = "install firn's programs from one release: `firn install --from DIR`";

/// True: nothing failed.
pub fn run(args: &DoctorArgs) -> Result<bool> {
    let (mut checks, config) = configuration();
    let socket = &args.socket.address;
    let daemon = Daemon::find(socket);
    let state = socket.parent().unwrap_or(Path::new("/run/containerd"));
    match host::root(Path::new("/proc/self/status")) {
        ControlFlow::Continue(check) => checks.push(check),
        ControlFlow::Break(check) => {
            checks.push(check);
            return shown(&checks, args.json);
        }
    }
    checks.extend(host::checks(&config));
    checks.extend(clients::checks(&daemon));
    checks.extend(programs::checks(&config));
    let (of_driver, inventory) = driver::checks(&config);
    checks.extend(of_driver);
    checks.extend(space::checks(&config, inventory.as_ref(), socket));
    checks.extend(images::checks(&config, socket));
    checks.extend(remains::checks(state, args.fix));
    if args.deep {
        checks.push(deep::check(socket, &config, inventory.as_ref(), args.json));
    }
    shown(&checks, args.json)
}

/// True: nothing failed.
fn shown(checks: &[Check], as_json: bool) -> Result<bool> {
    if as_json {
        output::json(&Checks { checks })?
    } else {
        print(checks)
    }
    Ok(checks.iter().all(|check| check.status != Status::Fail))
}

/// A check for each mistake in the file. The other checks continue with what is right in it.
fn configuration() -> (Vec<Check>, Config) {
    const NAME: &str = "config";
    let path = Config::path();
    let shown = path.display();
    let reading = match Config::read(&path) {
        Ok(reading) => reading,
        Err(error) => return (vec![Check::failed(NAME, &error)], Config::default()),
    };
    let config = reading.config.clone();
    let mistakes = config::mistakes(reading);
    if mistakes.is_empty() {
        let found = if path.exists() {
            shown.to_string()
        } else {
            format!("no {shown}: the defaults hold")
        };
        return (vec![Check::ok(NAME, found)], config);
    }
    let check = |mistake: &Mistake| {
        let prevents = config::prevented(mistake).join(", ");
        Check::fail(
            NAME,
            format!("FIRN-CONFIG-INVALID: {shown}, {mistake}; refused: {prevents}"),
            format!("correct line {}, then `firn config check`", mistake.line),
        )
    };
    (mistakes.iter().map(check).collect(), config)
}

fn print(checks: &[Check]) {
    for check in checks {
        let (tone, status) = match check.status {
            Status::Ok => (Tone::Good, "ok  "),
            Status::Warn => (Tone::Warning, "warn"),
            Status::Fail => (Tone::Bad, "FAIL"),
        };
        let hint = check.remedy.as_ref().map(|remedy| format!(". hint: {remedy}"));
        let (name, found, hint) = (check.name, &check.found, hint.unwrap_or_default());
        output::print_toned(
            Some((tone, status)),
            &format!("{status}  {name:<12}  {found}{hint}"),
        );
    }
    let count = |status| checks.iter().filter(|check| check.status == status).count();
    let warnings = text::count(count(Status::Warn), "warning");
    line!("{} failed, {warnings}", count(Status::Fail));
}
