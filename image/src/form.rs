//! The form of a checkpoint in a directory: what every client's checkpoint is converted to before it is
//! looked at, signed or restored.
//!
//! The directory is an image itself, with CRIU's files and firn.json. Or it has the parts of an archive of
//! the kubelet:
//!
//! | part | what it is |
//! |---|---|
//! | `checkpoint/` | the image |
//! | `rootfs-diff.tar` | what the container had written; absent if that is nothing |
//! | `spec.dump` | the container's spec; absent in what firn writes |
//!
//! Whoever looks at a directory decides by [`CheckpointDir::find`] which of both it is. One that is both is
//! refused: otherwise somebody inspects or signs one image while another one is restored.

mod entry;

use std::fs::FileType;
use std::io;
use std::path::{Path, PathBuf};

use firn_config::names;
use firn_host::{Absent, Problem};

pub use entry::{Archived, Entry, EntryError, EntryKind};

/// The image, in a directory with parts.
pub const IMAGE: &str = "checkpoint";

/// What the container had written, next to the image.
pub const LAYER: &str = "rootfs-diff.tar";

/// The container's spec, next to the image.
pub const SPEC: &str = "spec.dump";

/// CRIU's file that each image has.
pub const INVENTORY: &str = "inventory.img";

/// Files without which an image cannot be restored; CRIU writes both at the end of a dump.
pub const LAST: [&str; 2] = [INVENTORY, "pstree.img"];

/// Files of which one shows that a directory is an image, also one that is not complete.
pub const MARKS: [&str; 2] = [INVENTORY, names::MANIFEST];

/// A checkpoint in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointDir {
    /// The directory of CRIU's files.
    pub image: PathBuf,
    /// What there is of what the container had written; it may be no regular file.
    pub layer: Option<PathBuf>,
    /// The file with the spec; it may be no regular file.
    pub spec: Option<PathBuf>,
}

/// Why a directory cannot be taken for a checkpoint.
#[derive(Debug, thiserror::Error, Problem)]
pub enum FormError {
    #[error("{} is an image, and has another one in {IMAGE}", dir.display())]
    #[problem("FIRN-IMAGE-CORRUPT", "move one of both into a directory of its own")]
    Both { dir: PathBuf },
    #[error("cannot look at {}", path.display())]
    #[problem("FIRN-FILE", "see the cause")]
    Look { path: PathBuf, source: io::Error },
}

impl CheckpointDir {
    /// A directory that is an image itself.
    pub fn of_image(dir: &Path) -> Self {
        Self {
            image: dir.to_owned(),
            layer: None,
            spec: None,
        }
    }

    /// The checkpoint in a directory; none: there is no image. What is in the directory may come from an
    /// archive of anybody: links are not followed.
    ///
    /// # Errors
    /// The directory cannot be looked at, or has both an image and the parts of a checkpoint.
    pub fn find(dir: &Path) -> Result<Option<Self>, FormError> {
        let image = dir.join(IMAGE);
        let is_inside = kind(&image)?.is_some_and(|kind| kind.is_dir()) && has_image(&image)?;
        match (has_image(dir)?, is_inside) {
            (true, true) => Err(FormError::Both { dir: dir.to_owned() }),
            (true, false) => Ok(Some(Self::of_image(dir))),
            (false, false) => Ok(None),
            (false, true) => {
                let part = |name: &str| {
                    let path = dir.join(name);
                    Ok::<_, FormError>(kind(&path)?.map(|_| path))
                };
                Ok(Some(Self {
                    layer: part(LAYER)?,
                    spec: part(SPEC)?,
                    image,
                }))
            }
        }
    }
}

/// Whether there are files of an image directly in a directory, also of one that is not complete.
fn has_image(dir: &Path) -> Result<bool, FormError> {
    for name in MARKS {
        if kind(&dir.join(name))?.is_some_and(|kind| kind.is_file()) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn kind(path: &Path) -> Result<Option<FileType>, FormError> {
    match path.symlink_metadata() {
        Ok(found) => Ok(Some(found.file_type())),
        Err(error) if error.is_absent() => Ok(None),
        Err(source) => Err(FormError::Look {
            path: path.to_owned(),
            source,
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_directory_is_an_image_or_has_the_parts_of_a_checkpoint() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("job");
        let image = dir.join(IMAGE);
        let find = || CheckpointDir::find(&dir).unwrap();
        assert_eq!(find(), None, "there is no such directory");
        fs::create_dir_all(&image).unwrap();
        fs::write(dir.join(LAYER), "").unwrap();
        assert_eq!(find(), None, "there is no image");
        fs::write(image.join(INVENTORY), "").unwrap();
        fs::write(dir.join(SPEC), "").unwrap();
        let parts = CheckpointDir {
            image: image.clone(),
            layer: Some(dir.join(LAYER)),
            spec: Some(dir.join(SPEC)),
        };
        assert_eq!(find(), Some(parts));
        // A dump that was cut off has no inventory, and is found for its manifest.
        fs::rename(image.join(INVENTORY), image.join(names::MANIFEST)).unwrap();
        assert_eq!(find().map(|found| found.image), Some(image.clone()));
        // Nobody adds an image to an archive that another one is looked at.
        fs::write(dir.join(INVENTORY), "").unwrap();
        let both = CheckpointDir::find(&dir).unwrap_err();
        assert_eq!(both.code(), "FIRN-IMAGE-CORRUPT");
        fs::remove_dir_all(&image).unwrap();
        assert_eq!(find(), Some(CheckpointDir::of_image(&dir)));
    }

    #[test]
    fn links_lead_to_no_image() {
        let root = tempfile::tempdir().unwrap();
        let (elsewhere, dir) = (root.path().join("elsewhere"), root.path().join("job"));
        for dir in [&elsewhere, &dir] {
            fs::create_dir(dir).unwrap();
        }
        fs::write(elsewhere.join(INVENTORY), "").unwrap();
        symlink(&elsewhere, dir.join(IMAGE)).unwrap();
        assert_eq!(CheckpointDir::find(&dir).unwrap(), None);
        symlink(elsewhere.join(INVENTORY), dir.join(INVENTORY)).unwrap();
        assert_eq!(CheckpointDir::find(&dir).unwrap(), None);
    }
}
