//! What a restore decides before anything is started. A refusal here leaves no process and no mount.

mod helper;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use firn_config::{Config, Keys, Tcp, find_criu_plugin, find_program, names};
use firn_gpu::protocol::GpuMemory;
use firn_gpu::{GpuPair, Inventory};
use firn_host::Problem;
use firn_image::criu::has_connections;
use firn_image::manifest::{self, DumpFlags, Manifest, Memory, Verified};
use firn_image::memory::call::{Request, Stored};
use firn_oci::amd;
use firn_oci::criu_config::{CriuConfig, Operation};
use firn_oci::job_hook::{
    Facts, FactsOfGpu, JobHook, any_is_named, prepare as prepare_hooks, release_devices, releases_devices,
};
use firn_oci::{Spec, dev_repair, edit, mounts};
use firn_preflight::{expect_cpu, expect_criu};
use firn_process::OrWarn;
use firn_process::blocking::{Left, stoppable};
use firn_process::cancel::{CancellationToken, Interrupted};
use firn_process::reaper::Reaper;
use firn_remap::GpuAssignment;

use super::RestoreError;
use super::compare::{self, printed};
use super::device_free;
use super::error::Refusal;
use super::place::{in_use, is_own};
use crate::configured::configured;
use crate::driver::{Driver, WorkerError};
use crate::gpu_request::ResolvedSpec;
use crate::interposer;
use crate::job_hook::{self, HookError, address};
use crate::lease;
use crate::look;
use crate::memory::Copier;
use crate::memory_owner::{self, Chosen};
use crate::options::RuncOptions;
use crate::prepared_restore::{GpuPart, PlainPart, PreparedRestore};
use crate::runc::{Runc, RuntimeKind};
use helper::{library_dirs, replay_hooks};

/// How long firn-hook may take. It reads or makes some small files.
const HELPER: Duration = Duration::from_secs(30);

/// A restore that Create prepares: the container, and the checkpoint in `image`.
#[derive(Clone, Copy)]
pub struct Preparation<'a> {
    pub id: &'a str,
    pub options: &'a RuncOptions,
    pub bundle: &'a Path,
    pub image: &'a Path,
    /// Who has chosen the image.
    pub chosen: Chosen,
    pub runc: &'a Runc,
    pub reaper: &'a Reaper,
    pub cancel: &'a CancellationToken,
}

