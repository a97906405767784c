//! The test image as containerd keeps it: imported once by each version of containerd in a program of suites,
//! and copied to the nodes that follow. An import takes more of a processor than most trials.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use firn_node::{Image, Node, Suite};

/// Where containerd keeps content, snapshots and metadata.
const DATA: &str = "/var/lib/containerd";
/// A containerd's own id, which is another one on each node.
const ID: &str = "./io.containerd.grpc.v1.introspection";

/// Archives of [`DATA`], in files without a name, so that nothing is left of them.
static ARCHIVES: Mutex<BTreeMap<Suite, File>> = Mutex::new(BTreeMap::new());

/// Starts containerd on a node on which it has never run, with this image, which is always the same.
pub(crate) fn start_containerd_with(node: &Node, image: &Image) -> Result<()> {
    let mut archives = ARCHIVES.lock().unwrap_or_else(PoisonError::into_inner);
    let suite = node.record().suite;
    if let Some(archive) = archives.get(&suite) {
        let archive = archive.try_clone().context("open the archive again")?;
        drop(archives);
        unpack(node, &archive)?;
        return node.start_containerd();
    }
    node.start_containerd()?;
    image.import(node)?;
    // Order matters: nothing writes while it is packed.
    node.kill_containerd()?;
    archives.insert(suite, pack(node)?);
    drop(archives);
    node.start_containerd()
}

fn pack(node: &Node) -> Result<File> {
    let archive = tempfile::tempfile().context("make a file for containerd's data")?;
    let mut tar = tar(node);
    tar.args(["--create", "--exclude", ID, "."]);
    tar.stdout(archive.try_clone().context("open the archive again")?);
    run(tar, node)?;
    Ok(archive)
}

fn unpack(node: &Node, archive: &File) -> Result<()> {
    // Opened by its path, so that each reader has a place of its own in the file.
    let path = format!("/proc/{}/fd/{}", std::process::id(), archive.as_raw_fd());
    let archive = File::open(&path).with_context(|| format!("open {path}"))?;
    let mut tar = tar(node);
    tar.args(["--extract", "--preserve-permissions"]);
    tar.stdin(archive);
    run(tar, node)
}

/// tar of the host, with containerd's data of the node as its directory.
fn tar(node: &Node) -> Command {
    let mut tar = Command::new("tar");
    tar.args(["--xattrs", "--xattrs-include=*", "--numeric-owner", "--directory"]);
    tar.arg(node.path(DATA)).stdin(Stdio::null());
    tar
}

fn run(mut tar: Command, node: &Node) -> Result<()> {
    let status = tar.status().context("run tar")?;
    ensure!(
        status.success(),
        "copy containerd's data of {}: {status}",
        node.name()
    );
    Ok(())
}
