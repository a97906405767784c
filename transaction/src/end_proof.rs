//! What has been shown before a workload ends for a checkpoint or a copy of it.
//!
//! Whatever ends a workload takes an [`EndProof`] by value, so that no code path ends one on the strength of
//! an answer alone. Only the checks of this module make one:
//!
//! | who ends it | what is shown |
//! |---|---|
//! | a checkpoint that the container ends with (shim, firn-runc) | its image is on its disk: [`Durable`] |
//! | `firn checkpoint --exit` | the same of the directory or file; or containerd has committed every blob |
//! | what moves a workload | its copy was seen twice, some time apart: [`RunsElsewhere`] |
//!
//! What a store has of a checkpoint's memory is compared before its container ends: by the copy itself, or by
//! `firn checkpoint --exit`.
//!
//! What removes memory or files of a checkpoint for the sake of another place takes a [`Durable`] of that
//! place.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use firn_config::names;
use firn_host::durable::{self, NotOnDisk};
use firn_image::form::INVENTORY;
use firn_image::manifest::{ImageFile, is_of_image};

use crate::transfer::RunsElsewhere;

/// A checkpoint that is on its disk. Write-back that fails later takes nothing away from it.
#[derive(Debug)]
#[must_use]
pub struct Durable(PathBuf);

impl Durable {
    /// Syncs the files of an image directory, and then the directory. `inside` leads to it, and `path` is
    /// shown. Fails soon after `stop` is set, and if one of `files` is not there any more, or has not the
    /// size that it had: the client may have removed the image. With `files` there has to be a manifest.
    pub fn image(
        inside: &Path,
        path: &Path,
        files: &[ImageFile],
        stop: &AtomicBool,
    ) -> Result<Self, NotOnDisk> {
        let is_meant = |name: &std::ffi::OsStr| name.to_str().is_some_and(is_of_image);
        let synced = durable::sync_files(inside, is_meant, stop);
        // Order matters: a client that removes the image begins anywhere.
        let synced = synced.and_then(|()| durable::sync_file(&inside.join(INVENTORY)));
        let synced = synced.and_then(|()| files.iter().try_for_each(|file| file_is_whole(inside, file)));
        let synced = synced.and_then(|()| match files {
            [] => Ok(()),
            _ => durable::sync_file(&inside.join(names::MANIFEST)),
        });
        synced.map_err(|NotOnDisk { path: at, source }| NotOnDisk {
            path: match at.strip_prefix(inside) {
                Ok(rest) if rest.as_os_str().is_empty() => path.to_owned(),
                Ok(rest) => path.join(rest),
                Err(_) => at,
            },
            source,
        })?;
        Ok(Self(path.to_owned()))
    }

    /// As [`Self::image`], of a second directory of an image, and its name in the directory above.
    pub(crate) fn rescued(dir: &Path, files: &[ImageFile], stop: &AtomicBool) -> Result<Self, NotOnDisk> {
        let _files = Self::image(dir, dir, files, stop)?;
        Self::named(dir)
    }

    /// Syncs everything in a directory and below it, and its name in the directory above.
    pub fn tree(dir: &Path, stop: &AtomicBool) -> Result<Self, NotOnDisk> {
        durable::sync_tree(dir, stop)?;
        Self::named(dir)
    }

    /// Syncs a file, and its name in the directory above.
    pub fn file(path: &Path) -> Result<Self, NotOnDisk> {
        durable::sync_file(path)?;
        Self::named(path)
    }

    fn named(path: &Path) -> Result<Self, NotOnDisk> {
        let failed = |source| NotOnDisk {
            path: path.to_owned(),
            source,
        };
        if let Some(above) = std::path::absolute(path).map_err(failed)?.parent() {
            durable::sync_names(above)?;
        }
        Ok(Self(path.to_owned()))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

fn file_is_whole(dir: &Path, file: &ImageFile) -> Result<(), NotOnDisk> {
    let path = dir.join(&file.name);
    let size = path.symlink_metadata().map(|metadata| metadata.len());
    let source = match size {
        Ok(size) if size == file.size => return Ok(()),
        Ok(size) => io::Error::other(format!("it has {size} bytes instead of {}", file.size)),
        Err(error) => error,
    };
    Err(NotOnDisk { path, source })
}

/// Shown: the workload may end.
#[derive(Debug)]
#[must_use]
pub struct EndProof(Evidence);

#[derive(Debug)]
enum Evidence {
    Durable(PathBuf),
    Committed(String),
    Copy(String),
}

impl EndProof {
    /// containerd has committed every blob of the checkpoint `name`: it syncs a blob before it answers.
    pub fn committed(name: &str) -> Self {
        Self(Evidence::Committed(name.to_owned()))
    }

    /// A copy runs on this node, and still did a while after its start.
    pub fn of_copy(node: &str, _runs: RunsElsewhere) -> Self {
        Self(Evidence::Copy(node.to_owned()))
    }

    /// Of a test that ends nothing.
    #[cfg(any(test, feature = "testing"))]
    pub fn of_test() -> Self {
        Self(Evidence::Copy("test".to_owned()))
    }
}

impl From<Durable> for EndProof {
    fn from(durable: Durable) -> Self {
        Self(Evidence::Durable(durable.0))
    }
}

/// For the log: a container ends, because ...
impl fmt::Display for EndProof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Evidence::Durable(path) => write!(f, "its checkpoint in {} is on its disk", path.display()),
            Evidence::Committed(name) => write!(f, "containerd has its checkpoint {name}"),
            Evidence::Copy(node) => write!(f, "its copy runs on {node}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_a_directory_is_in_the_working_directory() {
        assert!(Path::new("Cargo.toml").exists(), "it is that of the crate");
        assert_eq!(
            Durable::file(Path::new("Cargo.toml")).unwrap().path(),
            "Cargo.toml"
        );
    }

    #[test]
    fn what_is_not_on_its_disk_is_named_and_a_proof_shows_why() {
        let dir = tempfile::tempdir().unwrap();
        let (inside, path) = (dir.path().join("inside"), Path::new("/srv/image"));
        let go = AtomicBool::new(false);
        let image = || Durable::image(&inside, path, &[], &go);
        assert_eq!(image().unwrap_err().path, path);
        std::fs::create_dir(&inside).unwrap();
        assert_eq!(image().unwrap_err().path, path.join(INVENTORY));
        std::fs::write(inside.join(INVENTORY), "x").unwrap();
        let proofs = [
            (
                EndProof::from(image().unwrap()),
                "its checkpoint in /srv/image is on its disk",
            ),
            (EndProof::committed("warm"), "containerd has its checkpoint warm"),
        ];
        for (proof, shown) in proofs {
            assert_eq!(proof.to_string(), shown);
        }
    }
}
