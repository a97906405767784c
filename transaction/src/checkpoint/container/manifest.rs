//! Writes the manifest of a complete image.

use firn_gpu::{CudaProcess, CudaState, SourceGpu};
use firn_host::{Chain, CpuFeatures, clock, procfs};
use firn_image::manifest::{self, Manifest, Origin};
use firn_oci::mounts::RequiredMount;
use firn_preflight::Inherited;

use super::ContainerEffects;
use crate::checkpoint::dump::{bounded, describe};
use crate::checkpoint::error::EffectError;
use crate::parked::Parked;
use crate::{interposer, look, recording};

impl ContainerEffects<'_> {
    /// The processes for the manifest.
    pub(super) fn inside(&self, processes: &[CudaProcess]) -> Vec<manifest::CheckpointedProcess> {
        let inner = |task: String| procfs::inner_pid(&task);
        processes
            .iter()
            .filter_map(|CudaProcess { pid, restore_tid, .. }| {
                Some(manifest::CheckpointedProcess {
                    pid: inner(pid.to_string())?,
                    restore_tid: inner(format!("{pid}/task/{restore_tid}"))?,
                    state: CudaState::Running,
                })
            })
            .collect()
    }

    /// What processes have inherited, by their pids in the container.
    fn inherited_inside(&self) -> Vec<manifest::InheritedGpus> {
        let inside = |inherited: &Inherited| {
            Some(manifest::InheritedGpus {
                pid: procfs::inner_pid(&inherited.pid.to_string())?,
                open: inherited.open.clone(),
            })
        };
        self.progress.inherited.iter().filter_map(inside).collect()
    }

    /// Which of the mounts processes have in use. None if that cannot be read: then all of them may be.
    async fn in_use(&self, mounts: &[RequiredMount]) -> Result<Option<Vec<bool>>, EffectError> {
        let Ok(pids) = self.cgroup.pids() else {
            return Ok(None);
        };
        let places = mounts.iter().map(|mount| mount.destination.clone()).collect();
        match self.look(look::Request::InUse { pids, places }).await {
            Err(EffectError::Look(error)) => {
                let id = &self.transaction.container.id;
                log::warn!("all mounts of {id} may be in use: {}", Chain(&error));
                Ok(None)
            }
            seen => seen,
        }
    }

    /// Where the checkpoint comes from, for people.
    fn origin(&self) -> Origin {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let parked = self.progress.parked.as_ref().map(Parked::bytes);
        let bytes = || self.needs.values().copied().fold(0, u64::saturating_add);
        let source = self.source();
        Origin {
            container: self.transaction.container.id.clone(),
            image: source.image.clone(),
            host: host.trim_end().to_owned(),
            command: source.command.clone(),
            made: clock::now() / 1000,
            gpu_memory: parked.unwrap_or_else(bytes),
        }
    }

    /// The container's GPUs with the memory that its processes had on each.
    fn with_memory(&self, gpus: Vec<SourceGpu>) -> Vec<SourceGpu> {
        let parked = self.progress.parked.as_ref().map(|parked| &parked.memory);
        let memory = parked.unwrap_or(&self.needs);
        let used = |gpu: SourceGpu| SourceGpu {
            memory_used: memory.get(&gpu.uuid).copied().unwrap_or_default(),
            ..gpu
        };
        gpus.into_iter().map(used).collect()
    }

    /// The image gets the library that the processes have mapped.
    pub(super) async fn keep_library(&self) -> Result<(), EffectError> {
        if !self.transaction.container.traits.interposed {
            return Ok(());
        }
        let (bundle, image) = (
            self.transaction.container.bundle.clone(),
            self.request.image.inside(),
        );
        let (what, limit) = ("keep firn's library", self.transaction.config.deadlines.criu_dump);
        let pack = move || interposer::pack(&bundle, &image);
        Ok(bounded(what, limit, self.transaction.cancel(), pack).await??)
    }

    /// The checksums of the image.
    pub(super) async fn describe_image(&mut self) -> Result<(), EffectError> {
        let known = std::mem::take(&mut self.progress.copied.files);
        let (limit, cancel) = (
            self.transaction.config.deadlines.criu_dump,
            self.transaction.cancel(),
        );
        self.progress.images = describe(&self.request.image, known, limit, cancel).await?;
        if let Some(recording) = recording::current() {
            let memory = self.progress.copied.memory.as_ref();
            recording.image_bytes(manifest::size(&self.progress.images, memory));
        }
        Ok(())
    }

    pub(super) async fn write_manifest(&mut self) -> Result<(), EffectError> {
        let processes = std::mem::take(&mut self.progress.described);
        let images = self.progress.images.clone();
        let bulk = self.progress.copied.memory.take();
        let source = self.source().clone();
        let image = self.request.image.clone();
        let (limit, cancel) = (
            self.transaction.config.deadlines.criu_dump,
            self.transaction.cancel(),
        );
        let mut mounts = source.mounts;
        if let Some(used) = self.in_use(&mounts).await? {
            for (mount, used) in mounts.iter_mut().zip(used) {
                mount.in_use = used;
            }
        }
        let backend = self.transaction.container.traits.backend;
        let is_device_free = source.assertions.device_free;
        let gpus = self.with_memory(source.gpus);
        let (checkpoint, inherited_gpus) = (self.transaction.id.clone(), self.inherited_inside());
        let origin = self.origin().cleaned();
        let write = move || {
            let mut manifest = Manifest {
                checkpoint,
                origin: Some(origin),
                hooks: source.hooks,
                backend,
                dump: source.dump,
                driver: Some(source.driver),
                gpus,
                topology: source.topology,
                processes,
                inherited_gpus,
                released_gpus: None,
                bulk,
                mounts,
                cpu: CpuFeatures::here(),
                versions: source.versions,
                images,
            };
            if is_device_free {
                manifest = manifest.without_devices();
            }
            manifest.write_by(&image.inside(), image.path())?;
            image.seal();
            Ok(image.check()?)
        };
        bounded("write the manifest", limit, cancel, write).await?
    }
}
