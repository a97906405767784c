//! Checkpoint of a container.
//!
//! A container whose spec requests no GPU is dumped as the stock shim would do it. For a container with GPUs,
//! the phases of [`phases`] run over [`ContainerEffects`]. If the client wants the container to end with the
//! dump, CRIU still leaves it running, frozen. firn ends it once the image with its manifest is complete, so
//! no failure after CRIU can cost the workload.

mod container;
mod dump;
mod error;
mod phases;
mod plain;
mod rollback;

use std::path::{Path, PathBuf};

use firn_config::{Config, find_program, names};
use firn_image::manifest::DumpFlags;
use firn_oci::criu_config::{CriuConfig, Operation};
use firn_oci::{Spec, edit, nccl};
use firn_preflight::{OtherGpus, OtherVendors, Workload};

pub use error::{CheckpointError, EffectError, FailureKind};
pub use rollback::{resume, rollback_after_panic};

use crate::cgroup::FreezerState;
use crate::container::{Container, InitState};
use crate::image_dir::{ImageDir, ImageDirError};
use crate::journal::{self, Begin, Journal, Outcome};
use crate::look::{self, Checked};
use crate::phase::Phase;
use crate::procfs;
use crate::reaper::Reaper;
use crate::runc::{Bounds, Checkpoint, RuntimeKind};
use crate::timings::PhaseTimings;
use container::{ContainerEffects, Context};
use dump::WorkDir;
use phases::Begun;

/// The log of a failed dump, kept in the bundle as the stock shim does.
pub const KEPT_LOG: &str = "criu-dump.log";

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
}

impl Request {
    fn call<'a>(
        &'a self,
        image: &'a Path,
        work: &'a Path,
        leave_running: bool,
        plugins: Option<&'a Path>,
        bounds: Bounds<'a>,
    ) -> Checkpoint<'a> {
        Checkpoint {
            image,
            work,
            parent: self.parent.as_deref(),
            flags: &self.flags,
            empty_namespaces: &self.empty_namespaces,
            leave_running,
            plugins,
            bounds,
        }
    }

    fn begin(&self, container: &Container, was_frozen: bool) -> Begin {
        let work = WorkDir::choose(container, self);
        Begin {
            op: journal::Operation::Checkpoint,
            container: container.id.clone(),
            gpu: container.gpu,
            exit: self.exit,
            image: self.image.path().to_owned(),
            work: work.path,
            work_is_ours: work.ours,
            was_frozen,
        }
    }
}

/// Edits the bundle of a new GPU container so that its dump will work: CRIU without its CUDA plugin and, if
/// the container requests it, NCCL ranks that share no GPU memory.
pub fn prepare_bundle(bundle: &Path, mut spec: Spec) -> Result<(), CheckpointError> {
    let config = Config::load().map_err(CheckpointError::Config)?;
    let criu = CriuConfig::new(&spec, bundle, config.criu.libs_dir.as_deref());
    criu.write(Operation::Dump)?;
    nccl::over_sockets(&mut spec, u64::from(config.nccl.shm_mib) << 20)?;
    if firn_oci::drop_mounting_hooks(&mut spec)? > 0 {
        log::info!("the hook disable-device-node-modification is removed: CRIU cannot dump what it mounts");
    }
    edit::set_criu_config(&mut spec, &criu.path())?;
    spec.save(bundle)?;
    Ok(())
}

/// Checks the image directory that was found for a checkpoint of `container`. For a container without GPUs,
/// the OCI runtime reports a directory that cannot be used, unless it has gone.
pub fn usable(
    container: &Container,
    found: Result<ImageDir, ImageDirError>,
    path: &Path,
) -> Result<ImageDir, CheckpointError> {
    match found {
        Err(error) if container.gpu || matches!(error, ImageDirError::Gone { .. }) => {
            Err(CheckpointError::refused(container, error.into()))
        }
        found => Ok(found.unwrap_or_else(|_| ImageDir::unopened(path))),
    }
}

/// Checkpoints `container`. The caller holds its operation lock.
pub async fn run(container: &Container, request: &Request, reaper: &Reaper) -> Result<(), CheckpointError> {
    let others = other_gpus(container, reaper).await?;
    if container.gpu {
        gpu(container, request, reaper).await
    } else {
        plain::run(container, request, others).await
    }
}

