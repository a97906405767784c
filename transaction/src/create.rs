//! What Create decides before anything is started.
//!
//! [`prepare`] gives the spec in the bundle the GPUs that it requests, edits it so that the container can be
//! checkpointed, or for the restore of a checkpoint. Whoever creates the container mounts its rootfs before,
//! and runs the OCI runtime after.

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::Pin;

use firn_config::{Config, Keys};
use firn_gpu::Backend;
use firn_host::{Chain, ProblemLine};
use firn_oci::criu_config::CriuConfig;
use firn_oci::job_hook::{self, JobHook, JobHookError};
use firn_oci::{Spec, SpecError, annotations, edit};
use firn_process::OrWarn;
use firn_process::cancel::CancellationToken;
use firn_process::reaper::Reaper;

use crate::checkpoint::{self, CheckpointError};
use crate::configured::configured;
use crate::container::ContainerTraits;
use crate::gpu_request;
use crate::interposer;
use crate::memory_owner::Chosen;
use crate::options::RuncOptions;
use crate::prepared_restore::PreparedRestore;
use crate::restore::{self, ImageStore, Named, Node, Preparation, Refusal, RestoreError, Wish};
use crate::runc::Runc;

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
    /// Where checkpoints are that pods name as images.
    pub images: &'a dyn ImageStore,
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
    /// Why a container that its pod wanted to have restored is created without its checkpoint.
    pub fallback: Option<PrepareError>,
    /// Annotations without effect, a line for each.
    pub warnings: Vec<String>,
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
///
/// A pod's annotations may name a checkpoint for the container. If that cannot be restored, and they allow
/// it, the container is created without.
pub async fn prepare(request: Request<'_>) -> Result<PreparedBundle, PrepareError> {
    let (given, warnings) = given(request.bundle)?;
    for warning in &warnings {
        log::warn!("container {}: {warning}", request.id);
    }
    let prepared = prepare_given(given, request).await?;
    Ok(PreparedBundle { warnings, ..prepared })
}

async fn prepare_given(given: Spec, request: Request<'_>) -> Result<PreparedBundle, PrepareError> {
    let Request {
        bundle,
        image,
        reaper,
        ..
    } = request;
    let mut labels = Labels::Due(request.labels);
    let attempt = Attempt {
        id: request.id,
        namespace: request.namespace,
        bundle,
        options: &request.options,
        reaper,
        cancel: request.cancel,
    };
    let wish = match image {
        Some(image) => {
            return attempt
                .prepare(given, &mut labels, Some((image, Chosen::ByClient)))
                .await;
        }
        None => Wish::of(&given).map_err(|cause| refused(request.id, bundle, cause))?,
    };
    let Some(wish) = wish else {
        return attempt.prepare(given, &mut labels, None).await;
    };
    // Boxed: of most containers nothing is restored.
    let restored = attempt.restore_named(&wish, &given, &mut labels, request.images);
    let restored = Box::pin(restored).await;
    let (prepared, named) = match restored {
        Ok(restored) => restored,
        Err(error) if wish.falls_back && !request.cancel.is_cancelled() => {
            log::warn!(
                "container {} starts without its checkpoint: {}",
                request.id,
                Chain(&error)
            );
            given.save(bundle)?;
            let prepared = attempt.prepare(given, &mut labels, None).await?;
            return Ok(PreparedBundle {
                fallback: Some(error),
                ..prepared
            });
        }
        Err(error) => return Err(error),
    };
    // Order matters: a container that starts without its checkpoint must not find its files. A layer that was
    // unpacked in part fails the Create: the kubelet makes another container, with files of its own.
    let unpacked = named.unpack_layer(bundle, reaper, request.cancel).await;
    unpacked.map_err(|cause| refused(request.id, &named.image, cause))?;
    named.note(request.id, bundle);
    Ok(prepared)
}

/// The spec that a client has put into the bundle, and what of its annotations has no effect. What firn notes
/// for itself is not taken from it.
fn given(bundle: &Path) -> Result<(Spec, Vec<String>), SpecError> {
    let mut given = Spec::load(bundle)?;
    let mut warnings = Vec::new();
    let internal = edit::drop_internal_annotations(&mut given)?;
    if !internal.is_empty() {
        let internal = internal.join(", ");
        warnings.push(format!(
            "annotations that no spec may have are removed: {internal}"
        ));
        given.save(bundle)?;
    }
    let wrong = annotations::with_unknown_values(&given).into_iter();
    warnings.extend(wrong.map(|wrong| format!("annotation {wrong}")));
    Ok((given, warnings))
}

