//! The configuration file: its sections and their defaults.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::names;
use crate::section::{self, Word, sections};

sections! {
    /// The node's configuration.
    pub struct Config {
        /// The driver worker.
        pub worker: Worker = Worker::default(),
        /// The OCI hook.
        pub hook: Hook = Hook::default(),
        /// The OCI runtime behind firn-runc.
        pub runc: Runc = Runc::default(),
        /// How CRIU is run on GPU containers.
        pub criu: Criu = Criu::default(),
        /// How long each phase of a checkpoint or restore may take.
        pub deadlines: Deadlines = Deadlines::default(),
        /// How containers get their GPUs.
        pub create: Create = Create::default(),
        /// What is checkpointed.
        pub checkpoint: Checkpoint = Checkpoint::default(),
        /// Which GPUs restored containers get.
        pub restore: Restore = Restore::default(),
        /// Where the memory of checkpoints goes.
        pub images: Images = Images::default(),
        /// Containers whose pause gives their GPUs free.
        pub pause: Pause = Pause::default(),
        /// Containers with the annotation `firn.dev/nccl`.
        pub nccl: Nccl = Nccl::default(),
        /// firn's library between programs and NVIDIA's driver.
        pub cuda: Cuda = Cuda::default(),
    }

    /// `[worker]`
    pub struct Worker {
        /// Where `firn-gpu` is. Default: the calling program's directory, then PATH.
        pub path: Option<PathBuf> = None,
    }

    /// `[hook]`
    pub struct Hook {
        /// Where `firn-hook` is. Default: the calling program's directory, then PATH.
        pub path: Option<PathBuf> = None,
    }

    /// `[runc]`
    pub struct Runc {
        /// Where the runc is that firn-runc calls. Default: PATH.
        pub path: Option<PathBuf> = None,
    }

    /// `[criu]`
    pub struct Criu {
        /// Directory of plugins that CRIU is given for GPU containers; must hold no CUDA plugin. Default:
        /// none.
        pub libs_dir: Option<PathBuf> = None,
        /// CRIU's plugin for AMD's GPUs, `amdgpu_plugin.so`. Default: looked for where CRIU's packages put
        /// it.
        pub amdgpu_plugin: Option<PathBuf> = None,
        /// Whether the distribution has repaired what CRIU of its version cannot do on the node's kernel.
        pub repaired: bool = false,
    }

    /// `[deadlines]`: the longest that each phase may take before the operation is rolled back.
    pub struct Deadlines {
        /// Reading the driver version and the GPUs.
        pub inventory: Duration = Duration::from_secs(30),
        /// Finding the CUDA processes of a container and their state.
        pub discover: Duration = Duration::from_secs(10),
        /// Each look at what the container's processes, its mounts or the image's file system show.
        pub look: Duration = Duration::from_secs(30),
        /// Comparing an image with its checksums before a restore.
        pub verify: Duration = Duration::from_secs(1800),
        /// Freezing or thawing the container's cgroup.
        pub freeze: Duration = Duration::from_secs(10),
        /// The driver's lock of all processes. The application's threads run meanwhile.
        pub gpu_lock: Duration = Duration::from_secs(10),
        /// The driver's copy of GPU memory into host memory, all processes together.
        pub gpu_checkpoint: Duration = Duration::from_secs(600),
        /// Holding the threads that must not run while the driver works.
        pub hold: Duration = Duration::from_secs(30),
        /// `runc checkpoint`, and once more for the checksums of what it has written.
        pub criu_dump: Duration = Duration::from_secs(1800),
        /// The container's hook `prepare`.
        pub prepare: Duration = Duration::from_secs(120),
        /// The container's hook `resumed`.
        pub resumed: Duration = Duration::from_secs(120),
        /// The container's hook `restored`.
        pub restored: Duration = Duration::from_secs(300),
        /// The container's hook `failed`.
        pub failed: Duration = Duration::from_secs(120),
        /// What a resume waits for GPUs that another container has, if it is to wait.
        pub gpu_wait: Duration = Duration::from_secs(600),
        /// `runc restore`.
        pub criu_restore: Duration = Duration::from_secs(1800),
        /// The driver's copy of GPU memory back onto the GPU, all processes together.
        pub gpu_restore: Duration = Duration::from_secs(600),
        /// The driver's unlock of all processes.
        pub gpu_unlock: Duration = Duration::from_secs(10),
        /// What a rollback waits for the driver to end what it has begun: it continues with a copy whose
        /// caller was cut off.
        pub rollback: Duration = Duration::from_secs(600),
        /// The end of a container that is killed, or was to end with its checkpoint: the kernel frees its
        /// memory.
        pub end: Duration = Duration::from_secs(120),
        /// The end of a driver worker that was killed: a call of the driver may hold it in the kernel.
        pub worker_end: Duration = Duration::from_secs(10),
    }

    /// `[create]`
    pub struct Create {
        /// Where CDI files are; those of a later directory come first.
        pub cdi_dirs: Vec<PathBuf> = ["/etc/cdi", "/var/run/cdi"].map(PathBuf::from).to_vec(),
        /// Hooks of NVIDIA's that would mount GPUs behind the spec.
        pub hooks: Conversion = Conversion::Convert,
        /// Whether the variable `NVIDIA_VISIBLE_DEVICES` gives GPUs. Images set it too.
        pub visible_devices: bool = false,
        /// Whether mounts below /var/run/nvidia-container-devices give GPUs.
        pub volume_mounts: bool = false,
        /// Whether annotations `cdi.k8s.io/...` give GPUs. Where containerd acts on them, they are in the
        /// spec already.
        pub cdi_annotations: bool = false,
    }

    /// `[checkpoint]`
    pub struct Checkpoint {
        /// Processes that are not in the tree of init, as those of `ctr tasks exec`. A container's annotation
        /// comes first.
        pub exec: Exec = Exec::Refuse,
        /// What becomes of TCP connections. A container's annotation comes first.
        pub tcp: Tcp = Tcp::Refuse,
        /// Hooks that containers name.
        pub hooks: JobHooks = JobHooks::Run,
        /// Image directories of GPU containers that others than root may enter.
        pub open_image_dir: OpenImageDir = OpenImageDir::Tighten,
        /// Where a complete image is put when its checkpoint has failed all the same, and containerd will
        /// remove it. Default: [`names::RESCUE_DIR`].
        pub rescue_dir: Option<PathBuf> = None,
        /// Whether the whole host has transparent huge pages while the driver copies GPU memory.
        pub huge_pages: HugePages = HugePages::Off,
    }

    /// `[restore]`
    pub struct Restore {
        /// GPUs of this node, by UUID or by the index that `nvidia-smi` shows, that a restored container may
        /// get when its spec was not written for this node (`ctr containers restore`). Never used for
        /// containers of Kubernetes.
        pub gpus: Vec<String> = Vec::new(),
        /// Pairs `GPU-old=GPU-new` for checkpoints that hold a GPU named on the left.
        pub gpu_map: Vec<String> = Vec::new(),
        /// How GPUs are chosen where no map names them. A container's annotation comes first.
        pub policy: RemapPolicy = RemapPolicy::Auto,
        /// Whether containers of Kubernetes may be made from checkpoints. By containerd's CRI whoever may
        /// make a pod names the checkpoint as the container's image.
        pub cri: bool = false,
        /// Where the checkpoints are that pods may name: a directory for each namespace of Kubernetes that
        /// may. Default: none may.
        pub from_dir: Option<PathBuf> = None,
        /// Whether pods may name checkpoints in the node's store that have a name for their namespace.
        pub from_store: bool = false,
        /// Images in containerd's store that pods may name, `NAMESPACE=IMAGE`; a `*` at the end of the image
        /// stands for any text, as a namespace for any whose pods the image's signature permits. Default:
        /// none.
        pub from_images: Vec<String> = Vec::new(),
        /// Whether such an image that is not signed may have memory in the node's store: that of the pod's
        /// own namespace.
        pub images_from_store: bool = false,
        /// The directory with the keys of those who may sign checkpoints for namespaces, `NAME.pub`. Default:
        /// nobody may.
        pub trusted_keys: Option<PathBuf> = None,
        /// The most bytes that such an image may have when it is unpacked. Default: half of what is free.
        pub image_cap: Option<u64> = None,
    }

    /// `[images]`
    pub struct Images {
        /// The directory of the node's store for memory. Default: none.
        pub store: Option<PathBuf> = None,
        /// The file with the key of the store, if it is encrypted. Default: it is not.
        pub store_key: Option<PathBuf> = None,
        /// The most bytes that a checkpoint may make of the store. Default: what its file system holds.
        pub store_cap: Option<u64> = None,
        /// Where the memory of checkpoints goes. A container's annotation comes first.
        pub bulk: Bulk = Bulk::Inline,
        /// Whether that annotation counts.
        pub allow_bulk: bool = true,
        /// Which program copies memory into the image directory.
        pub inline_copy: InlineCopy = InlineCopy::Criu,
    }

    /// `[pause]`
    pub struct Pause {
        /// What a resume does if another container has the GPUs. A container's annotation comes first.
        pub gpu_busy: GpuBusy = GpuBusy::Refuse,
    }

    /// `[nccl]`
    pub struct Nccl {
        /// MiB that a tmpfs at /dev/shm has at least.
        pub shm_mib: u32 = 1024,
    }

    /// `[cuda]`
    pub struct Cuda {
        /// Which new containers with NVIDIA's GPUs have the library. A restored one has it if its checkpoint
        /// has it.
        pub interpose: Interpose = Interpose::Annotated,
        /// Where `libfirn_cuda.so` is. Default: looked for as `libfirn_criu.so` is.
        pub library: Option<PathBuf> = None,
    }
}

