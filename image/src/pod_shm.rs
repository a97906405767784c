//! The files of a pod's /dev/shm: what the shim asks firn-hook for, and the file of the image that has them.
//! CRIU takes that directory for a mount from outside, whose files it leaves out.

mod archive;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use archive::{ArchiveFault, Entry, Kind, Reader, Writer};

/// Archive the files for a checkpoint: `firn-hook keep-shm` reads this.
#[derive(Debug, Serialize, Deserialize)]
pub struct KeepShm {
    /// What is mounted at /dev/shm.
    pub dir: PathBuf,
    /// The archive, which is made if there is a file to keep or an earlier archive.
    pub archive: PathBuf,
    /// Where an earlier one may be.
    pub earlier: PathBuf,
    /// Processes of the container.
    pub own: Vec<i32>,
    /// The directory with the cgroups of all containers of the pod. What only others have open stays theirs.
    pub pod: PathBuf,
}

/// Make the archived files for a copy: `firn-hook fill-shm` reads this, and `firn-hook empty-shm`, which
/// removes what was made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FillShm {
    /// What is mounted at /dev/shm of the copy.
    pub dir: PathBuf,
    pub archive: PathBuf,
    /// The file that has what was made, one [`MadeFile`] in each line.
    pub record: PathBuf,
    /// The directory with the cgroups of all containers of the pod.
    pub pod: PathBuf,
}

/// A file that was made where nothing was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeFile {
    /// Its name below the directory, in bytes.
    pub name: Vec<u8>,
    /// Its inode, of that file system.
    pub inode: u64,
}
