//! A checkpoint that is an image in containerd's content store, unpacked as an archive of the kubelet is.
//!
//! It is hostile: whoever pushes to a registry has made it. Every blob is compared with its digest. Nothing
//! but regular files is written, by names directly in two places, into a directory that is made for it; what
//! comes out of the archive has a limit. This process gives up its rights first, and the files of the host.
//!
//! | who made it | what it is |
//! |---|---|
//! | `ctr containers checkpoint` | an index that has CRIU's files and the written layer as blobs |
//! | buildah, of the kubelet's archive | a manifest with an annotation, and the archive as its only layer |

mod blobs;
#[cfg(any(test, fuzzing))]
pub mod fuzz;

use std::collections::BTreeMap;
use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, chroot};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use firn_image::form::{self, Archived, Entry, EntryKind};
use flate2::bufread::MultiGzDecoder;
use serde::Deserialize;
use tar::{Archive, EntryType};

use crate::cap::{Cap, ENTRY, limit_process};
use crate::rights;
use blobs::{Blob, Descriptor, Store};

/// containerd's media type of the archive of an image directory.
const CRIU: &str = "application/vnd.containerd.container.criu.checkpoint.criu.tar";
/// Media types of written layers, as containerd makes them.
const LAYERS: [&str; 2] = [
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar",
];
/// Annotations of an image that is an archive of the kubelet: containerd's and CRI-O's.
const OF_ARCHIVES: [&str; 2] = [
    "org.criu.checkpoint.container.name",
    "io.kubernetes.cri-o.annotations.checkpoint.name",
];
/// Largest index or manifest that is read, as containerd limits it.
const MAX_LIST: u64 = 8 << 20;

/// An index or a manifest of OCI.
#[derive(Default, Deserialize)]
struct List {
    #[serde(default)]
    manifests: Vec<Descriptor>,
    #[serde(default)]
    layers: Vec<Descriptor>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

/// The blobs of a checkpoint.
#[derive(Debug, PartialEq)]
enum Parts {
    /// CRIU's files, and what the container had written.
    Apart(Descriptor, Option<Descriptor>),
    /// Both in one archive.
    Archive(Descriptor),
}

/// Unpacks the image into a directory that this makes. With `cap` 0 it may take half of what is free. Returns
/// how many bytes are left of the cap.
pub fn unpack(store: &Path, digest: &str, dir: &Path, cap: &str) -> Result<u64> {
    let store = Store::new(store);
    let parts = parts(&store, digest)?;
    let made = DirBuilder::new().mode(0o700).create(dir);
    made.with_context(|| format!("cannot make {}", dir.display()))?;
    let cap = Cap::of(cap, dir)?;
    let blobs = match parts {
        Parts::Apart(image, layer) => {
            let layer = layer.map(|layer| store.open(&layer)).transpose()?;
            (store.open(&image)?, Some(layer))
        }
        Parts::Archive(archive) => (store.open(&archive)?, None),
    };
    chroot(dir).with_context(|| format!("cannot enter {}", dir.display()))?;
    std::env::set_current_dir("/").context("cannot enter the new directory")?;
    rights::keep_writing()?;
    limit_process()?;
    let target = Target {
        root: PathBuf::from("/"),
        cap,
    };
    match blobs {
        (archive, None) => target.archive(archive)?,
        (image, Some(layer)) => target.apart(image, layer)?,
    }
    Ok(target.cap.left())
}

fn parts(store: &Store, digest: &str) -> Result<Parts> {
    let mut list = read_list(store, digest)?;
    let criu = |part: &&Descriptor| part.media_type == CRIU;
    if let Some(image) = only(list.manifests.iter().filter(criu))? {
        let layer = |part: &&Descriptor| LAYERS.contains(&&*part.media_type);
        return Ok(Parts::Apart(image, only(list.manifests.iter().filter(layer))?));
    }
    // Whoever pushes one image of one platform may push an index of it.
    if let [only] = &*list.manifests {
        list = read_list(store, &only.digest)?;
    }
    let is_archive = OF_ARCHIVES.iter().any(|key| list.annotations.contains_key(*key));
    ensure!(is_archive, "it is not a checkpoint of a container");
    let archive = only(list.layers.iter())?.context("it has no layer")?;
    Ok(Parts::Archive(archive))
}

fn read_list(store: &Store, digest: &str) -> Result<List> {
    let bytes = store.read(digest, MAX_LIST)?;
    serde_json::from_slice(&bytes).with_context(|| format!("{digest} is no index and no manifest"))
}

/// The one that there is, or none.
fn only<'a>(mut of: impl Iterator<Item = &'a Descriptor>) -> Result<Option<Descriptor>> {
    let found = of.next().cloned();
    ensure!(of.next().is_none(), "it has parts of several checkpoints");
    Ok(found)
}

