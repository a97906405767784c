//! What Create decides before anything is started.
//!
//! [`prepare`] gives the spec in the bundle the GPUs that it requests, edits it so that the container can be
//! checkpointed, or for the restore of a checkpoint. Whoever creates the container mounts its rootfs before,
//! and runs the OCI runtime after.

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::Pin;

use firn_gpu::Backend;
use firn_host::ProblemLine;
use firn_oci::job_hook::{self, JobHook, JobHookError};
use firn_oci::{Spec, SpecError};

use crate::cancel::CancellationToken;
use crate::checkpoint::{self, CheckpointError};
use crate::container::ContainerTraits;
use crate::gpu_request;
use crate::options::RuncOptions;
use crate::prepared_restore::PreparedRestore;
use crate::reaper::Reaper;
use crate::restore::{self, Preparation, RestoreError};
use crate::runc::Runc;
use crate::warn::OrWarn;

pub use crate::gpu_request::GpuRequestError;

/// The container that a client requests.
pub struct Request<'a> {
    pub id: &'a str,
    pub namespace: &'a str,
    pub bundle: &'a Path,
    pub options: RuncOptions,
    /// The checkpoint to restore from.
    pub image: Option<&'a Path>,
    pub reaper: &'a Reaper,
    /// The container's labels, which clients copy from its image. Awaited only if hooks may be called.
    pub labels: Pin<Box<dyn Future<Output = BTreeMap<String, String>> + Send + 'a>>,
    /// Cancelled when the client no longer wants the container.
    pub cancel: &'a CancellationToken,
}

/// A bundle that the OCI runtime can create the container from, or restore it.
pub struct PreparedBundle {
    /// The options of the request, with the OCI runtime to call.
    pub options: RuncOptions,
    pub traits: ContainerTraits,
    pub runc: Runc,
    /// Absent for a container that is not restored.
    pub restore: Option<PreparedRestore>,
}

/// Why a container is not created. Nothing has been started.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    #[error("OCI runtime create failed: cannot read the bundle")]
    Spec(#[from] SpecError),
    #[error(transparent)]
    GpuRequest(#[from] GpuRequestError),
    #[error("{}", ProblemLine(.0))]
    JobHook(#[from] JobHookError),
    #[error(transparent)]
    Restore(#[from] RestoreError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// Edits the bundle so that the OCI runtime can use it.
pub async fn prepare(request: Request<'_>) -> Result<PreparedBundle, PrepareError> {
    let (id, bundle, reaper) = (request.id, request.bundle, request.reaper);
    let mut options = request.options;
    let spec = Spec::load(bundle)?;
    let mut resolved =
        gpu_request::resolve(spec, bundle, options.wrapper(), request.image.is_some(), reaper).await?;
    if resolved.gpu || job_hook::asserts_release(&resolved.spec) {
        let labels = request.labels.await;
        // A pod's annotation is that of all its containers: one without devices need not have hooks.
        let is_meant = resolved.gpu || resolved.spec.has_other_gpus();
        let is_meant = is_meant || JobHook::Prepare.is_named_by(&resolved.spec, &labels);
        if is_meant && job_hook::prepare(&mut resolved.spec, &labels)? {
            resolved.spec.save(bundle)?;
        }
    }
    let (spec, gpu) = (&resolved.spec, resolved.gpu);
    if let Some(runtime) = &resolved.runtime {
        options.binary_name.clone_from(runtime);
    }
    let mut traits = traits_of(spec, gpu);
    let runc = Runc::new(id, request.namespace, bundle, &options, reaper.clone());
    let restore = match request.image {
        Some(image) => {
            let preparation = Preparation {
                id,
                options: &options,
                bundle,
                image,
                runc: &runc,
                reaper,
                cancel: request.cancel,
            };
            Some(preparation.prepare(&resolved).await?)
        }
        None => {
            mark_shared_cgroup(id, &options, spec, bundle);
            None
        }
    };
    let part = restore.as_ref().and_then(|restore| restore.gpu.as_ref());
    if let Some(part) = part.filter(|part| part.device_free) {
        traits.device_free = true;
        if !part.has_nvidia {
            traits.backend = Backend::None;
        }
    }
    traits.criu = match part {
        // The restore has edited the bundle already.
        Some(part) => Some(part.criu.clone()),
        None if traits.by_firn() => Some(checkpoint::prepare_bundle(bundle, resolved.spec)?),
        None => None,
    };
    Ok(PreparedBundle {
        options,
        traits,
        runc,
        restore,
    })
}

fn traits_of(spec: &Spec, gpu: bool) -> ContainerTraits {
    let other_gpus = spec.has_other_gpus();
    ContainerTraits {
        backend: match (gpu, other_gpus) {
            (true, _) => Backend::Nvidia,
            (false, true) => Backend::CriuPlugin,
            (false, false) => Backend::None,
        },
        other_gpus,
        device_free: job_hook::releases_devices(spec),
        private_pids: spec.has_namespace("pid") && spec.namespace_path("pid").is_none(),
        criu: None,
    }
}

/// Marks the bundle if there are processes in the container's cgroup already: the runtime refuses such a
/// cgroup, and the clean-up that follows must not end them.
fn mark_shared_cgroup(id: &str, options: &RuncOptions, spec: &Spec, bundle: &Path) {
    let in_use = restore::in_use(id, options, spec, bundle);
    if in_use.or_warn(format_args!("container {id}: cannot read its cgroup")) == Some(true) {
        log::warn!("container {id}: its cgroup has processes already");
    }
}