impl Preparation<'_> {
    /// Reads the checkpoint and edits the container's spec for the GPUs that it gets.
    pub async fn prepare(self, resolved: &ResolvedSpec) -> Result<PreparedRestore, RestoreError> {
        let prepared = self.prepare_unless_refused(resolved).await;
        prepared.map_err(|cause| RestoreError::Refused {
            id: self.id.to_owned(),
            image: self.image.to_owned(),
            cause,
        })
    }

    async fn prepare_unless_refused(self, resolved: &ResolvedSpec) -> Result<PreparedRestore, Refusal> {
        let (bundle, image) = (self.bundle, self.image);
        let mut spec = resolved.spec.clone();
        if self.chosen == Chosen::ByClient {
            expect_permitted(&spec)?;
        }
        let manifest = read_image(spec.clone(), image, self.cancel).await?;
        if let Some((manifest, _)) = &manifest {
            expect_cpu(&manifest.cpu, &spec)?;
        }
        let from_device_free = manifest
            .as_ref()
            .is_some_and(|(manifest, _)| manifest.is_device_free());
        let has_hooks = resolved.gpu || from_device_free;
        if has_hooks {
            if let Some((manifest, _)) = &manifest
                && adopt(&mut spec, manifest)?
            {
                spec.save(bundle)?;
            }
            job_hook::admit(&spec, &Config::load(Keys::JOB_HOOKS)?)?;
        }
        let checkpoint = manifest.as_ref().map_or("", |(manifest, _)| &manifest.checkpoint);
        let mut prepared = PreparedRestore {
            id: self.id.to_owned(),
            image: image.to_owned(),
            flags: DumpFlags::default(),
            verified: None,
            bytes: 0,
            plain: PlainPart::default(),
            facts: (has_hooks && any_is_named(&spec))
                .then(|| job_hook::facts(JobHook::Restored, checkpoint, image)),
            gpu: None,
        };
        match &manifest {
            Some((manifest, _)) if from_device_free || !manifest.gpus.is_empty() => {
                prepared.gpu = Some(self.gpu_part(spec, manifest, prepared.facts.as_mut()).await?);
            }
            // An image without GPU state, by another shim or by firn.
            _ => {
                let by_firn = resolved.gpu || releases_devices(&spec);
                prepared.flags.open_tcp = keeps_connections(&spec, bundle, image, self.cancel).await?;
                prepared.plain = plain_part(bundle, spec, by_firn, manifest.is_some(), self.runc).await?
            }
        }
        // Order matters: the image is compared with the edited spec, which the OCI runtime will read.
        compare::image(bundle, image, self.reaper).await?;
        if let Some((manifest, verified)) = manifest {
            prepared.flags = manifest.dump;
            prepared.bytes = manifest::size(&manifest.images, manifest.bulk.as_ref());
            prepared.verified = Some(Arc::new(verified));
        }
        Ok(prepared)
    }

    async fn gpu_part(
        self,
        mut spec: Spec,
        manifest: &Manifest,
        facts: Option<&mut Facts>,
    ) -> Result<GpuPart, Refusal> {
        let device_free = manifest.is_device_free();
        let has_nvidia = spec.requests_gpu();
        if !has_nvidia && !device_free {
            return Err(Refusal::NoGpuRequested);
        }
        self.runc.expect_runc().await?;
        expect_criu(&std::env::var_os("PATH").unwrap_or_default())?;
        self.find_free_cgroup(&mut spec)?;
        let config = Config::load(Keys::RESTORE)?;
        let worker = find_program(names::WORKER_PROGRAM, config.worker.path.as_deref())?;
        let hook = find_program(names::HOOK_PROGRAM, config.hook.path.as_deref())?;
        let plugin = plugin(manifest, &config)?;
        let stored = self.stored(&spec, manifest, &config, &hook).await?;
        let (bundle, reaper) = (self.bundle, self.reaper);
        let inventory = if has_nvidia {
            self.inventory(&worker, &config, device_free && spec.author().owns_node())
                .await?
        } else {
            Inventory::default()
        };
        let (pairs, needs) = if device_free {
            device_free::give(self.id, &mut spec, manifest, &inventory, &config, facts)?;
            (Vec::new(), GpuMemory::new())
        } else {
            self.assign(&mut spec, manifest, &inventory, &config, facts)?
        };
        let criu = CriuConfig::new(&spec, bundle, config.criu.libs_dir.as_deref())
            .with_plugins(config.criu.libs_dir.clone(), plugin)
            .with_tcp(if manifest.dump.open_tcp {
                Tcp::Keep
            } else {
                Tcp::Refuse
            })
            .with_script(&hook);
        edit::strip_gpu_hooks(&mut spec)?;
        edit::add_restore_hook(&mut spec, &hook)?;
        edit::set_criu_config(&mut spec, &criu.path())?;
        let (version, limit) = (&inventory.driver_version, config.deadlines.look);
        self.apply_mounts(&mut spec, manifest, version, &hook, limit)
            .await?;
        spec.save(bundle)?;
        if spec.create_hooks().next().is_some() {
            replay_hooks(&hook, bundle, reaper).await;
        }
        criu.write(Operation::Restore)?;
        Ok(GpuPart {
            stored,
            device_free,
            has_nvidia: spec.requests_gpu(),
            pairs,
            needs,
            processes: manifest.processes.clone(),
            inherited: manifest.inherited_gpus.clone(),
            criu,
            config,
            worker,
            hook,
        })
    }

    /// Looks whether this node's store has what the image does not hold, and the container may have it.
    async fn stored(
        self,
        spec: &Spec,
        manifest: &Manifest,
        config: &Config,
        hook: &Path,
    ) -> Result<Option<Stored>, Refusal> {
        let Some(memory) = manifest.bulk.clone() else {
            return Ok(None);
        };
        let stored = Stored {
            store: config.images.store.clone(),
            key: config.images.store_key.clone(),
            memory,
            checkpoint: Some(manifest.checkpoint.clone()),
            reader: memory_owner::reader(spec, self.chosen, config).ok_or(Refusal::ImageFromStore)?,
        };
        let copier = Copier {
            hook: hook.to_owned(),
            reaper: self.reaper.clone(),
            limit: config.deadlines.verify,
            container: self.id.to_owned(),
            bundle: self.bundle.to_owned(),
            journal: None,
        };
        let () = copier.ask(Request::Look(stored.clone()), self.cancel).await?;
        Ok(Some(stored))
    }

    /// Gives the container the library that the processes of the image have mapped, if they have one.
    async fn give_library(self, spec: &mut Spec, manifest: &Manifest) -> Result<(), Refusal> {
        if !manifest.is_interposed() {
            return Ok(interposer::remove(spec, self.bundle)?);
        }
        let limit = configured().deadlines.verify;
        let (image, bundle) = (self.image.to_owned(), self.bundle.to_owned());
        let unpacked = stoppable(limit, self.cancel, move |_| interposer::unpack(&image, &bundle));
        unpacked.await.map_err(|left| left_image(left, limit))??;
        Ok(interposer::add_restored(spec, self.bundle)?)
    }

    /// The node's GPUs. With `may_lack_driver` a node whose driver cannot be asked has none.
    async fn inventory(
        self,
        worker: &Path,
        config: &Config,
        may_lack_driver: bool,
    ) -> Result<Inventory, Refusal> {
        let mut gpu = Driver::new(worker.to_owned(), self.reaper.clone(), config.deadlines.clone());
        let inventory = gpu.inventory().await;
        gpu.end().await;
        match inventory {
            Err(error @ WorkerError::Refused { .. }) if may_lack_driver => {
                log::warn!(
                    "restore of {}: this node has no GPU of NVIDIA's: {error}",
                    self.id
                );
                Ok(Inventory::default())
            }
            inventory => Ok(inventory?),
        }
    }

    /// Gives the spec the GPUs that replace those of the checkpoint. Returns the map for the driver, and how
    /// much memory is needed on each.
    fn assign(
        self,
        spec: &mut Spec,
        manifest: &Manifest,
        inventory: &Inventory,
        config: &Config,
        facts: Option<&mut Facts>,
    ) -> Result<(Vec<GpuPair>, GpuMemory), Refusal> {
        let decision = GpuAssignment::make(spec, manifest, inventory, &config.restore)
            .map_err(|error| lease::name_holders(error, spec))?;
        for pair in decision.map.pairs() {
            log::info!("gpu map: {} -> {}", pair.old, pair.new);
        }
        if let Some(facts) = facts {
            add_gpus(facts, manifest, &decision, inventory);
        }
        for warning in &decision.warnings {
            log::warn!("restore of {}: {warning}", self.id);
        }
        let edited = edit::replace_gpus(spec, &decision.targets(), &inventory.common_nodes)?;
        log::debug!("spec edited for the target's GPUs: {edited:?}");
        Ok((decision.map.for_driver().to_vec(), decision.needs(&manifest.gpus)))
    }

    /// Gives the spec the mounts that the checkpoint needs, and logs which of them differ.
    async fn apply_mounts(
        self,
        spec: &mut Spec,
        manifest: &Manifest,
        version: &str,
        hook: &Path,
        limit: Duration,
    ) -> Result<(), Refusal> {
        self.give_library(spec, manifest).await?;
        let empty = self.bundle.join(names::BUNDLE_EMPTY);
        let mounts = spec.value()["mounts"].clone();
        let resolve = async |dirs: Vec<String>| {
            let request = look::Request::Mounts {
                mounts: mounts.clone(),
                bundle: self.bundle.to_owned(),
                required: manifest.mounts.clone(),
                device_free: manifest.is_device_free(),
                version: version.to_owned(),
                dirs,
                empty: empty.clone(),
            };
            look::look::<mounts::ResolvedMounts>(&request, self.reaper, limit, self.cancel).await
        };
        let dirs = mounts::LIBRARY_DIRS.map(str::to_owned).to_vec();
        let mut resolved = match resolve(dirs.clone()).await {
            Err(Interrupted::Failed(error)) if error.code() == mounts::SOURCE_MISSING => {
                let by_cdi = library_dirs(hook, self.reaper).await;
                resolve([dirs, by_cdi].concat()).await.map_err(|_| error)?
            }
            resolved => resolved?,
        };
        resolved.apply(spec)?;
        if !resolved.empty.is_empty() {
            std::fs::write(&empty, "").map_err(|source| Refusal::EmptyFile { path: empty, source })?;
        }
        for (destination, file) in &resolved.from_driver {
            let (at, file) = (destination.display(), file.display());
            log::info!("mount {at}: {file} of this node's driver");
        }
        for at in resolved.empty.iter().map(|path| path.display()) {
            log::warn!("mount {at}: this node has none, it will be empty");
        }
        for at in resolved.late.iter().map(|path| path.display()) {
            log::info!("mount {at}: the checkpoint did not have it, firn-hook makes it");
        }
        for at in resolved.extra.iter().map(|path| path.display()) {
            log::warn!("mount {at}: the checkpoint did not have it, it will not be there");
        }
        Ok(())
    }

    /// `ctr containers restore` copies the cgroup of the source along with its spec. Under another id the
    /// container gets a cgroup of its own next to it, because the rollback of a restore kills all processes
    /// in its cgroup.
    fn find_free_cgroup(self, spec: &mut Spec) -> Result<(), Refusal> {
        if !is_own(self.id, spec) {
            edit::rename_cgroup(spec, self.id)?;
        }
        if in_use(self.id, self.options, spec, self.bundle)? {
            return Err(Refusal::CgroupBusy {
                path: spec.cgroups_path().unwrap_or_default().to_owned(),
            });
        }
        Ok(())
    }
}

