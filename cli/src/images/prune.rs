//! `firn images prune`: removes checkpoints that the user names, or that are old.
//!
//! Order matters: everything is looked at before the first is removed.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Result;
use firn_config::{Config, Keys, names};
use firn_host::{Problem, ProblemReport, UnlessAbsent, clock};
use firn_image::manifest::is_of_image;
use firn_image::store::{Packing, Store};
use firn_transaction::journal::Record;
use serde::Serialize;

use super::args::{Common, PruneArgs};
use super::find::{self, Checkpoint, Kind};
use crate::containerd::{Containerd, block_on, bundles};
use crate::oci_image::ImageError;
use crate::output::{self, line, note, printed};
use crate::text;

/// Why a checkpoint stays.
#[derive(Debug, thiserror::Error, Problem)]
enum PruneError {
    #[error("this node has no checkpoint {name}")]
    #[problem(
        "FIRN-PRUNE-UNKNOWN",
        "`firn images ls` lists them; --namespace narrows the choice"
    )]
    Unknown { name: String },
    #[error("there are several checkpoints {name}")]
    #[problem(
        "FIRN-PRUNE-UNKNOWN",
        "name the namespace: `firn images prune NAME --namespace NS`"
    )]
    Several { name: String },
    #[error("checkpoint {name} is in use: {why}")]
    #[problem("FIRN-PRUNE-IN-USE", "wait until that has ended: `firn ps` shows it")]
    InUse { name: String, why: String },
    #[error("{name} holds {foreign}, which is no file of a checkpoint")]
    #[problem(
        "FIRN-PRUNE-FOREIGN",
        "move that file elsewhere, or remove the directory yourself"
    )]
    Foreign { name: String, foreign: String },
    #[error("not every place could be read, so that it is not known what is in use")]
    #[problem(
        "FIRN-CONTAINERD",
        "--address names containerd's socket; --no-containerd is for machines without it"
    )]
    NotAsked,
    #[error("cannot remove {name}")]
    #[problem("FIRN-FILE", "see the cause, and `firn images ls`")]
    Remove { name: String, source: io::Error },
    #[error(transparent)]
    Call(#[from] ImageError),
}

/// What was removed.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Pruned<'a> {
    /// Whether nothing was removed: --dry-run.
    dry_run: bool,
    /// The checkpoints that were removed, or would be.
    removed: Vec<find::Shown<'a>>,
    /// Those that were kept although they are old enough, or could not be removed.
    kept: Vec<Kept<'a>>,
    /// The size of those that were removed, in bytes.
    bytes: u64,
}

/// A checkpoint that was kept.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Kept<'a> {
    /// The image, or the directory.
    name: &'a str,
    /// Why it was kept.
    failure: &'a ProblemReport,
}

printed! { Pruned<'_>: "images prune" }

/// True: all that was wanted is removed, or would be.
pub fn run(args: &PruneArgs) -> Result<bool> {
    let (found, is_whole) = find::find(&args.common)?;
    if !is_whole {
        return output::failed(args.common.json, ProblemReport::from(PruneError::NotAsked));
    }
    let wanted = match wanted(args, &found) {
        Ok(wanted) => wanted,
        Err(error) => return output::failed(args.common.json, ProblemReport::from(error)),
    };
    let used = Used::find(&args.common)?;
    let (mut removed, mut kept) = (Vec::new(), Vec::new());
    for checkpoint in wanted {
        match used.expect_none(checkpoint) {
            Ok(()) => removed.push(checkpoint),
            Err(error) if args.names.is_empty() => kept.push((checkpoint, ProblemReport::from(error))),
            Err(error) => return output::failed(args.common.json, ProblemReport::from(error)),
        }
    }
    let mut done = Vec::new();
    for checkpoint in removed {
        let result = match args.dry_run {
            true => Ok(()),
            false => remove(checkpoint, &args.common)?,
        };
        match result {
            Ok(()) => done.push(checkpoint),
            Err(error) => kept.push((checkpoint, error.into())),
        }
    }
    print(args, &done, &kept)?;
    Ok(kept.is_empty())
}

/// The checkpoints that are named, or old enough.
fn wanted<'a>(args: &PruneArgs, found: &'a [Checkpoint]) -> Result<Vec<&'a Checkpoint>, PruneError> {
    let now = clock::now() / 1000;
    let is_old = |checkpoint: &&Checkpoint| {
        let age = now.saturating_sub(checkpoint.made);
        args.older_than
            .is_none_or(|least| checkpoint.made > 0 && age > least.as_secs())
    };
    let namespace = args.namespace.as_deref();
    let fits = |one: &&Checkpoint| namespace.is_none_or(|namespace| one.namespace == namespace);
    if args.names.is_empty() {
        return Ok(found.iter().filter(fits).filter(is_old).collect());
    }
    let mut wanted = Vec::new();
    for name in args.names.iter().collect::<std::collections::BTreeSet<_>>() {
        let mut named = found.iter().filter(|one| one.name == *name).filter(fits);
        match (named.next(), named.next()) {
            (Some(one), None) => wanted.extend(Some(one).filter(is_old)),
            (None, _) => return Err(PruneError::Unknown { name: name.clone() }),
            (Some(_), Some(_)) => return Err(PruneError::Several { name: name.clone() }),
        }
    }
    Ok(wanted)
}

