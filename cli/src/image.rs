//! An image directory: whether it is complete, and what it holds.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use firn_config::names;
use firn_image::manifest::{ImageFile, Manifest, ManifestError, UntrustedDir, describe_images};

use firn_host::ProblemReport;

/// What was found in an image directory.
#[derive(Default)]
pub struct Found {
    pub manifest: Option<Manifest>,
    pub images: Vec<ImageFile>,
}

impl Found {
    pub fn bytes(&self) -> u64 {
        self.images.iter().map(|file| file.size).sum()
    }
}

/// How much of a file is searched for names of files.
const MOST_BYTES: u64 = 64 << 20;

/// Parts of file names: every container with an NVIDIA GPU has such a file mapped, open or mounted.
const DRIVER: [&[u8]; 3] = [b"/libcuda.so.", b"/libnvidia-ml.so.", b"/dev/nvidia"];

/// What a directory holds, and why the image is not complete.
pub fn look(dir: &Path) -> (Found, Option<ProblemReport>) {
    let manifest = match Manifest::read(dir) {
        Ok(manifest) => manifest,
        Err(error) => return (Found::default(), Some(error.into())),
    };
    if let Some(manifest) = manifest {
        let failure = manifest.verify_images(dir).err().map(ProblemReport::from);
        let images = manifest.images.clone();
        let manifest = Some(manifest);
        return (Found { manifest, images }, failure);
    }
    let images = match describe_images(dir, &AtomicBool::new(false)) {
        Ok(images) => images,
        Err(error) => return (Found::default(), Some(error.into())),
    };
    // firn writes the manifest last, for every container with NVIDIA GPUs.
    let failure = names_driver(dir, &images).then(|| ManifestError::Missing { dir: dir.to_owned() }.into());
    let manifest = None;
    (Found { manifest, images }, failure)
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

/// The image directory, and the archive next to it. DIR may be either.
pub fn parts(dir: &Path) -> (PathBuf, Option<PathBuf>) {
    let image = dir.join(names::ARCHIVE_IMAGE);
    match image.join(names::MANIFEST).exists() {
        true => (
            image,
            Some(dir.join(names::ARCHIVE_LAYER)).filter(|layer| layer.exists()),
        ),
        false => (dir.to_owned(), None),
    }
}
