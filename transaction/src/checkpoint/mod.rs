//! Checkpoint of a container.
//!
//! A container whose spec requests no GPU is dumped as the stock shim would do it. For a container with GPUs,
//! or whose job lets go of every device before ([`crate::container::ContainerTraits::device_free`]), the
//! phases of [`phases`] run over the effects of [`container`]. If the client wants the container to end
//! with the dump, CRIU still leaves it running, frozen. firn ends it once the image with its manifest is
//! complete, so no failure after CRIU can cost the workload.

mod container;
mod dump;
mod error;
mod gpu;
mod job;
mod overrides;
pub mod park;
mod phases;
mod plain;
mod rollback;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use firn_config::{Config, Keys};
use firn_image::manifest::DumpFlags;
use firn_oci::criu_config::{CriuConfig, Operation};
use firn_oci::{Spec, edit, nccl};
use firn_preflight::{OtherGpus, OtherVendors, Workload, user_namespace};

pub use error::{CheckpointError, EffectError, FailureKind};
pub(crate) use error::{line, quoted};
pub use job::call_pending;
pub use overrides::{Overrides, UnknownOverride};
pub use rollback::{resume, rollback_after_panic};

use firn_process::cancel::CancellationToken;
use firn_process::panics::caught;
use firn_process::reaper::Reaper;

use crate::configured::configured;
use crate::container::{Container, ContainerTraits};
use crate::image_dir::{ImageDir, ImageDirError};
use crate::interposer;
use crate::journal;
use crate::look::{self, Checked};
use crate::meeting::Meeting;
use crate::runc::{Bounds, Checkpoint};
use crate::transaction::Intent;
use dump::{WorkDir, bounded};

/// The log of a failed dump, kept in the bundle as the stock shim does.
pub(crate) const KEPT_LOG: &str = "criu-dump.log";

/// The checkpoint that the client requests.
pub struct Request {
    /// Directory that receives the image.
    pub image: ImageDir,
    /// CRIU's work directory; none means a temporary one in the bundle.
    pub work: Option<PathBuf>,
    /// Image of an earlier pre-dump.
    pub parent: Option<PathBuf>,
    /// The container ends with the dump.
    pub exit: bool,
    pub flags: DumpFlags,
    /// Namespaces that are dumped without their content.
    pub empty_namespaces: Vec<String>,
    /// The containers that are checkpointed at the same moment.
    pub meeting: Option<Arc<Meeting>>,
    /// The archive that gets what the container has written to its root file system.
    pub layer: Option<PathBuf>,
    /// The client has copied the container's files before, if it has paused it.
    pub files_copied: bool,
    /// All memory goes into the image, whatever annotation and configuration have of a store.
    pub inline: bool,
    /// What counts instead of the container's annotations.
    pub overrides: Overrides,
}

impl Request {
    /// Of a transaction that writes no image.
    fn without_image() -> Self {
        Self {
            image: ImageDir::unopened(Path::new("")),
            work: None,
            parent: None,
            exit: false,
            flags: DumpFlags::default(),
            empty_namespaces: Vec::new(),
            meeting: None,
            layer: None,
            files_copied: false,
            inline: false,
            overrides: Overrides::default(),
        }
    }

    /// A call of the runtime that leaves the container running. The caller adds the directories.
    fn call<'a>(&'a self, flags: &'a DumpFlags, bounds: Bounds<'a>) -> Checkpoint<'a> {
        Checkpoint {
            image: Path::new(""),
            work: Path::new(""),
            parent: self.parent.as_deref(),
            flags,
            empty_namespaces: &self.empty_namespaces,
            leave_running: true,
            plugins: None,
            bounds,
        }
    }

    /// Without an id: the job's hooks are called with GPUs alone.
    fn intent(&self, container: &Container) -> Intent {
        let work = WorkDir::choose(container, self);
        Intent {
            operation: journal::Operation::Checkpoint,
            gpu: container.traits.by_firn(),
            id: String::new(),
            exit: self.exit,
            image: self.image.path().to_owned(),
            work: work.path,
            work_is_ours: work.ours,
            was_frozen: false,
        }
    }
}

