//! The command line of `firn install` and `firn uninstall`.

use std::path::{Path, PathBuf};

/// Put firn's programs on a node, and its runtime handler into containerd's configuration.
///
/// Copies firn's four programs and its plugin for CRIU to PREFIX/bin, each by rename, so that running
/// containers keep what they have. With --containerd it also adds the runtime handler `firn` for Kubernetes.
/// `containerd config dump` has to show the rest of the configuration as it was, or nothing is changed. Also
/// upgrades: run it again, as `upgrade` if you like, with the new release.
#[derive(Debug, clap::Args)]
#[command(
    visible_alias = "upgrade",
    after_help = "Examples:\n  firn install --dry-run\n  firn install --containerd --restart\n  \
                  ./firn upgrade\n\n\
                        Exit status: 0 done, 1 failed, 2 wrong usage."
)]
pub struct InstallArgs {
    /// The directory that has the programs. Default: that of this program.
    #[arg(long, value_name = "DIR")]
    pub from: Option<PathBuf>,
    #[command(flatten)]
    pub place: Destination,
    /// Add the runtime handler to containerd's configuration.
    #[arg(long)]
    pub containerd: bool,
}

/// Remove what `firn install` has put on a node.
///
/// Refuses while containers run under firn, because their shim needs the programs and containerd the handler.
/// Files that somebody else has put there stay.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn uninstall --dry-run\n  firn uninstall --restart --wait\n\n\
                        Exit status: 0 done, also if nothing was there, 1 failed, 2 wrong usage."
)]
pub struct UninstallArgs {
    #[command(flatten)]
    pub place: Destination,
    /// Wait until no container runs under firn.
    #[arg(long)]
    pub wait: bool,
}

/// Where firn is installed.
#[derive(Debug, clap::Args)]
pub struct Destination {
    /// Root directory of the node: for a container that has the node's file system.
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    /// The programs are in PREFIX/bin. Those of /usr belong to a package, and stay as they are. Default: /usr
    /// for the firn of a package, else /usr/local.
    #[arg(long)]
    pub prefix: Option<PathBuf>,
    /// containerd's configuration.
    #[arg(long, value_name = "FILE", default_value = "/etc/containerd/config.toml")]
    pub config: PathBuf,
    /// Restart containerd by systemd if its configuration was changed. Pods run on.
    #[arg(long)]
    pub restart: bool,
    /// Only show what would be done.
    #[arg(long)]
    pub dry_run: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

impl Destination {
    /// Below which the programs are, or will be. `own` is this program.
    pub fn prefix(&self, own: &Path) -> PathBuf {
        let default = || {
            if own == Path::new(PACKAGED).join("bin/firn") {
                PACKAGED
            } else {
                "/usr/local"
            }
        };
        self.prefix.clone().unwrap_or_else(|| default().into())
    }
}

/// The prefix of packages.
pub const PACKAGED: &str = "/usr";
