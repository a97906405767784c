//! The checkpoint manifest, `firn.json` in the CRIU image directory.
//!
//! One flat regular file, as that is all that every client carries along. It is written last, after the dump: a dump of
//! a GPU container without a manifest is not valid, so an interrupted one is never taken for a good one.
//!
//! ```text
//! {"format":"firn-checkpoint","major":1,"minor":0,"sha256":"<of the bytes of body>","body":{...}}
//! ```
//!
//! The head can be read without knowing the body. Another major version is refused; a newer minor version has fields
//! that are skipped. Sizes and counts are bounded.
//!
//! **The manifest is untrusted at restore**: it may refuse a restore and never grants one. What it names is compared
//! with the target's own spec, and used only if the spec gives the same. The checksums find damage, not malice, and say
//! nothing of what is written after they were compared: [`Verified`] does.
//!
//! **An image without manifest** was made by another shim, or its dump was interrupted. Nothing in CRIU's files tells
//! whether it holds GPU state, so the target decides: a container that asks for a GPU needs a manifest
//! ([`Manifest::read_for`]); one that does not could not use GPU state anyway and is restored as runc alone would.

mod limits;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use firn_config::names;
use firn_gpu::{CudaState, Topology};
use firn_host::{Problem, Remedy, remedy};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::block_hash::sha256;
pub use crate::checksums::{
    ImageError, ImageFile, Verified, describe as describe_images, describe_by as describe_images_by,
    is_of_image,
};
pub use crate::dir::ImageDir;
use crate::{checksums, dir};
pub use firn_gpu::SourceGpu;
pub use firn_oci::mounts::RequiredMount;

/// Largest manifest that is written or read: room for the files of some ten thousand threads.
pub const MAX_BYTES: u64 = 4 << 20;

const FORMAT: &str = "firn-checkpoint";
const MAJOR: u64 = 1;
const MINOR: u64 = 0;

/// What a checkpoint holds besides CRIU's images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// With which options the dump was made; the restore needs the same.
    pub dump: DumpFlags,
    /// The driver of the source; absent when no GPU was granted.
    pub driver: Option<DriverVersion>,
    /// GPUs that the source's spec granted: all of them must be mapped, also those that no process used.
    pub gpus: Vec<SourceGpu>,
    /// How these reached each other, as far as it was told; nothing in images of minor versions 0 and 1.
    #[serde(default, skip_serializing_if = "Topology::is_empty")]
    pub topology: Topology,
    /// Processes whose GPU state lies in the images. Empty: the images hold no GPU state.
    pub processes: Vec<CudaProcess>,
    /// Bind mounts that the restore will need.
    pub mounts: Vec<RequiredMount>,
    /// Who made the dump.
    pub versions: Versions,
    /// CRIU's files.
    pub images: Vec<ImageFile>,
}

/// Options of `runc checkpoint`, named as in containerd's CheckpointOptions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DumpFlags {
    /// Established TCP connections were dumped.
    pub open_tcp: bool,
    /// Unix sockets with peers outside were allowed.
    pub external_unix_sockets: bool,
    /// The container's terminal was dumped as a shell job.
    pub terminal: bool,
    /// File locks were dumped.
    pub file_locks: bool,
}

/// Version of the NVIDIA driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverVersion {
    /// Full version, `580.159.04`.
    pub driver: String,
    /// CUDA version as `cuDriverGetVersion` codes it.
    pub cuda: i32,
}

/// A process whose GPU state was checkpointed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaProcess {
    /// Its id in the container's pid namespace.
    pub pid: i32,
    /// Its restore thread, in the same namespace.
    pub restore_tid: i32,
    /// Its state before firn touched it.
    pub state: CudaState,
}

/// Versions of what made the dump; shown to people.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// firn.
    pub firn: String,
    /// CRIU.
    pub criu: String,
    /// runc.
    pub runc: String,
    /// Linux.
    pub kernel: String,
}

/// A manifest that is missing or cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// There is none, and the container needs one.
    #[error("checkpoint {} has no manifest, and the container asks for a GPU", dir.display())]
    Missing { dir: PathBuf },
    /// It cannot be read.
    #[error("cannot read manifest {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// It is larger than any manifest.
    #[error("manifest {} is larger than {MAX_BYTES} bytes", path.display())]
    TooLarge { path: PathBuf },
    /// It is not JSON of the right shape.
    #[error("manifest {} is damaged", path.display())]
    Shape {
        path: PathBuf,
        source: serde_json::Error,
    },
    /// It is of a major version that this firn does not know.
    #[error("manifest {} has format version {found}, this firn reads version {MAJOR}", path.display())]
    Version { path: PathBuf, found: u64 },
    /// Its content is not what was written.
    #[error("manifest {} is damaged: its checksum does not match", path.display())]
    Checksum { path: PathBuf },
    /// It holds a value that no dump writes.
    #[error("manifest {} holds an impossible value in {field}", path.display())]
    Value { path: PathBuf, field: &'static str },
    /// It cannot be written.
    #[error("cannot write manifest {}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

impl Problem for ManifestError {
    fn remedy(&self) -> Remedy<'_> {
        match self {
            Self::Missing { .. } => remedy(
                "FIRN-MANIFEST-MISSING",
                "the checkpoint was not made by firn, or not finished; make it again under firn",
            ),
            Self::Read { .. } => remedy(
                "FIRN-MANIFEST-UNREADABLE",
                "check the checkpoint directory; the manifest must be a regular file",
            ),
            Self::TooLarge { .. } => remedy(
                "FIRN-MANIFEST-TOO-LARGE",
                "copy the checkpoint from its origin again",
            ),
            Self::Shape { .. } | Self::Checksum { .. } | Self::Value { .. } => remedy(
                "FIRN-MANIFEST-CORRUPT",
                "copy the checkpoint from its origin again",
            ),
            Self::Version { .. } => remedy(
                "FIRN-MANIFEST-VERSION",
                "restore with the firn that made the checkpoint, or a newer one",
            ),
            Self::Write { .. } => remedy(
                "FIRN-MANIFEST-UNWRITABLE",
                "check that the checkpoint directory is writable and not full",
            ),
        }
    }
}

