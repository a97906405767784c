//! The command line of `firn ps`.

use std::path::PathBuf;

use crate::complete;

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
  firn ps job
  firn ps -n k8s.io --state /run/k3s/containerd --json

Exit status: 0 done, also if no container runs, 1 failed, or there is no such container, 2 wrong usage.";

/// List the containers under firn, or show one, with their GPUs, and what is in progress.
///
/// Shows what each container is, the GPU memory that it uses, and of a checkpoint, restore, pause or move the
/// phase, how long it has taken, how much is copied and how long it will still take. Names why a container is
/// suspended, and the command that resumes it. Reads the bundles of containerd's shims and the transactions
/// of firn-runc. Changes nothing.
#[derive(Debug, clap::Args)]
#[command(after_help = PS)]
pub struct PsArgs {
    /// Id of a container. Shows it in detail.
    #[arg(add = complete::all_tasks())]
    pub container: Option<String>,
    #[command(flatten)]
    pub at: Where,
    /// Show it again every second, until Ctrl-C.
    #[arg(long, short)]
    pub watch: bool,
    /// Print JSON: one object, with --watch one in each line.
    #[arg(long)]
    pub json: bool,
}