/// Where the files go, and how many bytes they may have.
struct Target {
    root: PathBuf,
    cap: Cap,
}

impl Target {
    fn apart(&self, image: Blob, layer: Option<Blob>) -> Result<()> {
        self.directory(form::IMAGE)?;
        self.untar(image, Archived::Image)?;
        let Some(mut layer) = layer else {
            return Ok(());
        };
        // It stays as it is: who unpacks it knows its form.
        self.cap.take(layer.size())?;
        self.file(Path::new(form::LAYER), layer.size(), &mut layer)?;
        layer.finish()
    }

    fn archive(&self, archive: Blob) -> Result<()> {
        self.directory(form::IMAGE)?;
        self.untar(archive, Archived::Parts)
    }

    /// Unpacks the image, and what the container had written. Reports next to them are left out, and the
    /// spec: the pod has its own.
    fn untar(&self, blob: Blob, archived: Archived) -> Result<()> {
        let mut source = BufReader::new(blob);
        let mut archive = Archive::new(self.cap.reader(decompressed(&mut source)?));
        for entry in archive.entries().context("it is no archive")? {
            let mut entry = entry.context("it is no archive")?;
            let path = entry.path()?.into_owned();
            let shown = || format!("{} of the archive", path.display());
            self.cap.take(ENTRY).with_context(shown)?;
            let kind = match entry.header().entry_type() {
                EntryType::Regular => EntryKind::File,
                EntryType::Directory => EntryKind::Directory,
                _ => EntryKind::Other,
            };
            let place = match archived.entry(&path, kind).with_context(shown)? {
                Entry::File(name) => Path::new(form::IMAGE).join(name),
                Entry::Layer => PathBuf::from(form::LAYER),
                Entry::Spec | Entry::Nothing => continue,
            };
            let size = entry.size();
            self.file(&place, size, &mut entry).with_context(shown)?;
        }
        drop(archive);
        source.into_inner().finish()
    }

    fn directory(&self, name: &str) -> Result<()> {
        let made = DirBuilder::new().mode(0o700).create(self.root.join(name));
        made.with_context(|| format!("cannot make {name}"))
    }

    fn file(&self, place: &Path, size: u64, from: &mut impl Read) -> Result<()> {
        let mut options = OpenOptions::new();
        let options = options.write(true).create_new(true).mode(0o600);
        let opened = options.open(self.root.join(place));
        let mut to = opened.with_context(|| format!("cannot make {}", place.display()))?;
        let written = io::copy(&mut from.take(size), &mut to).context("cannot write it")?;
        ensure!(written == size, "it has {written} bytes instead of {size}");
        Ok(())
    }
}

/// Layers may be compressed by gzip; CRIU's files are not.
fn decompressed<'a>(source: &'a mut impl BufRead) -> Result<Box<dyn Read + 'a>> {
    Ok(match source.fill_buf()? {
        [0x1f, 0x8b, ..] => Box::new(MultiGzDecoder::new(source)),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => bail!("it is compressed by zstd and not by gzip"),
        _ => Box::new(source),
    })
}

#[cfg(test)]
mod tests;
