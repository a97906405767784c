//! Removes a checkpoint. [`remove`] alone does, with a proof that nothing uses the checkpoint and that its
//! directory holds nothing else. It makes the proof itself: the removal of others may have taken long.
//!
//! A directory is opened once for that: what was looked at is what is emptied, whatever stands at its path
//! then. A file goes only by a name that was looked at, so that a directory with another file stays.

use std::collections::HashSet;
use std::fs::{self, Metadata};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Result;
use firn_config::{Config, Keys, names};
use firn_host::{Absent, FileId, ProblemReport, UnlessAbsent};
use firn_image::form::{self, CheckpointDir};
use firn_image::manifest::{UntrustedDir, is_of_image};
use firn_store::{Packing, Pin, Store};
use firn_transaction::journal::Record;

use super::args::Common;
use super::find::{Checkpoint, Kind};
use super::prune::PruneError;
use crate::containerd::{Containerd, block_on, bundles};
use crate::leftovers::Leftover;
use crate::oci_image::ImageError;

/// The proof that nothing uses a checkpoint.
pub struct Unused {
    /// None for an image of containerd.
    directory: Option<Directory>,
}

/// The directory of a checkpoint, held open.
struct Directory {
    parent: UntrustedDir,
    name: String,
    contents: Contents,
}

/// What a directory holds: files of a checkpoint alone.
struct Contents {
    dir: UntrustedDir,
    files: Vec<String>,
    /// The image in an archive of the kubelet or of podman.
    image: Option<Box<Contents>>,
}

/// What is in use on this node.
#[derive(Default)]
pub struct Used {
    /// containerd's state directory, with the bundles.
    pub(super) state: PathBuf,
    /// The machine has no containerd: there may be no such directory.
    pub(super) may_be_absent: bool,
    /// Blobs that a lease of containerd keeps, as `NAMESPACE/DIGEST`.
    pub(super) leased: HashSet<String>,
    /// Indexes in the store that the operator has pinned. The pin of a checkpoint itself goes with it.
    pub(super) pinned: HashSet<String>,
    /// The node's store, if there is one.
    store: Option<Store>,
}

impl Used {
    pub fn find(common: &Common) -> Result<Self> {
        let mut used = Self {
            state: common.state(),
            may_be_absent: common.no_containerd,
            ..Self::default()
        };
        // Fails if a bundle or a journal cannot be read.
        used.directories()?;
        if !common.no_containerd {
            used.leased = block_on(leased(&common.socket.address))?.map_err(ProblemReport::from)?;
        }
        let images = Config::load(Keys::STORE).map_err(ProblemReport::from)?.images;
        if let Some(store) = images.store.filter(|store| store.is_dir()) {
            let packing = Packing::with_key(images.store_key.as_deref()).map_err(ProblemReport::from)?;
            let store = Store::open(&store, &packing).map_err(ProblemReport::from)?;
            for index in store.pinned().map_err(ProblemReport::from)? {
                let noted = store.noted(&index).map_err(ProblemReport::from)?;
                if noted.pin == Some(Pin::Operator) {
                    used.pinned.insert(index.to_string());
                }
            }
            used.store = Some(store);
        }
        Ok(used)
    }