/// What can be read without knowing the body.
#[derive(Deserialize)]
struct Head {
    format: String,
    major: u64,
}

#[derive(Serialize, Deserialize)]
struct Envelope<'a> {
    format: &'a str,
    major: u64,
    minor: u64,
    sha256: &'a str,
    #[serde(borrow)]
    body: &'a RawValue,
}

impl Manifest {
    /// Whether the images hold GPU state.
    pub fn has_gpu_state(&self) -> bool {
        !self.processes.is_empty()
    }

    /// Writes the manifest into the image directory. To be called last, when `runc checkpoint` has succeeded.
    pub fn write(&self, dir: &Path) -> Result<(), ManifestError> {
        self.write_by(dir, dir)
    }

    /// As [`Manifest::write`], where errors name the directory `shown`.
    pub fn write_by(&self, dir: &Path, shown: &Path) -> Result<(), ManifestError> {
        let path = shown.join(names::MANIFEST);
        let bytes = self.encode(&path)?;
        firn_host::atomic_file::write(dir, names::MANIFEST, &bytes, 0o600)
            .map_err(|source| ManifestError::Write { path, source })
    }

    /// The bytes of the file; `path` is for errors.
    pub fn encode(&self, path: &Path) -> Result<Vec<u8>, ManifestError> {
        let path = || path.to_owned();
        self.check()
            .map_err(|field| ManifestError::Value { path: path(), field })?;
        let unwritable = |source: serde_json::Error| ManifestError::Write {
            path: path(),
            source: source.into(),
        };
        let body = serde_json::value::to_raw_value(self).map_err(unwritable)?;
        let sha256 = sha256(body.get().as_bytes());
        let envelope = Envelope {
            format: FORMAT,
            major: MAJOR,
            minor: MINOR,
            sha256: &sha256,
            body: &body,
        };
        let bytes = serde_json::to_vec(&envelope).map_err(unwritable)?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(ManifestError::TooLarge { path: path() });
        }
        Ok(bytes)
    }

    /// Reads the manifest of an image directory, if it has one.
    pub fn read(dir: &Path) -> Result<Option<Self>, ManifestError> {
        let path = dir.join(names::MANIFEST);
        let file = ImageDir::open(dir).and_then(|dir| dir.file(names::MANIFEST));
        match file.and_then(|file| dir::read_at_most(&file, MAX_BYTES)) {
            Ok(Some(bytes)) => Self::decode(&bytes, &path).map(Some),
            Ok(None) => Err(ManifestError::TooLarge { path }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(ManifestError::Read { path, source }),
        }
    }

    /// Reads the manifest for a container that is to be restored, and insists on one if the container asks for a GPU.
    pub fn read_for(spec: &firn_oci::Spec, dir: &Path) -> Result<Option<Self>, ManifestError> {
        match Self::read(dir)? {
            None if spec.requests_gpu() => Err(ManifestError::Missing { dir: dir.to_owned() }),
            manifest => Ok(manifest),
        }
    }

    /// Whether CRIU's files are those of the dump.
    pub fn verify_images(&self, dir: &Path) -> Result<Verified, ImageError> {
        self.verify_images_until(dir, &AtomicBool::new(false))
    }

    /// As [`Manifest::verify_images`], for who may not want to wait to its end: it fails soon after `stop` is set.
    pub fn verify_images_until(&self, dir: &Path, stop: &AtomicBool) -> Result<Verified, ImageError> {
        checksums::verify(&self.images, dir, stop)
    }

    pub fn decode(bytes: &[u8], path: &Path) -> Result<Self, ManifestError> {
        let path = || path.to_owned();
        let shape = |source| ManifestError::Shape { path: path(), source };
        let head: Head = serde_json::from_slice(bytes).map_err(shape)?;
        if head.format != FORMAT {
            return Err(ManifestError::Value {
                path: path(),
                field: "format",
            });
        }
        if head.major != MAJOR {
            return Err(ManifestError::Version {
                path: path(),
                found: head.major,
            });
        }
        let envelope: Envelope<'_> = serde_json::from_slice(bytes).map_err(shape)?;
        if sha256(envelope.body.get().as_bytes()) != envelope.sha256 {
            return Err(ManifestError::Checksum { path: path() });
        }
        let manifest: Self = serde_json::from_slice(envelope.body.get().as_bytes()).map_err(shape)?;
        manifest
            .check()
            .map_err(|field| ManifestError::Value { path: path(), field })?;
        Ok(manifest)
    }
}

/// A file with this body and a checksum that fits it.
#[cfg(any(test, fuzzing, feature = "fixtures"))]
pub fn sealed(body: &str) -> Vec<u8> {
    let sha256 = sha256(body.as_bytes());
    format!(r#"{{"format":"{FORMAT}","major":{MAJOR},"minor":{MINOR},"sha256":"{sha256}","body":{body}}}"#)
        .into_bytes()
}

#[cfg(test)]
mod tests;
