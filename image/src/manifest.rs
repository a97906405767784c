//! The checkpoint manifest, `firn.json` in the CRIU image directory.
//!
//! It is one regular file, because every client includes such a file in its archives. It is written last,
//! after the dump: an interrupted dump has no manifest, so nobody takes it for a complete one.
//!
//! ```text
//! {"format":"firn-checkpoint","major":1,"minor":0,"needs":["nvidia"],"sha256":"<of body>","body":{...}}
//! ```
//!
//! The envelope can be read without knowing the body. Another major version is refused, and so is a need that
//! this firn does not have. Unknown fields of a newer minor version are skipped. Sizes and counts are
//! bounded.
//!
//! **The manifest is untrusted at restore**: it can refuse a restore and grants nothing. What it names is
//! compared with the target's own spec, and used only if the spec gives the same. The checksums find damage,
//! not malice. A file that is changed after its checksum was compared is found by [`Verified`].
//!
//! **An image without manifest** was made by another shim, or its dump was interrupted. CRIU's files do not
//! show whether they hold GPU state, so the target decides: a container that requests a GPU needs a manifest
//! ([`Manifest::read_for`]); any other could not use GPU state and is restored as runc alone would restore
//! it.

mod envelope;
mod error;
mod limits;
mod origin;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use firn_config::names;
use firn_gpu::{Backend, CudaState, Topology};
use firn_host::CpuFeatures;
use firn_host::bounded::read_at_most;
use serde::{Deserialize, Serialize};

use crate::checksums;
pub use crate::checksums::{
    ImageError, ImageFile, Memory, Verified, describe as describe_images, describe_by as describe_images_by,
    is_of_image,
};
pub use error::ManifestError;
pub use firn_gpu::SourceGpu;
pub use firn_oci::mounts::RequiredMount;
use firn_store::Digest;
pub use firn_store::UntrustedDir;
pub use origin::Origin;

/// Largest manifest that is written or read: room for the files of some ten thousand threads.
pub const MAX_BYTES: u64 = 4 << 20;

/// What a checkpoint holds in addition to CRIU's images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Random id of the checkpoint, for the job's hooks. Empty in images of older versions.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub checkpoint: String,
    /// Where it comes from, for people. Images of older versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
    /// Annotations of the source that name hooks of the job: the copy has them unless it names its own.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub hooks: BTreeMap<String, String>,
    /// What carries the GPU state.
    pub backend: Backend,
    /// Options of the dump; the restore needs the same.
    pub dump: DumpFlags,
    /// The driver of the source; null without GPUs.
    pub driver: Option<DriverVersion>,
    /// GPUs that the source's spec granted: all of them must be mapped, also those that no process used.
    pub gpus: Vec<SourceGpu>,
    /// How these reached each other, as far as the source reported it.
    pub topology: Topology,
    /// Processes whose GPU state the image holds. Empty: it holds none.
    pub processes: Vec<CheckpointedProcess>,
    /// Processes without CUDA that had inherited GPUs, which firn's plugin for CRIU has dumped.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inherited_gpus: Vec<InheritedGpus>,
    /// The GPUs that the source had, where its hook `prepare` has let go of every device: the image holds
    /// nothing of any. Absent: it is not such an image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released_gpus: Option<Vec<SourceGpu>>,
    /// Memory that is in a store instead of CRIU's files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bulk: Option<StoredMemory>,
    /// Bind mounts that the restore needs.
    pub mounts: Vec<RequiredMount>,
    /// What the source's CPU could do. Images of older versions do not have it.
    #[serde(default, skip_serializing_if = "CpuFeatures::is_empty")]
    pub cpu: CpuFeatures,
    /// Programs that made the dump.
    pub versions: Versions,
    /// CRIU's files.
    pub images: Vec<ImageFile>,
}

/// Options of `runc checkpoint`, named as in containerd's CheckpointOptions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DriverVersion {
    /// Full version, `580.159.04`.
    pub driver: String,
    /// CUDA version in the coding of `cuDriverGetVersion`.
    pub cuda: i32,
}

/// A process whose GPU state was checkpointed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CheckpointedProcess {
    /// Its id in the container's pid namespace.
    pub pid: i32,
    /// Its restore thread, in the same namespace.
    pub restore_tid: i32,
    /// Its state before the checkpoint.
    pub state: CudaState,
}

/// The descriptors of GPUs that a process without CUDA had inherited from a CUDA process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct InheritedGpus {
    /// Its id in the container's pid namespace.
    pub pid: i32,
    /// Numbers of descriptors. It may have mappings alone.
    pub open: Vec<i32>,
}

/// Memory of the processes that is in a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StoredMemory {
    /// Id of the store that got it. Another store that has the same extents does as well.
    pub store: String,
    /// Digest of the index that names the extents.
    pub index: Digest,
    /// Bytes of the ranges, with zeros.
    pub bytes: u64,
    /// Bytes that the store did not have before. For people, as is the next one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub written: u64,
    /// Bytes that the store had.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub reused: u64,
}