/// Which new containers have firn's library between their programs and NVIDIA's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interpose {
    /// None.
    Never,
    /// Those whose annotation requests it.
    Annotated,
    /// All with NVIDIA's GPUs.
    Always,
}

impl Word for Interpose {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("never", Self::Never),
        ("annotated", Self::Annotated),
        ("always", Self::Always),
    ];
}

/// What becomes of a hook that would mount GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conversion {
    /// The GPUs that it names become edits of the spec, by CDI.
    Convert,
    /// It is run; the container cannot be checkpointed.
    Keep,
}

impl Word for Conversion {
    const WORDS: &'static [(&'static str, Self)] = &[("convert", Self::Convert), ("keep", Self::Keep)];
}

impl Checkpoint {
    /// The directory for rescued images.
    pub fn rescue_dir(&self) -> &Path {
        self.rescue_dir.as_deref().unwrap_or(Path::new(names::RESCUE_DIR))
    }
}

/// What becomes of hooks that containers name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobHooks {
    /// They are called.
    Run,
    /// A container that names any is neither checkpointed nor restored.
    Refuse,
}

impl Word for JobHooks {
    const WORDS: &'static [(&'static str, Self)] = &[("run", Self::Run), ("refuse", Self::Refuse)];
}

/// What becomes of an image directory that others than its owner may enter, or that is not root's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenImageDir {
    /// An empty one is made root's alone; one with files in it is refused.
    Tighten,
    /// It is refused.
    Refuse,
    /// It is used as it is. The files are root's alone all the same, where the file system knows owners.
    Allow,
}

