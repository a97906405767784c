//! The command lines of `firn ps` and `firn status`.

use std::path::PathBuf;

/// Where the bundles are.
#[derive(Debug, clap::Args)]
pub struct Where {
    /// Only containers of this namespace of containerd.
    #[arg(long, short)]
    pub namespace: Option<String>,
    /// The state directory of containerd; that of k3s is /run/k3s/containerd.
    #[arg(long, value_name = "DIR", default_value = "/run/containerd")]
    pub state: PathBuf,
}

const PS: &str = "Examples:
  firn ps
  firn ps --watch
  firn ps -n k8s.io --state /run/k3s/containerd --json

Exit status: 0 done, also if no container runs, 1 failed, 2 wrong usage.";

/// List the containers under firn, with their GPUs, and what is in progress.
///
/// Shows what each container is, the GPU memory that it uses, and of a checkpoint, restore, pause or move the
/// phase, how long it has taken, how much is copied and how long it will still take. Names why a container is
/// suspended, and the command that resumes it. Reads the bundles of containerd's shims and the transactions
/// of firn-runc. Changes nothing.
#[derive(Debug, clap::Args)]
#[command(after_help = PS)]
pub struct PsArgs {
    #[command(flatten)]
    pub at: Where,
    /// Show it again every second, until Ctrl-C.
    #[arg(long, short)]
    pub watch: bool,
    /// Print JSON: one object, with --watch one in each line.
    #[arg(long)]
    pub json: bool,
}

const STATUS: &str = "Examples:
  firn status job
  firn status job -n k8s.io --json

Exit status: 0 done, 1 there is no such container, or it failed, 2 wrong usage.";

/// Show one container under firn in detail: its GPUs, its memory, and what is in progress.
///
/// `firn ps` lists all of them. Changes nothing.
#[derive(Debug, clap::Args)]
#[command(after_help = STATUS)]
pub struct StatusArgs {
    /// Id of the container.
    pub id: String,
    #[command(flatten)]
    pub at: Where,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}