/// Bytes of an image, with what is in a store.
pub fn size(images: &[ImageFile], bulk: Option<&StoredMemory>) -> u64 {
    let files: u64 = images.iter().map(|file| file.size).sum();
    files + bulk.map_or(0, |bulk| bulk.bytes)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// Versions of the programs that made the dump, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    pub firn: String,
    pub criu: String,
    pub runc: String,
    pub kernel: String,
}

impl Manifest {
    /// Whether the images hold GPU state.
    pub fn has_gpu_state(&self) -> bool {
        !self.processes.is_empty()
    }

    /// Whether the processes have firn's library between them and NVIDIA's driver.
    pub fn is_interposed(&self) -> bool {
        self.images
            .iter()
            .any(|file| file.name == names::CUDA_LIBRARY_IMAGE)
    }

    /// Whether the images hold nothing of any device, and may be restored with other devices or none.
    pub fn is_device_free(&self) -> bool {
        self.released_gpus.is_some()
    }

    /// The same for an image that holds nothing of any device: the source's GPUs are facts for the job.
    pub fn without_devices(self) -> Self {
        Self {
            backend: Backend::None,
            driver: None,
            gpus: Vec::new(),
            topology: Topology::default(),
            processes: Vec::new(),
            released_gpus: Some(self.gpus),
            ..self
        }
    }

    /// What a reader must be able to do, for the envelope.
    fn needs(&self) -> Vec<&'static str> {
        [
            (self.backend == Backend::Nvidia, envelope::NVIDIA),
            (!self.inherited_gpus.is_empty(), envelope::INHERITED),
            (self.is_device_free(), envelope::DEVICE_FREE),
            (self.bulk.is_some(), envelope::STORED),
            (
                self.images.iter().any(|file| file.blake3.is_some()),
                envelope::BLAKE3,
            ),
            (self.is_interposed(), envelope::INTERPOSED),
        ]
        .into_iter()
        .filter_map(|(is_needed, need)| is_needed.then_some(need))
        .collect()
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
        self.check().map_err(|field| ManifestError::Value {
            path: path.to_owned(),
            field,
        })?;
        envelope::seal(self, path)
    }

    /// Reads the manifest of an image directory, if it has one.
    pub fn read(dir: &Path) -> Result<Option<Self>, ManifestError> {
        Self::read_by(dir, dir)
    }

    /// As [`Self::read`], where errors name the directory `shown`.
    pub fn read_by(dir: &Path, shown: &Path) -> Result<Option<Self>, ManifestError> {
        Ok(Self::read_with_bytes_by(dir, shown)?.map(|(manifest, _)| manifest))
    }

    /// As [`Self::read`], with the file's bytes, for a signature of what was read.
    pub fn read_with_bytes(dir: &Path) -> Result<Option<(Self, Vec<u8>)>, ManifestError> {
        Self::read_with_bytes_by(dir, dir)
    }

    fn read_with_bytes_by(dir: &Path, shown: &Path) -> Result<Option<(Self, Vec<u8>)>, ManifestError> {
        let path = shown.join(names::MANIFEST);
        let file = UntrustedDir::open(dir).and_then(|dir| dir.file(names::MANIFEST));
        match file.and_then(|file| read_at_most(file, MAX_BYTES)) {
            Ok(Some(bytes)) => Ok(Some((Self::decode(&bytes, &path)?, bytes))),
            Ok(None) => Err(ManifestError::TooLarge { path }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(ManifestError::Read { path, source }),
        }
    }

    /// Reads the manifest for a container that is to be restored. One that requests a GPU must have a
    /// manifest.
    pub fn read_for(spec: &firn_oci::Spec, dir: &Path) -> Result<Option<Self>, ManifestError> {
        match Self::read(dir)? {
            None if spec.requests_gpu() => Err(ManifestError::Missing { dir: dir.to_owned() }),
            manifest => Ok(manifest),
        }
    }

    /// Compares CRIU's files with their checksums.
    pub fn verify_images(&self, dir: &Path) -> Result<Verified, ImageError> {
        self.verify_images_until(dir, Memory::Now, &AtomicBool::new(false))
    }

    /// As [`Manifest::verify_images`]. It fails soon after `stop` is set.
    pub fn verify_images_until(
        &self,
        dir: &Path,
        memory: Memory,
        stop: &AtomicBool,
    ) -> Result<Verified, ImageError> {
        checksums::verify(&self.images, dir, memory, stop)
    }

    /// Reads the bytes of a manifest; `path` is for errors.
    pub fn decode(bytes: &[u8], path: &Path) -> Result<Self, ManifestError> {
        let path = || path.to_owned();
        let envelope = envelope::open(bytes, &path())?;
        let shape = |source| ManifestError::Shape { path: path(), source };
        let manifest: Self = serde_json::from_str(envelope.body.get()).map_err(shape)?;
        let is_listed = |need: &&str| envelope.needs.iter().any(|listed| listed == need);
        let field = match manifest.check() {
            Err(field) => field,
            Ok(()) if !manifest.needs().iter().all(is_listed) => "needs",
            Ok(()) => return Ok(manifest),
        };
        Err(ManifestError::Value { path: path(), field })
    }
}

#[cfg(test)]
mod tests;