/// Refuses the image of a container that somebody else than a client of this node wants to have restored,
/// unless the configuration permits it.
fn expect_permitted(spec: &Spec) -> Result<(), Refusal> {
    if spec.author().owns_node() || Config::load(Keys::CRI)?.restore.cri {
        Ok(())
    } else {
        Err(Refusal::Cri)
    }
}

/// What is decided before the OCI runtime itself restores the container of this bundle: whether it may be
/// restored, and whether the image exceeds its spec.
///
/// # Errors
/// [`RestoreError::Refused`].
pub async fn admit(
    id: &str,
    spec: &Spec,
    bundle: &Path,
    image: &Path,
    reaper: &Reaper,
) -> Result<(), RestoreError> {
    let admitted = async {
        expect_permitted(spec)?;
        compare::image(bundle, image, reaper).await
    };
    admitted.await.map_err(|cause| RestoreError::Refused {
        id: id.to_owned(),
        image: image.to_owned(),
        cause,
    })
}

/// firn's plugin for CRIU, if the image needs it.
fn plugin(manifest: &Manifest, config: &Config) -> Result<Option<PathBuf>, Refusal> {
    if manifest.inherited_gpus.is_empty() {
        Ok(None)
    } else {
        find_criu_plugin(config.criu.libs_dir.as_deref())
            .map(Some)
            .ok_or(Refusal::NoPlugin)
    }
}

