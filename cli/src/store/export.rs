//! `firn store export`: an image directory that needs no store.

use anyhow::Result;
use firn_image::memory::export;
use serde_json::json;

use super::args::ExportArgs;
use super::progress::Progress;
use super::{place, shown};
use crate::output::{self, line};
use crate::text;

/// True: it is written.
pub fn run(args: &ExportArgs) -> Result<bool> {
    let store = place(&args.common)?.directory()?;
    let begin = |total| {
        let progress = Progress::new("exported", total);
        move |bytes| progress.add(bytes)
    };
    let memory = shown(export(&args.dir, Some(store), &args.out, begin))?;
    match args.common.json {
        true => output::json(&json!({"dir": args.out, "memory": memory}))?,
        false => line!("{} has the memory, {}", args.out.display(), text::bytes(memory)),
    }
    Ok(true)
}
