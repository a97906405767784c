//! `firn restore`: a container from an image, a tar file or an image directory.

pub mod check;
mod contents;
mod copy;
pub mod dir;
mod error;
mod explain;
mod gpus;
mod into;
mod made;
mod named;
pub mod unpack;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use crate::args::restore::RestoreArgs;
use crate::containerd::block_on;
use crate::output::{self, line, printed};
use crate::place::Location;
use crate::steps::{Step, Steps};
use crate::text;
use error::RestoreError;
use gpus::Mode;

/// The argument that names standard input.
pub const STDIN: &str = "-";

/// What was restored, or would be.
pub struct Restored {
    id: String,
    /// None with --dry-run.
    pid: Option<u32>,
    /// Pairs of GPUs, old and new.
    map: Vec<(String, String)>,
    bytes: u64,
}

impl Restored {
    fn new(id: &str, bytes: u64) -> Self {
        Self {
            id: id.to_owned(),
            pid: None,
            map: Vec::new(),
            bytes,
        }
    }
}

/// What was restored, or would be.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Restoration<'a> {
    /// Id of the container.
    container: &'a str,
    /// containerd's namespace of the container.
    namespace: &'a str,
    /// The image, tar file or `-` that the checkpoint was read from; absent for an image directory.
    image: Option<&'a str>,
    /// The directory of CRIU's files; absent for images and tar files.
    dir: Option<PathBuf>,
    /// Pid of the container's first process on the node; absent with --dry-run.
    pid: Option<u32>,
    /// How long the command took, in milliseconds.
    ms: u64,
    /// With --dry-run: the GPUs of the source, and those that would take their place. Empty otherwise, and
    /// for a checkpoint without GPUs.
    map: Vec<Pair<'a>>,
    /// Bytes of the checkpoint that were read; absent for an image directory.
    bytes: Option<u64>,
    /// Whether nothing was restored: --dry-run.
    dry_run: bool,
    /// The phases that have ended, in their order; absent for an image directory.
    phases: Option<Vec<Step<'a>>>,
}

/// A GPU, and the one in its place.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Pair<'a> {
    /// UUID of the GPU that the source had.
    old: &'a str,
    /// UUID of the GPU that the container gets.
    new: &'a str,
}

printed! { Restoration<'_>: "restore" }

/// True: done. An error of a restore from a stream is one before anything was begun: `firn move` on the other
/// node, which reads it, lets its container continue.
pub fn run(args: &RestoreArgs) -> Result<bool> {
    if let Some(image) = &args.check {
        return check::run(args, image);
    }
    let (begun, mut steps) = (Instant::now(), Steps::new(args.json));
    let done = match &args.dir {
        Some(dir) => into_known(args, dir, Some(&args.from))?,
        None => match Location::of(&args.from, args.kind) {
            Ok(place) if args.explain => {
                explain::print(args, &place);
                return Ok(true);
            }
            Ok(Location::Dir(dir)) => into_known(args, &dir, args.into.as_ref().or(args.name.as_ref()))?,
            Ok(place) => into_new(args, &place, &mut steps)?.map(|done| (done, None)),
            Err(ambiguous) => Err(ambiguous.into()),
        },
    };
    match done {
        Ok((restored, dir)) => {
            if args.json {
                output::json(&described(args, &restored, dir, begun, &steps))?
            } else {
                print(&restored, begun)
            }
            Ok(true)
        }
        Err(error) => output::failed(args.json, error.shown()),
    }
}

/// Into a new container, or the files and processes into one that containerd knows.
fn into_new(
    args: &RestoreArgs,
    place: &Location,
    steps: &mut Steps,
) -> Result<Result<Restored, RestoreError>> {
    Ok(match Mode::read(args) {
        Ok(mode) => block_on(copy::restore(args, &mode, place, steps))?,
        Err(error) => Err(error),
    })
}

/// From an image directory, into a container that containerd knows. Returns the directory of CRIU's files,
/// too.
fn into_known(
    args: &RestoreArgs,
    dir: &Path,
    id: Option<&String>,
) -> Result<Result<(Restored, Option<PathBuf>), RestoreError>> {
    let Some(id) = id else {
        let dir = dir.display().to_string();
        return Ok(Err(RestoreError::NoName { dir }));
    };
    Ok(match Mode::read(args) {
        Ok(mode) => block_on(dir::restore(args, &mode, dir, id))?,
        Err(error) => Err(error),
    })
}

fn described<'a>(
    args: &'a RestoreArgs,
    restored: &'a Restored,
    dir: Option<PathBuf>,
    begun: Instant,
    steps: &'a Steps,
) -> Restoration<'a> {
    let is_known = dir.is_some();
    let pair = |(old, new): &'a (String, String)| Pair { old, new };
    Restoration {
        container: &restored.id,
        namespace: &args.containerd.namespace,
        image: (!is_known).then_some(&args.from),
        dir,
        pid: restored.pid,
        ms: text::ms(begun.elapsed()),
        map: restored.map.iter().map(pair).collect(),
        bytes: (!is_known).then_some(restored.bytes),
        dry_run: args.dry_run,
        phases: (!is_known).then(|| steps.ended()),
    }
}

fn print(restored: &Restored, begun: Instant) {
    for (old, new) in &restored.map {
        line!("gpu     {old} -> {new}");
    }
    let (id, seconds) = (&restored.id, begun.elapsed().as_secs_f64());
    match restored.pid {
        Some(pid) => line!("{id} runs again, pid {pid}, after {seconds:.1} s"),
        None => line!("{id} would be restored"),
    }
}
