//! The command line of `firn metrics`.

use std::path::PathBuf;

use firn_config::names;

/// Print the metrics of this node's transactions and containers, as Prometheus reads them.
///
/// Counts and durations come from the history of the node, which never counts backwards; what continues comes
/// from the containers. firn-textfile.timer of the package writes them to a file for node_exporter.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  firn metrics\n  \
                  firn metrics --textfile /var/lib/prometheus/node-exporter/firn.prom\n\n\
                  Exit status: 0 done, 1 failed, 2 wrong usage.")]
pub struct MetricsArgs {
    /// Write them to a file for node_exporter's textfile collector. Its readers see the old one or the new.
    #[arg(long, value_name = "FILE.prom")]
    pub textfile: Option<PathBuf>,
    /// The state directory of containerd; that of k3s is /run/k3s/containerd.
    #[arg(long, value_name = "DIR", default_value = "/run/containerd")]
    pub state: PathBuf,
    /// Directory of the history.
    #[arg(long, value_name = "DIR", default_value = names::HISTORY)]
    pub dir: PathBuf,
}
