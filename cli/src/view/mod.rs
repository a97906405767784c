//! A checkpoint that is looked at, whatever it is: an image directory, a tar file, or an image of containerd.
//!
//! Of an archive the small files are unpacked into a directory of firn's, which goes with the view. Memory
//! stays where it is: its size is compared, and its content is compared by a restore.

pub mod args;
mod bytes;

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use firn_containerd::Message;
use firn_host::bounded::read_at_most;
use firn_host::open_regular;
use firn_image::form::{self, Archived, CheckpointDir, EntryError, FormError};
use firn_oci::Spec;

use crate::archive::{Entry, FileSpan};
use crate::containerd::{Any, BUNDLES, Containerd, ContainerdArgs, block_on, bundles_called};
use crate::image::{self, ArchivedFile, ImageSummary};
use crate::oci_image::{ImageError, Index, MAX_JSON, media, no_checkpoint};
use crate::place::Location;
use crate::stored;
use crate::work_dir::WorkDir;
use args::SubjectArgs;
use bytes::Bytes;
use firn_host::ProblemReport;

/// Files from this size on are left where they are, if they hold memory.
const MEMORY: u64 = 1 << 20;

/// Most bytes of one file, and of all files, that are unpacked.
const MOST: u64 = 64 << 20;
const MOST_OF_ALL: u64 = 512 << 20;

/// Files of a tar file with the layout of OCI.
const INDEX: &str = "index.json";
const BLOBS: &str = "blobs/sha256/";

/// What a command is about.
pub enum Subject {
    /// The bundle of a running container.
    Container(PathBuf),
    Checkpoint(Location),
}

impl Subject {
    /// What is there under a name counts first, then a running container.
    pub fn of(args: &SubjectArgs) -> Self {
        let text = &args.subject;
        let place = Location::to_read(text, args.kind);
        let is_name = |word: &str| !word.contains('/') && ![".", ".."].contains(&word);
        let namespace = &args.containerd.namespace;
        if args.kind.is_some() || !is_name(text) || !is_name(namespace) {
            return Self::Checkpoint(place);
        }
        let called = bundles_called(&args.state.join(BUNDLES).join(namespace), text);
        match (&place, <[PathBuf; 1]>::try_from(called)) {
            (Location::Ref(_), Ok([bundle])) => Self::Container(bundle),
            // A directory that only has the name of the container.
            (Location::Dir(dir), Ok([bundle])) if matches!(CheckpointDir::find(dir), Ok(None)) => {
                Self::Container(bundle)
            }
            _ => Self::Checkpoint(place),
        }
    }
}

/// A checkpoint.
pub struct View {
    /// What it is, for people.
    pub what: String,
    /// The image directory, or one that has the small files of the image.
    pub dir: PathBuf,
    /// Files that are left where they are.
    left: Vec<ArchivedFile>,
    /// Of an image that containerd or firn has made.
    pub index: Option<Index>,
    /// The spec of the container, where the checkpoint has it.
    pub spec: Option<Spec>,
    /// Bytes of the files that the container has written.
    pub written: Option<u64>,
    _work: Option<WorkDir>,
}

impl View {
    pub fn open(place: &Location, at: &ContainerdArgs) -> anyhow::Result<Self> {
        let opened = match place {
            Location::Dir(dir) => Self::of_dir(dir),
            Location::File(path) => block_on(Self::of_file(path))?,
            Location::Ref(name) => block_on(async {
                let containerd = Containerd::connect(&at.socket.address, &at.namespace).await?;
                Self::of_image(&containerd, name).await
            })?,
        };
        Ok(opened.map_err(ProblemReport::from)?)
    }

    /// What the image holds, and why it is not complete, or its memory not in the store.
    pub fn look(&self) -> (ImageSummary, Option<ProblemReport>) {
        let (found, failure) = image::look(&self.dir, &self.left);
        let missing = || stored::missing(found.manifest.as_ref()?);
        let failure = failure.or_else(missing);
        (found, failure)
    }

    /// Bytes of memory that were not read.
    pub fn unread(&self) -> u64 {
        self.left.iter().map(|file| file.size).sum()
    }

    pub fn of_dir(dir: &Path) -> Result<Self, ImageError> {
        let CheckpointDir { image, layer, spec } = image::parts(dir)?;
        let spec = spec.and_then(|spec| read_at_most(&open_regular(&spec).ok()?, MOST).ok().flatten());
        Ok(Self {
            what: format!("image {}", dir.display()),
            dir: image,
            left: Vec::new(),
            index: None,
            spec: spec.and_then(|bytes| spec_of(&bytes)),
            written: layer.and_then(|layer| Some(layer.metadata().ok()?.len())),
            _work: None,
        })
    }

    pub async fn of_image(containerd: &Containerd, name: &str) -> Result<Self, ImageError> {
        let target = containerd.image(name).await?.and_then(|image| image.target);
        let target = target.ok_or_else(|| ImageError::NoImage {
            name: name.to_owned(),
        })?;
        let index = Index::read(containerd, name, &target.digest).await?;
        Self::of_index(containerd, name, index, &std::env::temp_dir()).await
    }

