//! `firn store verify`: reads everything and compares it with its names.

use std::collections::BTreeMap;
use std::sync::Mutex;

use anyhow::Result;
use firn_host::{Problem, ProblemReport};
use firn_store::{Digest, Store};
use serde::Serialize;

use super::args::VerifyArgs;
use super::origin::{Fault, Origin, each};
use super::progress::Progress;
use super::usage::kept;
use super::{find, named, short, shown};
use crate::output::{self, line, printed};
use crate::text;

/// What is wrong with a store.
#[derive(Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Faults {
    /// Number of checkpoints.
    images: usize,
    /// Number of extents that were read.
    extents: usize,
    /// Their bytes.
    bytes: u64,
    /// Why an index cannot be used, by the id of the checkpoint.
    damaged_images: BTreeMap<Digest, ProblemReport>,
    /// Names of extents that are damaged.
    damaged: Vec<Digest>,
    /// How many extents a checkpoint lacks, those of another size or content included, by its id.
    incomplete: BTreeMap<Digest, usize>,
    /// Whether what is damaged was removed: --repair.
    repaired: bool,
}

printed! { Faults: "store verify" }

impl Faults {
    fn is_whole(&self) -> bool {
        self.damaged_images.is_empty() && self.damaged.is_empty() && self.incomplete.is_empty()
    }
}

/// True: all is there and whole.
pub fn run(args: &VerifyArgs) -> Result<bool> {
    let named = named(&args.common)?;
    let found = if args.repair {
        let store = named.open_directory()?;
        let found = look(&store, args)?;
        repair(&store, &found)?;
        Faults {
            repaired: true,
            ..found
        }
    } else {
        look(&*named.open()?, args)?
    };
    if args.common.json {
        output::json(&found)?
    } else {
        print(&found)
    }
    Ok(found.is_whole())
}

fn look(store: &dyn Origin, args: &VerifyArgs) -> Result<Faults> {
    let images = match &args.id {
        Some(id) => vec![find(store, id)?],
        None => shown(store.images())?.into_iter().collect(),
    };
    compare(store, images, args.id.is_none())
}

/// Reads these images, and with `all` also the extents that none of them has. Extents go by their names in
/// the store.
fn compare(store: &dyn Origin, images: Vec<Digest>, all: bool) -> Result<Faults> {
    let there = shown(store.extents())?;
    let mut found = Faults {
        images: images.len(),
        ..Faults::default()
    };
    let mut indexes = Vec::new();
    for id in images {
        match store.index(&id) {
            Ok((index, _)) => indexes.push((id, kept(&index, store.form()))),
            Err(error) => drop(found.damaged_images.insert(id, error.report())),
        }
    }
    let used = |extent: &Digest| indexes.iter().any(|(_, extents)| extents.contains_key(extent));
    let to_read: Vec<(Digest, u64)> = if all {
        there.clone().into_iter().collect()
    } else {
        there
            .clone()
            .into_iter()
            .filter(|(extent, _)| used(extent))
            .collect()
    };
    found.extents = to_read.len();
    found.bytes = to_read.iter().map(|(_, length)| length).sum();
    found.damaged = read(store, &to_read)?;
    for (id, extents) in indexes {
        let lacks = |(extent, length): &(&Digest, &u64)| {
            let size = there.get(extent);
            !size.is_some_and(|size| store.form().may_hold(*size, **length))
                || found.damaged.binary_search(extent).is_ok()
        };
        match extents.iter().filter(lacks).count() {
            0 => {}
            count => drop(found.incomplete.insert(id, count)),
        }
    }
    Ok(found)
}

/// The damaged ones among these, in order.
fn read(store: &dyn Origin, extents: &[(Digest, u64)]) -> Result<Vec<Digest>> {
    let progress = Progress::new("verified", extents.iter().map(|(_, length)| length).sum());
    let damaged = Mutex::new(Vec::new());
    let work = |extent: &Digest, length, buffer: &mut [u8]| {
        if !is_whole(store, extent, length, buffer)? {
            damaged
                .lock()
                .unwrap_or_else(|lock| lock.into_inner())
                .push(*extent);
        }
        progress.add(length);
        Ok::<(), Fault>(())
    };
    shown(each(store.threads(), extents, work))?;
    let mut damaged = damaged.into_inner().unwrap_or_else(|lock| lock.into_inner());
    damaged.sort_unstable();
    Ok(damaged)
}

/// Whether an extent has the content of its name. One that is gone is whole: gc removes what is not needed.
fn is_whole(store: &dyn Origin, name: &Digest, size: u64, buffer: &mut [u8]) -> Result<bool, Fault> {
    match store.compare(name, size, buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.is_missing() => Ok(true),
        Err(error) if error.is_damage() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes what is damaged. It is read again first: a writer may have replaced it.
fn repair(store: &Store, found: &Faults) -> Result<()> {
    if found.damaged.is_empty() && found.damaged_images.is_empty() {
        return Ok(());
    }
    let removal = shown(store.removal())?;
    for extent in &found.damaged {
        shown(removal.damaged_extent(extent))?;
    }
    for image in found.damaged_images.keys() {
        shown(removal.damaged_index(image))?;
    }
    Ok(())
}

fn print(found: &Faults) {
    let bytes = text::bytes(found.bytes);
    line!(
        "read        {bytes} in {}, {}",
        text::count(found.extents, "extent"),
        text::count(found.images, "checkpoint")
    );
    let removed = if found.repaired { ", removed" } else { "" };
    for extent in &found.damaged {
        line!("damaged     extent {extent}{removed}");
    }
    for failure in found.damaged_images.values() {
        line!("damaged     {failure}{removed}");
    }
    for (image, count) in &found.incomplete {
        line!(
            "incomplete  {} lacks {}",
            short(image),
            text::count(*count, "extent")
        );
    }
    if found.is_whole() {
        line!("whole");
    }
}