impl Word for OpenImageDir {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("tighten", Self::Tighten),
        ("refuse", Self::Refuse),
        ("allow", Self::Allow),
    ];
}

/// What becomes of the host's switch for transparent huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// It is not looked at.
    Off,
    /// It is on while the driver copies GPU memory into host memory.
    WhileCopying,
}

impl Word for HugePages {
    const WORDS: &'static [(&'static str, Self)] =
        &[("off", Self::Off), ("while-copying", Self::WhileCopying)];
}

/// Where the memory of a checkpoint goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bulk {
    /// Into the image directory.
    Inline,
    /// Into the node's store.
    Store,
}

impl Word for Bulk {
    const WORDS: &'static [(&'static str, Self)] = &[("inline", Self::Inline), ("store", Self::Store)];
}

/// Which program copies memory into the image directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InlineCopy {
    /// CRIU, with one thread.
    Criu,
    /// firn, with several threads and without zero pages.
    Firn,
}

impl Word for InlineCopy {
    const WORDS: &'static [(&'static str, Self)] = &[("criu", Self::Criu), ("firn", Self::Firn)];
}

impl Images {
    /// Where the memory of a container goes that has this annotation. None: it has an unknown value.
    pub fn bulk_for(&self, annotation: Option<&str>) -> Option<Bulk> {
        match annotation.filter(|_| self.allow_bulk) {
            Some(word) => section::of_word(word),
            None => Some(self.bulk),
        }
    }
}

