//! File names, environment variables and annotations that more than one part of firn uses.
//!
//! Each is declared here and nowhere else.

/// Configuration file of the node.
pub const CONFIG_FILE: &str = "/etc/firn/config.toml";

/// Environment variable that names another configuration file.
pub const ENV_CONFIG: &str = "FIRN_CONFIG";

/// File name of the shim.
pub const SHIM_PROGRAM: &str = "containerd-shim-firn-v2";

/// File name of the OCI runtime, for clients that call one.
pub const RUNC_PROGRAM: &str = "firn-runc";

/// File name of the driver worker.
pub const WORKER_PROGRAM: &str = "firn-gpu";

/// File name of the OCI hook.
pub const HOOK_PROGRAM: &str = "firn-hook";

/// In the bundle: GPUs that processes had inherited at the last checkpoint, or in the image that the
/// container was restored from.
pub const BUNDLE_INHERITED: &str = "firn-inherited.json";

/// File in the bundle with the processes whose checkpoint the driver has refused.
pub const BUNDLE_REFUSED: &str = "firn-gpu-refused.json";

/// firn's plugin for CRIU.
pub const CRIU_PLUGIN: &str = "libfirn_criu.so";

/// firn's library between programs and NVIDIA's driver. Its copy in the bundle of a container that has it has
/// the same name.
pub const CUDA_LIBRARY: &str = "libfirn_cuda.so";

/// Where a container has that copy.
pub const CUDA_LIBRARY_INSIDE: &str = "/run/firn-cuda/libfirn_cuda.so";

/// File of an image: the library that the processes of the container have mapped.
pub const CUDA_LIBRARY_IMAGE: &str = "cuda-library.img";

/// Annotation: which GPU of the source becomes which GPU of this node, `GPU-old=GPU-new,...`.
pub const ANNOTATION_GPU_MAP: &str = "firn.dev/gpu-map";

/// Annotation: how GPUs of this node are chosen for those of the source, in the words of
/// [`crate::RemapPolicy`].
pub const ANNOTATION_REMAP_POLICY: &str = "firn.dev/remap-policy";

/// Annotation of a pod: the checkpoint that its container is restored from when it is created, `NAME`, or
/// `CONTAINER=NAME,...` for some of its containers. A name may be `image:IMAGE` or
/// `store:NAME`.
pub const ANNOTATION_RESTORE_FROM: &str = "firn.dev/restore-from";

/// Annotation of a pod: `cold` starts a container whose restore is refused without its checkpoint.
pub const ANNOTATION_RESTORE_FALLBACK: &str = "firn.dev/restore-fallback";

/// Annotation of a pod: whether a container that the kubelet starts again is restored again (`again`) or
/// starts without its checkpoint (`cold`).
pub const ANNOTATION_RESTORE_RESTARTS: &str = "firn.dev/restore-restarts";

/// Annotations by containerd's CRI plugin: the pod's namespace, and the container's name in the pod.
pub const ANNOTATION_CRI_NAMESPACE: &str = "io.kubernetes.cri.sandbox-namespace";
/// Label of a pod's container by the kubelet, which CRI-O makes an annotation: the pod's namespace.
pub const ANNOTATION_POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// See [`ANNOTATION_CRI_NAMESPACE`].
pub const ANNOTATION_CRI_POD: &str = "io.kubernetes.cri.sandbox-name";
/// Annotation of CRI: the container's pod, by containerd's id of its sandbox.
pub const ANNOTATION_CRI_SANDBOX: &str = "io.kubernetes.cri.sandbox-id";
/// Annotation of CRI: the container's pod, by the kubelet's id.
pub const ANNOTATION_CRI_UID: &str = "io.kubernetes.cri.sandbox-uid";
/// See [`ANNOTATION_CRI_NAMESPACE`].
pub const ANNOTATION_CRI_NAME: &str = "io.kubernetes.cri.container-name";

/// Annotation by containerd's CRI plugin: the name of the container's image.
pub const ANNOTATION_CRI_IMAGE: &str = "io.kubernetes.cri.image-name";