fn refused(id: &str, image: &Path, cause: impl Into<Refusal>) -> PrepareError {
    PrepareError::Restore(RestoreError::Refused {
        id: id.to_owned(),
        image: image.to_owned(),
        cause: cause.into(),
    })
}

/// The container's labels, which are asked for once at most.
enum Labels<'a> {
    Due(Pin<Box<dyn Future<Output = BTreeMap<String, String>> + Send + 'a>>),
    Known(BTreeMap<String, String>),
}

impl Labels<'_> {
    async fn get(&mut self) -> &BTreeMap<String, String> {
        if let Self::Due(labels) = self {
            *self = Self::Known(labels.await);
        }
        match self {
            Self::Known(labels) => labels,
            Self::Due(_) => unreachable!("they are known by now"),
        }
    }
}

/// A container with or without a checkpoint.
struct Attempt<'a> {
    id: &'a str,
    namespace: &'a str,
    bundle: &'a Path,
    options: &'a RuncOptions,
    reaper: &'a Reaper,
    cancel: &'a CancellationToken,
}

impl Attempt<'_> {
    /// Prepares the restore that a pod has named. After an error nothing is left of an unpacked image.
    async fn restore_named(
        &self,
        wish: &Wish,
        given: &Spec,
        labels: &mut Labels<'_>,
        images: &dyn ImageStore,
    ) -> Result<(PreparedBundle, Named), PrepareError> {
        let restored = async {
            let refused = |cause: Refusal| refused(self.id, self.bundle, cause);
            let config = Config::load(Keys::NAMED_RESTORE).map_err(|cause| refused(cause.into()))?;
            let node = Node {
                config: &config,
                bundle: self.bundle,
                images,
                reaper: self.reaper,
                cancel: self.cancel,
            };
            let named = wish.find(node).await;
            let named = named.map_err(refused)?;
            let image = Some((&*named.image, named.chosen));
            let prepared = self.prepare(given.clone(), labels, image).await?;
            Ok((prepared, named))
        };
        let restored = restored.await;
        if restored.is_err() {
            restore::remove_unpacked(self.bundle).await;
        }
        restored
    }

    async fn prepare(
        &self,
        spec: Spec,
        labels: &mut Labels<'_>,
        image: Option<(&Path, Chosen)>,
    ) -> Result<PreparedBundle, PrepareError> {
        let (id, bundle, reaper) = (self.id, self.bundle, self.reaper);
        let mut options = self.options.clone();
        let mut resolved =
            gpu_request::resolve(spec, bundle, options.wrapper(), image.is_some(), reaper).await?;
        if resolved.gpu || job_hook::asserts_release(&resolved.spec) {
            let labels = labels.get().await;
            // A pod's annotation is that of all its containers: one without devices need not have hooks.
            let is_meant = resolved.gpu || resolved.spec.has_other_gpus();
            let is_meant = is_meant || JobHook::Prepare.is_named_by(&resolved.spec, labels);
            if is_meant && job_hook::prepare(&mut resolved.spec, labels)? {
                resolved.spec.save(bundle)?;
            }
        }
        let (spec, gpu) = (&resolved.spec, resolved.gpu);
        if let Some(runtime) = &resolved.runtime {
            options.binary_name.clone_from(runtime);
        }
        let mut traits = traits_of(spec, gpu);
        let runc = Runc::new(id, self.namespace, bundle, &options, reaper.clone());
        let restore = match image {
            Some((image, chosen)) => {
                let preparation = Preparation {
                    id,
                    options: &options,
                    bundle,
                    image,
                    chosen,
                    runc: &runc,
                    reaper,
                    cancel: self.cancel,
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
            None if traits.by_firn() => Some(checkpoint::prepare_bundle(bundle, resolved.spec, &traits)?),
            None => None,
        };
        traits.interposed = traits.by_firn() && interposer::is_in(bundle);
        Ok(PreparedBundle {
            options,
            traits,
            runc,
            restore,
            fallback: None,
            warnings: Vec::new(),
        })
    }
}

/// What [`prepare`] has decided for the container of this bundle, for a program that was started after it was
/// created.
pub fn reopen(bundle: &Path) -> Result<ContainerTraits, PrepareError> {
    let spec = Spec::load(bundle)?;
    let mut traits = traits_of(&spec, spec.requests_gpu());
    if traits.by_firn() {
        traits.interposed = interposer::is_in(bundle);
        let config = configured();
        traits.criu = Some(CriuConfig::new(&spec, bundle, config.criu.libs_dir.as_deref()));
    }
    Ok(traits)
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
        interposed: false,
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
