//! `firn store gc`: removes the memory of checkpoints that are gone.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use firn_config::{Config, Keys, names};
use firn_host::ProblemReport;
use firn_host::mountinfo::{MountEntry, mounted};
use firn_image::store::{Digest, Index, Store, StoreError};
use serde::Serialize;

use super::args::GcArgs;
use super::usage::kept;
use super::{keep, open, short, shown};
use crate::containerd::block_on;
use crate::output::{self, line, printed};
use crate::{leftovers, text};

/// What is done with the indexes, and with the extents that none of the kept ones names.
struct Plan {
    /// With the reason.
    kept: BTreeMap<Digest, String>,
    removed: BTreeMap<Digest, Index>,
    extents: BTreeMap<Digest, u64>,
    unfinished: u64,
}

/// What was removed.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Cleaned<'a> {
    /// Whether nothing was removed: --dry-run.
    dry_run: bool,
    /// Why a checkpoint's memory was kept, by its id in the store.
    kept: &'a BTreeMap<Digest, String>,
    /// Ids of the checkpoints whose memory was removed, or would be.
    removed: Vec<&'a Digest>,
    /// Number of extents that were removed.
    extents: usize,
    /// Bytes that were removed, with what was not finished.
    bytes: u64,
}

printed! { Cleaned<'_>: "store gc" }

/// What decides in addition to the store.
struct Facts {
    now: Duration,
    host: String,
    containerd: BTreeMap<Digest, String>,
    directories: BTreeMap<Digest, String>,
    mounts: Vec<MountEntry>,
}

/// Why an index that was there at the beginning stays, if it does.
type Reasons = BTreeMap<Digest, Option<String>>;

/// True: done.
pub fn run(args: &GcArgs) -> Result<bool> {
    let store = open(&args.common)?;
    // Order matters: what appears while containerd is asked is not among these, and stays.
    let known = shown(store.images())?;
    // Without the lock: image directories may be on file systems that hang.
    let reasons = Facts::find(&store, args)?.reasons(&store, known, args)?;
    let plan = match args.dry_run {
        true => Plan::make(&store, &reasons)?,
        false => {
            let removal = shown(store.removal())?;
            let plan = Plan::make(&store, &reasons)?;
            // Order matters: no index is left without its extents.
            plan.removed
                .keys()
                .try_for_each(|image| shown(removal.image(image)))?;
            plan.extents
                .keys()
                .try_for_each(|extent| shown(removal.extent(extent)))?;
            shown(removal.unfinished())?;
            plan
        }
    };
    match args.common.json {
        true => output::json(&plan.cleaned(args.dry_run))?,
        false => plan.print(args.dry_run),
    }
    Ok(true)
}

impl Facts {
    fn find(store: &Store, args: &GcArgs) -> Result<Self> {
        let containerd = match args.no_containerd {
            true => BTreeMap::new(),
            false => {
                let asked = block_on(keep::of_containerd(&args.socket.address))?;
                asked.map_err(ProblemReport::from)?
            }
        };
        let host =
            std::fs::read_to_string("/proc/sys/kernel/hostname").context("cannot read the host's name")?;
        let config = Config::load(Keys::STORE).map_err(ProblemReport::from)?;
        let mut directories = Vec::new();
        let in_store = store.root().join(names::STORE_NAMED);
        for from in config.restore.from_dir.iter().chain([&in_store]) {
            let named = keep::named_directories(from);
            directories.extend(named.with_context(|| {
                format!(
                    "cannot list the checkpoints in {}; nothing was removed",
                    from.display()
                )
            })?);
        }
        Ok(Self {
            now: SystemTime::now().duration_since(UNIX_EPOCH)?,
            host: host.trim_end().to_owned(),
            containerd,
            directories: keep::of_directories(directories)
                .into_iter()
                .chain(keep::of_leftovers(leftovers::directories(
                    &config,
                    &args.socket.address,
                )))
                .collect(),
            // Without them, whatever has a file system is kept.
            mounts: mounted().unwrap_or_default(),
        })
    }

    fn reasons(&self, store: &Store, known: BTreeSet<Digest>, args: &GcArgs) -> Result<Reasons> {
        let mut reasons = Reasons::new();
        for id in known {
            match store.index(&id) {
                // Another gc has removed it.
                Err(StoreError::Missing { .. }) => {}
                index => drop(reasons.insert(id, self.reason(&id, &shown(index)?, args))),
            }
        }
        Ok(reasons)
    }

    /// Why an index stays.
    fn reason(&self, id: &Digest, index: &Index, args: &GcArgs) -> Option<String> {
        let age = self.now.saturating_sub(Duration::from_secs(index.made));
        if let Some(image) = self.containerd.get(id) {
            return Some(format!("containerd has image {image}"));
        }
        if let Some(reason) = self.directories.get(id) {
            return Some(reason.clone());
        }
        if age < args.grace {
            return Some(format!("it is {} s old", age.as_secs()));
        }
        if index.host != self.host && !args.other_hosts {
            return Some(format!("it is of host {}", index.host));
        }
        keep::by_directory(index, id, &self.mounts)
    }
}

impl Plan {
    fn make(store: &Store, reasons: &Reasons) -> Result<Self> {
        let pinned = shown(store.pinned())?;
        let mut plan = Self {
            kept: BTreeMap::new(),
            removed: BTreeMap::new(),
            extents: shown(store.extents())?,
            unfinished: shown(store.unfinished())?,
        };
        for id in shown(store.images())? {
            // One that cannot be read may need any extent: then nothing is removed.
            let index = shown(store.index(&id))?;
            let reason = match (pinned.contains(&id), reasons.get(&id)) {
                (true, _) => Some("it is pinned".to_owned()),
                (false, None) => Some("it is new".to_owned()),
                (false, Some(reason)) => reason.clone(),
            };
            match reason {
                None => drop(plan.removed.insert(id, index)),
                Some(reason) => {
                    let used = kept(&index, store.form());
                    plan.extents.retain(|extent, _| !used.contains_key(extent));
                    plan.kept.insert(id, reason);
                }
            }
        }
        Ok(plan)
    }

    fn bytes(&self) -> u64 {
        self.extents.values().sum::<u64>() + self.unfinished
    }

    fn cleaned(&self, dry_run: bool) -> Cleaned<'_> {
        Cleaned {
            dry_run,
            kept: &self.kept,
            removed: self.removed.keys().collect(),
            extents: self.extents.len(),
            bytes: self.bytes(),
        }
    }

    fn print(&self, is_dry: bool) {
        for (id, reason) in &self.kept {
            line!("kept     {}: {reason}", short(id));
        }
        let (does, done) = match is_dry {
            true => ("removes", "would be removed"),
            false => ("removed", "removed"),
        };
        for (id, index) in &self.removed {
            line!("{does}  {} of container {}", short(id), index.container);
        }
        line!(
            "{} and {}, {}, {done}",
            text::count(self.removed.len(), "checkpoint"),
            text::count(self.extents.len(), "extent"),
            text::bytes(self.bytes())
        );
    }
}
