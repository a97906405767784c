//! Checks of the driver and of the GPUs.

use std::path::Path;

use firn_cdi::{CdiFile, Edits, KIND, Registry};
use firn_config::{Config, Reading};
use firn_gpu::{Gpu, Inventory};
use firn_host::procfs;
use firn_remap::{Grant, RequestedMap};

use super::Check;
use crate::cdi::is_ours;
use crate::{program, text};

/// Also returns what the driver shows.
pub fn checks(config: &Config) -> (Vec<Check>, Option<Inventory>) {
    let inventory = match program::inventory(config) {
        Ok(inventory) => inventory,
        Err(error) => {
            let error = format!("{error:#}");
            let (found, remedy) = error
                .split_once(". hint: ")
                .unwrap_or((&error, "`firn-gpu inventory` shows whether it runs at all"));
            let check = Check::fail("driver", format!("cannot be read: {found}"), remedy);
            return (vec![check], None);
        }
    };
    let mut checks = of_inventory(&inventory);
    checks.extend(mps(procfs::all().into_iter().map(procfs::comm)));
    checks.extend(named(config, &inventory));
    checks.extend(stale(&Registry::read(&config.create.cdi_dirs), &inventory));
    (checks, Some(inventory))
}

/// MPS, if one of these processes is its daemon.
fn mps(mut names: impl Iterator<Item = String>) -> Option<Check> {
    // The kernel keeps 15 letters of nvidia-cuda-mps-control and nvidia-cuda-mps-server.
    let runs = names.any(|name| name.starts_with("nvidia-cuda-mps"));
    runs.then(|| {
        Check::warn(
            "mps",
            "the MPS daemon runs: containers that use it cannot be checkpointed",
            "`echo quit | nvidia-cuda-mps-control` ends it",
        )
    })
}

/// GPUs that the configuration names.
fn named(config: &Config, inventory: &Inventory) -> Vec<Check> {
    const NAME: &str = "named gpus";
    let path = Config::path();
    let lines = Config::read(&path)
        .map(|Reading { lines, .. }| lines)
        .unwrap_or_default();
    let fail = |key: &str, found: String| {
        let line = lines.get(key).copied().unwrap_or_default();
        let file = path.display();
        Check::fail(
            NAME,
            found,
            format!("correct {file}, line {line}; `nvidia-smi -L` lists the GPUs"),
        )
    };
    let mut checks = Vec::new();
    for name in &config.restore.gpus {
        if let Err(error) = Grant::named(inventory, std::slice::from_ref(name), "[restore] gpus") {
            checks.push(fail("restore.gpus", error.to_string()));
        }
    }
    // A mistake in the map is one of the configuration's.
    let map = config.restore.gpu_map.join(",");
    if let Some(map) = (!map.is_empty())
        .then(|| RequestedMap::of_client(&map).ok())
        .flatten()
    {
        for pair in map.pairs {
            if !inventory.gpus.iter().any(|gpu| gpu.uuid == pair.new) {
                let found = format!(
                    "[restore] gpu-map names GPU {}, which this node does not have",
                    pair.new
                );
                checks.push(fail("restore.gpu-map", found));
            }
        }
    }
    checks
}

/// CDI files that were written for another driver, or for other GPUs.
fn stale(registry: &Registry, inventory: &Inventory) -> Vec<Check> {
    let files = registry.files().iter().filter(|file| file.kind == KIND);
    files.filter_map(|file| stale_file(file, inventory)).collect()
}

fn stale_file(file: &CdiFile, inventory: &Inventory) -> Option<Check> {
    let shown = file.path.display();
    let of_devices = file.devices.iter().map(|device| &device.edits);
    let missing = of_devices.clone().chain([&file.edits]).find_map(missing_file);
    let nodes = of_devices.flat_map(|edits| &edits.device_nodes);
    let nodes: Vec<&Path> = nodes
        .map(|node| Path::new(node.host_path.as_ref().unwrap_or(&node.path)))
        .collect();
    let left_out = inventory.gpus.iter().filter(|gpu| !gpu.mig).find(|gpu| {
        let node = gpu.node.as_ref();
        node.is_some_and(|node| !nodes.contains(&&*node.path))
    });
    let found = match (missing, left_out) {
        (Some(missing), _) => format!("{shown} is stale: it names {missing}, which is not there"),
        (None, Some(gpu)) => format!("{shown} is stale: it does not have GPU {}", gpu.uuid),
        (None, None) => return None,
    };
    let remedy = if is_ours(file) {
        format!("`firn cdi generate --output {shown}`")
    } else {
        format!("`nvidia-ctk cdi generate --output={shown}`, or what else has written it")
    };
    Some(Check::fail("cdi", found, remedy))
}

