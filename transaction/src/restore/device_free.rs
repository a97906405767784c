//! The devices of a copy whose checkpoint holds nothing of any: the target's grant alone decides.

use firn_config::Config;
use firn_gpu::Inventory;
use firn_image::manifest::Manifest;
use firn_oci::job_hook::{Facts, FactsOfGpu};
use firn_oci::{Spec, dev_repair, edit};
use firn_remap::Grant;

use super::error::Refusal;
use crate::job_hook::address;

/// Edits the spec for the devices that the container gets on this node, and adds to the facts which NVIDIA
/// GPUs it had and has.
///
/// A spec of Kubernetes was written for this node and stays as it is. Any other may be a copy of the
/// source's: nodes of devices that this node does not have are dropped.
pub(super) fn give(
    id: &str,
    spec: &mut Spec,
    manifest: &Manifest,
    inventory: &Inventory,
    config: &Config,
    facts: Option<&mut Facts>,
) -> Result<(), Refusal> {
    let grant = Grant::of_device_free(spec, inventory, &config.restore)?;
    if spec.author().owns_node() {
        if grant.gpus.is_empty() {
            edit::drop_nodes(spec)?
        } else {
            drop(edit::replace_gpus(spec, &grant.gpus, &inventory.common_nodes)?)
        }
        edit::replace_released(spec, &dev_repair::other_gpus_of_host())?;
    }
    let names: Vec<String> = grant.gpus.iter().map(|gpu| gpu.uuid.to_string()).collect();
    log::info!(
        "restore of {id} without devices of the source; GPUs: {}",
        names.join(", ")
    );
    if let Some(facts) = facts {
        let released = manifest.released_gpus.iter().flatten().map(|gpu| FactsOfGpu {
            old: Some(address(&gpu.uuid, &gpu.pci_address)),
            new: None,
        });
        let granted = grant.gpus.iter().map(|gpu| FactsOfGpu {
            old: None,
            new: Some(address(&gpu.uuid, &gpu.pci_address)),
        });
        facts.gpus = released.chain(granted).collect();
        let before = manifest.released_gpus.iter().flatten();
        let before: Vec<&str> = before.map(|gpu| &*gpu.pci_address).collect();
        let now: Vec<&str> = grant.gpus.iter().map(|gpu| &*gpu.pci_address).collect();
        facts.pci_changed = before != now;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use firn_image::fixtures::{inventory, manifest, pods, spec};
    use firn_oci::job_hook::JobHook;
    use serde_json::json;

    use super::*;
    use crate::job_hook::facts;

    /// The uuids of the pairs, and the paths of the nodes, for a spec with GPUs of these minors.
    fn given(spec: &Spec, inventory: &Inventory) -> (Vec<[Option<String>; 2]>, bool, Vec<String>) {
        let (mut spec, manifest) = (spec.clone(), manifest(&[0]).without_devices());
        let mut facts = facts(JobHook::Restored, "id", "/srv/image".as_ref());
        give(
            "job",
            &mut spec,
            &manifest,
            inventory,
            &Config::default(),
            Some(&mut facts),
        )
        .unwrap();
        let uuid = |gpu: Option<firn_oci::job_hook::GpuAddress>| gpu.map(|gpu| gpu.uuid);
        let pairs = facts.gpus.into_iter().map(|gpu| [uuid(gpu.old), uuid(gpu.new)]);
        let nodes = spec.devices().unwrap().into_iter();
        let nodes = nodes.map(|device| device.node.path.display().to_string());
        (pairs.collect(), facts.pci_changed, nodes.collect())
    }

    #[test]
    fn the_job_learns_what_it_had_and_what_it_has() {
        let here = inventory(195, 4);
        let uuid = |minor: usize| Some(here.gpus[minor].uuid.to_string());
        let (pairs, pci_changed, nodes) = given(&spec(195, &[2, 3]), &here);
        assert_eq!(pairs, [[uuid(0), None], [None, uuid(2)], [None, uuid(3)]]);
        assert!(
            pci_changed && nodes.contains(&"/dev/nvidia2".to_owned()),
            "{nodes:?}"
        );
        let (pairs, pci_changed, _) = given(&spec(195, &[0]), &here);
        assert_eq!(pairs, [[uuid(0), None], [None, uuid(0)]]);
        assert!(!pci_changed);
    }

    /// A pod's spec was written for this node: nothing in it is changed, and nothing of another node given.
    #[test]
    fn a_pods_nodes_stay_as_they_are() {
        let accel = json!({"path": "/dev/accel/accel9", "type": "c", "major": 261, "minor": 9});
        let here = inventory(195, 4);
        let mut spec = spec(195, &[2]);
        spec.list_mut("linux.devices").unwrap().push(accel);
        let before: Vec<_> = spec.devices().unwrap().into_iter().collect();
        for pod in pods(&spec) {
            let (_, _, nodes) = given(&pod, &here);
            assert!(nodes.contains(&"/dev/accel/accel9".to_owned()), "{nodes:?}");
            assert_eq!(nodes.len(), before.len(), "{pod:?}");
        }
        assert!(!given(&spec, &here).2.contains(&"/dev/accel/accel9".to_owned()));
    }

    #[test]
    fn nodes_that_open_nothing_here_are_dropped() {
        let (pairs, _, nodes) = given(&spec(195, &[2]), &Inventory::default());
        assert!(pairs[0][0].is_some() && pairs.len() == 1, "{pairs:?}");
        assert!(!nodes.iter().any(|path| path.contains("nvidia")), "{nodes:?}");
        let accel = json!([{"path": "/dev/accel/accel9", "type": "c", "major": 261, "minor": 9},
            {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}]);
        let (_, _, nodes) = given(
            &json!({"linux": {"devices": accel}}).into(),
            &Inventory::default(),
        );
        assert_eq!(nodes, ["/dev/fuse"]);
    }
}
