//! A real Kubernetes of two nodes: API server, scheduler, controllers, kubelets, and NVIDIA's device plugin
//! on simulated GPUs. Pods run under firn by its RuntimeClass, are checkpointed through the kubelet, and go
//! on elsewhere.
//!
//! Needs root, and programs that `cargo xtask cluster` builds: without them all stories are skipped.
#![allow(clippy::unwrap_used, reason = "a failed invariant fails the test")]

mod cluster;
mod installed;
mod plugins;
mod stories;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use firn_lab::{Claims, KUBERNETES, Platform, Skip, matrix};
use firn_node::go_lacks;
use serde_json::Value;

use crate::cluster::Cluster;

const PLATFORM: Platform = Platform::FORKY;

fn main() -> ExitCode {
    let cluster = Arc::new(Mutex::new(None));
    let trials = stories::STORIES.iter().map(|(name, story)| {
        let cluster = Arc::clone(&cluster);
        matrix::trial(matrix::name(name, PLATFORM), move || {
            on_cluster(&cluster, name, *story).with_context(|| name.to_owned())
        })
    });
    matrix::run([("cluster", matrix::Suite::new(&[]).with(trials))])
}

/// Runs a story on the cluster, which is made for the first. One in which a story has failed is not used
/// again.
fn on_cluster(kept: &Mutex<Option<Cluster>>, name: &str, story: fn(&Cluster) -> Result<()>) -> Result<()> {
    if let Some(reason) = go_lacks() {
        return Err(Skip::new(format!("Kubernetes is not built: {reason}")).into());
    }
    let Some(programs) = KUBERNETES.kept()? else {
        return Err(
            Skip::new("Kubernetes is not built: `cargo xtask cluster` does it, in ten minutes").into(),
        );
    };
    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
    let cluster = match kept.take() {
        Some(cluster) => cluster,
        None => Cluster::start(PLATFORM, &programs)?,
    };
    match story(&cluster).and_then(|()| claims(&cluster)?.works(name)) {
        Ok(()) => *kept = Some(cluster),
        Err(error) => {
            cluster.show();
            return Err(error);
        }
    }
    Ok(())
}

/// Of the RuntimeClass that firn is installed with.
fn claims(cluster: &Cluster) -> Result<Claims> {
    let versions: Value = serde_json::from_str(&cluster.kubectl(&["version", "--output", "json"])?)?;
    let version = versions["serverVersion"]["gitVersion"]
        .as_str()
        .context("no version")?;
    Claims::on_containerd(&cluster.north.host, "Kubernetes", version, "runtime_path")
}
