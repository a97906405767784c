//! The command line of `firn node-agent` and `firn labels`.

use std::path::PathBuf;

/// Print the labels by which Kubernetes finds nodes that can checkpoint.
///
/// With the driver, the GPU's model, and what the driver can do. `kubectl label node NAME $(firn labels)`
/// sets them; in a cluster `firn node-agent` does.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  firn labels\n  firn labels --json\n\n\
                  Exit status: 0 done, also without a GPU, 1 failed, 2 wrong usage.")]
pub struct LabelsArgs {
    /// Root directory of the node: for a container that has the node's file system.
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Keep firn installed on a node of Kubernetes, and the node's labels true.
///
/// What the DaemonSet of config/kubernetes/install runs. Installs the release as `firn install --containerd`
/// does, and labels the node firn.dev/runtime=ready once containerd has the handler. Leaves everything when
/// it ends. With --remove it takes the label away, so that no new pod comes, waits until no pod runs under
/// firn, and uninstalls.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  firn node-agent --node gpu-7 --restart\n  \
                  firn node-agent --node gpu-7 --remove\n\n\
                  Exit status: 1 it cannot continue, 2 wrong usage.")]
pub struct NodeAgentArgs {
    /// Name of the node in Kubernetes.
    #[arg(long, env = "NODE_NAME")]
    pub node: String,
    /// The directory that has the programs. Default: that of this program.
    #[arg(long, value_name = "DIR")]
    pub from: Option<PathBuf>,
    /// Root directory of the node.
    #[arg(long, value_name = "DIR", default_value = "/host")]
    pub root: PathBuf,
    /// Restart containerd by systemd when its configuration was changed. Without, the label is
    /// restart-containerd until somebody has done that.
    #[arg(long)]
    pub restart: bool,
    /// Remove firn from the node.
    #[arg(long)]
    pub remove: bool,
    /// How often the node is looked at.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub every: u64,
}