/// What becomes of processes that CRIU leaves out of a dump.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exec {
    /// The container is not checkpointed while it has such processes.
    #[default]
    Refuse,
    /// They are left out.
    Omit,
}

impl Word for Exec {
    const WORDS: &'static [(&'static str, Self)] = &[("refuse", Self::Refuse), ("omit", Self::Omit)];
}

/// What becomes of the established TCP connections of a checkpointed container. Connections of the container
/// that is left running stay as they are in every case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tcp {
    /// The container is not checkpointed while it has any.
    #[default]
    Refuse,
    /// The copy finds them closed.
    Close,
    /// The copy continues them.
    Keep,
    /// The copy continues those whose ends are both in the checkpoint, and finds the others closed.
    Auto,
}

impl Word for Tcp {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("refuse", Self::Refuse),
        ("close", Self::Close),
        ("keep", Self::Keep),
        ("auto", Self::Auto),
    ];
}

impl Tcp {
    /// The choice that this word stands for, in the configuration and in the annotation.
    pub fn of_word(word: &str) -> Option<Self> {
        section::of_word(word)
    }
}

/// What the resume of a parked container does if another container has one of its GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuBusy {
    /// It is refused.
    Refuse,
    /// It waits.
    Wait,
    /// It takes free GPUs of `[restore] gpus`.
    Elsewhere,
    /// Both have the GPU.
    Share,
}

impl Word for GpuBusy {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("refuse", Self::Refuse),
        ("wait", Self::Wait),
        ("elsewhere", Self::Elsewhere),
        ("share", Self::Share),
    ];
}

impl GpuBusy {
    /// The choice that this word stands for, in the configuration and in the annotation.
    pub fn of_word(word: &str) -> Option<Self> {
        section::of_word(word)
    }
}

/// How GPUs of this node are chosen for those of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemapPolicy {
    /// GPUs that are still there stay; the others are chosen such that links between GPUs are kept.
    Auto,
    /// As `Auto`, from more GPUs than are needed.
    Subset,
    /// Every GPU stays.
    Strict,
}

impl Word for RemapPolicy {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("auto", Self::Auto),
        ("subset", Self::Subset),
        ("strict", Self::Strict),
    ];
}

impl RemapPolicy {
    /// The policy that this word stands for, in the configuration and in the annotation.
    pub fn of_word(word: &str) -> Option<Self> {
        section::of_word(word)
    }

    /// Its word.
    pub fn word(self) -> &'static str {
        Self::WORDS
            .iter()
            .find(|(_, policy)| *policy == self)
            .map_or("auto", |(word, _)| word)
    }
}

#[cfg(test)]
mod tests;
