//! The node's GPUs: NVML joined with the nodes of the host's /dev.
//!
//! A GPU that NVML lists but cannot describe (lost, no permission) is left out and reported on standard
//! error: the others are still of use, and a container that was granted it will not find it.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use firn_host::Chain;
use nix::sys::stat::{major, minor};

use super::complain;
use super::node::{Node, Refusal};
use firn_gpu::{DeviceNode, Gpu, Inventory, NodeType, Topology};

/// Nodes of the driver that belong to no single GPU; those in /dev/nvidia-caps follow them.
const COMMON_NODES: [&str; 4] = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"];

impl Node {
    /// Asks NVML, libcuda and /dev. A missing libcuda is part of the answer; a missing NVML is none.
    pub(super) fn inventory(&self) -> Result<Inventory, Refusal<'_>> {
        let nvml = self.libraries.nvml().map_err(Refusal::Nvml)?;
        let driver_version = nvml.driver_version().map_err(Refusal::Nvml)?;
        let mut gpus = Vec::new();
        for (index, gpu) in nvml.gpus().map_err(Refusal::Nvml)?.into_iter().enumerate() {
            match gpu {
                Ok(gpu) => gpus.push(Gpu {
                    node: device_node(&self.dev_root, &format!("nvidia{}", gpu.minor)),
                    ..gpu
                }),
                Err(error) => complain(format_args!("GPU {index} is left out: {}", Chain(&error))),
            }
        }
        let (cuda_version, checkpoint_api) = match self.libraries.driver() {
            Ok(driver) => (driver.version().unwrap_or(0), driver.checkpointer().is_ok()),
            Err(_) => (0, false),
        };
        let common_nodes = common_nodes(&self.dev_root);
        let mut links = nvml.links();
        links.sort_by(|a, b| a.gpus.cmp(&b.gpus));
        let numa = (gpus.iter())
            .filter_map(|gpu| Some((gpu.uuid.clone(), numa_node(&self.sys_root, &gpu.pci_address)?)))
            .collect();
        Ok(Inventory {
            driver_version,
            cuda_version,
            checkpoint_api,
            gpus,
            topology: Topology { links, numa },
            common_nodes,
        })
    }
}

/// NUMA node of a PCI device; none on a machine that has only one or does not report it.
fn numa_node(sys_root: &Path, address: &str) -> Option<u32> {
    let (domain, device) = address.split_once(':')?;
    // NVML has a domain of eight digits, sysfs one of four or more.
    let domain = u32::from_str_radix(domain, 16).ok()?;
    let device = format!("{domain:04x}:{}", device.to_ascii_lowercase());
    let file = sys_root.join("bus/pci/devices").join(device).join("numa_node");
    // -1 stands for none.
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

fn common_nodes(dev_root: &Path) -> Vec<DeviceNode> {
    let mut names: Vec<String> = COMMON_NODES.iter().map(ToString::to_string).collect();
    // A node without MIG has no such directory.
    if let Ok(entries) = fs::read_dir(dev_root.join("nvidia-caps")) {
        let mut caps: Vec<String> = entries
            .flatten()
            .map(|e| format!("nvidia-caps/{}", e.file_name().to_string_lossy()))
            .collect();
        caps.sort();
        names.extend(caps);
    }
    names
        .iter()
        .filter_map(|name| device_node(dev_root, name))
        .collect()
}

/// The node `name`, if there is one: a symbolic link or a plain file is none.
fn device_node(dev_root: &Path, name: &str) -> Option<DeviceNode> {
    let path = dev_root.join(name);
    let metadata = fs::symlink_metadata(&path).ok()?;
    let kind = if metadata.file_type().is_char_device() {
        NodeType::Char
    } else if metadata.file_type().is_block_device() {
        NodeType::Block
    } else {
        return None;
    };
    let device = metadata.rdev();
    Some(DeviceNode {
        path,
        kind,
        major: major(device),
        minor: minor(device),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numa_node_is_that_of_the_pci_device() {
        let sys = tempfile::tempdir().unwrap();
        for (device, node) in [
            ("0000:1a:00.0", "1\n"),
            ("0000:17:00.0", "-1\n"),
            ("10000:01:00.0", "0"),
        ] {
            let device = sys.path().join("bus/pci/devices").join(device);
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("numa_node"), node).unwrap();
        }
        assert_eq!(numa_node(sys.path(), "00000000:1A:00.0"), Some(1));
        assert_eq!(numa_node(sys.path(), "00000000:17:00.0"), None);
        assert_eq!(numa_node(sys.path(), "00010000:01:00.0"), Some(0));
        assert_eq!(numa_node(sys.path(), "00000000:18:00.0"), None);
    }

    #[test]
    fn nodes_are_distinguished_from_files_and_links() {
        let null = device_node(Path::new("/dev"), "null").unwrap();
        assert_eq!(
            null,
            DeviceNode {
                path: "/dev/null".into(),
                kind: NodeType::Char,
                major: 1,
                minor: 3
            }
        );
        let dev = tempfile::tempdir().unwrap();
        fs::write(dev.path().join("nvidia0"), "").unwrap();
        std::os::unix::fs::symlink("/dev/null", dev.path().join("nvidiactl")).unwrap();
        assert_eq!(device_node(dev.path(), "nvidia0"), None);
        assert_eq!(device_node(dev.path(), "nvidia1"), None);
        assert_eq!(common_nodes(dev.path()), []);
    }
}