    /// The node's store, if there is one.
    pub fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    /// Proves that nothing uses the checkpoint, or shows why it stays. What transactions and containers use
    /// is looked at now.
    pub fn prove(&self, checkpoint: &Checkpoint) -> Result<Unused, PruneError> {
        let in_use = |why: String| PruneError::InUse {
            name: checkpoint.name.clone(),
            why,
        };
        let manifest = checkpoint.manifest.as_ref();
        let bulk = manifest.and_then(|manifest| manifest.bulk.as_ref());
        if bulk.is_some_and(|bulk| self.pinned.contains(&bulk.index.to_string())) {
            return Err(in_use(
                "its memory is pinned; `firn store unpin` ends that".to_owned(),
            ));
        }
        if checkpoint.kind == Kind::Image {
            let key = |digest: &str| format!("{}/{digest}", checkpoint.namespace);
            let mut blobs = checkpoint.blobs.iter();
            return match blobs.find(|blob| self.leased.contains(&key(&blob.digest))) {
                Some(blob) => Err(in_use(format!("a lease of containerd keeps {}", blob.digest))),
                None => Ok(Unused { directory: None }),
            };
        }
        let failed = |source| PruneError::remove(checkpoint, source);
        let directory = Directory::open(checkpoint)?;
        let id = FileId::of(&directory.contents.dir.itself().map_err(failed)?);
        let path = Path::new(&checkpoint.name);
        let used = self.directories().map_err(|error| unknown(checkpoint, &error))?;
        let uses_it = |used: &PathBuf| used.starts_with(path) || is_in(used, id);
        match used.into_iter().find(|(used, _)| uses_it(used)) {
            Some((_, why)) => Err(in_use(why)),
            None => Ok(Unused {
                directory: Some(directory),
            }),
        }
    }

    /// Directories that transactions and containers use, with the reason.
    fn directories(&self) -> Result<Vec<(PathBuf, String)>> {
        let unread = |source| {
            let state = self.state.clone();
            ProblemReport::from(PruneError::State { state, source })
        };
        let bundles = match bundles(&self.state) {
            Err(error) if self.may_be_absent && error.is_absent() => Vec::new(),
            bundles => bundles.map_err(unread)?,
        };
        let mut used = Vec::new();
        for bundle in bundles {
            let id = bundle.file_name().unwrap_or_default().to_string_lossy();
            if let Some(record) = Record::read(&bundle)? {
                let reason = format!("a {} of container {id} is in progress", record.begin.op);
                used.push((record.begin.image, reason));
            }
            let from = fs::read_to_string(bundle.join(names::BUNDLE_RESTORED_FROM)).if_present();
            if let Some(from) = from.map_err(unread)? {
                let reason = format!("container {id} was restored from it, and may be again");
                used.push((PathBuf::from(from.trim_end()), reason));
            }
        }
        Ok(used)
    }
}

/// Why a checkpoint stays of which nobody knows whether it is in use.
fn unknown(checkpoint: &Checkpoint, error: &anyhow::Error) -> PruneError {
    PruneError::remove(checkpoint, io::Error::other(format!("{error:#}")))
}