/// Edits the bundle of a new GPU container so that its dump will work: CRIU without its CUDA plugin and, if
/// the container requests it, NCCL ranks that share no GPU memory. With NVIDIA's GPUs it may get firn's
/// library. Returns CRIU's configuration.
pub(crate) fn prepare_bundle(
    bundle: &Path,
    mut spec: Spec,
    traits: &ContainerTraits,
) -> Result<CriuConfig, CheckpointError> {
    let config = configured();
    let criu = CriuConfig::new(&spec, bundle, config.criu.libs_dir.as_deref());
    criu.write(Operation::Dump)?;
    nccl::over_sockets(&mut spec, u64::from(config.nccl.shm_mib) << 20)?;
    interposer::add(&mut spec, bundle, traits.has_nvidia(), &config.cuda)?;
    if firn_oci::drop_mounting_hooks(&mut spec)? > 0 {
        log::info!("the hook disable-device-node-modification is removed: CRIU cannot dump what it mounts");
    }
    edit::set_criu_config(&mut spec, &criu.path())?;
    spec.save(bundle)?;
    Ok(criu)
}

/// Checks the image directory that was found for a checkpoint of `container`. For a container without GPUs,
/// the OCI runtime reports a directory that cannot be used, unless it has gone.
pub fn usable(
    container: &Container,
    found: Result<ImageDir, ImageDirError>,
    path: &Path,
) -> Result<ImageDir, CheckpointError> {
    match found {
        Err(error) if container.traits.by_firn() || matches!(error, ImageDirError::Gone { .. }) => {
            Err(CheckpointError::refused(container, error))
        }
        found => Ok(found.unwrap_or_else(|_| ImageDir::unopened(path))),
    }
}

/// Checkpoints `container`. After a panic of firn's own code it is rolled back, too. The caller holds its
/// operation lock.
pub async fn run(container: &Container, request: &Request, reaper: &Reaper) -> Result<(), CheckpointError> {
    match caught(Box::pin(transact(container, request, reaper))).await {
        Ok(done) => done,
        Err(_) => Err(rollback_after_panic(container, reaper).await),
    }
}

async fn transact(container: &Container, request: &Request, reaper: &Reaper) -> Result<(), CheckpointError> {
    expect_image(container)
        .await
        .map_err(|cause| CheckpointError::refused(container, cause))?;
    let others = other_gpus(container, reaper).await?;
    if container.traits.by_firn() {
        gpu::run(container, request, reaper).await
    } else {
        if let Some(refusal) = user_namespace(Path::new("/proc"), container.init.pid()) {
            return Err(CheckpointError::refused(container, refusal));
        }
        plain::run(container, request, others, reaper).await
    }
}

/// Refuses a CRIU configuration with which there would be no image where it is looked for.
async fn expect_image(container: &Container) -> Result<(), EffectError> {
    let guard = container.transaction.begin();
    let (bundle, limit) = (container.bundle.clone(), configured().deadlines.look);
    let read = move || match Spec::load(&bundle) {
        Ok(spec) => CriuConfig::of_criu(&spec, &bundle).expect_image(),
        // What is wrong with the spec is reported by those who need more of it.
        Err(_) => Ok(()),
    };
    let what = "the read of CRIU's configuration";
    Ok(bounded(what, limit, &guard.cancel, read).await??)
}

/// Joins a meeting for the `nth` time, and waits for the others.
async fn join(meeting: &Meeting, nth: usize, cancel: &CancellationToken) -> Result<(), EffectError> {
    match cancel.unless_cancelled(meeting.join(nth)).await {
        Some(true) => Ok(()),
        Some(false) if meeting.is_withdrawn() => Err(EffectError::Withdrawn),
        Some(false) => Err(match meeting.late() {
            Some(limit) => EffectError::OthersLate { limit },
            None => EffectError::Others,
        }),
        None => Err(EffectError::Killed),
    }
}

/// How the processes use GPUs of other vendors. A container that was given none is not inspected, and neither
/// is one whose job lets go of them in its hook: it has not been called yet.
async fn other_gpus(container: &Container, reaper: &Reaper) -> Result<OtherGpus, CheckpointError> {
    if !container.traits.other_gpus || container.traits.device_free {
        return Ok(OtherGpus::Unused);
    }
    let config = Config::load(Keys::CRIU).map_err(CheckpointError::Config)?;
    let workload = Workload {
        init: container.init.pid(),
        pids: container.cgroup()?.pids()?,
        other_vendors: Some(OtherVendors {
            nvidia: container.traits.has_nvidia(),
            amdgpu_plugin: config.criu.amdgpu_plugin.clone(),
        }),
        ..Workload::default()
    };
    let guard = container.transaction.begin();
    let request = look::Request::Check(Box::new(workload));
    let limit = config.deadlines.look;
    let checked: Result<Checked, _> = look::look(&request, reaper, limit, &guard.cancel).await;
    checked
        .map(|checked| checked.other_gpus)
        .map_err(|cause| CheckpointError::refused(container, cause))
}
