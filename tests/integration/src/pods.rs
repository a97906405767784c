//! What a node needs to run pods: containerd's configuration for Kubernetes, and images.

use std::path::Path;

use anyhow::Result;
use firn_node::{GoOptions, Image, Node, SlowGo};

use crate::{Built, IMAGE};

/// The programs of Kubernetes, in one file: `cargo xtask cluster` builds them.
pub const KUBERNETES: SlowGo = SlowGo {
    source: concat!(env!("CARGO_MANIFEST_DIR"), "/kubernetes"),
    name: "kubernetes",
    options: GoOptions {
        cgo: false,
        ldflags: "-s -w -X k8s.io/component-base/version.gitVersion=v1.34.4 \
                  -X k8s.io/component-base/version.gitMajor=1 \
                  -X k8s.io/component-base/version.gitMinor=34 \
                  -X k8s.io/client-go/pkg/version.gitVersion=v1.34.4",
        tags: "",
    },
};
/// What stands for the pause image: the container that holds a pod's namespaces.
const PAUSE: &str = "localhost/firn-pause:latest";
const CONFIG: &str = "/etc/containerd/config.toml";
/// Where containerd looks for network plugins: the first is its default, the second Debian's.
const PLUGINS: [&str; 2] = ["/opt/cni/bin", "/usr/lib/cni"];

/// Gives containerd the handler by `firn install`, what only tests need, and these runtimes. For a node that
/// has firn's programs, and whose containerd has not started yet.
pub fn configure_pods(node: &Node, runtimes: &str) -> Result<()> {
    let suite = node.record().suite;
    let base = node.read(CONFIG)?;
    // A machine that is a container itself may not lower it.
    let own = suite.cri_config(PAUSE) + "restrict_oom_score_adj = true\n";
    node.write(CONFIG, base + &own)?;
    node.run(&["firn", "install", "--containerd"])?;
    node.write(CONFIG, node.read(CONFIG)? + runtimes)
}

/// Installs a network plugin, and how containerd calls it.
pub fn install_network_plugin(node: &Node, program: &Path, name: &str) -> Result<()> {
    for dir in PLUGINS {
        node.install(program, format!("{dir}/{name}"), 0o755)?;
    }
    Ok(())
}

/// Gives the images of pods and of their sandboxes to the namespace of Kubernetes.
pub fn import_pod_images(node: &Node) -> Result<()> {
    let built = Built::for_tests()?;
    let image = Image::new(IMAGE)
        .program(built.program("gpu-counter"), "/bin/gpu-counter")
        .program(built.program("objects"), "/bin/objects");
    image.import_into(node, "k8s.io")?;
    let pause = Image::new(PAUSE).command(&["sh", "-c", "while :; do sleep 1000; done"]);
    pause.import_into(node, "k8s.io")
}