/// How the processes use GPUs of other vendors. A container that was given none is not inspected.
async fn other_gpus(container: &Container, reaper: &Reaper) -> Result<OtherGpus, CheckpointError> {
    if !container.other_gpus {
        return Ok(OtherGpus::Unused);
    }
    let config = Config::load().map_err(CheckpointError::Config)?;
    let workload = Workload {
        init: container.init.pid(),
        pids: container.cgroup()?.pids()?,
        other_vendors: Some(OtherVendors {
            nvidia: container.gpu,
            amdgpu_plugin: config.criu.amdgpu_plugin.clone(),
        }),
        ..Workload::default()
    };
    let guard = container.begin_transaction();
    let request = look::Request::Check(Box::new(workload));
    let limit = config.deadlines.look;
    let checked: Result<Checked, _> = look::look(&request, reaper, limit, &guard.cancel).await;
    checked
        .map(|checked| checked.other_gpus)
        .map_err(|cause| CheckpointError::refused(container, cause.into()))
}

async fn gpu(container: &Container, request: &Request, reaper: &Reaper) -> Result<(), CheckpointError> {
    match container.runc.kind().await {
        RuntimeKind::Runc => {}
        kind => return Err(CheckpointError::by_runtime(container, kind)),
    }
    let config = Config::load().map_err(CheckpointError::Config)?;
    let cgroup = container.cgroup()?;
    let was_frozen = cgroup.freezer_state()? != FreezerState::Thawed;
    let mut timings = PhaseTimings::begin("checkpoint", &container.id);
    let worker = find_program(names::WORKER_PROGRAM, config.worker.path.as_deref())
        .map_err(CheckpointError::Program)?;
    let journal = Journal::begin(&container.bundle, request.begin(container, was_frozen))
        .await
        .map_err(|error| CheckpointError::unwritten(container, error))?;
    let guard = container.begin_transaction();
    let cancel = &guard.cancel;
    let mut effects = ContainerEffects::new(
        container,
        request,
        &config,
        Context {
            cgroup,
            worker,
            reaper,
            timings: &mut timings,
            journal: journal.clone(),
            cancel: cancel.clone(),
        },
    );
    let mut result = transact(&mut effects, was_frozen, request.exit).await;
    journal::point("checkpoint-transacted").await;
    let is_cancelled = result.is_err() && cancel.is_cancelled();
    if is_cancelled {
        effects.kill().await;
    }
    // Order matters: if init ends from now on, the handler of its exit thaws the container.
    if result.as_ref().is_err_and(|failure| failure.suspended.is_some()) {
        container.set_state(InitState::Suspended);
    }
    let ended = if result.is_ok() && request.exit {
        effects.finish_container().await
    } else {
        Ok(())
    };
    // A killed process that still frees its memory is no zombie yet.
    let is_alive = !is_cancelled && procfs::is_alive(container.init.pid());
    if result.is_err() && !is_alive {
        effects.leave_thawed().await;
        drop(container.take_held());
    }
    effects
        .tidy(result.as_mut().err().map(|failure| &mut failure.source))
        .await;
    // The container has ended, and its client has gone and removed the image.
    let gone = result.is_ok() && request.exit && effects.has_lost_image().await;
    let image = match effects.complete() {
        false => None,
        true if result.is_err() || ended.is_err() || gone => effects.keep_image().await,
        true => {
            effects.drop_rescue().await;
            None
        }
    };
    effects.end().await;
    journal::point("checkpoint-worker-gone").await;
    journal
        .end(match &result {
            Ok(()) => Outcome::Done,
            Err(_) if !is_alive => Outcome::Ended,
            Err(phases::Failure {
                suspended: Some(_), ..
            }) => Outcome::Suspended,
            Err(_) => Outcome::Failed,
        })
        .await;
    journal::point("checkpoint-ended").await;
    timings.end(&container.bundle, result.is_ok() && ended.is_ok());
    result
        .map_err(|failure| CheckpointError::from_failure(&container.id, failure, image.clone(), is_alive))?;
    ended.map_err(|cause| CheckpointError::NotEnded {
        container: container.id.clone(),
        image: image.clone().unwrap_or_else(|| request.image.path().to_owned()),
        cause,
    })?;
    if gone {
        return Err(CheckpointError::Ended {
            container: container.id.clone(),
            phase: Phase::End,
            cause: ImageDirError::gone(request.image.path()).into(),
            image,
        });
    }
    Ok(())
}

async fn transact(
    effects: &mut ContainerEffects<'_>,
    was_frozen: bool,
    exit: bool,
) -> Result<(), phases::Failure<EffectError>> {
    let dumped = Begun::new(effects, was_frozen)
        .gpu_lock()
        .await?
        .gpu_checkpoint()
        .await?
        .dump()
        .await?;
    if exit {
        Ok(())
    } else {
        dumped.leave_running().await
    }
}
