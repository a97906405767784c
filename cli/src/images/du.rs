//! `firn images du`: what takes room, and what several checkpoints share.

use std::collections::{BTreeMap, HashMap, HashSet};

use anyhow::Result;
use firn_config::{Config, Keys};
use firn_host::ProblemReport;
use firn_store::{Digest, Packing, Store};
use serde::Serialize;

use super::args::ListArgs;
use super::find::{self, Checkpoint, Kind};
use crate::image::Sizes;
use crate::output::{self, line, note, printed};
use crate::store::usage::Contents;
use crate::text;

/// A checkpoint's share.
struct Share<'a> {
    checkpoint: &'a Checkpoint,
    /// Bytes that others have as well: of blobs in containerd, and of memory in the store.
    shared: u64,
}

/// What takes room.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Usage<'a> {
    /// One for each checkpoint, the oldest first.
    checkpoints: Vec<CheckpointShare<'a>>,
    /// The sums of their sizes by class.
    sizes: Sizes,
    /// The sum of their sizes in bytes.
    bytes: u64,
    /// Bytes of blobs in containerd that the sums have more than once.
    counted_twice: u64,
}

/// A checkpoint's share.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct CheckpointShare<'a> {
    /// The image, or the directory.
    name: &'a str,
    /// Namespace of containerd, or of Kubernetes; absent for what is left.
    namespace: Option<&'a str>,
    /// Where it is.
    kind: Kind,
    /// Its size by class.
    sizes: Sizes,
    /// Its size in bytes.
    bytes: u64,
    /// Bytes that other checkpoints have as well: blobs in containerd, memory in the store.
    shared: u64,
}

printed! { Usage<'_>: "images du" }

/// True: every place could be read.
pub fn run(args: &ListArgs) -> Result<bool> {
    let (found, is_whole) = find::find(&args.common)?;
    let extents = match in_store() {
        Ok(extents) => extents,
        Err(error) => {
            note!("firn: what the store shares is not shown: {error:#}");
            HashMap::new()
        }
    };
    let mut users: BTreeMap<&str, u32> = BTreeMap::new();
    for checkpoint in &found {
        let blobs: HashSet<&str> = checkpoint.blobs.iter().map(|blob| &*blob.digest).collect();
        for digest in blobs {
            *users.entry(digest).or_default() += 1;
        }
    }
    let share = |checkpoint| share(checkpoint, &users, &extents);
    let all: Vec<Share<'_>> = found.iter().map(share).collect();
    let total = found
        .iter()
        .fold(Sizes::default(), |sum, one| sum.plus(&one.sizes));
    let shared = once(&found, &users);
    if args.common.json {
        output::json(&Usage {
            checkpoints: all.iter().map(Share::shown).collect(),
            sizes: total,
            bytes: total.all(),
            counted_twice: shared,
        })?
    } else {
        print(&all, &total, shared)
    }
    Ok(is_whole)
}

/// For each index in the store, the bytes that other checkpoints have as well.
fn in_store() -> Result<HashMap<Digest, u64>> {
    let images = Config::load(Keys::STORE).map_err(ProblemReport::from)?.images;
    let Some(store) = images.store.filter(|store| store.is_dir()) else {
        return Ok(HashMap::new());
    };
    let packing = Packing::with_key(images.store_key.as_deref()).map_err(ProblemReport::from)?;
    let store = Store::open(&store, &packing).map_err(ProblemReport::from)?;
    let contents = Contents::read(&store)?.images.into_iter();
    Ok(contents.map(|image| (image.id, image.shared)).collect())
}

fn share<'a>(
    checkpoint: &'a Checkpoint,
    users: &BTreeMap<&str, u32>,
    extents: &HashMap<Digest, u64>,
) -> Share<'a> {
    let blobs = checkpoint.blobs.iter().filter(|blob| users[&*blob.digest] > 1);
    let blobs: u64 = blobs.map(|blob| blob.size).sum();
    let bulk = checkpoint
        .manifest
        .as_ref()
        .and_then(|manifest| manifest.bulk.as_ref());
    let stored = bulk.and_then(|bulk| extents.get(&bulk.index)).copied();
    Share {
        checkpoint,
        shared: blobs + stored.unwrap_or(0),
    }
}

/// Bytes of blobs that are counted for more than one checkpoint.
fn once(found: &[Checkpoint], users: &BTreeMap<&str, u32>) -> u64 {
    let sizes: BTreeMap<&str, u64> = found
        .iter()
        .flat_map(|checkpoint| &checkpoint.blobs)
        .map(|blob| (&*blob.digest, blob.size))
        .collect();
    let twice = sizes
        .iter()
        .map(|(digest, size)| size * u64::from(users[digest] - 1));
    twice.sum()
}

impl Share<'_> {
    fn shown(&self) -> CheckpointShare<'_> {
        let Checkpoint {
            name,
            namespace,
            kind,
            sizes,
            ..
        } = self.checkpoint;
        CheckpointShare {
            name,
            namespace: text::some(namespace),
            kind: *kind,
            sizes: *sizes,
            bytes: sizes.all(),
            shared: self.shared,
        }
    }
}

fn print(all: &[Share<'_>], total: &Sizes, twice: u64) {
    if all.is_empty() {
        line!("no checkpoints");
        return;
    }
    let row = |name: &str, sizes: &Sizes, shared: u64| {
        let [gpu, memory, stored, state, files] = sizes.named().map(|(_, bytes)| text::bytes(bytes));
        let all = text::bytes(sizes.all());
        [
            name.to_owned(),
            gpu,
            memory,
            stored,
            state,
            files,
            all,
            text::bytes(shared),
        ]
    };
    let rows = all
        .iter()
        .map(|one| row(&one.checkpoint.name, &one.checkpoint.sizes, one.shared));
    let sum = row(&text::count(all.len(), "checkpoint"), total, twice);
    output::table(
        [
            "NAME",
            "GPU MEMORY",
            "MEMORY",
            "STORED",
            "STATE",
            "FILES",
            "ALL",
            "SHARED",
        ],
        rows.chain([sum]),
    );
}
