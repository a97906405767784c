//! The command line of `firn restore`.

use std::path::PathBuf;

use clap::Args;

use crate::complete;
use crate::containerd::ContainerdArgs;
use crate::place::Kind;

const HELP: &str = "Examples:
  firn restore checkpoint/job
  firn restore job.tar --name job2 --gpus 2,3
  firn restore checkpoint/job --gpus 1 --dry-run
  firn restore job.tar --dry-run --inventory other-node.json
  firn restore ./images/job --dry-run --spec config.json
  firn restore ./images/job --into job
  firn restore checkpoint/web --into web
  firn restore --dir /srv/job job

A path begins with /, ./ or ../, or ends with / or .tar; - is standard input. Other names are images, unless \
a file or directory has the name: then write ./NAME, or add --as ref.

Exit status: 0 the container runs (with --dry-run: would be restored), 1 it was not restored and nothing of \
it is left, 2 wrong usage, 3 refused (would be), and nothing was touched.";

/// Options of a restore through containerd, which go with no spec and no GPUs that are given.
const GIVEN: [&str; 6] = ["name", "into", "dir", "explain", "work_dir", "log"];

/// Restore a container from a checkpoint.
///
/// From an image (REF) or a tar file (FILE), of firn or of `ctr containers checkpoint --rw --task`,
/// containerd gets a new container, or --into names one that it knows. An image directory (DIR), such as one
/// that an error of firn names, is restored into a container that containerd still knows
/// (`ctr containers list`) and that has no task (`ctr tasks delete --force ID`); the directory stays. ctr and
/// nerdctl manage the container afterwards.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct RestoreArgs {
    /// The checkpoint. With --dir: id of the container.
    #[arg(value_name = "REF|FILE|DIR", add = complete::places())]
    pub from: String,
    /// The image directory; the argument is the container's id then.
    #[arg(long, conflicts_with_all = ["name", "kind", "explain", "into"])]
    pub dir: Option<PathBuf>,
    /// Container to restore into, which containerd knows and which has no task that runs, such as one of
    /// `nerdctl create`: its id or nerdctl's name of it. Of an image or a tar file it gets the files, too.
    #[arg(
        long,
        value_name = "CONTAINER",
        conflicts_with_all = ["name", "explain"],
        add = complete::containers()
    )]
    pub into: Option<String>,
    /// Id of the container. Default: that of the source.
    #[arg(long, value_name = "ID")]
    pub name: Option<String>,
    /// GPUs of this node, by UUID or by the index of nvidia-smi, with commas: as many as the checkpoint has.
    /// `auto`: free ones.
    #[arg(long, value_name = "GPUS")]
    pub gpus: Option<String>,
    /// Which GPU becomes which: pairs `GPU-old=GPU-new` with commas.
    #[arg(long, value_name = "PAIRS", conflicts_with = "gpus")]
    pub gpu_map: Option<String>,
    /// Do not compare the CPUs of both nodes (firn.dev/cpu). Programs that use instructions which this node's
    /// CPU lacks end with SIGILL.
    #[arg(long, value_name = "any", value_parser = ["any"])]
    pub cpu: Option<String>,
    /// Only show whether it would be restored, and onto which GPUs, as the shim would decide.
    #[arg(long)]
    pub dry_run: bool,
    /// With --dry-run: the spec (config.json) of the container to be restored. Default: that of the
    /// checkpoint; an image directory has none. containerd is not asked about containers then, and the
    /// checkpoint may also be one that would be made now of a running container: give its id.
    #[arg(long, value_name = "FILE", requires = "dry_run", conflicts_with_all = GIVEN)]
    pub spec: Option<PathBuf>,
    /// With --dry-run: the GPUs of another node, the output of `firn-gpu inventory` there. Otherwise as
    /// --spec.
    #[arg(long, value_name = "FILE", requires = "dry_run", conflicts_with_all = GIVEN)]
    pub inventory: Option<PathBuf>,
    /// What the argument is, if its form does not decide.
    #[arg(long = "as", value_name = "KIND")]
    pub kind: Option<Kind>,
    /// Print the commands of ctr that do the same, and do nothing.
    #[arg(long)]
    pub explain: bool,
    /// Only show what this node is, for `firn move`: whether it has this image and the container.
    #[arg(long, value_name = "IMAGE", hide = true, requires = "name")]
    pub check: Option<String>,
    /// Where the checkpoint is unpacked until the container runs.
    #[arg(long, value_name = "DIR", default_value = firn_config::names::RESTORE_DIR)]
    pub work_dir: PathBuf,
    #[command(flatten)]
    pub containerd: ContainerdArgs,
    /// File that receives what the container writes to its standard output and error. Default: what nerdctl
    /// has chosen for its container, or a file that `firn logs` shows. /dev/null: nothing is kept.
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// Print no progress.
    #[arg(long, short)]
    pub quiet: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}
