//! `firn doctor`: whether this node can checkpoint and restore GPU containers.

mod driver;
mod host;
mod images;
mod programs;

use anyhow::Result;
use firn_config::Config;
use serde::Serialize;

use crate::args::DoctorArgs;
use crate::output::{self, line};
use firn_host::Problem;

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Ok,
    /// Works, with a limit.
    Warn,
    /// Checkpoints or restores will fail.
    Fail,
}

/// One line of the report.
#[derive(Debug, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    pub status: Status,
    /// What was found.
    pub found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

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

/// True: nothing failed.
pub fn run(args: &DoctorArgs) -> Result<bool> {
    let (check, config) = configuration();
    let mut checks = vec![check];
    checks.extend(host::checks(&config));
    checks.extend(programs::checks(&config));
    checks.extend(driver::checks(&config));
    checks.extend(images::checks(&config));
    if args.json {
        output::json(&checks)?;
    } else {
        print(&checks);
    }
    Ok(checks.iter().all(|check| check.status != Status::Fail))
}

/// The other checks go on with what is right in the file.
fn configuration() -> (Check, Config) {
    const NAME: &str = "config";
    let path = Config::path();
    match Config::load_what_is_valid() {
        (config, Some(error)) => (Check::failed(NAME, &error), config),
        (config, None) if path.exists() => (Check::ok(NAME, path.display().to_string()), config),
        (config, None) => (
            Check::ok(NAME, format!("no {}: the defaults hold", path.display())),
            config,
        ),
    }
}

fn print(checks: &[Check]) {
    for check in checks {
        let status = match check.status {
            Status::Ok => "ok  ",
            Status::Warn => "warn",
            Status::Fail => "FAIL",
        };
        let found = check.found.replace('\n', "\n                  ");
        match &check.remedy {
            None => line!("{status}  {:<10}  {found}", check.name),
            Some(remedy) => line!("{status}  {:<10}  {found}. hint: {remedy}", check.name),
        }
    }
    let count = |status| checks.iter().filter(|check| check.status == status).count();
    line!("{} failed, {} warnings", count(Status::Fail), count(Status::Warn));
}
