//! A directory in which a checkpoint is unpacked.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use firn_host::UnlessAbsent;

use crate::oci_image::ImageError;
use crate::output::note;

/// A directory for root alone, which is removed when this is dropped.
pub struct WorkDir(PathBuf);

impl WorkDir {
    /// `parent` is made if it is not there.
    pub fn make(parent: &Path, id: &str) -> Result<Self, ImageError> {
        let failed = |path: &Path| ImageError::file(format!("make {}", path.display()));
        let made = DirBuilder::new().recursive(true).mode(0o700).create(parent);
        made.map_err(failed(parent))?;
        let path = parent.join(format!("{id}-{}", std::process::id()));
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.map_err(failed(&path))?;
        Ok(Self(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0).unless_absent() {
            note!("firn: {} is left: {error}", self.0.display());
        }
    }
}
