//! `cargo xtask cluster`: the suite in a real Kubernetes, with the build that it needs.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use firn_lab::KUBERNETES;
use firn_node::go_lacks;

use crate::tools::{cargo, exit_as, need_root};
use crate::workspace;

/// Run the stories in a Kubernetes of two nodes
///
/// Builds etcd, the API server, the controllers, the scheduler, the kubelet and kubectl first (about ten
/// minutes on two processors; kept in target/node/go), and the network plugins and NVIDIA's device plugin.
/// `cargo xtask test` runs the same stories once these are built, and leaves them out before. Needs root and
/// Go with a module proxy.
#[derive(clap::Args)]
pub struct Cmd {
    /// Only stories with this in their names
    filter: Option<String>,
}

pub fn run(cmd: &Cmd) -> Result<ExitCode> {
    need_root("cluster")?;
    if let Some(reason) = go_lacks() {
        bail!("Kubernetes cannot be built: {reason}");
    }
    if KUBERNETES.kept()?.is_none() {
        println!("building Kubernetes: about ten minutes on two processors, once");
    }
    KUBERNETES.build()?;
    let mut suite = cargo();
    suite.args(["test", "--workspace", "--locked", "--test", "cluster", "--"]);
    suite.args(&cmd.filter).current_dir(workspace()?);
    Ok(exit_as(suite.status().context("run the suite")?))
}
