//! The command line of `firn logs`.

use crate::complete;
use crate::containerd::ContainerdArgs;

/// Show the output of a container that goes to a file.
///
/// That of a container which `firn restore` or `firn move` has made, unless --log named another place; and
/// that of any task whose client has given it a file, as `ctr run --log-uri file:///FILE`. nerdctl and
/// Kubernetes keep output themselves: see `nerdctl logs` and `kubectl logs`. What the container has written
/// is printed as it is.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  firn logs job\n  firn logs job --follow\n\n\
                  Exit status: 0 done, 1 failed, or no file gets its output, 2 wrong usage.")]
pub struct LogsArgs {
    /// Id of the container, or nerdctl's name of it.
    #[arg(add = complete::logs())]
    pub container: String,
    /// Wait for more until the container has ended.
    #[arg(long, short)]
    pub follow: bool,
    #[command(flatten)]
    pub containerd: ContainerdArgs,
}
