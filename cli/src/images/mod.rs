//! `firn images`: the checkpoints on this node.

pub mod args;
mod du;
mod find;
mod prune;
mod release;
mod removal;

use anyhow::Result;
use serde::Serialize;

use crate::output::{self, line, printed};
use args::{ImagesCommand, ListArgs};
use find::Checkpoint;

/// The checkpoints on this node.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Checkpoints<'a> {
    /// One for each, the oldest first.
    checkpoints: Vec<find::CheckpointRow<'a>>,
}

printed! { Checkpoints<'_>: "images ls" }

/// True: done.
pub fn run(command: &ImagesCommand) -> Result<bool> {
    match command {
        ImagesCommand::Ls(args) => ls(args),
        ImagesCommand::Du(args) => du::run(args),
        ImagesCommand::Prune(args) => prune::run(args),
    }
}

/// True: every place could be read, and no memory is missing.
fn ls(args: &ListArgs) -> Result<bool> {
    let (mut found, mut is_whole) = find::find(&args.common)?;
    for checkpoint in &mut found {
        is_whole &= checkpoint.look_for_memory();
    }
    if args.common.json {
        output::json(&Checkpoints {
            checkpoints: found.iter().map(Checkpoint::shown).collect(),
        })?;
        return Ok(is_whole);
    }
    if found.is_empty() {
        line!("no checkpoints");
        return Ok(is_whole);
    }
    const HEAD: [&str; 7] = ["NAME", "NAMESPACE", "KIND", "CONTAINER", "MADE", "SIZE", "GPUS"];
    output::table(HEAD, found.iter().map(find::row));
    for checkpoint in &found {
        if let Some(failure) = &checkpoint.failure {
            line!("{}: {failure}", checkpoint.name);
        }
    }
    Ok(is_whole)
}