/// Annotation by the kubelet, where the runtime handler passes it on: how often it has started this container
/// of the pod again.
pub const ANNOTATION_RESTARTS: &str = "io.kubernetes.container.restartCount";

/// Annotation: `none` asserts that the container's processes share no GPU memory with each other,
/// `released-by-hook` that they share none once the prepare hook was called.
pub const ANNOTATION_IPC: &str = "firn.dev/ipc";

/// Annotation: `none` asserts that no GPU of a process accesses the memory of another one.
pub const ANNOTATION_PEER_ACCESS: &str = "firn.dev/peer-access";

/// Annotation: `any` lets a copy continue on a CPU that lacks instructions of the source's.
pub const ANNOTATION_CPU: &str = "firn.dev/cpu";

/// Annotation: `released-by-hook` asserts that no process holds any accelerator once the prepare hook was
/// called. The checkpoint then holds nothing of any device.
pub const ANNOTATION_GPU: &str = "firn.dev/gpu";

/// Annotation: `sockets` makes the ranks of NCCL in the container talk over TCP, so that they can be
/// checkpointed.
pub const ANNOTATION_NCCL: &str = "firn.dev/nccl";

/// Annotation: `interpose` puts [`CUDA_LIBRARY`] between the container's programs and NVIDIA's driver.
pub const ANNOTATION_CUDA: &str = "firn.dev/cuda";

/// Annotation: `omit` leaves processes out of a checkpoint that are not in the tree of init, `refuse` refuses
/// it.
pub const ANNOTATION_EXEC: &str = "firn.dev/exec";

/// Annotation: what becomes of TCP connections, and of Unix sockets that lead outside, in the words of
/// [`crate::Tcp`].
pub const ANNOTATION_TCP: &str = "firn.dev/tcp";

/// Annotation: where the memory of a checkpoint goes, in the words of [`crate::Bulk`].
pub const ANNOTATION_BULK: &str = "firn.dev/bulk";

/// Annotation: `release-gpu` makes a pause give the container's GPUs free.
pub const ANNOTATION_PAUSE: &str = "firn.dev/pause";

/// Annotation: what a resume does if another container has the GPUs, in the words of [`crate::GpuBusy`].
/// Also in the annotations of a task's update.
pub const ANNOTATION_GPU_BUSY: &str = "firn.dev/gpu-busy";

/// In the annotations of a task's update: the GPUs that the container gets from now on, by UUID or index, or
/// [`SAME_GPUS`].
pub const ANNOTATION_MOVE_GPU: &str = "firn.dev/move-gpu";

/// In an update, like [`ANNOTATION_MOVE_GPU`]: the containers of a pod that are to be checkpointed at one
/// moment, as a JSON object of the image directory of each id.
pub const ANNOTATION_CHECKPOINT_POD: &str = "firn.dev/checkpoint-pod";

/// In an update: the value of an [`ANNOTATION_CHECKPOINT_POD`] that was sent before. That checkpoint is not
/// wanted any more, and is rolled back if it is not complete.
pub const ANNOTATION_WITHDRAW_POD: &str = "firn.dev/withdraw-pod";

/// In an update: the process of a command of firn for which the container is paused, until it resumes the
/// container or ends: its pid and when it was started.
pub const ANNOTATION_PAUSE_FOR: &str = "firn.dev/pause-for";

/// In an update: a value of [`ANNOTATION_PAUSE_FOR`] that was sent before. The container stays paused, also
/// when that process ends.
pub const ANNOTATION_PAUSE_KEPT: &str = "firn.dev/pause-kept";

/// A value of [`ANNOTATION_MOVE_GPU`]: those that it has.
pub const SAME_GPUS: &str = "same";

/// Label of a container in containerd's metadata: the state of one that is parked.
pub const LABEL_PARKED: &str = "firn.dev/parked";

/// Directory of the node in which each container of firn names its GPUs.
pub const LEASES: &str = "/run/firn/leases";

/// Directory of the node in which firn-runc notes its transactions: the root directory of runc, and in it a
/// file for each container, with its bundle.
pub const RUNC_TRANSACTIONS: &str = "/run/firn/runc";

