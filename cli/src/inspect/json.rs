//! A checkpoint as JSON.

use std::collections::BTreeMap;

use firn_gpu::{Backend, SourceGpu, Topology};
use firn_host::ProblemReport;
use firn_image::manifest::{
    CheckpointedProcess, DriverVersion, DumpFlags, ImageFile, InheritedGpus, Manifest, Origin, RequiredMount,
    StoredMemory,
};
use serde::Serialize;

use super::processes::ProcessRow;
use crate::image::Sizes;
use crate::output::printed;
use crate::text::{some, utc};

/// A checkpoint.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Checkpoint<'a> {
    /// What was looked at, for people.
    pub what: &'a str,
    /// What firn has written about it; absent if it was not made by firn, or if its manifest is damaged.
    pub manifest: Option<ManifestReport<'a>>,
    /// CRIU's files. Empty for a damaged checkpoint.
    pub images: &'a [ImageFile],
    /// Its size by class.
    pub sizes: Sizes,
    /// Name of the image that the container began with; absent if it is not known.
    pub image: Option<&'a str>,
    /// Bytes of memory in an archive, of which only the size was compared.
    pub unread: u64,
    /// Why it is not whole; absent if it is.
    pub failure: Option<&'a ProblemReport>,
    /// The processes, parents first; absent without --processes.
    pub processes: Option<Vec<ProcessRow<'a>>>,
}

printed! { Checkpoint<'_>: "inspect" }

/// The manifest of a checkpoint.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ManifestReport<'a> {
    /// Random id of the checkpoint; absent in images of older versions.
    checkpoint: Option<&'a str>,
    /// Where it comes from; absent in images of older versions.
    origin: Option<Source<'a>>,
    /// Annotations of the source that name hooks of the job; absent if there are none.
    hooks: Option<&'a BTreeMap<String, String>>,
    /// What carries the GPU state.
    backend: Backend,
    /// Options of the dump.
    dump: &'a DumpFlags,
    /// The driver of the source; absent without GPUs.
    driver: Option<&'a DriverVersion>,
    /// GPUs that the spec of the source granted.
    gpus: &'a [SourceGpu],
    /// How they reached each other, as far as the source reported it.
    topology: &'a Topology,
    /// Processes whose GPU state the image holds. Empty: it holds none.
    processes: &'a [CheckpointedProcess],
    /// Processes without CUDA that had inherited GPUs; absent if there are none.
    inherited_gpus: Option<&'a [InheritedGpus]>,
    /// The GPUs that the source had, where the image holds nothing of any device; absent for other images.
    released_gpus: Option<&'a [SourceGpu]>,
    /// Memory that is in a store; absent if there is none.
    bulk: Option<&'a StoredMemory>,
    /// Bind mounts that a restore needs.
    mounts: &'a [RequiredMount],
    /// Programs that made the dump.
    versions: Versions<'a>,
    /// CRIU's files.
    images: &'a [ImageFile],
}

/// Where a checkpoint comes from.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Source<'a> {
    /// Id of the container.
    container: &'a str,
    /// Name of the image that it began with; absent if it is not known.
    image: Option<&'a str>,
    /// Name of the node.
    host: &'a str,
    /// The arguments of its first process, with spaces between them; absent if they are not known.
    command: Option<&'a str>,
    /// When the manifest was written, UTC.
    #[cfg_attr(test, schemars(extend("format" = "date-time")))]
    time: Option<String>,
    /// Bytes of GPU memory that the processes had, as far as the driver reported it.
    gpu_memory: u64,
}

/// Versions of the programs that made the dump.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Versions<'a> {
    /// That of firn; absent if it is not known.
    firn: Option<&'a str>,
    /// That of CRIU; absent if it is not known.
    criu: Option<&'a str>,
    /// That of runc; absent if it is not known.
    runc: Option<&'a str>,
    /// That of Linux; absent if it is not known.
    kernel: Option<&'a str>,
}

impl<'a> ManifestReport<'a> {
    pub fn of(manifest: &'a Manifest) -> Self {
        let versions = &manifest.versions;
        Self {
            checkpoint: some(&manifest.checkpoint),
            origin: manifest.origin.as_ref().map(Source::of),
            hooks: Some(&manifest.hooks).filter(|hooks| !hooks.is_empty()),
            backend: manifest.backend,
            dump: &manifest.dump,
            driver: manifest.driver.as_ref(),
            gpus: &manifest.gpus,
            topology: &manifest.topology,
            processes: &manifest.processes,
            inherited_gpus: Some(&*manifest.inherited_gpus).filter(|all| !all.is_empty()),
            released_gpus: manifest.released_gpus.as_deref(),
            bulk: manifest.bulk.as_ref(),
            mounts: &manifest.mounts,
            versions: Versions {
                firn: some(&versions.firn),
                criu: some(&versions.criu),
                runc: some(&versions.runc),
                kernel: some(&versions.kernel),
            },
            images: &manifest.images,
        }
    }
}

impl<'a> Source<'a> {
    fn of(origin: &'a Origin) -> Self {
        Self {
            container: &origin.container,
            image: some(&origin.image),
            host: &origin.host,
            command: some(&origin.command),
            time: utc(origin.made),
            gpu_memory: origin.gpu_memory,
        }
    }
}
