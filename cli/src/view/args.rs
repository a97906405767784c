//! What `firn inspect`, `firn audit` and a dry run of `firn restore` are about.

use std::path::PathBuf;

use crate::complete;
use crate::containerd::ContainerdArgs;
use crate::place::Kind;

/// The argument that names a container or a checkpoint.
#[derive(Debug, clap::Args)]
pub struct SubjectArgs {
    /// A checkpoint: an image directory, a tar file, or the name of an image in containerd. Or the id of a
    /// running container; for `firn audit` also a pid.
    #[arg(value_name = "CONTAINER|DIR|FILE|REF", add = complete::subjects())]
    pub subject: String,
    /// What the argument is, if its form does not decide.
    #[arg(long = "as", value_name = "KIND")]
    pub kind: Option<Kind>,
    #[command(flatten)]
    pub containerd: ContainerdArgs,
    /// The state directory of containerd; that of k3s is /run/k3s/containerd.
    #[arg(long, value_name = "DIR", default_value = "/run/containerd")]
    pub state: PathBuf,
}
