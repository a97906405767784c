//! An image directory: whether it is complete, and what it holds.

use std::io::Read;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use firn_image::form::{CheckpointDir, FormError};
use firn_image::manifest::{
    ImageError, ImageFile, Manifest, ManifestError, UntrustedDir, describe_images, is_of_image,
};

use firn_host::ProblemReport;

/// What was found in an image directory.
#[derive(Default)]
pub struct ImageSummary {
    pub manifest: Option<Manifest>,
    pub images: Vec<ImageFile>,
}

impl ImageSummary {
    pub fn bytes(&self) -> u64 {
        self.images.iter().map(|file| file.size).sum()
    }
}

/// The sizes of a checkpoint by class, in bytes.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Sizes {
    /// Bytes of GPU memory, which is in the memory of the processes.
    pub gpu: u64,
    /// Bytes of memory of the processes in CRIU's files, without that.
    pub memory: u64,
    /// Bytes of memory of the processes in a store, without GPU memory.
    pub stored: u64,
    /// Bytes of what CRIU knows of the processes.
    pub state: u64,
    /// Bytes of the files that the container has written.
    pub files: u64,
}

impl Sizes {
    pub fn of(found: &ImageSummary, written: Option<u64>) -> Self {
        let manifest = found.manifest.as_ref();
        let stored = manifest
            .and_then(|manifest| manifest.bulk.as_ref())
            .map_or(0, |bulk| bulk.bytes);
        let pages = found.images.iter().filter(|file| file.name.starts_with("pages-"));
        let pages: u64 = pages.map(|file| file.size).sum();
        let origin = manifest.and_then(|manifest| manifest.origin.as_ref());
        // The store has the large memory: GPU memory first.
        let gpu = origin
            .map_or(0, |origin| origin.gpu_memory)
            .min(pages.saturating_add(stored));
        let gpu_in_pages = gpu.saturating_sub(stored);
        Self {
            gpu,
            memory: pages - gpu_in_pages,
            stored: stored.saturating_sub(gpu),
            state: found.bytes() - pages,
            files: written.unwrap_or(0),
        }
    }

    pub fn all(&self) -> u64 {
        let all = self.named().into_iter().map(|(_, bytes)| bytes);
        all.fold(0, u64::saturating_add)
    }

    pub fn plus(self, other: &Self) -> Self {
        Self {
            gpu: self.gpu + other.gpu,
            memory: self.memory + other.memory,
            stored: self.stored + other.stored,
            state: self.state + other.state,
            files: self.files + other.files,
        }
    }

    /// With the names of the classes.
    pub fn named(&self) -> [(&'static str, u64); 5] {
        [
            ("GPU memory", self.gpu),
            ("memory", self.memory),
            ("other memory in a store", self.stored),
            ("process state", self.state),
            ("written files", self.files),
        ]
    }
}

/// How much of a file is searched for names of files.
const MOST_BYTES: u64 = 64 << 20;

/// Parts of file names: every container with an NVIDIA GPU has such a file mapped, open or mounted.
const DRIVER: [&[u8]; 3] = [b"/libcuda.so.", b"/libnvidia-ml.so.", b"/dev/nvidia"];

/// A file of an image that was left in its archive.
pub struct ArchivedFile {
    pub name: String,
    pub size: u64,
}

/// What a directory holds, and why the image is not complete. Of files that are not in it only the sizes are
/// compared.
pub fn look(dir: &Path, left: &[ArchivedFile]) -> (ImageSummary, Option<ProblemReport>) {
    let manifest = match Manifest::read(dir) {
        Ok(manifest) => manifest,
        Err(error) => return (ImageSummary::default(), Some(error.into())),
    };
    if let Some(manifest) = manifest {
        let failure = compare(&manifest, dir, left).err().map(ProblemReport::from);
        let images = manifest.images.clone();
        let manifest = Some(manifest);
        return (ImageSummary { manifest, images }, failure);
    }
    let mut images = match describe_images(dir, &AtomicBool::new(false)) {
        Ok(images) => images,
        Err(error) => return (ImageSummary::default(), Some(error.into())),
    };
    // firn writes the manifest last, for every container with NVIDIA GPUs.
    let failure = names_driver(dir, &images).then(|| ManifestError::Missing { dir: dir.to_owned() }.into());
    let unread = left.iter().map(|file| ImageFile {
        name: file.name.clone(),
        size: file.size,
        sha256: None,
        blake3: None,
        sha256_of_blocks: None,
    });
    images.extend(unread);
    let manifest = None;
    (ImageSummary { manifest, images }, failure)
}

fn compare(manifest: &Manifest, dir: &Path, left: &[ArchivedFile]) -> Result<(), ImageError> {
    let path = |name: &String| dir.join(name);
    let mut here = manifest.clone();
    for ArchivedFile { name, size } in left {
        let Some(at) = here.images.iter().position(|file| file.name == *name) else {
            if is_of_image(name) {
                return Err(ImageError::Added { path: path(name) });
            } else {
                continue;
            }
        };
        let expected = here.images.remove(at).size;
        if expected != *size {
            let (path, found) = (path(name), *size);
            return Err(ImageError::Size {
                path,
                found,
                expected,
            });
        }
    }
    here.verify_images(dir).map(drop)
}

/// Whether CRIU's lists of files and mounts name the NVIDIA driver.
fn names_driver(dir: &Path, images: &[ImageFile]) -> bool {
    let is_list =
        |name: &str| matches!(name, "files.img" | "reg-files.img") || name.starts_with("mountpoints-");
    let names = |image: &ImageFile| {
        let mut bytes = Vec::new();
        let file = UntrustedDir::open(dir).and_then(|dir| dir.file(&image.name));
        let read = file.and_then(|file| file.take(MOST_BYTES).read_to_end(&mut bytes));
        let has = |needle: &&[u8]| bytes.windows(needle.len()).any(|window| window == *needle);
        read.is_ok() && DRIVER.iter().any(has)
    };
    images.iter().filter(|image| is_list(&image.name)).any(names)
}

/// The parts of the checkpoint in a directory, which is taken for an image if there is none.
pub fn parts(dir: &Path) -> Result<CheckpointDir, FormError> {
    let found = CheckpointDir::find(dir)?;
    Ok(found.unwrap_or_else(|| CheckpointDir::of_image(dir)))
}
