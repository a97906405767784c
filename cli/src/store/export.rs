//! `firn store export` and `import`: an image directory that needs no store, and one whose memory is in it.

use anyhow::Result;
use firn_image::memory;
use serde_json::json;

use super::args::{ExportArgs, ImportArgs};
use super::progress::Progress;
use super::{cap, made, named, short, shown};
use crate::output::{self, line};
use crate::text;

/// True: it is written.
pub fn run(args: &ExportArgs) -> Result<bool> {
    let store = named(&args.common)?;
    let from = (Some(store.place.directory()?), store.key);
    let memory = shown(memory::export(&args.dir, from, &args.out, counted("exported")))?;
    match args.common.json {
        true => output::json(&json!({"dir": args.out, "memory": memory}))?,
        false => line!("{} has the memory, {}", args.out.display(), text::bytes(memory)),
    }
    Ok(true)
}

/// True: it is written.
pub fn import(args: &ImportArgs) -> Result<bool> {
    let store = named(&args.common)?;
    let (packing, path) = (store.packing()?, store.place.directory()?);
    // Not before it is known that something goes there.
    let to = (|| made(&path, &packing), cap(&args.common)?);
    let memory = shown(memory::import(&args.dir, to, &args.out, counted("imported")))?;
    match args.common.json {
        true => output::json(&json!({"dir": args.out, "memory": memory}))?,
        false => line!(
            "{} has {} in the store as {}: {} written, {} were there",
            args.out.display(),
            text::bytes(memory.bytes),
            short(&memory.index),
            text::bytes(memory.written),
            text::bytes(memory.reused)
        ),
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
