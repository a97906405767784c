//! Checks of the driver and of the GPUs.

use firn_config::Config;
use firn_gpu::{Gpu, Inventory};

use super::Check;
use crate::{program, text};

pub fn checks(config: &Config) -> Vec<Check> {
    match program::inventory(config) {
        Ok(inventory) => of_inventory(&inventory),
        Err(error) => {
            let error = format!("{error:#}");
            let (found, remedy) = error
                .split_once(". hint: ")
                .unwrap_or((&error, "see whether firn-gpu runs at all"));
            vec![Check::fail("driver", format!("cannot be read: {found}"), remedy)]
        }
    }
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
    let (limit, remedy) = match () {
        () if gpu.mig => ("in MIG mode", "whole GPUs only can be checkpointed"),
        () if gpu.node.is_none() => (
            "no device node",
            "`nvidia-modprobe -c 0` or `nvidia-smi` makes the nodes",
        ),
        () if !gpu.persistence => (
            "persistence mode is off",
            "`nvidia-smi -pm 1`; without it the driver's restore can fail or be slow while no GPU is awake",
        ),
        () => return Check::ok(NAME, found),
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
