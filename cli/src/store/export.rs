//! `firn store export` and `import`: an image directory that needs no store, and one whose memory is in it.

use std::path::Path;

use anyhow::Result;
use firn_image::manifest::StoredMemory;
use firn_image::memory;
use serde::Serialize;

use super::args::{ExportArgs, ImportArgs};
use super::progress::Progress;
use super::{cap, made, named, short, shown};
use crate::output::{self, line, printed};
use crate::text;

/// An image directory that needs no store.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Exported<'a> {
    /// The image directory that was written.
    dir: &'a Path,
    /// Bytes of memory that came from the store.
    memory: u64,
}

/// An image directory whose memory is in a store.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Imported<'a> {
    /// The image directory that was written.
    dir: &'a Path,
    /// What is in the store.
    memory: &'a StoredMemory,
}

printed! { Exported<'_>: "store export"; Imported<'_>: "store import" }

/// True: it is written.
pub fn run(args: &ExportArgs) -> Result<bool> {
    let store = named(&args.common)?;
    let from = Some(store.place.directory()?);
    let exported = memory::export(&args.dir, from, store.key, &args.out, counted("exported"));
    let memory = shown(exported)?;
    if args.common.json {
        output::json(&Exported {
            dir: &args.out,
            memory,
        })?
    } else {
        line!("{} has the memory, {}", args.out.display(), text::bytes(memory))
    }
    Ok(true)
}

/// True: it is written.
pub fn import(args: &ImportArgs) -> Result<bool> {
    let store = named(&args.common)?;
    let (packing, path) = (store.packing()?, store.place.directory()?);
    // Not before it is known that something goes there.
    let to = || made(&path, &packing);
    let imported = memory::import(&args.dir, to, cap(&args.common)?, &args.out, counted("imported"));
    let memory = shown(imported)?;
    if args.common.json {
        output::json(&Imported {
            dir: &args.out,
            memory: &memory,
        })?
    } else {
        line!(
            "{} has {} in the store as {}: {} written, {} were there",
            args.out.display(),
            text::bytes(memory.bytes),
            short(&memory.index),
            text::bytes(memory.written),
            text::bytes(memory.reused)
        )
    }
    Ok(true)
}

/// Shows how far a copy is, once its bytes are known.
fn counted(what: &'static str) -> impl FnOnce(u64) -> Box<dyn Fn(u64) + Sync> {
    move |total| {
        let progress = Progress::new(what, total);
        Box::new(move |bytes| progress.add(bytes))
    }
}
