//! The command line.

pub mod checkpoint;
pub mod config;
pub mod overrides;
pub mod relocate;
pub mod restore;

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

use crate::agent::args::{LabelsArgs, NodeAgentArgs};

use crate::complete;
use crate::containerd::{ContainerdArgs, Socket};
use crate::history::args::HistoryArgs;
use crate::images::args::ImagesCommand;
use crate::install::args::{InstallArgs, UninstallArgs};
use crate::logs::args::LogsArgs;
use crate::metrics::args::MetricsArgs;

use crate::ps::args::PsArgs;
use crate::store::args::StoreCommand;
use crate::view::args::SubjectArgs;
use checkpoint::CheckpointArgs;
use config::ConfigCommand;
use overrides::OverrideArgs;
use relocate::MoveArgs;
use restore::RestoreArgs;

const EXAMPLES: &str = "Examples:\n  firn doctor\n  firn ps\n  firn checkpoint job job.tar\n  \
                        firn restore job.tar\n  firn help checkpoint\n\n\
                        Exit status: 0 done, 1 failed, 2 wrong usage.";

/// Checkpoint, restore and move GPU containers, and show their checkpoints and their nodes
#[derive(Debug, Parser)]
#[command(name = "firn", version, after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Inspect(InspectArgs),
    Audit(AuditArgs),
    Checkpoint(CheckpointArgs),
    Restore(RestoreArgs),
    Sign(SignArgs),
    Resume(ResumeArgs),
    Move(MoveArgs),
    MoveGpu(MoveGpuArgs),
    Doctor(DoctorArgs),
    #[command(subcommand)]
    Images(ImagesCommand),
    Ps(PsArgs),
    Logs(LogsArgs),
    History(HistoryArgs),
    Metrics(MetricsArgs),
    Drain(DrainArgs),
    Install(InstallArgs),
    Uninstall(UninstallArgs),
    Labels(LabelsArgs),
    NodeAgent(NodeAgentArgs),
    Version(VersionArgs),
    Completions(CompletionsArgs),
    #[command(hide = true)]
    Man(ManArgs),
    #[command(subcommand)]
    Cdi(CdiCommand),
    #[command(subcommand)]
    Config(ConfigCommand),
    #[command(subcommand)]
    Store(StoreCommand),
}

/// Sign a checkpoint: pods of these namespaces may then be restored from it by annotation, on nodes that
/// trust the key.
///
/// DIR is a CRIU image directory, or the directory of an unpacked Kubernetes checkpoint, whose written files
/// are signed too. Writes `firn.json.minisig` next to `firn.json`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn sign ./images/job --key firn.key --namespace research\n  \
                  firn sign ./images/job --print-comment --namespace research\n\n\
                  Exit status: 0 done, 1 failed, 2 wrong usage."
)]
pub struct SignArgs {
    /// The checkpoint.
    pub dir: PathBuf,
    /// A secret key without a password (`minisign -G -W`).
    #[arg(long, value_name = "FILE", required_unless_present = "print_comment")]
    pub key: Option<PathBuf>,
    /// A namespace of Kubernetes; may be given several times.
    #[arg(long, value_name = "NS", required_unless_present = "all_namespaces")]
    pub namespace: Vec<String>,
    /// Permit pods of all namespaces.
    #[arg(long, conflicts_with = "namespace")]
    pub all_namespaces: bool,
    /// The only name by which pods may name it: of its directory, in the store, or of the image.
    #[arg(long)]
    pub name: Option<String>,
    /// The last day on which pods may be restored from it, in UTC (`2027-01-31`).
    #[arg(long, value_name = "DAY")]
    pub until: Option<String>,
    /// Sign nothing: print the trusted comment for `minisign -S -t COMMENT -m DIR/firn.json`.
    #[arg(long, conflicts_with = "key")]
    pub print_comment: bool,
}