/// What is in use on this node.
#[derive(Default)]
struct Used {
    /// Directories, with the reason.
    directories: Vec<(PathBuf, String)>,
    /// Blobs that a lease of containerd keeps, as `NAMESPACE/DIGEST`.
    leased: HashSet<String>,
    /// Indexes in the store that somebody has pinned.
    pinned: HashSet<String>,
}

impl Used {
    fn find(common: &Common) -> Result<Self> {
        let mut used = Self::default();
        for bundle in bundles(&common.state) {
            let id = bundle
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if let Some(record) = Record::read(&bundle)? {
                let reason = format!("a {} of container {id} is in progress", record.begin.op);
                used.directories.push((record.begin.image, reason));
            }
            if let Ok(from) = fs::read_to_string(bundle.join(names::BUNDLE_RESTORED_FROM)) {
                let reason = format!("container {id} was restored from it, and may be again");
                used.directories.push((PathBuf::from(from.trim_end()), reason));
            }
        }
        if !common.no_containerd {
            used.leased = block_on(leased(&common.socket.address))?.map_err(ProblemReport::from)?;
        }
        let images = Config::load(Keys::STORE).map_err(ProblemReport::from)?.images;
        if let Some(store) = images.store.filter(|store| store.is_dir()) {
            let packing = Packing::with_key(images.store_key.as_deref()).map_err(ProblemReport::from)?;
            let store = Store::open(&store, &packing).map_err(ProblemReport::from)?;
            let pinned = store.pinned().map_err(ProblemReport::from)?;
            used.pinned = pinned.iter().map(ToString::to_string).collect();
        }
        Ok(used)
    }

    fn expect_none(&self, checkpoint: &Checkpoint) -> Result<(), PruneError> {
        let name = checkpoint.name.clone();
        let in_use = |why: String| {
            Err(PruneError::InUse {
                name: name.clone(),
                why,
            })
        };
        let bulk = checkpoint
            .manifest
            .as_ref()
            .and_then(|manifest| manifest.bulk.as_ref());
        if bulk.is_some_and(|bulk| self.pinned.contains(&bulk.index.to_string())) {
            return in_use("its memory is pinned; `firn store unpin` ends that".to_owned());
        }
        if checkpoint.kind == Kind::Image {
            let key = |digest: &str| format!("{}/{digest}", checkpoint.namespace);
            let leased = checkpoint
                .blobs
                .iter()
                .find(|blob| self.leased.contains(&key(&blob.digest)));
            return match leased {
                Some(blob) => in_use(format!("a lease of containerd keeps {}", blob.digest)),
                None => Ok(()),
            };
        }
        let dir = Path::new(&checkpoint.name);
        let is_it = |path: &Path| path.starts_with(dir);
        if let Some((_, why)) = self.directories.iter().find(|(path, _)| is_it(path)) {
            return in_use(why.clone());
        }
        match foreign(dir) {
            Ok(None) => Ok(()),
            Ok(Some(foreign)) => Err(PruneError::Foreign { name, foreign }),
            Err(source) => Err(PruneError::Remove { name, source }),
        }
    }
}

