//! Hosts with CRI-O, which has firn-runc as a runtime handler.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow, ensure};
use firn_lab::{GpuHost, IMAGE, SimGpu, Skip, install_network_plugin};
use firn_node::{GoOptions, Node, Platform, c_build_of, go_build_of, go_install, go_lacks, wait_for};

use crate::crio::client::LIMIT;

pub const VERSION: &str = "v1.34.0";
const MODULE: &str = "github.com/cri-o/cri-o";
const CRICTL: &str = "sigs.k8s.io/cri-tools/cmd/crictl";
/// Without what needs libraries in C.
const OPTIONS: GoOptions = GoOptions {
    cgo: false,
    ldflags: "-s -w",
    tags: "containers_image_openpgp,exclude_graphdriver_btrfs,libdm_no_deferred_remove",
};
/// conmon, and podman, which reads images into CRI-O's storage and makes images of checkpoints. The suite
/// `podman` has the same root.
const PACKAGES: &[&str] = &["conmon", "netavark", "podman"];

/// As podman's suite: a test node may make no whiteouts, so there are no overlays.
const STORAGE: &str = "[storage]\ndriver = \"vfs\"\ngraphroot = \"/var/lib/containerd/crio\"\n\
                       runroot = \"/run/containers/storage\"\n";
/// As podman's suite: no limit for pids.
const CONFIG: &str = r#"[crio.api]
listen = "/run/crio/crio.sock"
[crio.image]
pause_image = "PAUSE"
[crio.runtime]
default_runtime = "runc"
conmon_cgroup = "pod"
cgroup_manager = "cgroupfs"
pids_limit = 0
[crio.runtime.runtimes.runc]
runtime_path = "/usr/sbin/runc"
"#;
/// As docs/guide/podman.md has it.
const DROP_IN: &str = r#"[crio.runtime]
enable_criu_support = true
[crio.runtime.runtimes.firn-runc]
runtime_path = "/usr/local/bin/firn-runc"
"#;
const LOG: &str = "/var/log/crio.log";

/// Stands for every network plugin: reports that the pod has an address, and does nothing.
const PLUGIN: &str = r#"#!/bin/sh
case $CNI_COMMAND in
VERSION) echo '{"cniVersion":"0.4.0","supportedVersions":["0.4.0"]}'; exit ;;
ADD) ;;
*) exit 0 ;;
esac
echo '{"cniVersion":"0.4.0","interfaces":[{"name":"'"$CNI_IFNAME"'","sandbox":"'"$CNI_NETNS"'"}],
"ips":[{"version":"4","interface":0,"address":"10.88.0.2/24"}]}'
"#;
const NETWORK: &str = r#"{"cniVersion":"0.4.0","name":"none","plugins":[{"type":"none"}]}"#;

/// CRI-O, pinns, and crictl.
type Programs = [PathBuf; 3];

/// A node with this many GPUs, and with CRI-O.
pub fn host(platform: Platform, name: &str, gpus: u32) -> Result<GpuHost> {
    let programs = programs()?;
    let gpus: Vec<SimGpu> = (1..=gpus).map(SimGpu::h200).collect();
    let host = GpuHost::for_test_with(platform, name, &gpus, PACKAGES)?;
    let node = host.node();
    for (program, name) in programs.iter().zip(["crio", "pinns", "crictl"]) {
        node.install(program, format!("/usr/local/bin/{name}"), 0o755)?;
    }
    let plugin = tempfile::NamedTempFile::new()?;
    fs::write(plugin.path(), PLUGIN)?;
    for name in ["none", "loopback"] {
        install_network_plugin(node, plugin.path(), name)?;
    }
    node.write("/etc/cni/net.d/none.conflist", NETWORK)?;
    node.write("/etc/containers/storage.conf", STORAGE)?;
    node.write("/etc/crio/crio.conf", CONFIG.replace("PAUSE", IMAGE))?;
    node.write("/etc/crio/crio.conf.d/20-firn.conf", DROP_IN)?;
    node.write(
        "/etc/crictl.yaml",
        "runtime-endpoint: unix:///run/crio/crio.sock\ntimeout: 60\n",
    )?;
    read_image(node)?;
    start(node)?;
    Ok(host)
}

fn read_image(node: &Node) -> Result<()> {
    node.run(&["ctr", "images", "export", "--local", "/root/image.tar", IMAGE])?;
    let loaded = node
        .run(&["podman", "load", "--input", "/root/image.tar"])?
        .stdout;
    let loaded = loaded.rsplit(": ").next().context(loaded.clone())?.trim();
    node.run(&["podman", "tag", loaded, IMAGE]).map(drop)
}

fn start(node: &Node) -> Result<()> {
    let start = format!("crio >>{LOG} 2>&1 </dev/null &");
    node.run(&["sh", "-euc", &start])?;
    let served = wait_for("CRI-O", LIMIT, || {
        ensure!(
            node.processes().iter().any(|process| process.command == "crio"),
            "CRI-O has ended"
        );
        Ok(node.run(&["crictl", "version"]).ok().map(drop))
    });
    served.with_context(|| node.read(LOG).unwrap_or_default())
}

/// Builds the programs, once per test program.
fn programs() -> Result<&'static Programs> {
    static BUILT: OnceLock<Result<Programs, String>> = OnceLock::new();
    if let Some(reason) = go_lacks() {
        return Err(Skip::new(format!("CRI-O is not built: {reason}")).into());
    }
    let build = || -> Result<Programs> {
        Ok([
            go_build_of(MODULE, VERSION, "cmd/crio", OPTIONS, |_: &Path| Ok(()))?,
            c_build_of(MODULE, VERSION, "pinns/src", "pinns")?,
            go_install(CRICTL, VERSION)?,
        ])
    };
    let built = BUILT.get_or_init(|| build().map_err(|error| format!("{error:#}")));
    built.as_ref().map_err(|error| anyhow!("{error}"))
}
