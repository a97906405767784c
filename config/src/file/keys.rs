//! The keys of the configuration file.

use super::{
    Checkpoint, Config, Conversion, Create, Criu, Deadlines, Exec, Hook, Nccl, OpenImageDir, RemapPolicy,
    Restore, Worker,
};
use crate::section::{Keys, Section, Slot};

impl Section for Config {
    fn keys(&mut self) -> Keys<'_> {
        let Self {
            worker,
            hook,
            criu,
            deadlines,
            create,
            checkpoint,
            restore,
            nccl,
        } = self;
        vec![
            ("worker", Slot::Section(worker)),
            ("hook", Slot::Section(hook)),
            ("criu", Slot::Section(criu)),
            ("deadlines", Slot::Section(deadlines)),
            ("create", Slot::Section(create)),
            ("checkpoint", Slot::Section(checkpoint)),
            ("restore", Slot::Section(restore)),
            ("nccl", Slot::Section(nccl)),
        ]
    }
}

impl Section for Worker {
    fn keys(&mut self) -> Keys<'_> {
        let Self { path } = self;
        vec![("path", Slot::AbsolutePath(path))]
    }
}

impl Section for Hook {
    fn keys(&mut self) -> Keys<'_> {
        let Self { path } = self;
        vec![("path", Slot::AbsolutePath(path))]
    }
}

impl Section for Criu {
    fn keys(&mut self) -> Keys<'_> {
        let Self {
            libs_dir,
            amdgpu_plugin,
        } = self;
        vec![
            ("libs-dir", Slot::AbsolutePath(libs_dir)),
            ("amdgpu-plugin", Slot::AbsolutePath(amdgpu_plugin)),
        ]
    }
}

impl Section for Deadlines {
    fn keys(&mut self) -> Keys<'_> {
        let Self {
            inventory,
            discover,
            look,
            verify,
            freeze,
            gpu_lock,
            gpu_checkpoint,
            hold,
            criu_dump,
            criu_restore,
            gpu_restore,
            gpu_unlock,
            rollback,
            end,
            worker_end,
        } = self;
        vec![
            ("inventory", Slot::Duration(inventory)),
            ("discover", Slot::Duration(discover)),
            ("look", Slot::Duration(look)),
            ("verify", Slot::Duration(verify)),
            ("freeze", Slot::Duration(freeze)),
            ("gpu-lock", Slot::Duration(gpu_lock)),
            ("gpu-checkpoint", Slot::Duration(gpu_checkpoint)),
            ("hold", Slot::Duration(hold)),
            ("criu-dump", Slot::Duration(criu_dump)),
            ("criu-restore", Slot::Duration(criu_restore)),
            ("gpu-restore", Slot::Duration(gpu_restore)),
            ("gpu-unlock", Slot::Duration(gpu_unlock)),
            ("rollback", Slot::Duration(rollback)),
            ("end", Slot::Duration(end)),
            ("worker-end", Slot::Duration(worker_end)),
        ]
    }
}

impl Section for Create {
    fn keys(&mut self) -> Keys<'_> {
        let Self {
            cdi_dirs,
            hooks,
            visible_devices,
            volume_mounts,
            cdi_annotations,
        } = self;
        vec![
            ("cdi-dirs", Slot::Paths(cdi_dirs)),
            ("hooks", Slot::word(hooks, &Conversion::WORDS)),
            ("visible-devices", Slot::Bool(visible_devices)),
            ("volume-mounts", Slot::Bool(volume_mounts)),
            ("cdi-annotations", Slot::Bool(cdi_annotations)),
        ]
    }
}

impl Section for Checkpoint {
    fn keys(&mut self) -> Keys<'_> {
        let Self {
            exec,
            open_image_dir,
            rescue_dir,
        } = self;
        vec![
            ("exec", Slot::word(exec, &Exec::WORDS)),
            ("open-image-dir", Slot::word(open_image_dir, &OpenImageDir::WORDS)),
            ("rescue-dir", Slot::AbsolutePath(rescue_dir)),
        ]
    }
}

impl Section for Restore {
    fn keys(&mut self) -> Keys<'_> {
        let Self {
            gpus,
            gpu_map,
            policy,
            cri,
        } = self;
        vec![
            ("gpus", Slot::Texts(gpus)),
            ("gpu-map", Slot::Texts(gpu_map)),
            ("policy", Slot::word(policy, &RemapPolicy::WORDS)),
            ("cri", Slot::Bool(cri)),
        ]
    }
}

impl Section for Nccl {
    fn keys(&mut self) -> Keys<'_> {
        let Self { shm_mib } = self;
        vec![("shm-mib", Slot::Number(shm_mib))]
    }
}