/// Directory of the node in which firn's commands lock the container that they work on: a directory for each
/// namespace, and in it a file for each container. The pause of such a command gives no GPU free.
pub const COMMANDS: &str = "/run/firn/commands";

/// Directory of the node in which firn notes who has turned on the host's huge pages.
pub const HUGE_PAGES: &str = "/run/firn/huge-pages";

/// Annotation: what is called in the container when its checkpoint begins.
pub const ANNOTATION_HOOK_PREPARE: &str = "firn.dev/hook-prepare";

/// Annotation: what is called in the container when it continues after its checkpoint.
pub const ANNOTATION_HOOK_RESUMED: &str = "firn.dev/hook-resumed";

/// Annotation: what is called in a restored container.
pub const ANNOTATION_HOOK_RESTORED: &str = "firn.dev/hook-restored";

/// Annotation: what is called in the container when its checkpoint has failed.
pub const ANNOTATION_HOOK_FAILED: &str = "firn.dev/hook-failed";

/// Directory in the container for the files of its hooks: a tmpfs.
pub const JOB_DIR: &str = "/run/firn";

/// In the container: the facts of the hook that is called.
pub const JOB_HOOK_FILE: &str = "/run/firn/hook.json";

/// In the container: the facts of the restore.
pub const JOB_RESTORE_FILE: &str = "/run/firn/restore.json";

/// In the container: where the job answers to a signal.
pub const JOB_ANSWER_FILE: &str = "/run/firn/answer";

/// Annotation of runc: path of the CRIU configuration file of this container. Empty: none.
pub const ANNOTATION_CRIU_CONFIG: &str = "org.criu.config";

/// Annotation by earlier versions of firn: the value that [`ANNOTATION_CRIU_CONFIG`] had before firn put its
/// own file there. It is in [`BUNDLE_USERS_CRIU_CONFIG`].
pub const ANNOTATION_USERS_CRIU_CONFIG: &str = "firn.dev/criu-config";

/// How the names of all of firn's annotations begin.
pub const FIRNS: &str = "firn.dev/";

/// firn's annotations that a given spec may have. Whoever writes a spec may set them, as the author of a pod:
/// they may cost the container its own state and give it nothing.
pub const ANNOTATIONS_OF_SPECS: [&str; 20] = [
    ANNOTATION_GPU_MAP,
    ANNOTATION_REMAP_POLICY,
    ANNOTATION_RESTORE_FROM,
    ANNOTATION_RESTORE_FALLBACK,
    ANNOTATION_RESTORE_RESTARTS,
    ANNOTATION_IPC,
    ANNOTATION_GPU,
    ANNOTATION_NCCL,
    ANNOTATION_CUDA,
    ANNOTATION_PEER_ACCESS,
    ANNOTATION_CPU,
    ANNOTATION_EXEC,
    ANNOTATION_TCP,
    ANNOTATION_BULK,
    ANNOTATION_PAUSE,
    ANNOTATION_GPU_BUSY,
    ANNOTATION_HOOK_PREPARE,
    ANNOTATION_HOOK_RESUMED,
    ANNOTATION_HOOK_RESTORED,
    ANNOTATION_HOOK_FAILED,
];

/// Names of firn that stand elsewhere: in the annotations of an update, in labels, in the index of an image.
/// Create removes them from a given spec, and every other name that begins with [`FIRNS`].
pub const NEVER_IN_SPECS: [&str; 9] = [
    ANNOTATION_USERS_CRIU_CONFIG,
    ANNOTATION_MOVE_GPU,
    ANNOTATION_CHECKPOINT_POD,
    ANNOTATION_WITHDRAW_POD,
    ANNOTATION_PAUSE_FOR,
    ANNOTATION_PAUSE_KEPT,
    LABEL_PARKED,
    ANNOTATION_CONTAINER,
    ANNOTATION_BASE_CHAIN,
];

/// Annotation by podman and CRI-O: which of them made the container.
pub const ANNOTATION_MANAGER: &str = "io.container.manager";