/// Whether a path leads to the directory or into it, by another name.
fn is_in(path: &Path, id: FileId) -> bool {
    let is_it = |path: &Path| fs::metadata(path).is_ok_and(|found| FileId::of(&found) == id);
    path.ancestors().any(is_it)
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

impl Directory {
    /// Opens the directory that was listed, if it holds a checkpoint alone.
    fn open(checkpoint: &Checkpoint) -> Result<Self, PruneError> {
        let failed = |source| PruneError::remove(checkpoint, source);
        let foreign = |foreign: String| PruneError::Foreign {
            name: checkpoint.name.clone(),
            foreign,
        };
        let other = |what: &str| failed(io::Error::other(what.to_owned()));
        let path = Path::new(&checkpoint.name);
        let (Some(at), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else {
            return Err(other("it has no parent"));
        };
        let parent = UntrustedDir::open(at).map_err(failed)?;
        if parent.metadata(name).map_err(failed)?.is_symlink() {
            return Err(foreign("a link".to_owned()));
        }
        let dir = match checkpoint.kind {
            Kind::Left => Leftover::open(&parent, at, name.as_ref())
                .map(|left| left.dir)
                .ok_or_else(|| other("it is not root's alone"))?,
            _ => parent.inside(name).map_err(failed)?,
        };
        if checkpoint.id != Some(FileId::of(&dir.itself().map_err(failed)?)) {
            return Err(other("it is another directory than the one that was listed"));
        }
        // An image itself has no other one inside.
        let found = CheckpointDir::find(&dir.path()).map_err(|error| failed(io::Error::other(error)))?;
        let has_parts = found.is_some_and(|found| found.image != dir.path());
        let contents = Contents::of(dir, has_parts).map_err(failed)?.map_err(foreign)?;
        let name = name.to_owned();
        Ok(Self {
            parent,
            name,
            contents,
        })
    }

    /// Removes the files, and the directory.
    fn remove(&self) -> io::Result<()> {
        self.contents.empty()?;
        let id = |found: Metadata| FileId::of(&found);
        // Another one at its place is not this one.
        if id(self.parent.metadata(&self.name)?) != id(self.contents.dir.itself()?) {
            return Err(io::Error::other("another directory is at its place"));
        }
        self.parent.remove_dir(&self.name)
    }
}

/// Files next to an image in an archive of the kubelet or of podman.
const ARCHIVE: [&str; 9] = [
    form::LAYER,
    form::SPEC,
    "config.dump",
    "status",
    "status.dump",
    "container.log",
    "network.status",
    "bind.mounts",
    "stats-dump",
];

impl Contents {
    /// The inner error: what the directory holds that is none of a checkpoint. `is_archive`: there may be
    /// an image in a directory of its own.
    fn of(dir: UntrustedDir, is_archive: bool) -> io::Result<Result<Self, String>> {
        let (mut files, mut image) = (Vec::new(), None);
        for name in dir.entries()? {
            let shown = name.to_string_lossy().into_owned();
            let Ok(name) = name.into_string() else {
                return Ok(Err(shown));
            };
            let kind = dir.metadata(&name)?.file_type();
            if is_archive && kind.is_dir() && name == form::IMAGE {
                match Self::of(dir.inside(&name)?, false)? {
                    Ok(inside) => image = Some(Box::new(inside)),
                    Err(foreign) => return Ok(Err(format!("{name}/{foreign}"))),
                }
            } else if kind.is_file() && is_ours(&name) {
                files.push(name);
            } else {
                return Ok(Err(shown));
            }
        }
        Ok(Ok(Self { dir, files, image }))
    }

    /// Removes what was found. Order matters: without its manifest it is no checkpoint.
    fn empty(&self) -> io::Result<()> {
        if let Some(image) = &self.image {
            image.empty()?;
            self.dir.remove_dir(form::IMAGE)?;
        }
        let is_manifest = |name: &&String| *name == names::MANIFEST;
        let manifest = self.files.iter().filter(is_manifest);
        let others = self.files.iter().filter(|name| !is_manifest(name));
        for name in manifest.chain(others) {
            self.dir.remove_file(name).unless_absent()?;
        }
        Ok(())
    }
}

fn is_ours(name: &str) -> bool {
    let is_log = Path::new(name).extension().is_some_and(|end| end == "log");
    is_of_image(name)
        || is_log
        || name == names::SIGNATURE
        || name.starts_with("stats-")
        || ARCHIVE.contains(&name)
}

/// Removes the checkpoint, if nothing uses it by now.
pub fn remove(checkpoint: &Checkpoint, common: &Common) -> Result<(), PruneError> {
    let failed = |source| PruneError::remove(checkpoint, source);
    let used = Used::find(common).map_err(|error| unknown(checkpoint, &error))?;
    match used.prove(checkpoint)?.directory {
        Some(directory) => directory.remove().map_err(failed),
        None => block_on(remove_image(checkpoint, &common.socket.address)).map_err(failed)?,
    }
}

/// Removes an image, unless another one has its name by now.
async fn remove_image(checkpoint: &Checkpoint, socket: &Path) -> Result<(), PruneError> {
    let call = |error| PruneError::from(ImageError::from(error));
    let name = &checkpoint.name;
    let containerd = Containerd::connect(socket, &checkpoint.namespace)
        .await
        .map_err(call)?;
    let image = containerd.image(name).await.map_err(call)?;
    let image = image.ok_or_else(|| ImageError::NoImage { name: name.clone() })?;
    let target = image.target.unwrap_or_default();
    if checkpoint
        .blobs
        .last()
        .is_none_or(|listed| listed.digest != target.digest)
    {
        let another = io::Error::other("it is another image than the one that was listed");
        return Err(PruneError::remove(checkpoint, another));
    }
    containerd.delete_target(name, Some(target)).await.map_err(call)
}

#[cfg(test)]
mod tests;
