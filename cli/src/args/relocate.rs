//! The command line of `firn move`.

use clap::Args;

use super::overrides::OverrideArgs;
use crate::complete;
use crate::containerd::ContainerdArgs;

const HELP: &str = "Examples:
  firn move job root@gpu-8
  firn move job root@gpu-8 --gpus 2,3
  firn move job root@gpu-8 --dry-run
  firn move job root@gpu-8 --ssh 'ssh -p 2222 -i /root/.ssh/moves'

Exit status: 0 the container runs there (with --dry-run: nothing is in the way), 1 it was not moved and \
continues here, or the error names what to do, 2 wrong usage, 3 refused, and nothing was touched.";

/// Move a container to another node, over ssh.
///
/// Checks both nodes first. The container stands still while its checkpoint goes through ssh and is restored
/// there; it is removed here once the copy runs. After a failure it continues here. If the connection is lost
/// while the copy may have begun to run, the container stays paused here, and the error names what to do. The
/// other node needs firn, the same driver, and a root login by key.
#[derive(Clone, Debug, Args)]
#[command(after_help = HELP)]
pub struct MoveArgs {
    /// Id of the container.
    #[arg(add = complete::tasks())]
    pub container: String,
    /// The other node, as ssh takes it: USER@HOST.
    #[arg(value_parser = node)]
    pub target: String,
    /// Id of the container there. Default: the same.
    #[arg(long, value_name = "ID")]
    pub name: Option<String>,
    /// GPUs of the other node, by UUID or by the index of nvidia-smi, with commas. `auto`: free ones.
    #[arg(long, value_name = "GPUS")]
    pub gpus: Option<String>,
    /// Which GPU becomes which: pairs `GPU-old=GPU-new` with commas.
    #[arg(long, value_name = "PAIRS", conflicts_with = "gpus")]
    pub gpu_map: Option<String>,
    /// Do not compare the CPUs of both nodes (firn.dev/cpu). Programs that use instructions which the other
    /// node's CPU lacks end with SIGILL there.
    #[arg(long, value_name = "any", value_parser = ["any"])]
    pub cpu: Option<String>,
    #[command(flatten)]
    pub overrides: OverrideArgs,
    /// Only check both nodes.
    #[arg(long)]
    pub dry_run: bool,
    /// The program that runs a command there, with its options, as rsync's -e.
    #[arg(
        long,
        value_name = "COMMAND",
        default_value = "ssh -o BatchMode=yes -o ServerAliveInterval=15"
    )]
    pub ssh: String,
    /// firn's program there.
    #[arg(long, value_name = "PATH", default_value = "firn")]
    pub remote_firn: String,
    #[command(flatten)]
    pub containerd: ContainerdArgs,
    /// Print no progress.
    #[arg(long, short)]
    pub quiet: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// ssh would take what begins with a dash for one of its options.
fn node(word: &str) -> Result<String, &'static str> {
    if word.starts_with('-') || word.is_empty() {
        Err("a node is USER@HOST")
    } else {
        Ok(word.to_owned())
    }
}

impl MoveArgs {
    /// Id of the copy.
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or(&self.container)
    }
}
