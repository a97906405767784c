use std::io;
use std::path::PathBuf;

use firn_host::Problem;

use super::{MAX_BYTES, envelope};

/// A manifest that is missing or cannot be used.
#[derive(Debug, thiserror::Error, Problem)]
#[problem("FIRN-MANIFEST-CORRUPT", "copy the checkpoint from its origin again")]
pub enum ManifestError {
    #[error("checkpoint {} has no manifest, and the container requests a GPU", dir.display())]
    #[problem(
        "FIRN-MANIFEST-MISSING",
        "the checkpoint was not made by firn, or not finished; make it again under firn"
    )]
    Missing { dir: PathBuf },
    #[error("cannot read manifest {}", path.display())]
    #[problem(
        "FIRN-MANIFEST-UNREADABLE",
        "check the checkpoint directory; the manifest must be a regular file"
    )]
    Read { path: PathBuf, source: io::Error },
    #[error("manifest {} is larger than {MAX_BYTES} bytes", path.display())]
    #[problem("FIRN-MANIFEST-TOO-LARGE", "copy the checkpoint from its origin again")]
    TooLarge { path: PathBuf },
    /// It is not JSON of the right shape.
    #[error("manifest {} is damaged", path.display())]
    Shape {
        path: PathBuf,
        source: serde_json::Error,
    },
    #[error(
        "manifest {} has format version {found}, this firn reads version {}",
        path.display(),
        envelope::MAJOR
    )]
    #[problem(
        "FIRN-MANIFEST-VERSION",
        "restore with the release of firn that made the checkpoint"
    )]
    Version { path: PathBuf, found: u64 },
    #[error("manifest {} needs {}, which this firn does not have", path.display(), unknown.join(", "))]
    #[problem("FIRN-MANIFEST-NEEDS", "upgrade firn on this node")]
    Needs { path: PathBuf, unknown: Vec<String> },
    #[error("manifest {} is damaged: its checksum does not match", path.display())]
    Checksum { path: PathBuf },
    /// It holds a value that no dump writes.
    #[error("manifest {} holds an impossible value in {field}", path.display())]
    Value { path: PathBuf, field: &'static str },
    #[error("cannot write manifest {}", path.display())]
    #[problem(
        "FIRN-MANIFEST-UNWRITABLE",
        "check that the checkpoint directory is writable and not full"
    )]
    Write { path: PathBuf, source: io::Error },
}
