//! What the checkpoints of a store take, and `firn store du`.

use std::collections::{BTreeMap, HashMap};

use anyhow::Result;
use firn_config::{Config, Keys};
use firn_host::{Problem, ProblemReport};
use firn_store::{Digest, Form, Index};
use serde::Serialize;

use super::args::DuArgs;
use super::origin::Origin;
use super::shown;
use crate::output::{self, line, printed};
use crate::text;

/// A checkpoint, and its share of the store.
#[derive(Debug)]
pub struct Image {
    pub id: Digest,
    pub index: Option<Index>,
    /// Why its index cannot be used.
    pub failure: Option<ProblemReport>,
    pub pinned: bool,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of extents that no other checkpoint has.
    pub own: u64,
    /// Bytes of extents that others have as well.
    pub shared: u64,
    pub zero: u64,
    /// Extents that the store lacks.
    pub missing: usize,
}

impl Image {
    pub fn is_complete(&self) -> bool {
        self.failure.is_none() && self.missing == 0
    }
}

/// What a store holds.
pub struct Contents {
    pub images: Vec<Image>,
    /// By their names in the store, with the sizes of their files.
    pub extents: BTreeMap<Digest, u64>,
    /// How many checkpoints use an extent.
    pub users: HashMap<Digest, u32>,
}

impl Contents {
    pub fn read(store: &dyn Origin) -> Result<Self> {
        let extents = shown(store.extents())?;
        let pinned = shown(store.pinned())?;
        let mut users: HashMap<Digest, u32> = HashMap::new();
        let mut read = Vec::new();
        for id in shown(store.images())? {
            let index = store.index(&id);
            let index = index.map(|(index, _)| index).map_err(|error| error.report());
            let used = index.as_ref().map(|index| kept(index, store.form()));
            let used = used.unwrap_or_default();
            for extent in used.keys() {
                *users.entry(*extent).or_default() += 1;
            }
            read.push((id, index, used));
        }
        let images = read.into_iter().map(|(id, index, used)| {
            let there = |extent: &Digest, length: &u64| {
                let size = extents.get(extent);
                size.is_some_and(|size| store.form().may_hold(*size, *length))
            };
            let own = used.iter().filter(|(extent, _)| users[*extent] == 1);
            let (index, failure) = match index {
                Ok(index) => (Some(index), None),
                Err(failure) => (None, Some(failure)),
            };
            let own: u64 = own.map(|(_, length)| length).sum();
            Image {
                id,
                pinned: pinned.contains(&id),
                memory: index.as_ref().map_or(0, Index::bytes),
                zero: index.as_ref().map_or(0, Index::zero_bytes),
                own,
                shared: used.values().sum::<u64>() - own,
                missing: used
                    .iter()
                    .filter(|(extent, length)| !there(extent, length))
                    .count(),
                index,
                failure,
            }
        });
        Ok(Self {
            images: images.collect(),
            extents,
            users,
        })
    }
}

/// The extents of an index, each once, with their lengths.
pub fn distinct(index: &Index) -> HashMap<Digest, u64> {
    let extents = index.extents();
    extents
        .filter_map(|(extent, length)| Some((extent?, length as u64)))
        .collect()
}

/// The same by the names that they have in a store of this form.
pub fn kept(index: &Index, form: &Form) -> HashMap<Digest, u64> {
    let extents = distinct(index).into_iter();
    extents
        .map(|(extent, length)| (form.name(&extent), length))
        .collect()
}

/// What takes room in a store.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Usage {
    /// Number of checkpoints.
    images: usize,
    /// Bytes of memory of all checkpoints.
    memory: u64,
    /// Bytes of zeros in it, for which nothing is stored.
    zero: u64,
    /// Number of extents.
    extents: usize,
    /// Bytes of their files.
    stored: u64,
    /// Bytes of extents that no checkpoint has: `firn store gc` removes them.
    unused: u64,
    /// Bytes of what was not finished.
    unfinished: u64,
    /// Bytes that are free on the file system.
    free: u64,
    /// The most bytes that the configuration lets its store have; absent if it has no such limit.
    cap: Option<u64>,
}

printed! { Usage: "store du" }

/// `firn store du`.
pub fn run(args: &DuArgs) -> Result<bool> {
    let store = super::open(&args.common)?;
    let contents = Contents::read(&store)?;
    let unused = contents
        .extents
        .iter()
        .filter(|(extent, _)| !contents.users.contains_key(extent));
    let usage = Usage {
        images: contents.images.len(),
        memory: contents.images.iter().map(|image| image.memory).sum(),
        zero: contents.images.iter().map(|image| image.zero).sum(),
        extents: contents.extents.len(),
        stored: contents.extents.values().sum(),
        unused: unused.map(|(_, length)| length).sum(),
        unfinished: shown(store.unfinished())?,
        free: shown(store.free())?,
        cap: Config::load(Keys::STORE)
            .map_err(ProblemReport::from)?
            .images
            .store_cap,
    };
    if args.common.json {
        output::json(&usage)?
    } else {
        print(&usage)
    }
    Ok(true)
}

fn print(usage: &Usage) {
    let bytes = text::bytes;
    line!(
        "memory      {} in {}",
        bytes(usage.memory),
        text::count(usage.images, "checkpoint")
    );
    line!("zero        {}, for which nothing is stored", bytes(usage.zero));
    line!(
        "stored      {} in {}",
        bytes(usage.stored),
        text::count(usage.extents, "extent")
    );
    line!(
        "unused      {}, which `firn store gc` removes",
        bytes(usage.unused)
    );
    line!("unfinished  {}", bytes(usage.unfinished));
    line!("free        {} on the file system", bytes(usage.free));
    if let Some(cap) = usage.cap {
        line!("cap         {}", bytes(cap));
    }
}
