//! The command line of `firn cri-pods`.

use std::path::PathBuf;

use crate::containerd::Socket;

const HELP: &str = "Examples:
  firn cri-pods
  firn cri-pods --checkpoints /var/lib/kubelet

Exit status: 0 ended by SIGTERM or Ctrl-C, 1 failed, 2 wrong usage.";

/// Serve CheckpointPod and RestorePod of Kubernetes' CRI in front of containerd, which has neither yet.
///
/// Listens on a socket of its own, which only root can use. All other calls go to containerd as they are.
/// Runs until SIGTERM. Checkpoints that are in progress are rolled back then, and pods that are being
/// restored are removed.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct CriPodsArgs {
    /// Socket to listen on.
    #[arg(long, value_name = "SOCKET", default_value = "/run/firn/cri.sock")]
    pub listen: PathBuf,
    /// Directory below which callers may write and read checkpoints; repeat it for more. Default: everywhere.
    #[arg(long, value_name = "DIR")]
    pub checkpoints: Vec<PathBuf>,
    #[command(flatten)]
    pub containerd: Socket,
}
