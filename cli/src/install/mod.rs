//! `firn install` and `firn uninstall`: firn's programs and its runtime handler on a node.

pub mod args;
mod daemon;
mod error;
mod handler;
mod programs;
pub mod running;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use firn_host::ProblemLine;
use serde::Serialize;

pub use self::daemon::is_older_than;
pub use self::handler::runtimes;

use self::args::{Destination, InstallArgs, PACKAGED, UninstallArgs};
use self::error::InstallError;
use self::handler::Configuration;
use self::programs::Release;
use crate::output::{self, line, note, printed};

/// What became of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Change {
    /// It was not there.
    Added,
    /// It was another one.
    Replaced,
    /// It is as it was.
    Unchanged,
    /// It is gone.
    Removed,
}

impl Change {
    fn word(self) -> &'static str {
        match self {
            Self::Added => "added",
            Self::Replaced => "replaced",
            Self::Unchanged => "unchanged",
            Self::Removed => "removed",
        }
    }
}

/// A file, and what became of it.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ChangedFile {
    /// Its path on the node.
    pub path: PathBuf,
    /// What became of it, or would with --dry-run.
    pub change: Change,
}

/// What was done on the node.
#[derive(Debug, Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Report {
    /// firn's programs. Empty for a package, whose programs are the package manager's.
    programs: Vec<ChangedFile>,
    /// The file of containerd's configuration that has the runtime handler; absent if containerd's
    /// configuration is not changed.
    handler: Option<ChangedFile>,
    /// Whether containerd was restarted.
    restarted: bool,
    /// Whether it has to be, for its configuration to be in force.
    restart: bool,
}

printed! { Report: "install", "uninstall" }

pub fn install(args: &InstallArgs) -> Result<bool> {
    show(&args.place, installed(args, &own()?))
}

fn own() -> Result<PathBuf> {
    std::env::current_exe().context("cannot find this program")
}

/// `own` is this program.
fn installed(args: &InstallArgs, own: &Path) -> Result<Report, InstallError> {
    let place = &args.place;
    let prefix = place.prefix(own);
    let from = args.from.as_deref().or(own.parent()).unwrap_or(Path::new("."));
    let release = if prefix == Path::new(PACKAGED) {
        None
    } else {
        Some(Release::open(from)?)
    };
    enter(&place.root)?;
    let configuration = args
        .containerd
        .then(|| Configuration::read(&place.config))
        .transpose()?;
    let handler = configuration
        .map(|configuration| configuration.add(&prefix, place.dry_run))
        .transpose()?;
    let (handler, former) = handler.unzip();
    let programs = release.map(|release| release.install(&prefix.join("bin"), place.dry_run));
    match programs.transpose().map(Option::unwrap_or_default) {
        Ok(programs) => finish(place, programs, handler),
        Err(error) => {
            former.unwrap_or_default().restore();
            Err(error)
        }
    }
}

pub fn uninstall(args: &UninstallArgs) -> Result<bool> {
    show(&args.place, removed(args, &own()?))
}

fn removed(args: &UninstallArgs, own: &Path) -> Result<Report, InstallError> {
    let place = &args.place;
    let prefix = place.prefix(own);
    enter(&place.root)?;
    if args.wait && !place.dry_run {
        wait_for_the_last();
    }
    running::none()?;
    let configuration = if place.config.exists() {
        Some(Configuration::read(&place.config)?)
    } else {
        None
    };
    let handler = configuration
        .map(|configuration| configuration.remove(place.dry_run))
        .transpose()?;
    let programs = if prefix == Path::new(PACKAGED) {
        Vec::new()
    } else {
        programs::remove(&prefix.join("bin"), place.dry_run)?
    };
    finish(place, programs, handler.flatten())
}

/// Waits for the end of the containers that run under firn.
fn wait_for_the_last() {
    const POLL: Duration = Duration::from_secs(1);
    const REPORT: Duration = Duration::from_secs(30);
    let mut shown: Option<Instant> = None;
    while let Err(error) = running::none() {
        if shown.is_none_or(|at| at.elapsed() > REPORT) {
            note!("firn: waiting: {error}");
            shown = Some(Instant::now());
        }
        thread::sleep(POLL);
    }
}

/// Restarts containerd if its configuration is not in force, and that was asked for.
fn finish(
    place: &Destination,
    programs: Vec<ChangedFile>,
    handler: Option<ChangedFile>,
) -> Result<Report, InstallError> {
    let changed = handler
        .as_ref()
        .is_some_and(|done| done.change != Change::Unchanged || daemon::is_older_than(&done.path));
    let restarted = changed && place.restart && !place.dry_run;
    if restarted {
        daemon::restart()?;
    }
    Ok(Report {
        programs,
        handler,
        restarted,
        restart: changed && !restarted,
    })
}

/// Makes the node's root directory this process's.
pub fn enter(root: &Path) -> Result<(), InstallError> {
    if root == Path::new("/") {
        return Ok(());
    }
    let enter = || {
        nix::unistd::chroot(root)?;
        nix::unistd::chdir("/")
    };
    enter().map_err(|error| InstallError::io("enter", root)(error.into()))
}

/// Where containerd and systemctl are looked for: a container's PATH may lack directories of the node's.
pub fn search_path() -> OsString {
    const USUAL: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":");
    path.push(USUAL);
    path
}

fn show(place: &Destination, done: Result<Report, InstallError>) -> Result<bool> {
    match done {
        Ok(report) if place.json => output::json(&report)?,
        Ok(report) => print(place, &report),
        Err(error) => return output::failed(place.json, ProblemLine(&error)),
    }
    Ok(true)
}

fn print(place: &Destination, report: &Report) {
    let would = if place.dry_run { "would be " } else { "" };
    for done in report.programs.iter().chain(&report.handler) {
        let (path, word) = (done.path.display(), done.change.word());
        match done.change {
            Change::Unchanged => line!("{path}: {word}"),
            _ => line!("{path}: {would}{word}"),
        }
    }
    if report.programs.is_empty() && report.handler.is_none() {
        line!("nothing of firn is installed");
    }
    if report.restarted {
        line!("containerd was restarted");
    }
    if report.restart {
        line!("containerd has to be restarted: systemctl restart containerd (containers run on)");
    }
}