/// Adds which GPU of the checkpoint has become which.
fn add_gpus(facts: &mut Facts, manifest: &Manifest, decision: &GpuAssignment, inventory: &Inventory) {
    facts.gpus = manifest
        .gpus
        .iter()
        .map(|old| {
            let pair = decision.map.pairs().iter().find(|pair| pair.old == old.uuid);
            let new = inventory
                .gpus
                .iter()
                .find(|gpu| pair.is_some_and(|pair| pair.new == gpu.uuid));
            FactsOfGpu {
                old: Some(address(&old.uuid, &old.pci_address)),
                new: new.map(|new| address(&new.uuid, &new.pci_address)),
            }
        })
        .collect();
    facts.pci_changed = facts.gpus.iter().any(FactsOfGpu::has_moved);
}

/// Gives the copy the hooks of its source, and the assertion that its devices are let go. Returns whether the
/// spec was changed.
fn adopt(spec: &mut Spec, manifest: &Manifest) -> Result<bool, Refusal> {
    let has_hooks = prepare_hooks(spec, &manifest.hooks).map_err(HookError::Setting)?;
    let can_release = manifest.is_device_free() && JobHook::Prepare.is_named(spec);
    Ok((can_release && release_devices(spec)?) || has_hooks)
}

/// CRIU's settings for an image without NVIDIA's GPU state. The state of AMD's GPUs is in CRIU's images if a
/// process had them open, which is not known here. So a program or plugin that is missing on this node
/// refuses nothing. Device nodes of graphics and of accelerators alone are left as the stock shim leaves
/// them: nothing carries their state.
async fn plain_part(
    bundle: &Path,
    mut spec: Spec,
    may_have_gpus: bool,
    is_firns: bool,
    runc: &Runc,
) -> Result<PlainPart, Refusal> {
    let mut plain = PlainPart::default();
    let is_runc = runc.kind().await == RuntimeKind::Runc;
    let config = configured();
    let hook = find_program(names::HOOK_PROGRAM, config.hook.path.as_deref()).or_log();
    let with_script = |criu: CriuConfig| match &hook {
        Some(hook) => criu.with_script(hook),
        None => criu,
    };
    if may_have_gpus {
        // Create edits the spec and writes CRIU's configuration later, as for a container with NVIDIA's GPUs.
        let criu = CriuConfig::new(&spec, bundle, config.criu.libs_dir.as_deref());
        plain.criu = is_runc.then(|| with_script(criu).without_state());
        return Ok(plain);
    }
    let criu = with_script(CriuConfig::of_criu(&spec, bundle));
    if spec.has_amd_gpus() && !is_firns {
        let plugin = config.criu.amdgpu_plugin.as_deref();
        plain.plugins = amd::plugin_directory(bundle, plugin, &amd::PLUGIN_DIRS).or_log();
        if is_runc {
            let edited = edit::replace_other_gpus(&mut spec, &dev_repair::other_gpus_of_host())?;
            if !edited.is_empty() {
                let bundle = bundle.display();
                log::warn!("device nodes in the spec in {bundle} have changed: {edited}");
            }
        }
    }
    if is_runc {
        edit::set_criu_config(&mut spec, &criu.path())?;
        if let Some(hook) = &hook {
            edit::add_restore_hook(&mut spec, hook)?;
        }
        spec.save(bundle)?;
        plain.criu = Some(criu);
    }
    Ok(plain)
}