/// Show what a checkpoint holds and whether its files are complete.
///
/// The verdict comes first. Of a tar file or an image in containerd the memory is not read: its size is
/// compared. An image directory is the path given to `ctr task checkpoint --image-path`, a directory of
/// nerdctl's checkpoints, or that of an unpacked Kubernetes checkpoint. `firn ps` shows containers.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn inspect checkpoint/job\n  firn inspect job.tar --processes\n  \
                  firn inspect ./images/job -v\n\n\
                  Exit status: 0 the checkpoint is complete, 1 it is damaged or unfinished, 2 wrong usage."
)]
pub struct InspectArgs {
    #[command(flatten)]
    pub subject: SubjectArgs,
    /// Show the tree of the processes.
    #[arg(long)]
    pub processes: bool,
    /// Also show versions, options of the dump, mounts and files.
    #[arg(long, short)]
    pub verbose: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Show whether a workload can be checkpointed here and restored there, before anything is stopped.
///
/// Applies the rules by which the shim refuses a checkpoint, shows what may prevent one, and adds up GPUs
/// and memory. Reads /proc and the container's bundle, and queries the driver which processes use CUDA.
/// Changes nothing.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn audit job\n  firn audit job --target other-node.json -v\n  \
                  firn audit checkpoint/job --json\n\n\
                  Exit status: 0 it can, 1 it cannot or the audit failed, 2 wrong usage, 3 nothing refuses \
                  it and something speaks against it."
)]
pub struct AuditArgs {
    #[command(flatten)]
    pub subject: SubjectArgs,
    #[command(flatten)]
    pub overrides: OverrideArgs,
    /// The node to restore on: the output of `firn-gpu inventory` there.
    #[arg(long, value_name = "FILE")]
    pub target: Option<PathBuf>,
    /// Where the image will be written; without, the directory for temporary files, where containerd makes
    /// it.
    #[arg(long, value_name = "DIR")]
    pub image_dir: Option<PathBuf>,
    /// Also show what was looked for and not found, and the processes.
    #[arg(long, short)]
    pub verbose: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Move the GPU jobs of a Kubernetes node to other nodes, by checkpoints.
///
/// Moves pods with the RuntimeClass firn and GPUs, whose controller makes them again elsewhere and whose
/// annotation firn.dev/restore-from names a checkpoint that is not there yet. Names first what cannot be
/// moved, and then touches nothing. Else cordons the node, lets the kubelet checkpoint each job, copies the
/// checkpoint to the other nodes, evicts the pod, waits until the pod in its place continues, and removes the
/// checkpoint. What a job does between its checkpoint and its end is done again. Other pods stay: see
/// `kubectl drain`. Calls kubectl, and needs firn's agents on the nodes (config/kubernetes/agents.yaml).
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn drain gpu-7 --dry-run\n  firn drain gpu-7 --to gpu-8\n\n\
                  Exit status: 0 all jobs continue elsewhere (with --dry-run: can be moved), 1 one was not \
                  moved, or nothing was touched, 2 wrong usage."
)]
pub struct DrainArgs {
    /// Name of the node.
    pub node: String,
    /// A node that gets the checkpoints; repeat it for more. Default: all others that can take pods.
    #[arg(long, value_name = "NODE")]
    pub to: Vec<String>,
    /// Also move jobs that may write to volumes: what they write after their checkpoint stays there, and they
    /// do it again.
    #[arg(long)]
    pub with_volumes: bool,
    /// Only show what can be moved.
    #[arg(long)]
    pub dry_run: bool,
    /// How long a checkpoint may take, and how long the pod in its place may take to continue.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub timeout: u64,
    /// Context of kubectl's configuration.
    #[arg(long)]
    pub context: Option<String>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Resume a paused container whose pause has freed its GPUs (annotation firn.dev/pause=release-gpu).
///
/// As `ctr tasks resume`, and onto other GPUs of this node, if wanted. A container that cannot be resumed
/// stays paused, with its GPU state in host memory.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn resume train\n  firn resume train --gpus 1 --busy wait\n\n\
                  Exit status: 0 the container continues, 1 it does not, 2 wrong usage, 3 refused, and \
                  nothing was touched."
)]
pub struct ResumeArgs {
    #[command(flatten)]
    pub task: TaskArgs,
    /// GPUs of this node in the place of its own, by UUID or by the index of nvidia-smi, with commas; or
    /// pairs `GPU-old=GPU-new`.
    #[arg(long, value_name = "GPUS")]
    pub gpus: Option<String>,
}

/// Move a running container to other GPUs of this node.
///
/// Its GPU memory goes through host memory. Its processes, files and connections stay. If the other GPUs
/// cannot take it, it continues with its own.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn move-gpu train --gpus 1\n  firn move-gpu ranks --gpus 2,3\n\n\
                  Exit status: 0 the container runs on the other GPUs, 1 it was not moved, 2 wrong usage, 3 \
                  refused, and nothing was touched."
)]
pub struct MoveGpuArgs {
    #[command(flatten)]
    pub task: TaskArgs,
    /// GPUs of this node, by UUID or by the index of nvidia-smi, with commas; or pairs `GPU-old=GPU-new`.
    #[arg(long, value_name = "GPUS")]
    pub gpus: String,
}

