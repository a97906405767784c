//! `firn store gc`: removes the memory of checkpoints that are gone, by proof
//! ([`firn_store::Removal`]).

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use firn_config::{Config, Keys, names};
use firn_host::ProblemReport;
use firn_host::mountinfo::mounted;
use firn_image::referrer::{Referrers, may_name};
use firn_store::{Decisions, Digest, Kept, Needs, Rules, Store, StoreError, expect_mounted, machine};
use serde::Serialize;

use super::args::GcArgs;
use super::{keep, open, short, shown};
use crate::containerd::block_on;
use crate::output::{self, line, printed};
use crate::{leftovers, text};

/// What was removed.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Cleaned<'a> {
    /// Whether nothing was removed: --dry-run.
    dry_run: bool,
    /// Why a checkpoint's memory was kept, by its id in the store.
    kept: BTreeMap<&'a Digest, String>,
    /// Ids of the checkpoints whose memory was removed, or would be.
    removed: Vec<&'a Digest>,
    /// Ids of those that were kept although nothing is seen that names them.
    unreferenced: Vec<&'a Digest>,
    /// Number of extents that were removed.
    extents: usize,
    /// Bytes that were removed, with what was not finished.
    bytes: u64,
}

printed! { Cleaned<'_>: "store gc" }

/// True: done.
pub fn run(args: &GcArgs) -> Result<bool> {
    let store = open(&args.common)?;
    // Without the lock: image directories may be on file systems that hang.
    let needs = needs(&store, args)?;
    let rules = Rules {
        now: SystemTime::now().duration_since(UNIX_EPOCH)?,
        grace: args.grace,
        machine: machine(),
        other_machines: args.other_hosts,
        unreferenced_since: args.unreferenced_since,
    };
    let decisions = if args.dry_run {
        Decisions::make(&store, &needs, &rules)
    } else {
        store
            .removal()
            .and_then(|removal| removal.collect(&needs, &rules))
    };
    let decisions = shown(decisions)?;
    if args.common.json {
        output::json(&cleaned(&decisions, args.dry_run))?
    } else {
        print(&decisions, args.dry_run)
    }
    Ok(true)
}

/// What needs each index of the store, as far as this node sees it.
fn needs(store: &Store, args: &GcArgs) -> Result<Needs> {
    // Order matters: what appears while the others are looked at is not among these, and stays.
    let known = shown(store.images())?;
    let named = referrers(store, args)?;
    // Without them, whatever has a file system is kept.
    let mounts = mounted().unwrap_or_default();
    let mut needs = Needs::new();
    for id in known {
        let index = match store.index(&id) {
            // Another gc has removed it.
            Err(StoreError::Missing { .. }) => continue,
            index => shown(index)?,
        };
        let by = named.of(&id).map(str::to_owned);
        needs.insert(id, by.or_else(|| may_name(&index, &id, &mounts)));
    }
    Ok(needs)
}

/// What images of containerd and the checkpoints on this node name.
fn referrers(store: &Store, args: &GcArgs) -> Result<Referrers> {
    let mut named = Referrers::default();
    if !args.no_containerd {
        let images = block_on(keep::of_containerd(&args.socket.address))?;
        for (index, image) in images.map_err(ProblemReport::from)? {
            named.add(index, format!("containerd has image {image}"));
        }
    }
    let config = Config::load(Keys::STORE).map_err(ProblemReport::from)?;
    let rescue = config.checkpoint.rescue_dir();
    let in_store = store.root().join(names::STORE_NAMED);
    let from = config.restore.from_dir.as_deref();
    for root in [rescue, &in_store].into_iter().chain(from) {
        shown(expect_mounted(root, Path::new(names::STORES)))?;
    }
    // Order matters for the message alone: the first that has an index is named.
    for left in leftovers::directories(&config, &args.socket.address) {
        shown(named.add_image_by(&left.dir.path(), &left.path))?;
    }
    shown(named.add_images_in(rescue))?;
    shown(named.add_named_in(&in_store))?;
    if let Some(from) = from {
        shown(keep::expect_there(from))?;
        shown(named.add_named_in(from))?;
    }
    Ok(named)
}

/// Indexes that nothing is seen to name.
fn unreferenced(decisions: &Decisions) -> Vec<&Digest> {
    let kept = decisions.kept.iter();
    let kept = kept.filter(|(_, reason)| matches!(reason, Kept::Unreferenced { .. }));
    kept.map(|(id, _)| id).collect()
}

fn cleaned(decisions: &Decisions, dry_run: bool) -> Cleaned<'_> {
    let kept = decisions.kept.iter();
    Cleaned {
        dry_run,
        kept: kept.map(|(id, reason)| (id, reason.to_string())).collect(),
        removed: decisions.gone.keys().collect(),
        unreferenced: unreferenced(decisions),
        extents: decisions.extents.len(),
        bytes: decisions.bytes(),
    }
}

fn print(decisions: &Decisions, is_dry: bool) {
    for (id, reason) in &decisions.kept {
        line!("kept     {}: {reason}", short(id));
    }
    let (does, done) = if is_dry {
        ("removes", "would be removed")
    } else {
        ("removed", "removed")
    };
    for (id, index) in &decisions.gone {
        line!("{does}  {} of container {}", short(id), index.container);
    }
    line!(
        "{} and {}, {}, {done}",
        text::count(decisions.gone.len(), "checkpoint"),
        text::count(decisions.extents.len(), "extent"),
        text::bytes(decisions.bytes())
    );
    let left = unreferenced(decisions).len();
    if left > 0 {
        line!(
            "nothing is seen that names {}: `firn store unpin ID` states that one is gone, and \
             `--unreferenced-since 7d` removes those that nothing has named for so long",
            text::count(left, "checkpoint")
        );
    }
}