/// Annotation that containerd's CRI plugin puts on every container: `sandbox` or `container`.
pub const ANNOTATION_CRI_TYPE: &str = "io.kubernetes.cri.container-type";

/// CRIU configuration file that runc reads when the container has no [`ANNOTATION_CRIU_CONFIG`].
pub const RUNC_CRIU_CONFIG: &str = "/etc/criu/runc.conf";

/// The container's spec, in its bundle.
pub const BUNDLE_SPEC: &str = "config.json";

/// The CRIU configuration file that firn writes for a GPU container, in its bundle.
pub const BUNDLE_CRIU_CONFIG: &str = "firn-criu.conf";

/// File in the bundle: the path of the user's CRIU configuration file that the spec named before firn put its
/// own in its place, empty if the spec named none.
pub const BUNDLE_USERS_CRIU_CONFIG: &str = "firn-criu-user";

/// Empty directory in the bundle that CRIU is given as its plugin directory, so that it loads no CUDA plugin.
pub const BUNDLE_CRIU_LIBS: &str = "firn-criu-libs";

/// In that directory: the Unix sockets that firn's plugin lets CRIU dump without their other ends. A line for
/// each: `seen INODE`, `hidden INODE PEER` if CRIU does not see the other end, `unseen INODE TYPE` if it does
/// not see the socket itself.
pub const CRIU_UNIX_SOCKETS: &str = "firn-unix-sockets";

/// File in the bundle of a pod's container that is restored because an annotation names its checkpoint: the
/// image directory.
pub const BUNDLE_RESTORED_FROM: &str = "firn-restored-from";

/// An empty file NAMESPACE/ID for each container that was restored because its pod names a checkpoint:
/// whoever may know that need not see bundles.
pub const RESTORED: &str = "/run/firn/restored";

/// Directory in the bundle for the checkpoint of such a container that is an image in containerd's store. It
/// is in containerd's directory for what belongs to a task, which is on disk and removed with the bundle.
pub const BUNDLE_UNPACKED: &str = "work/firn-checkpoint";

/// Link to firn-hook, in the bundle, that CRIU is given as a script of a restore.
pub const BUNDLE_CRIU_SCRIPT: &str = "firn-criu-script";

/// Why that script has failed, in the bundle.
pub const BUNDLE_SCRIPT_REFUSAL: &str = "firn-criu-script.json";

/// What firn-hook keeps of a pod's /dev/shm when CRIU calls it at the end of a dump, in the bundle.
pub const BUNDLE_KEEP_SHM: &str = "firn-keep-shm.json";

/// What a restore has made in a pod's /dev/shm, in the bundle.
pub const BUNDLE_SHM_MADE: &str = "firn-shm-made.jsonl";

/// Environment variable with the reason for which CRIU runs a script.
pub const ENV_CRIU_ACTION: &str = "CRTOOLS_SCRIPT_ACTION";

/// Environment variable with the pid of the container's init, for CRIU's scripts.
pub const ENV_CRIU_INIT: &str = "CRTOOLS_INIT_PID";

/// File in the bundle: the cgroup that the spec names was in use before the container.
pub const BUNDLE_OTHERS_CGROUP: &str = "firn-cgroup-of-others";

/// Empty file in the bundle that a restored container gets where it had a file of the driver that it can do
/// without.
pub const BUNDLE_EMPTY: &str = "firn-empty";

/// File in the bundle that shows how far a copy of memory is, for as long as it lasts.
pub const BUNDLE_PROGRESS: &str = "firn-progress.json";

/// File in the bundle of a paused container that a command of firn is about to end, or was: its copy may run,
/// or its checkpoint is complete. It has the command's process.
pub const BUNDLE_PAUSE_KEPT: &str = "firn-pause-kept";

/// Directory in the bundle with nothing but CRIU's plugin for AMD's GPUs.
pub const BUNDLE_AMD_LIBS: &str = "firn-criu-amd";

/// What `firn checkpoint` and `firn move` send with a checkpoint to have all memory in the image, whatever
/// the configuration has.
pub const BULK_INLINE: &str = "inline";

/// Directory with a file for each store that the node has used: where its file system was mounted.
pub const STORES: &str = "/var/lib/firn/stores";

