//! `firn labels`: what a node can do, as labels of Kubernetes.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use firn_config::{Config, in_path, names};
use firn_gpu::Inventory;
use firn_preflight::expect_criu;
use serde::Serialize;

use super::args::LabelsArgs;
use crate::daemon::Daemon;
use crate::output::{self, printed, verbatim};
use crate::{install, program};

/// Values of [`LABEL_RUNTIME`](names::LABEL_RUNTIME). containerd has the handler.
pub const READY: &str = "ready";
/// Its configuration has it, and it was not restarted since.
pub const RESTART: &str = "restart-containerd";
/// `firn install` fails there.
pub const FAILED: &str = "failed";

/// All labels but that of the runtime.
pub const OF_NODE: [&str; 5] = [
    names::LABEL_VERSION,
    names::LABEL_DRIVER,
    names::LABEL_MODEL,
    names::LABEL_CHECKPOINT,
    names::LABEL_REMAP,
];

/// containerd's usual socket.
const SOCKET: &str = "/run/containerd/containerd.sock";

/// The driver from which on restores go to other GPUs.
const REMAPS: u32 = 580;

/// The labels of the node that are known; absent are those of GPUs where the node has none.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct NodeLabels<'a>(
    /// The value of each label, by the label's name.
    &'a BTreeMap<&'static str, String>,
);

printed! { NodeLabels<'_>: "labels" }

pub fn run(args: &LabelsArgs) -> Result<bool> {
    install::enter(&args.root)?;
    let mut config = Config::load_what_is_valid().0;
    // A container's PATH may lack the directory.
    let worker = || in_path(names::WORKER_PROGRAM, &install::search_path());
    config.worker.path = config.worker.path.or_else(worker);
    // None on a node without a driver.
    let inventory = program::inventory(&config).ok();
    let labels = of(inventory.as_ref(), has_criu());
    if args.json {
        output::json(&NodeLabels(&labels))?
    } else {
        labels.iter().for_each(|(key, value)| verbatim!("{key}={value}"))
    }
    Ok(true)
}

/// Whether containerd finds CRIU, or a user of the node does where no containerd is seen.
fn has_criu() -> bool {
    let mut path = Daemon::find(Path::new(SOCKET)).path;
    path.push(":");
    path.push(install::search_path());
    expect_criu(&path).is_ok()
}

fn of(inventory: Option<&Inventory>, has_criu: bool) -> BTreeMap<&'static str, String> {
    let mut labels = BTreeMap::from([(names::LABEL_VERSION, env!("CARGO_PKG_VERSION").to_owned())]);
    let Some(inventory) = inventory.filter(|inventory| !inventory.gpus.is_empty()) else {
        return labels;
    };
    let driver = &inventory.driver_version;
    let branch = driver
        .split('.')
        .next()
        .and_then(|branch| branch.parse::<u32>().ok());
    labels.insert(names::LABEL_DRIVER, value(driver));
    let checkpoints = inventory.checkpoint_api && has_criu;
    labels.insert(names::LABEL_CHECKPOINT, checkpoints.to_string());
    let remaps = checkpoints && branch.is_some_and(|branch| branch >= REMAPS);
    labels.insert(names::LABEL_REMAP, remaps.to_string());
    let mut models: Vec<&str> = inventory.gpus.iter().map(|gpu| gpu.name.as_str()).collect();
    models.dedup();
    let model = match models[..] {
        [model] => value(model),
        _ => "mixed".to_owned(),
    };
    labels.insert(names::LABEL_MODEL, model);
    labels
}

/// The text as a value of a label: 63 characters at most, none but letters, digits, `-`, `_` and `.`, which
/// begins and ends with a letter or digit.
fn value(text: &str) -> String {
    let kept = |letter: char| match letter {
        letter if letter.is_ascii_alphanumeric() || "-_.".contains(letter) => letter,
        _ => '-',
    };
    let all: String = text.chars().map(kept).take(63).collect();
    all.trim_matches(|letter: char| !letter.is_ascii_alphanumeric())
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_have_values_that_kubernetes_takes() {
        assert_eq!(value("NVIDIA H100 80GB HBM3"), "NVIDIA-H100-80GB-HBM3");
        assert_eq!(value("(ä) x/"), "x");
        assert_eq!(value(&"a".repeat(80)).len(), 63);
    }

    #[test]
    fn the_driver_decides_what_a_node_can() {
        let gpu = r#"{"uuid":"GPU-01010101-0101-0101-0101-010101010101","name":"A B","pci_device_id":1,
            "pci_address":"00000000:01:00.0","memory_total":1,"memory_free":1,"minor":0,"mig":false,
            "persistence":true,"node":null}"#;
        let with = |driver: &str, names: &[&str]| {
            let gpus = names.iter().map(|name| {
                let mut gpu: firn_gpu::Gpu = serde_json::from_str(gpu).unwrap();
                gpu.name = (*name).to_owned();
                gpu
            });
            let inventory = Inventory {
                driver_version: driver.to_owned(),
                checkpoint_api: true,
                gpus: gpus.collect(),
                ..Inventory::default()
            };
            let labels = of(Some(&inventory), true);
            OF_NODE.map(|key| labels.get(key).cloned().unwrap_or_default())
        };
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(
            with("580.159.04", &["A B", "A B"]),
            [version, "580.159.04", "A-B", "true", "true"]
        );
        assert_eq!(
            with("570.1", &["A", "B"]),
            [version, "570.1", "mixed", "true", "false"]
        );
        assert_eq!(with("570.1", &[]), [version, "", "", "", ""]);
        assert_eq!(of(None, true).len(), 1);
    }
}
