//! The command line of `firn images`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Subcommand;

use crate::complete;
use crate::containerd::Socket;
use crate::store::args::duration;

/// List the checkpoints on this node, show what takes room, and remove them.
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  firn images ls\n  firn images du\n  \
                  firn images prune --older-than 7d --dry-run")]
pub enum ImagesCommand {
    #[command(
        about = "List the checkpoints of this node",
        after_help = "Examples:\n  firn images ls\n  firn images ls --json\n\n\
                      Exit status: 0 done, 1 a place could not be read or memory is missing, 2 wrong usage."
    )]
    Ls(ListArgs),
    #[command(
        about = "Show what takes room in the checkpoints of this node, and how much several of them share",
        after_help = "Examples:\n  firn images du\n  firn images du --json\n\n\
                      Exit status: 0 done, 1 a place could not be read, 2 wrong usage."
    )]
    Du(ListArgs),
    Prune(PruneArgs),
}

/// Where checkpoints are looked for.
#[derive(Debug, clap::Args)]
pub struct Common {
    /// The machine has no containerd.
    #[arg(long, conflicts_with = "address")]
    pub no_containerd: bool,
    #[command(flatten)]
    pub socket: Socket,
    /// The state directory of containerd. Default: the directory of its socket.
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

impl Common {
    /// The state directory of containerd.
    pub fn state(&self) -> PathBuf {
        let of_socket = self.socket.address.parent();
        self.state
            .clone()
            .unwrap_or_else(|| of_socket.unwrap_or(Path::new("/")).to_owned())
    }
}

/// Show the checkpoints of this node.
///
/// Looks at the images of containerd in all namespaces, at the directory from which pods may be restored
/// (`[restore] from-dir`), at the names in the store, and at images that failed checkpoints and containerd
/// have left.
#[derive(Debug, clap::Args)]
pub struct ListArgs {
    #[command(flatten)]
    pub common: Common,
}

/// Remove checkpoints, by their names in `firn images ls` or by their age.
///
/// Removes nothing that is not named or old enough, that is in use, or that is no checkpoint. If a named one
/// cannot be removed, nothing is. Memory in a store goes with the next `firn store gc`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  firn images prune checkpoint/job --dry-run\n  \
                  firn images prune --older-than 7d\n  \
                  firn images prune --left --older-than 30d\n\n\
                  Exit status: 0 done, 1 nothing was removed, or not all, 2 wrong usage.")]
pub struct PruneArgs {
    /// Names of checkpoints.
    #[arg(value_name = "NAME", required_unless_present = "older_than", add = complete::images())]
    pub names: Vec<String>,
    /// All that are older, or of the named ones those: a whole number and s, m, h or d.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub older_than: Option<Duration>,
    /// Only those of this namespace, of containerd or of Kubernetes.
    #[arg(long, short)]
    pub namespace: Option<String>,
    /// Only those that failed checkpoints and containerd have left.
    #[arg(long, conflicts_with = "namespace")]
    pub left: bool,
    /// Show what would be removed, and remove nothing.
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub common: Common,
}