/// Default directory for complete images that their client may otherwise remove.
pub const RESCUE_DIR: &str = "/var/lib/firn/rescue";

/// Directory with the history of the node's transactions.
pub const HISTORY: &str = "/var/lib/firn/history";

/// Directory in which `firn restore` unpacks checkpoints until their containers run.
pub const RESTORE_DIR: &str = "/var/lib/firn/restore";

/// Directory with what the containers that `firn restore` has made write to their standard output and error.
pub const LOGS: &str = "/var/lib/firn/logs";

/// Annotation of a checkpoint image's index: the id of the container.
pub const ANNOTATION_CONTAINER: &str = "firn.dev/container";

/// Annotation of a checkpoint image's index: chain id of the layers that the container began with.
pub const ANNOTATION_BASE_CHAIN: &str = "firn.dev/base-chain";

/// Prefix of the directories for complete images that are put next to containerd's temporary ones,
/// where those are on another file system than the rescue directory.
pub const RESCUE_PREFIX: &str = "firn-rescue-";

/// How the names of the temporary directories begin that containerd makes for checkpoints, and removes.
pub const CONTAINERD_CHECKPOINT: &str = "ctrd-checkpoint";

/// The checkpoint manifest, in the CRIU image directory.
pub const MANIFEST: &str = "firn.json";

/// The signature of the manifest, next to it.
pub const SIGNATURE: &str = "firn.json.minisig";

/// Directory of a store for checkpoints with a name: `NAMESPACE/NAME`, as below `[restore] from-dir`.
pub const STORE_NAMED: &str = "named";

/// Directory below `[restore] from-dir` for checkpoints that their signature permits. No namespace has such a
/// name.
pub const SIGNED_DIR: &str = "_signed";

/// File among the CRIU images in which runc keeps the container's stdio.
pub const RUNC_DESCRIPTORS: &str = "descriptors.json";

/// File among the CRIU images with the files of a pod's /dev/shm, which CRIU leaves out.
pub const SHM_ARCHIVE: &str = "dev-shm.img";

/// The same before CRIU has dumped the container.
pub const EARLY_SHM_ARCHIVE: &str = ".dev-shm.early";

/// Option of firn-runc that shows its own version: --version shows runc's.
pub const RUNC_VERSION_OPTION: &str = "--firn-version";

/// Label of a node of Kubernetes: whether its containerd has the runtime handler.
pub const LABEL_RUNTIME: &str = "firn.dev/runtime";
/// Label of a node: firn's version.
pub const LABEL_VERSION: &str = "firn.dev/version";
/// Label of a node: its driver's version.
pub const LABEL_DRIVER: &str = "firn.dev/driver";
/// Label of a node: the model of its GPUs.
pub const LABEL_MODEL: &str = "firn.dev/gpu-model";
/// Label of a node: whether its driver can checkpoint.
pub const LABEL_CHECKPOINT: &str = "firn.dev/checkpoint";
/// Label of a node: whether its driver can restore onto other GPUs.
pub const LABEL_REMAP: &str = "firn.dev/remap";

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Whoever adds a name has to decide whether a given spec may have it.
    #[test]
    fn every_annotation_is_known_as_one_of_specs_or_of_none() {
        const FOR_NODES: [&str; 6] = [
            LABEL_RUNTIME,
            LABEL_VERSION,
            LABEL_DRIVER,
            LABEL_MODEL,
            LABEL_CHECKPOINT,
            LABEL_REMAP,
        ];
        let lines = include_str!("names.rs")
            .lines()
            .filter(|line| line.starts_with("pub const "));
        let values = lines.filter_map(|line| line.split('"').nth(1));
        let all: BTreeSet<&str> = values
            .filter(|value| value.len() > FIRNS.len() && value.starts_with(FIRNS))
            .collect();
        let lists = [&ANNOTATIONS_OF_SPECS[..], &NEVER_IN_SPECS, &FOR_NODES];
        let listed: Vec<&str> = lists.concat();
        assert_eq!(listed.len(), all.len(), "a name is in two lists");
        assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), all);
    }
}
