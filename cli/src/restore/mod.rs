//! `firn restore`: a container from an image, a tar file or an image directory.

mod check;
mod copy;
pub mod dir;
mod error;
mod explain;
mod gpus;
mod into;
mod named;
pub mod unpack;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;
use serde_json::{Value, json};

use crate::args::restore::RestoreArgs;
use crate::containerd::block_on;
use crate::output::{self, line};
use crate::place::Place;
use crate::steps::Steps;
use error::RestoreError;

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

/// True: done.
pub fn run(args: &RestoreArgs) -> Result<bool> {
    if let Some(image) = &args.check {
        return check::run(args, image);
    }
    let (begun, mut steps) = (Instant::now(), Steps::new(args.json));
    let done = match &args.dir {
        Some(dir) => into_known(args, dir, Some(&args.from))?,
        None => match Place::of(&args.from, args.kind) {
            Ok(place) if args.explain => {
                explain::print(args, &place);
                return Ok(true);
            }
            Ok(Place::Dir(dir)) => into_known(args, &dir, args.into.as_ref().or(args.name.as_ref()))?,
            Ok(place) => into_new(args, &place, &mut steps)?.map(|done| (done, None)),
            Err(ambiguous) => Err(ambiguous.into()),
        },
    };
    match done {
        Ok((restored, dir)) => {
            let ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
            match args.json {
                true => output::json(&as_json(args, &restored, dir, ms, &steps))?,
                false => print(&restored, begun),
            }
            Ok(true)
        }
        Err(error) => output::failed(args.json, error.shown()),
    }
}

/// Into a new container, or the files and processes into one that containerd knows.
fn into_new(args: &RestoreArgs, place: &Place, steps: &mut Steps) -> Result<Result<Restored, RestoreError>> {
    Ok(match gpus::Here::look(args) {
        Ok(here) => block_on(copy::restore((args, here.as_ref()), place, steps))?,
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
    Ok(match gpus::Here::look(args) {
        Ok(here) => block_on(dir::restore((args, here.as_ref()), dir, id))?,
        Err(error) => Err(error),
    })
}

fn as_json(args: &RestoreArgs, restored: &Restored, dir: Option<PathBuf>, ms: u64, steps: &Steps) -> Value {
    let (id, namespace, pid) = (&restored.id, &args.containerd.namespace, restored.pid);
    let pair = |(old, new): &(String, String)| json!({"old": old, "new": new});
    let map: Vec<Value> = restored.map.iter().map(pair).collect();
    if let Some(dir) = dir {
        return json!({
            "container": id, "namespace": namespace, "dir": dir, "pid": pid, "ms": ms, "map": map,
            "dry_run": args.dry_run,
        });
    }
    json!({
        "container": id, "namespace": namespace, "image": args.from, "pid": pid, "ms": ms, "map": map,
        "bytes": restored.bytes, "dry_run": args.dry_run, "phases": steps.as_json(),
    })
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
