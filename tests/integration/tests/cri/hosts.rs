//! Hosts whose containerd serves Kubernetes: with both shims side by side, and with firn in the stock shim's
//! place.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use anyhow::{Context, Result, anyhow};
use firn_lab::{FIRN, GpuHost, STOCK, SimGpu, configure_pods, import_pod_images, install_network_plugin};
use firn_node::{GoOptions, Node, Platform, Suite, go_build};

use crate::cri::client::{CLIENT, Cri};

const RUNTIME_CLASS: &str = include_str!("../../../../config/kubernetes/runtimeclass.yaml");
/// Where runc keeps its state under the handler that has options of its own.
const NAMED_ROOT: &str = "/run/containerd/firn-runc";

/// How a pod gets its shim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// containerd's own shim.
    Stock,
    /// Handler `firn` of the shipped configuration: the stock runtime's name with `runtime_path`.
    Path,
    /// Runtime name `io.containerd.firn.v2`, with options, which containerd then sends as TOML.
    Named,
    /// Firn under the stock shim's file name.
    DropIn,
}

impl Way {
    /// Every way to get firn.
    pub const FIRN: [Self; 3] = [Self::Path, Self::Named, Self::DropIn];

    /// The name of its handler in containerd's configuration, which is what a RuntimeClass names.
    pub fn handler(self) -> &'static str {
        match self {
            Self::Stock | Self::DropIn => "runc",
            // Of the shipped file: its handler has to be that of the shipped configuration.
            Self::Path => RUNTIME_CLASS
                .lines()
                .find_map(|line| line.strip_prefix("handler: "))
                .unwrap_or("none is named"),
            Self::Named => "firn-named",
        }
    }

    /// Where runc keeps its state.
    pub fn runc_root(self) -> &'static str {
        match self {
            Self::Stock | Self::Path | Self::DropIn => "/run/containerd/runc",
            Self::Named => NAMED_ROOT,
        }
    }

    /// How containerd's configuration names the runtime.
    pub fn runtime(self) -> &'static str {
        match self {
            Self::Path => "runtime_path",
            Self::Named => FIRN,
            Self::Stock | Self::DropIn => STOCK,
        }
    }

    /// The shim's program.
    pub fn program(self) -> &'static str {
        match self {
            Self::Stock => "/usr/bin/containerd-shim-runc-v2",
            Self::Path | Self::Named => "/usr/local/bin/containerd-shim-firn-v2",
            Self::DropIn => "/usr/local/bin/containerd-shim-runc-v2",
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stock => "the stock shim",
            Self::Path => "firn by runtime_path",
            Self::Named => "firn by its name",
            Self::DropIn => "firn as drop-in",
        })
    }
}

/// The platforms on which Kubernetes' calls are tried.
pub const PLATFORMS: [Platform; 2] = [Platform::TRIXIE, Platform::FORKY];

/// The hosts of a platform, made when they are wanted, used by one test at a time.
pub struct Hosts {
    pub platform: Platform,
    /// With both shims.
    both: Mutex<Option<GpuHost>>,
    /// With firn in the stock shim's place.
    replaced: Mutex<Option<GpuHost>>,
}

impl Hosts {
    pub fn new(platform: Platform) -> Self {
        Self {
            platform,
            both: Mutex::default(),
            replaced: Mutex::default(),
        }
    }

    /// Runs a test in this way. A host on which it has failed, or left something, is not used again.
    pub fn with<T>(&self, way: Way, test: impl FnOnce(Cri<'_>) -> Result<T>) -> Result<T> {
        let (kept, name) = match way {
            Way::DropIn => (&self.replaced, "cri-d"),
            Way::Stock | Way::Path | Way::Named => (&self.both, "cri"),
        };
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        // Not back in its place if the test panics.
        let host = match kept.take() {
            Some(host) => host,
            None => self.make(way, name)?,
        };
        let done = test(Cri { host: &host, way })
            .and_then(|done| host.idle().map(|()| done))
            .with_context(|| format!("with {way}"));
        match done {
            Ok(_) => *kept = Some(host),
            Err(_) => eprintln!("{}", host.log()),
        }
        done
    }

    fn make(&self, way: Way, name: &str) -> Result<GpuHost> {
        let client = client()?;
        let gpus = [SimGpu::h200(1), SimGpu::h200(2)];
        let host = GpuHost::for_cri(self.platform, name, &gpus, |node| {
            configure(node, self.platform.suite)
        })?;
        let node = host.node();
        node.install(client, CLIENT, 0o755)?;
        if way == Way::DropIn {
            host.drop_in()?;
        }
        import_pod_images(node)?;
        Ok(host)
    }
}

/// The client, built once per test program.
fn client() -> Result<&'static Path> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("cri-client");
    let built = BUILT.get_or_init(|| {
        go_build(&source, "cri-client", GoOptions::default()).map_err(|error| format!("{error:#}"))
    });
    built.as_deref().map_err(|error| anyhow!("{error}"))
}

/// Stands for every network plugin: reports that the pod has an address, and does nothing.
const PLUGIN: &str = r#"#!/bin/sh
[ "$CNI_COMMAND" = ADD ] || exit 0
echo '{"cniVersion":"0.4.0","interfaces":[{"name":"'"$CNI_IFNAME"'","sandbox":"'"$CNI_NETNS"'"}],
"ips":[{"version":"4","interface":0,"address":"10.88.0.2/24"}]}'
"#;
const NETWORK: &str = r#"{"cniVersion":"0.4.0","name":"none","plugins":[{"type":"none"}]}"#;

/// Configures containerd, with a handler that has options of its own, and the plugin.
fn configure(node: &Node, suite: Suite) -> Result<()> {
    let plugin = tempfile::NamedTempFile::new()?;
    fs::write(plugin.path(), PLUGIN)?;
    for name in ["none", "loopback"] {
        install_network_plugin(node, plugin.path(), name)?;
    }
    node.write("/etc/cni/net.d/none.conflist", NETWORK)?;
    let table = format!(
        "[plugins.\"{}\".containerd.runtimes.firn-named",
        suite.cri_plugin()
    );
    let named = format!(
        "{table}]\nruntime_type = \"io.containerd.firn.v2\"\n\
         {table}.options]\nBinaryName = \"/usr/sbin/runc\"\nRoot = \"{NAMED_ROOT}\"\n\
         SystemdCgroup = false\n"
    );
    configure_pods(node, &named)
}