/// Whether an image without manifest has connections that its restore continues: whoever made it has asked
/// for them, and no client can ask for them at a restore.
async fn keeps_connections(
    spec: &Spec,
    bundle: &Path,
    image: &Path,
    cancel: &CancellationToken,
) -> Result<bool, Refusal> {
    // The author of a pod may have made the image.
    if !spec.author().owns_node() || CriuConfig::of_criu(spec, bundle).users_tcp() == Some(Tcp::Close) {
        return Ok(false);
    }
    let (limit, path) = (configured().deadlines.look, image.to_owned());
    let found = stoppable(limit, cancel, move |_| has_connections(&path));
    // What cannot be read is CRIU's to report.
    Ok(found
        .await
        .map_err(|left| left_image(left, limit))?
        .unwrap_or_default())
}

/// Reads and verifies the image, and returns its manifest if it has one. Reads every byte but those of memory
/// that is compared while CRIU restores it, unless the client no longer waits for the container.
async fn read_image(
    spec: Spec,
    image: &Path,
    cancel: &CancellationToken,
) -> Result<Option<(Manifest, Verified)>, Refusal> {
    let limit = configured().deadlines.verify;
    let path = image.to_owned();
    let read = stoppable(limit, cancel, move |stop| {
        let Some(manifest) = Manifest::read_for(&spec, &path)? else {
            return Ok(None);
        };
        let stand_still = manifest.is_device_free() || !manifest.gpus.is_empty();
        let memory = if stand_still { Memory::Later } else { Memory::Now };
        let verified = manifest.verify_images_until(&path, memory, stop)?;
        Ok(Some((manifest, verified)))
    });
    read.await.map_err(|left| left_image(left, limit))?
}

/// The refusal of an image whose verification has not finished.
pub(super) fn left_image(left: Left, limit: Duration) -> Refusal {
    match left {
        Left::Late => Refusal::ImageLate { limit },
        Left::Cancelled => Refusal::Killed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A wrapper of runc gives the container NVIDIA's GPUs, which its spec does not show.
    #[tokio::test]
    async fn a_container_that_gets_nvidia_gpus_is_not_edited_for_amd_gpus() {
        let reaper = Reaper::start().unwrap();
        let options = RuncOptions {
            binary_name: "/nonexistent/runc".to_owned(),
            ..RuncOptions::default()
        };
        for gpu in [false, true] {
            let bundle = tempfile::tempdir().unwrap();
            let node = serde_json::json!({"path": "/dev/kfd", "type": "c", "major": 511, "minor": 0});
            let spec = Spec::from(serde_json::json!({"linux": {"devices": [node]}}));
            let runc = Runc::new("c", "default", bundle.path(), &options, reaper.clone());
            let plain = plain_part(bundle.path(), spec, gpu, false, &runc).await.unwrap();
            assert!(plain.criu.is_some());
            let edited =
                Spec::load(bundle.path()).is_ok_and(|spec| spec.annotation("org.criu.config").is_some());
            assert_eq!(edited, !gpu, "with NVIDIA's GPUs: {gpu}");
            assert!(!gpu || std::fs::read_dir(bundle.path()).unwrap().next().is_none());
        }
    }
}