    /// The parts of the image are in the content store; its small files go below `tmp`.
    pub async fn of_index(
        containerd: &Containerd,
        name: &str,
        index: Index,
        tmp: &Path,
    ) -> Result<Self, ImageError> {
        let checkpoint = index.part(media::CHECKPOINT).cloned().unwrap_or_default();
        let spec = index.part(media::SPEC).cloned().unwrap_or_default();
        let spec = containerd.content(&spec.digest, 0, MAX_JSON).await?;
        let bytes = Bytes::Blob(containerd, &checkpoint.digest, checkpoint.size);
        let mut view = unpacked(name, &bytes, Archived::Image, tmp).await?;
        view.what = format!("image {name} of containerd");
        Ok(view.with_index(index, &spec))
    }

    async fn of_file(path: &Path) -> Result<Self, ImageError> {
        let (what, tmp) = (path.display().to_string(), std::env::temp_dir());
        let failed = || ImageError::file(format!("open {what}"));
        let file = open_regular(path).map_err(failed())?;
        let length = file.metadata().map_err(failed())?.len();
        let all = Bytes::File(&file, FileSpan { from: 0, length });
        let entries = all.list(&what).await?;
        let named = |name: &str| entries.iter().find(|entry| entry.is(name));
        let inside = Path::new(form::IMAGE).join(form::INVENTORY);
        let is_of_parts = entries.iter().any(|entry| entry.is(&inside));
        let indexes = entries.iter().filter(|entry| entry.is(INDEX)).count();
        // Who unpacks it with tar would find another image.
        if indexes > 0 && is_of_parts {
            return Err(FormError::Both { dir: what.into() }.into());
        }
        if indexes > 1 {
            return Err(no_checkpoint(&what, "it has two index.json"));
        }
        let mut view = if let Some(top) = named(INDEX) {
            let top: Index = serde_json::from_slice(&all.content(&what, top, MAX_JSON).await?)
                .map_err(|error| no_checkpoint(&what, error.to_string()))?;
            let [part] = &top.manifests[..] else {
                return Err(no_checkpoint(&what, "it has several images, or none"));
            };
            let blob = |digest: &str| {
                let entry = named(&format!("{BLOBS}{}", digest.trim_start_matches("sha256:")));
                entry.ok_or_else(|| no_checkpoint(&what, format!("{digest} is missing")))
            };
            let bytes = all.content(&what, blob(&part.digest)?, MAX_JSON).await?;
            let index = Index::parse(&what, &part.digest, &bytes)?;
            let of = |media: &str| blob(index.part(media).map_or("", |part| &part.digest));
            let spec = all.content(&what, of(media::SPEC)?, MAX_JSON).await?;
            let FileSpan { from, length } = of(media::CHECKPOINT)?.place;
            let image = Bytes::File(&file, FileSpan { from, length });
            let view = unpacked(&what, &image, Archived::Image, &tmp).await?;
            view.with_index(index, &spec)
        } else {
            let archived = if is_of_parts {
                Archived::Parts
            } else {
                Archived::Image
            };
            let mut view = unpacked(&what, &all, archived, &tmp).await?;
            if let Some(spec) = named(form::SPEC) {
                view.spec = spec_of(&all.content(&what, spec, MAX_JSON).await?);
            }
            view.written = named(form::LAYER).map(|layer| layer.place.length);
            view
        };
        view.what = format!("file {what}");
        Ok(view)
    }

    fn with_index(self, index: Index, spec: &[u8]) -> Self {
        let spec = Any::decode(spec).ok().and_then(|any| spec_of(&any.value));
        Self {
            spec,
            written: index.part(media::LAYER).map(|layer| layer.size),
            index: Some(index),
            ..self
        }
    }
}

fn spec_of(bytes: &[u8]) -> Option<Spec> {
    let value: serde_json::Value = serde_json::from_slice(bytes).ok()?;
    value.is_object().then(|| Spec::from(value))
}

/// The files of the image in an archive.
async fn unpacked(
    what: &str,
    archive: &Bytes<'_>,
    archived: Archived,
    tmp: &Path,
) -> Result<View, ImageError> {
    let work = WorkDir::make(tmp, "firn-view")?;
    let (mut left, mut all, mut seen) = (Vec::new(), 0, BTreeSet::new());
    for entry in archive.list(what).await? {
        let shown = entry.path.display();
        let found = match archived.entry(&entry.path, entry.kind) {
            Ok(form::Entry::Nothing) => continue,
            Ok(found) => found,
            Err(EntryError::TwoImages) => return Err(FormError::Both { dir: what.into() }.into()),
            Err(error) => return Err(no_checkpoint(what, format!("{shown}: {error}"))),
        };
        if !seen.insert(entry.path.clone()) {
            return Err(no_checkpoint(what, format!("it has {shown} twice")));
        }
        let form::Entry::File(name) = found else {
            continue;
        };
        let size = entry.place.length;
        if name.starts_with("pages-") && size >= MEMORY || size > MOST || all + size > MOST_OF_ALL {
            let name = name.to_owned();
            left.push(ArchivedFile { name, size });
        } else {
            all += size;
            write(archive, &entry, &work.path().join(name)).await?;
        }
    }
    if all == 0 && left.is_empty() {
        return Err(no_checkpoint(what, "it has no files of a checkpoint"));
    }
    Ok(View {
        what: what.to_owned(),
        dir: work.path().to_owned(),
        left,
        index: None,
        spec: None,
        written: None,
        _work: Some(work),
    })
}

async fn write(archive: &Bytes<'_>, entry: &Entry, to: &Path) -> Result<(), ImageError> {
    let failed = || ImageError::file(format!("write {}", to.display()));
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(0o600).open(to);
    let mut file = file.map_err(failed())?;
    archive.copy(&entry.place, &mut file).await?;
    file.flush().map_err(failed())
}
