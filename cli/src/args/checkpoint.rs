//! The command line of `firn checkpoint`.

use clap::{Args, ValueHint};

use super::overrides::OverrideArgs;
use crate::complete;
use crate::containerd::Socket;
use crate::place::Kind;

const HELP: &str = "Examples:
  firn checkpoint job checkpoint/job
  firn checkpoint job /srv/job.tar --exit
  firn checkpoint job ./images/job
  firn checkpoint job job.tar --tcp auto --exec omit
  firn checkpoint -n moby job checkpoint/job --explain
  firn checkpoint --pod default/server /var/lib/firn/named/default

A path begins with /, ./ or ../, or ends with / or .tar. Other names are images, unless a file or directory \
has the name: then write ./NAME, or add --as ref.

Exit status: 0 done, 1 failed: the container continues as before, and nothing is left, 2 wrong usage, 3 \
refused, and nothing was touched.";

/// Checkpoint a container, with its GPU memory and the files that it has written.
///
/// The container stands still meanwhile and continues afterwards, or ends with --exit once its checkpoint is
/// complete. The checkpoint is an image in containerd (REF), which `ctr containers restore` takes, a tar file
/// (FILE), which `ctr images import` takes, or an image directory (DIR). With --pod: all containers of a
/// Kubernetes pod of this node at one moment.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct CheckpointArgs {
    /// Id of the container, or nerdctl's name of it. With --pod: the directory that gets the images; firn
    /// makes it if it is not there.
    #[arg(value_name = "CONTAINER", add = complete::tasks())]
    pub container: String,
    /// What the checkpoint becomes: the name of an image, a tar file, or a directory.
    #[arg(
        value_name = "REF|FILE|DIR",
        required_unless_present = "pod",
        conflicts_with = "pod",
        value_hint = ValueHint::AnyPath
    )]
    pub to: Option<String>,
    /// The pod, as NAMESPACE/NAME.
    #[arg(long, conflicts_with_all = ["exit", "kind", "explain"])]
    pub pod: Option<String>,
    /// The container continues after its checkpoint. The default.
    #[arg(long, conflicts_with = "exit")]
    pub leave_running: bool,
    /// The container ends once its checkpoint is complete.
    #[arg(long)]
    pub exit: bool,
    #[command(flatten)]
    pub overrides: OverrideArgs,
    /// What the second argument is, if its form does not decide.
    #[arg(long = "as", value_name = "KIND")]
    pub kind: Option<Kind>,
    /// Print the commands of ctr that do the same, and do nothing.
    #[arg(long)]
    pub explain: bool,
    /// Namespace of the container in containerd: `default`, and with --pod `k8s.io`.
    #[arg(long, short, env = "CONTAINERD_NAMESPACE")]
    pub namespace: Option<String>,
    #[command(flatten)]
    pub containerd: Socket,
    /// Print no progress.
    #[arg(long, short)]
    pub quiet: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

impl CheckpointArgs {
    pub fn namespace(&self) -> &str {
        let usual = if self.pod.is_some() { "k8s.io" } else { "default" };
        self.namespace.as_deref().unwrap_or(usual)
    }
}
