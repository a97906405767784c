//! `firn store`: the store for the memory of checkpoints.

pub mod args;
mod bucket;
mod export;
mod gc;
pub mod keep;
mod ls;
mod name;
mod origin;
mod progress;
mod transfer;
pub mod usage;
mod verify;

use std::path::{Path, PathBuf};

use anyhow::Result;
use firn_config::{Config, Keys, names};
use firn_host::{Problem, ProblemReport};
use firn_store::{Digest, Packing, Pin, Store, StoreError};
use serde::Serialize;

use crate::output::{self, line, printed};
use args::{Common, PinArgs, StoreCommand};
use bucket::Bucket;
use origin::Origin;

/// Digits of an id that a person is shown.
const SHORT: usize = 16;

/// A command that names no store, or no checkpoint in it.
#[derive(Debug, thiserror::Error, Problem)]
enum NameError {
    #[error("neither --store nor `[images] store` of the configuration names a store")]
    #[problem("FIRN-STORE-UNUSABLE", "name it: `firn store ls --store DIR`")]
    NoStore,
    #[error("{url} is neither a directory nor a bucket")]
    #[problem("FIRN-STORE-UNUSABLE", "write DIR, file:///DIR or s3://BUCKET/PREFIX")]
    Scheme { url: String },
    #[error("{url} is no directory")]
    #[problem(
        "FIRN-STORE-UNUSABLE",
        "only `ls`, `verify` without --repair, `push` and `pull` work with a bucket; name a directory"
    )]
    NoDirectory { url: String },
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

/// A checkpoint that was pinned, or is not pinned any more.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Pinned {
    /// Id of the checkpoint in the store.
    id: Digest,
    /// Whether it is kept until `firn store unpin`.
    pinned: bool,
}

printed! { Pinned: "store pin", "store unpin" }

/// True: all is well.
pub fn run(command: &StoreCommand) -> Result<bool> {
    match command {
        StoreCommand::Ls(args) => ls::run(args),
        StoreCommand::Du(args) => usage::run(args),
        StoreCommand::Verify(args) => verify::run(args),
        StoreCommand::Gc(args) => gc::run(args),
        StoreCommand::Push(args) => transfer::push(args),
        StoreCommand::Pull(args) => transfer::pull(args),
        StoreCommand::Export(args) => export::run(args),
        StoreCommand::Import(args) => export::import(args),
        StoreCommand::Name(args) => name::run(args),
        StoreCommand::Pin(args) => pin(args, true),
        StoreCommand::Unpin(args) => pin(args, false),
    }
}

fn pin(args: &PinArgs, is_pinned: bool) -> Result<bool> {
    let store = open(&args.common)?;
    let id = find(&store, &args.id)?;
    if is_pinned {
        store.pin(&id, Pin::Operator)
    } else {
        store.unpin(&id).map(drop)
    }
    .map_err(ProblemReport::from)?;
    match (args.common.json, is_pinned) {
        (true, _) => output::json(&Pinned {
            id,
            pinned: is_pinned,
        })?,
        (false, true) => line!("{} is kept until `firn store unpin`", short(&id)),
        (false, false) => line!(
            "{} is kept as long as something on this node is seen to name it",
            short(&id)
        ),
    }
    Ok(true)
}

/// Where a store is.
enum StoreLocation {
    Dir(PathBuf),
    /// By its URL.
    Bucket(String),
}

impl StoreLocation {
    fn of(name: &Path) -> Result<Self> {
        let text = name.to_str().unwrap_or_default();
        match text.split_once("://") {
            None => Ok(Self::Dir(name.to_owned())),
            Some(("file", path)) => Ok(Self::Dir(path.into())),
            Some(("s3", _)) => Ok(Self::Bucket(text.to_owned())),
            Some(_) => Err(NameError::Scheme { url: text.to_owned() }.report().into()),
        }
    }

    /// The directory; a bucket is refused.
    fn directory(self) -> Result<PathBuf> {
        match self {
            Self::Dir(path) => Ok(path),
            Self::Bucket(url) => Err(NameError::NoDirectory { url }.report().into()),
        }
    }
}

/// A store, and the file of its key.
struct KeyedStore {
    place: StoreLocation,
    key: Option<PathBuf>,
}

impl KeyedStore {
    /// One that the command line names in addition to the node's own.
    fn other(url: &Path, key: Option<&PathBuf>) -> Result<Self> {
        Ok(Self {
            place: StoreLocation::of(url)?,
            key: key.cloned(),
        })
    }

    fn packing(&self) -> Result<Packing> {
        shown(Packing::with_key(self.key.as_deref()))
    }

    /// Opens it to be read.
    fn open(&self) -> Result<Box<dyn Origin>> {
        let packing = self.packing()?;
        Ok(match &self.place {
            StoreLocation::Dir(path) => Box::new(shown(Store::open(path, &packing))?),
            StoreLocation::Bucket(url) => Box::new(shown(Bucket::open(url, &packing))?),
        })
    }

    /// Opens the directory; a bucket is refused.
    fn open_directory(self) -> Result<Store> {
        let packing = self.packing()?;
        shown(Store::open(&self.place.directory()?, &packing))
    }
}

/// The store that the command or the configuration names, in a directory.
fn open(common: &Common) -> Result<Store> {
    named(common)?.open_directory()
}

/// The store in this directory, which is made if it is not there, unless its file system is not mounted.
fn made(path: &Path, packing: &Packing) -> Result<Store, StoreError> {
    Store::create_again(path, Path::new(names::STORES), packing)
}

fn named(common: &Common) -> Result<KeyedStore> {
    if let Some(store) = &common.store {
        return KeyedStore::other(store, common.store_key.as_ref());
    }
    let images = Config::load(Keys::STORE).map_err(ProblemReport::from)?.images;
    let store = images.store.ok_or_else(|| NameError::NoStore.report())?;
    Ok(KeyedStore {
        place: StoreLocation::Dir(store),
        key: common.store_key.clone().or(images.store_key),
    })
}

/// The most bytes that the configuration lets its store have. Another store has no such limit.
fn cap(common: &Common) -> Result<Option<u64>> {
    match &common.store {
        Some(_) => Ok(None),
        None => Ok(Config::load(Keys::STORE)
            .map_err(ProblemReport::from)?
            .images
            .store_cap),
    }
}

/// The index whose name begins so.
fn find(store: &dyn Origin, id: &str) -> Result<Digest> {
    let images = shown(store.images())?;
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
fn shown<T, P: Problem>(result: Result<T, P>) -> Result<T> {
    Ok(result.map_err(ProblemReport::from)?)
}
