//! `firn restore`: a container from an image, a tar file or an image directory.

pub mod check;
mod contents;
mod copy;
pub mod dir;
mod error;
mod explain;
pub mod facts;
mod given;
mod gpus;
mod into;
mod made;
mod named;
mod plan;
mod room;
pub mod unpack;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;
use firn_host::Problem;
use serde::Serialize;

use crate::args::restore::RestoreArgs;
use crate::containerd::block_on;
use crate::oci_image::Index;
use crate::outcome::Outcome;
use crate::output::{self, Tone, line, print_toned, printed};
use crate::place::Location;
use crate::steps::{Step, Steps};
use crate::text;
use error::RestoreError;
use gpus::Mode;
use plan::{Decision, Plan};

/// The argument that names standard input.
pub const STDIN: &str = "-";

/// What was restored, or would be.
#[derive(Default)]
pub struct Restored {
    /// None if a dry run names no container.
    id: Option<String>,
    /// None with --dry-run.
    pid: Option<u32>,
    /// Of a dry run.
    plan: Option<Plan>,
    /// The directory of CRIU's files, of an image directory.
    dir: Option<PathBuf>,
    /// Of an image or a tar file.
    bytes: Option<u64>,
    /// The file that gets what the container writes, if one does.
    log: Option<PathBuf>,
}

impl Restored {
    fn of_image(id: &str, index: &Index) -> Self {
        Self {
            id: Some(id.to_owned()),
            bytes: Some(index.bytes()),
            ..Self::default()
        }
    }

    fn planned(plan: Plan) -> Self {
        Self {
            plan: Some(plan),
            ..Self::default()
        }
    }
}

/// What was restored, or would be.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Restoration<'a> {
    /// Id of the container; absent if a dry run names none, or refuses the restore.
    container: Option<&'a str>,
    /// containerd's namespace of the container.
    namespace: &'a str,
    /// The image, tar file or `-` that the checkpoint was read from, or the running container that a dry run
    /// is about; absent for an image directory.
    image: Option<&'a str>,
    /// The directory of CRIU's files; absent for images and tar files, and as the container.
    dir: Option<&'a Path>,
    /// Pid of the container's first process on the node; absent with --dry-run.
    pid: Option<u32>,
    /// How long the command took, in milliseconds.
    ms: u64,
    /// Bytes of the checkpoint that were read; absent for an image directory, and as the container.
    bytes: Option<u64>,
    /// File that gets what the container writes to its standard output and error; absent with --dry-run, and
    /// if none gets it.
    log: Option<Cow<'a, str>>,
    /// Whether nothing was restored: --dry-run.
    dry_run: bool,
    #[serde(flatten)]
    decision: Decision<'a>,
    /// The phases that have ended, in their order; absent for an image directory.
    phases: Option<Vec<Step<'a>>>,
}

printed! { Restoration<'_>: "restore" }

/// How the steps are called in which something of the container is made.
const MAKING: [&str; 3] = ["unpack", "files", "restore"];

/// Done: or it would be. An error of a restore from a stream is one before anything was begun:
/// `firn move` on the other node, which reads it, lets its container continue.
pub fn run(args: &RestoreArgs) -> Result<Outcome> {
    if let Some(image) = &args.check {
        return check::run(args, image).map(Outcome::from);
    }
    let (begun, mut steps) = (Instant::now(), Steps::new(args.json || args.quiet));
    let place = match &args.dir {
        Some(dir) => Ok(Location::Dir(dir.clone())),
        None => Location::of(&args.from, args.kind),
    };
    let place = match place {
        Ok(place) => place,
        Err(ambiguous) => {
            output::failed(args.json, RestoreError::from(ambiguous).shown())?;
            return Ok(Outcome::Refused);
        }
    };
    if args.explain {
        explain::print(args, &place);
        return Ok(Outcome::Done);
    }
    let (restored, failure) = match restore(args, &place, &mut steps)? {
        Ok(restored) => (restored, None),
        Err(error) if args.dry_run && error.is_refusal() => (Restored::default(), Some(error.report())),
        Err(error) => {
            output::failed(args.json, error.shown())?;
            // What is no refusal could not be found out by a dry run.
            let has_begun = args.dry_run || steps.have_begun(&MAKING);
            return Ok(Outcome::failed(error.is_refused(has_begun)));
        }
    };
    if args.json {
        let is_dir = matches!(place, Location::Dir(_));
        output::json(&Restoration {
            container: restored.id.as_deref(),
            namespace: &args.containerd.namespace,
            image: (!is_dir).then_some(&args.from),
            dir: restored.dir.as_deref(),
            pid: restored.pid,
            ms: text::ms(begun.elapsed()),
            bytes: restored.bytes,
            log: restored.log.as_ref().map(|log| log.to_string_lossy()),
            dry_run: args.dry_run,
            decision: match (&restored.plan, &failure) {
                (_, Some(failure)) => Decision::refused(failure),
                (Some(plan), None) => Decision::accepted(plan),
                (None, None) => Decision::default(),
            },
            phases: (!is_dir).then(|| steps.ended()),
        })?;
    } else if let Some(failure) = &failure {
        print_toned(Some((Tone::Bad, &failure.code)), &format!("verdict {failure}"));
    } else {
        print(args, &restored, begun);
    }
    Ok(match failure {
        None => Outcome::Done,
        Some(_) => Outcome::Refused,
    })
}

/// Restores, or shows whether that would be accepted. The outer error: that could not be found out.
fn restore(
    args: &RestoreArgs,
    place: &Location,
    steps: &mut Steps,
) -> Result<Result<Restored, RestoreError>> {
    let mode = match Mode::read(args) {
        Ok(mode) => mode,
        Err(error) => return Ok(Err(error)),
    };
    let is_given = args.spec.is_some() || args.inventory.is_some();
    Ok(match (place, &mode) {
        (_, Mode::DryRun(node)) if is_given => given::plan(args, node)?,
        (Location::Dir(dir), _) => {
            let of_dir = args.dir.as_ref().map(|_| &args.from);
            match of_dir.or(args.into.as_ref()).or(args.name.as_ref()) {
                Some(id) => block_on(dir::restore(args, &mode, dir, id, steps))?,
                None => Err(RestoreError::NoName {
                    dir: dir.display().to_string(),
                }),
            }
        }
        _ => block_on(copy::restore(args, &mode, place, steps))?,
    })
}

fn print(args: &RestoreArgs, restored: &Restored, begun: Instant) {
    let id = restored.id.as_deref();
    match (&restored.plan, restored.pid) {
        (Some(plan), _) => {
            let here = if args.inventory.is_some() { "there" } else { "here" };
            let name = id.map_or_else(String::new, |id| format!(" as {id}"));
            line!("verdict can be restored {here}{name}, as far as can be seen");
            plan.print();
        }
        (None, Some(pid)) => {
            let (id, seconds) = (id.unwrap_or_default(), begun.elapsed().as_secs_f64());
            line!("{id} runs again, pid {pid}, after {seconds:.1} s");
            if let Some(log) = &restored.log {
                line!("its output goes to {}", log.display());
            }
        }
        (None, None) => {}
    }
}
