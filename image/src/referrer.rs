//! Which indexes image directories name.
//!
//! What cannot be read may name any index, so it is an error and never an absence. Directories of which file
//! systems are not mounted are found by [`expect_mounted`](firn_store::expect_mounted), and by links that
//! lead to nothing.

use std::collections::BTreeMap;
use std::fs::{self, DirEntry};
use std::io;
use std::path::{Path, PathBuf};

use firn_host::mountinfo::{MountEntry, is_mount_point};
use firn_host::{Absent, Problem};

use crate::form;
use crate::manifest::{Manifest, ManifestError, is_of_image};
use firn_store::{Digest, Index};

/// A place for checkpoints of which it cannot be found out what they name.
#[derive(Debug, thiserror::Error, Problem)]
pub enum ReferrerError {
    #[error("cannot find out which checkpoints are in {}; nothing was removed", path.display())]
    #[problem(
        "FIRN-STORE-UNUSABLE",
        "see that the directory can be read and its file system is mounted, or take it out of the \
         configuration if it was given up"
    )]
    List { path: PathBuf, source: io::Error },
    #[error("cannot find out which memory the checkpoint in {} needs; nothing was removed", path.display())]
    #[problem(
        "FIRN-STORE-UNUSABLE",
        "remove that checkpoint if it is damaged; one of a newer firn needs `firn store gc` of that version"
    )]
    Manifest {
        path: PathBuf,
        source: Box<ManifestError>,
    },
    #[error("{} is a link that leads to nothing; nothing was removed", path.display())]
    #[problem(
        "FIRN-STORE-UNUSABLE",
        "mount the file system that it leads to, or remove the link"
    )]
    Lost { path: PathBuf },
}

/// The indexes that checkpoints name, each with one of these.
#[derive(Debug, Default)]
pub struct Referrers(BTreeMap<Digest, String>);

impl Referrers {
    /// Adds an index, and what names it.
    pub fn add(&mut self, index: Digest, by: String) {
        self.0.insert(index, by);
    }

    /// What names an index, if anything does.
    pub fn of(&self, index: &Digest) -> Option<&str> {
        self.0.get(index).map(String::as_str)
    }

    /// Adds the image in a directory, if there is one.
    ///
    /// # Errors
    /// Its firn.json cannot be read, or is of a newer firn.
    pub fn add_image(&mut self, dir: &Path) -> Result<(), ReferrerError> {
        self.add_image_by(dir, dir)
    }

    /// As [`Self::add_image`], by a path to the directory that people are not shown.
    pub fn add_image_by(&mut self, dir: &Path, shown: &Path) -> Result<(), ReferrerError> {
        let manifest = Manifest::read_by(dir, shown).map_err(|source| ReferrerError::Manifest {
            path: shown.to_owned(),
            source: Box::new(source),
        })?;
        if let Some(bulk) = manifest.and_then(|manifest| manifest.bulk) {
            self.add(bulk.index, format!("{} is there", shown.display()));
        }
        Ok(())
    }

    /// Adds the images in a directory, each in a directory of its own. There may be no such directory yet.
    ///
    /// # Errors
    /// A directory or a firn.json cannot be read, or a link leads to nothing.
    pub fn add_images_in(&mut self, root: &Path) -> Result<(), ReferrerError> {
        for dir in directories(root)? {
            self.add_image(&dir)?;
        }
        Ok(())
    }

    /// Adds the checkpoints that pods may name: `NAMESPACE/NAME`, and the image in an archive of the kubelet
    /// there. There may be no such directory yet.
    ///
    /// # Errors
    /// As those of [`Self::add_images_in`].
    pub fn add_named_in(&mut self, root: &Path) -> Result<(), ReferrerError> {
        for dir in named_directories(root)? {
            self.add_image(&dir)?;
        }
        Ok(())
    }
}

/// The directories that pods may name to restore from: `NAMESPACE/NAME`, and the image in an archive of the
/// kubelet there, whether it is there or not.
///
/// # Errors
/// A directory cannot be read, or a link leads to nothing.
pub fn named_directories(root: &Path) -> Result<Vec<PathBuf>, ReferrerError> {
    let mut found = Vec::new();
    for namespace in directories(root)? {
        for named in directories(&namespace)? {
            found.push(named.join(form::IMAGE));
            found.push(named);
        }
    }
    Ok(found)
}

/// Directories in this one, and links to such. None if it is not there.
fn directories(of: &Path) -> Result<Vec<PathBuf>, ReferrerError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| ReferrerError::List { path, source }
    };
    let entries = match fs::read_dir(of) {
        Err(error) if error.is_absent() => return Ok(Vec::new()),
        entries => entries.map_err(failed(of))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed(of))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(failed(&path))?;
        let is_dir = if kind.is_symlink() {
            leads_to_directory(&path)?
        } else {
            kind.is_dir()
        };
        if is_dir {
            found.push(path);
        }
    }
    Ok(found)
}

/// Whether a link leads to a directory. An empty one is where a file system is not mounted.
fn leads_to_directory(link: &Path) -> Result<bool, ReferrerError> {
    let path = || link.to_owned();
    let list = |source| ReferrerError::List { path: path(), source };
    match fs::metadata(link) {
        Err(error) if error.is_absent() => Err(ReferrerError::Lost { path: path() }),
        Err(error) => Err(list(error)),
        Ok(found) if !found.is_dir() => Ok(false),
        Ok(_) => match fs::read_dir(link).map_err(list)?.next() {
            None => Err(ReferrerError::Lost { path: path() }),
            Some(entry) => entry.map(|_| true).map_err(list),
        },
    }
}

/// Why the image directory that an index knows may need it: it names it, or may, if it cannot be read or
/// understood, if its file system is not mounted, or if its checkpoint is not complete.
pub fn may_name(index: &Index, id: &Digest, mounts: &[MountEntry]) -> Option<String> {
    if let Some(mount) = &index.mount
        && !is_mount_point(mounts, mount)
    {
        return Some(format!("{} is not mounted, where its image is", mount.display()));
    }
    let dir = &index.image;
    match Manifest::read(dir) {
        Ok(None) => {
            let unfinished = has_files_of_an_image(dir);
            unfinished.then(|| format!("{} has no firn.json yet", dir.display()))
        }
        Ok(Some(manifest)) => {
            let is_named = manifest.bulk.is_some_and(|bulk| bulk.index == *id);
            is_named.then(|| format!("{} is there", dir.display()))
        }
        Err(_) => Some(format!("{} cannot be read, and may name it", dir.display())),
    }
}

/// Whether a dump has put files there. A directory that cannot be listed may have some.
fn has_files_of_an_image(dir: &Path) -> bool {
    let is_one = |entry: io::Result<DirEntry>| {
        entry.map_or(true, |entry| is_of_image(&entry.file_name().to_string_lossy()))
    };
    match fs::read_dir(dir) {
        Ok(mut entries) => entries.any(is_one),
        Err(error) => !error.is_absent(),
    }
}

#[cfg(test)]
mod tests;