/// A file of the host that the edits name and that is not there.
fn missing_file(edits: &Edits) -> Option<&str> {
    let nodes = edits
        .device_nodes
        .iter()
        .map(|node| node.host_path.as_ref().unwrap_or(&node.path));
    let mounts = edits.mounts.iter().map(|mount| &mount.host_path);
    let mut files = nodes.chain(mounts);
    files.find(|path| !Path::new(path).exists()).map(String::as_str)
}

fn of_inventory(inventory: &Inventory) -> Vec<Check> {
    let mut checks = vec![driver(inventory)];
    if inventory.gpus.is_empty() {
        checks.push(Check::fail(
            "gpu",
            "none found",
            "`nvidia-smi -L` shows what the driver sees",
        ));
    }
    let gpus = inventory.gpus.iter().enumerate();
    checks.extend(gpus.map(|(index, gpu)| of_gpu(index, gpu)));
    checks
}

fn driver(inventory: &Inventory) -> Check {
    const NAME: &str = "driver";
    let found = format!(
        "{} (CUDA {})",
        inventory.driver_version,
        text::cuda_version(inventory.cuda_version)
    );
    let branch = inventory.driver_version.split('.').next();
    match branch.and_then(|branch| branch.parse::<u32>().ok()) {
        _ if inventory.cuda_version == 0 => Check::fail(
            NAME,
            format!("{found}; libcuda is missing"),
            "install the driver's compute libraries",
        ),
        _ if !inventory.checkpoint_api => Check::fail(
            NAME,
            format!("{found} has no process checkpoint"),
            "install driver 570 or later",
        ),
        Some(..580) => Check::warn(
            NAME,
            format!("{found} restores onto the same GPUs only"),
            "install driver 580 or later to restore onto others",
        ),
        _ => Check::ok(NAME, found),
    }
}

fn of_gpu(index: usize, gpu: &Gpu) -> Check {
    const NAME: &str = "gpu";
    let memory = text::bytes(gpu.memory_total);
    let found = format!(
        "{index}: {} {}, {memory}, {}",
        gpu.uuid, gpu.name, gpu.pci_address
    );
    let (limit, remedy) = if gpu.mig {
        let remedy = format!("`nvidia-smi -i {index} -mig 0`; whole GPUs only can be checkpointed");
        return Check::warn(NAME, format!("{found}; in MIG mode"), remedy);
    } else if gpu.node.is_none() {
        (
            "no device node",
            "`nvidia-modprobe -c 0` or `nvidia-smi` makes the nodes",
        )
    } else if !gpu.persistence {
        (
            "persistence mode is off",
            "`nvidia-smi -pm 1`; without it the driver's restore can fail or be slow while no GPU is awake",
        )
    } else {
        return Check::ok(NAME, found);
    };
    Check::warn(NAME, format!("{found}; {limit}"), remedy)
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    fn inventory(change: fn(&mut Inventory)) -> Vec<(&'static str, Status)> {
        let gpu = r#"{"uuid":"GPU-01010101-0101-0101-0101-010101010101","name":"G","pci_device_id":1,
            "pci_address":"00000000:01:00.0","memory_total":1,"memory_free":1,"minor":0,"mig":false,
            "persistence":true,"node":{"path":"/dev/nvidia0","type":"c","major":195,"minor":0}}"#;
        let mut inventory = Inventory {
            driver_version: "580.95.05".into(),
            cuda_version: 13000,
            checkpoint_api: true,
            gpus: vec![serde_json::from_str(gpu).unwrap()],
            topology: firn_gpu::Topology::default(),
            common_nodes: vec![],
        };
        change(&mut inventory);
        of_inventory(&inventory)
            .into_iter()
            .map(|check| (check.name, check.status))
            .collect()
    }

    #[test]
    fn mps_is_known_by_its_daemon() {
        let of = |name: &str| mps([name.to_owned()].into_iter());
        assert!(
            of("nvidia-cuda-mps")
                .unwrap()
                .remedy
                .unwrap()
                .contains("echo quit")
        );
        assert!(of("nvidia-smi").is_none());
    }

    #[test]
    fn each_limit_of_driver_and_gpu_is_seen() {
        use Status::{Fail, Ok, Warn};
        assert_eq!(inventory(|_| ()), [("driver", Ok), ("gpu", Ok)]);
        assert_eq!(inventory(|i| i.checkpoint_api = false)[0], ("driver", Fail));
        assert_eq!(inventory(|i| i.cuda_version = 0)[0], ("driver", Fail));
        assert_eq!(
            inventory(|i| i.driver_version = "570.1".into())[0],
            ("driver", Warn)
        );
        assert_eq!(inventory(|i| i.gpus[0].mig = true)[1], ("gpu", Warn));
        assert_eq!(inventory(|i| i.gpus[0].node = None)[1], ("gpu", Warn));
        assert_eq!(inventory(|i| i.gpus[0].persistence = false)[1], ("gpu", Warn));
        assert_eq!(inventory(|i| i.gpus.clear())[1], ("gpu", Fail));
    }
}