/// A container with a task, and what to do if another one has the GPUs.
#[derive(Debug, clap::Args)]
pub struct TaskArgs {
    /// Id of the container.
    #[arg(add = complete::tasks())]
    pub id: String,
    /// What to do if another container of firn has one of the GPUs. Default: the container's
    /// annotation firn.dev/gpu-busy, or the configuration.
    #[arg(long)]
    pub busy: Option<Busy>,
    #[command(flatten)]
    pub containerd: ContainerdArgs,
    /// Print no progress.
    #[arg(long, short)]
    pub quiet: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// What happens if another container has one of the GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Busy {
    /// Fail.
    Refuse,
    /// Wait until it is free.
    Wait,
    /// Take free GPUs of [restore] gpus in the configuration.
    Elsewhere,
    /// Have it together.
    Share,
}

/// Check whether this node can checkpoint and restore GPU containers.
///
/// Run it as the user that containerd runs as, with the same PATH.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn doctor\n  firn doctor --fix\n  firn doctor --deep\n\n\
                  Exit status: 0 nothing failed (warnings may remain), 1 a check failed, 2 wrong usage."
)]
pub struct DoctorArgs {
    /// Remove what firn and CRIU have left after failures. What a running checkpoint or restore uses stays,
    /// and so do images.
    #[arg(long)]
    pub fix: bool,
    /// Also checkpoint and restore a small container of its own, with a GPU where the node has one.
    #[arg(long)]
    pub deep: bool,
    #[command(flatten)]
    pub socket: Socket,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Write and show the node's CDI files, which describe what a container needs for a GPU.
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  firn cdi generate --output /etc/cdi/nvidia.yaml\n  firn cdi list")]
pub enum CdiCommand {
    Generate(CdiGenerateArgs),
    List(CdiListArgs),
}

/// Describe this node's NVIDIA GPUs in a CDI file.
///
/// For nodes that have the driver and not NVIDIA's container toolkit. Names each GPU by its index and its
/// UUID, and all of them `all`: `ctr run --device nvidia.com/gpu=0` gives a container the GPU and the
/// driver's libraries. Write the file again when the driver or the GPUs change.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn cdi generate\n  firn cdi generate --output /etc/cdi/nvidia.yaml\n\n\
                  Exit status: 0 done, 1 failed, and nothing was written, 2 wrong usage."
)]
pub struct CdiGenerateArgs {
    /// File to write, such as /etc/cdi/nvidia.yaml. `-` shows it and writes nothing.
    #[arg(long, value_name = "FILE", default_value = "-")]
    pub output: Option<PathBuf>,
    /// Default: by the extension of the file, else YAML.
    #[arg(long)]
    pub format: Option<CdiFormat>,
    /// Directory below which the driver is installed.
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub driver_root: PathBuf,
    /// Also write if another tool has written a CDI file of these GPUs.
    #[arg(long)]
    pub force: bool,
    /// Write nothing, and do not fail, if another tool has written a CDI file of these GPUs.
    #[arg(long, conflicts_with = "force")]
    pub yield_to_others: bool,
}

/// How a CDI file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CdiFormat {
    Yaml,
    Json,
}

/// Show which devices the CDI files describe.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  firn cdi list\n  firn cdi list --json\n\n\
                  Exit status: 0 all files can be used, 1 a file is broken or a device is described twice, \
                  2 wrong usage.")]
pub struct CdiListArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Print the version of this program, and the commit from which it was built.
///
/// `firn doctor` shows those of the other programs on the node.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  firn version\n  firn version --json\n\n\
                  Exit status: 0 done, 1 failed, 2 wrong usage.")]
pub struct VersionArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Print what a shell needs to complete firn's commands and options, and names of containers and checkpoints.
///
/// The shell calls firn for that, with FIRN_COMPLETE in its environment.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn completions bash >/etc/bash_completion.d/firn\n  \
                  firn completions zsh >/usr/local/share/zsh/site-functions/_firn\n\n\
                  Exit status: 0 done, 1 failed, 2 wrong usage."
)]
pub struct CompletionsArgs {
    /// The shell.
    pub shell: clap_complete::Shell,
}

/// Write the manual pages of firn's commands, for packages.
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// The directory that gets firn.1, firn-audit.1 and so on.
    pub dir: PathBuf,
}

#[cfg(test)]
mod tests;
