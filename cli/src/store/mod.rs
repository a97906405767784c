//! `firn store`: the store for the memory of checkpoints.

mod archive;
pub mod args;
mod gc;
mod keep;
mod ls;
mod progress;
mod threads;
mod transfer;
mod usage;
mod verify;

use std::path::PathBuf;

use anyhow::Result;
use firn_config::Config;
use firn_host::{Problem, ProblemReport};
use firn_image::store::{Digest, Store, StoreError};
use serde_json::json;

use crate::output::{self, line};
use args::{Common, PinArgs, StoreCommand};

/// Digits of an id that a person is shown.
const SHORT: usize = 16;

/// A command that names no store, or no checkpoint in it.
#[derive(Debug, thiserror::Error, Problem)]
enum NameError {
    #[error("neither --store nor `[images] store` of the configuration names a store")]
    #[problem("FIRN-STORE-UNUSABLE", "name it: `firn store ls --store DIR`")]
    NoStore,
    #[error("{url} is no directory")]
    #[problem(
        "FIRN-STORE-UNUSABLE",
        "memory is copied between directories; mount the other place and name its directory"
    )]
    Scheme { url: String },
    #[error("the store has no checkpoint {id}")]
    #[problem("FIRN-STORE-MISSING", "`firn store ls` lists those that it has")]
    None { id: String },
    #[error("the store has several checkpoints that begin with {id:?}")]
    #[problem(
        "FIRN-STORE-MISSING",
        "write more digits of the id that `firn store ls` shows"
    )]
    Several { id: String },
}

/// True: all is well.
pub fn run(command: &StoreCommand) -> Result<bool> {
    match command {
        StoreCommand::Ls(args) => ls::run(args),
        StoreCommand::Du(args) => usage::run(args),
        StoreCommand::Verify(args) => verify::run(args),
        StoreCommand::Gc(args) => gc::run(args),
        StoreCommand::Push(args) => transfer::push(args),
        StoreCommand::Pull(args) => transfer::pull(args),
        StoreCommand::Pin(args) => pin(args, true),
        StoreCommand::Unpin(args) => pin(args, false),
    }
}

fn pin(args: &PinArgs, is_pinned: bool) -> Result<bool> {
    let store = open(&args.common)?;
    let id = find(&store, &args.id)?;
    match is_pinned {
        true => store.pin(&id),
        false => store.unpin(&id).map(drop),
    }
    .map_err(ProblemReport::from)?;
    match (args.common.json, is_pinned) {
        (true, _) => output::json(&json!({"id": id, "pinned": is_pinned}))?,
        (false, true) => line!("{} is kept until `firn store unpin`", short(&id)),
        (false, false) => line!("{} is kept as long as its checkpoint", short(&id)),
    }
    Ok(true)
}

/// The store that the command or the configuration names.
fn open(common: &Common) -> Result<Store> {
    shown(Store::open(&root(common)?))
}

fn root(common: &Common) -> Result<PathBuf> {
    if let Some(root) = &common.store {
        return Ok(root.clone());
    }
    let config = Config::load().map_err(ProblemReport::from)?;
    Ok(config.images.store.ok_or_else(|| NameError::NoStore.report())?)
}

/// The index whose name begins so.
fn find(store: &Store, id: &str) -> Result<Digest> {
    let images = store.images().map_err(ProblemReport::from)?;
    let mut found = images
        .into_iter()
        .filter(|image| image.to_string().starts_with(id));
    match (found.next(), found.next()) {
        (Some(image), None) => Ok(image),
        (None, _) => Err(NameError::None { id: id.to_owned() }.report().into()),
        (Some(_), Some(_)) => Err(NameError::Several { id: id.to_owned() }.report().into()),
    }
}

fn short(id: &Digest) -> String {
    let mut text = id.to_string();
    text.truncate(SHORT);
    text
}

/// What a store's error is to a person.
fn shown<T>(result: Result<T, StoreError>) -> Result<T> {
    Ok(result.map_err(ProblemReport::from)?)
}