/// The blobs that leases keep, in all namespaces.
async fn leased(socket: &Path) -> Result<HashSet<String>, ImageError> {
    let any = Containerd::connect(socket, "default").await?;
    let mut all = HashSet::new();
    for namespace in any.namespaces().await? {
        let containerd = any.for_namespace(&namespace)?;
        for lease in containerd.leases().await? {
            let blobs = containerd.leased_blobs(&lease).await?;
            all.extend(blobs.into_iter().map(|digest| format!("{namespace}/{digest}")));
        }
    }
    Ok(all)
}

/// Files next to an image in an archive of the kubelet or of podman.
const ARCHIVE: [&str; 9] = [
    names::ARCHIVE_LAYER,
    "spec.dump",
    "config.dump",
    "status",
    "status.dump",
    "container.log",
    "network.status",
    "bind.mounts",
    "stats-dump",
];

/// What the directory of a checkpoint holds that is none of it.
fn foreign(dir: &Path) -> io::Result<Option<String>> {
    if fs::symlink_metadata(dir)?.is_symlink() {
        return Ok(Some("a link".to_owned()));
    }
    for entry in fs::read_dir(dir)? {
        let (entry, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
        let name = name.to_string_lossy().into_owned();
        let kind = fs::symlink_metadata(&entry)?.file_type();
        let is_image_dir = kind.is_dir() && name == names::ARCHIVE_IMAGE;
        match is_image_dir {
            true => {
                if let Some(inside) = foreign(&entry)? {
                    return Ok(Some(format!("{name}/{inside}")));
                }
            }
            false if !kind.is_file() || !is_ours(&name) => return Ok(Some(name)),
            false => {}
        }
    }
    Ok(None)
}

fn is_ours(name: &str) -> bool {
    let is_log = Path::new(name).extension().is_some_and(|end| end == "log");
    is_of_image(name)
        || is_log
        || name == names::SIGNATURE
        || name.starts_with("stats-")
        || ARCHIVE.contains(&name)
}

/// The outer error: nothing could be tried.
fn remove(checkpoint: &Checkpoint, common: &Common) -> Result<Result<(), PruneError>> {
    let name = || checkpoint.name.clone();
    if checkpoint.kind == Kind::Image {
        return Ok(block_on(async {
            let containerd = Containerd::connect(&common.socket.address, &checkpoint.namespace).await;
            let containerd = containerd.map_err(ImageError::from)?;
            Ok(containerd.delete_image(&name()).await.map_err(ImageError::from)?)
        })?);
    }
    let removed = empty(Path::new(&checkpoint.name));
    Ok(removed.map_err(|source| PruneError::Remove { name: name(), source }))
}

/// Removes the files of a checkpoint, and the directory. Order matters: without its manifest it is none.
fn empty(dir: &Path) -> io::Result<()> {
    let inside = dir.join(names::ARCHIVE_IMAGE);
    if inside.is_dir() {
        empty(&inside)?;
    }
    fs::remove_file(dir.join(names::MANIFEST)).unless_absent()?;
    for entry in fs::read_dir(dir)? {
        fs::remove_file(entry?.path())?;
    }
    fs::remove_dir(dir)
}

fn print(args: &PruneArgs, done: &[&Checkpoint], kept: &[(&Checkpoint, ProblemReport)]) -> Result<()> {
    let bytes: u64 = done.iter().map(|one| one.sizes.all()).sum();
    if args.common.json {
        let kept = kept.iter().map(|(one, failure)| Kept {
            name: &one.name,
            failure,
        });
        return output::json(&Pruned {
            dry_run: args.dry_run,
            removed: done.iter().map(|one| one.shown()).collect(),
            kept: kept.collect(),
            bytes,
        });
    }
    let does = if args.dry_run { "removes" } else { "removed" };
    for one in done {
        line!("{does}  {}, {}", one.name, text::bytes(one.sizes.all()));
    }
    for (_, failure) in kept {
        note!("firn: kept: {failure}");
    }
    let done_text = if args.dry_run {
        "would be removed"
    } else {
        "removed"
    };
    line!(
        "{}, {}, {done_text}",
        text::count(done.len(), "checkpoint"),
        text::bytes(bytes)
    );
    if done.iter().any(|one| {
        one.manifest
            .as_ref()
            .is_some_and(|manifest| manifest.bulk.is_some())
    }) {
        line!("their memory in the store goes with `firn store gc`");
    }
    Ok(())
}
