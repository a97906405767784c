//! Which GPUs of this node a container may use.
//!
//! **At a checkpoint** the grant is what the spec's device nodes give: each `/dev/nvidiaN` entry is looked up
//! in the inventory by type and numbers. A spec whose device rules open whole ranges of devices (a privileged
//! container) gives every GPU, whatever its nodes are.
//!
//! **At a restore**, the first line that applies:
//!
//! | spec written by | given | grant |
//! |---|---|---|
//! | an orchestrator, or unknown | anything | the spec's device nodes, by numbers, and nothing else |
//! | a client | `[restore] gpus` in the configuration | those GPUs |
//! | a client | a map ([`RequestedMap`]) | the GPUs on its right side |
//! | a client | neither | the spec's device nodes by numbers, then by path |
//!
//! The kubelet has allocated what a pod's spec holds, and a pod's author must not reach beyond it. The spec
//! of a client comes from somebody who may use every device of the node ([`firn_oci::spec::Author`]). After
//! `ctr containers restore` it is a copy of the source's spec, so its device numbers are not those of this
//! node. The checkpoint image has no influence.
//!
//! **At the restore of a checkpoint without devices** maps have no part, and the spec's nodes that are none
//! of this node's GPUs grant none: the container may have fewer GPUs, or none ([`Grant::of_device_free`]).

use std::collections::BTreeSet;
use std::path::PathBuf;

use firn_config::Restore;
use firn_gpu::{DeviceNode, Gpu, GpuUuid, Inventory, NodeType, SourceGpu};
use firn_host::Problem;

use crate::{MapOrigin, RequestedMap};
use firn_oci::{DeviceRule, GpuPath, Spec, SpecDevice, SpecError, classify};

/// What a grant rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// The spec's device nodes.
    Nodes,
    /// Device rules that open whole ranges: the nodes are no allocation.
    Everything,
    /// `[restore] gpus` of the configuration.
    Config,
    /// The right side of a map.
    Map(MapOrigin),
}

/// GPUs that a container may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The GPUs: in the order of the configuration or map, else in that of the inventory.
    pub gpus: Vec<Gpu>,
    /// What the grant rests on.
    pub basis: Basis,
}

/// A grant that cannot be decided.
#[derive(Debug, thiserror::Error, Problem)]
pub enum GrantError {
    /// A GPU node of the spec is none of this node's GPUs.
    #[error("device {} ({kind} {major}:{minor}) of the spec is no GPU of this node", path.display())]
    #[problem(
        "FIRN-GRANT-UNRESOLVED",
        "for a spec of another node, name GPUs under [restore] in the configuration or in the annotation \
         firn.dev/gpu-map; otherwise write the CDI spec of this node again"
    )]
    Unresolved {
        path: PathBuf,
        kind: &'static str,
        major: u64,
        minor: u64,
    },
    /// The configuration or a map names a GPU that this node does not have.
    #[error("{origin} names GPU {name}, which this node does not have")]
    #[problem("FIRN-GPU-UNKNOWN", "`firn doctor` lists the GPUs of this node")]
    UnknownGpu { origin: String, name: String },
    /// The spec's devices cannot be read.
    #[error("cannot read the devices of the spec")]
    Spec(#[from] SpecError),
}

impl Grant {
    /// The grant of a container that was created on this node.
    pub fn of_spec(spec: &Spec, inventory: &Inventory) -> Result<Self, GrantError> {
        by_nodes(spec, inventory, Elsewhere::Refused)
    }

    /// The grant of a container that is to be restored on this node, by the table in the module head.
    pub fn at_restore(
        spec: &Spec,
        inventory: &Inventory,
        config: &Restore,
        map: Option<&RequestedMap>,
    ) -> Result<Self, GrantError> {
        if !spec.author().owns_node() {
            return by_nodes(spec, inventory, Elsewhere::Refused);
        }
        if !config.gpus.is_empty() {
            return by_names(inventory, &config.gpus, "gpus in the configuration");
        }
        if let Some(map) = map {
            return by_map(inventory, map);
        }
        by_nodes(spec, inventory, Elsewhere::ByPath)
    }

    /// The grant of a container that is to be restored from a checkpoint without devices. Of the pool of the
    /// configuration it gets as many GPUs as its spec has nodes of GPUs.
    pub fn of_device_free(spec: &Spec, inventory: &Inventory, config: &Restore) -> Result<Self, GrantError> {
        if !spec.author().owns_node() {
            return by_nodes(spec, inventory, Elsewhere::Refused);
        }
        if config.gpus.is_empty() {
            return by_nodes(spec, inventory, Elsewhere::LeftOut);
        }
        let mut grant = Self::at_restore(spec, inventory, config, None)?;
        grant.gpus.truncate(spec.gpu_nodes().len());
        Ok(grant)
    }

    /// The GPUs on the right side of a map.
    pub fn of_map(inventory: &Inventory, map: &RequestedMap) -> Result<Self, GrantError> {
        by_map(inventory, map)
    }

    /// GPUs of this node that are named by UUID or index, in that order. `origin` is where they are written,
    /// for messages.
    pub fn named(inventory: &Inventory, names: &[String], origin: &str) -> Result<Self, GrantError> {
        by_names(inventory, names, origin)
    }

    /// The GPUs of a pool that have as much memory free as the checkpoint had on any of its own; none if that
    /// leaves too few, or leaves all. Every other grant is what the container gets.
    pub fn with_room(&self, sources: &[SourceGpu]) -> Option<Self> {
        let has_room = |gpu: &&Gpu| sources.iter().all(|old| old.finds_room_on(gpu));
        let gpus: Vec<Gpu> = self.gpus.iter().filter(has_room).cloned().collect();
        let is_choice = self.basis == Basis::Config && gpus.len() < self.gpus.len();
        (is_choice && gpus.len() >= sources.len()).then_some(Self {
            gpus,
            basis: self.basis,
        })
    }

    /// Narrows a pool to as many GPUs as the checkpoint had: those of the checkpoint itself first, then from
    /// the left. `[restore] gpus` is a pool; every other grant is what the container gets, and stays as it
    /// is.
    pub fn narrow(&mut self, sources: &[GpuUuid]) {
        if self.basis == Basis::Config && self.gpus.len() > sources.len() {
            // Stable: GPUs of the pool keep their order.
            firn_host::ordered::sort_few_by_key(&mut self.gpus, |gpu| !sources.contains(&gpu.uuid));
            self.gpus.truncate(sources.len());
        }
    }
}

/// What becomes of a node whose numbers open none of this node's GPUs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Elsewhere {
    Refused,
    /// The GPU at its path is meant, or it is refused.
    ByPath,
    /// The GPU at its path is meant, or none.
    LeftOut,
}

/// The GPUs that the spec's device nodes open here.
fn by_nodes(spec: &Spec, inventory: &Inventory, elsewhere: Elsewhere) -> Result<Grant, GrantError> {
    let opened = opened_by_ranges(&spec.device_rules()?, inventory);
    if !opened.is_empty() {
        return Ok(Grant {
            gpus: opened,
            basis: Basis::Everything,
        });
    }
    let mut granted = BTreeSet::new();
    let is_gpu = |device: &&SpecDevice| classify(&device.node.path) == Some(GpuPath::Gpu);
    for device in spec.devices()?.iter().filter(is_gpu) {
        let of_path = || position(inventory, |node| node.path == device.node.path);
        let index = position(inventory, |node| node.id() == device.node.id());
        let index = index.or_else(|| of_path().filter(|_| elsewhere != Elsewhere::Refused));
        match index {
            None if elsewhere == Elsewhere::LeftOut => {}
            index => {
                granted.insert(index.ok_or_else(|| unresolved(&device.node))?);
            }
        }
    }
    let gpus = granted.into_iter().map(|index| inventory.gpus[index].clone());
    Ok(Grant {
        gpus: gpus.collect(),
        basis: Basis::Nodes,
    })
}

fn unresolved(node: &DeviceNode) -> GrantError {
    let kind = match node.kind {
        NodeType::Char => "c",
        NodeType::Block => "b",
    };
    GrantError::Unresolved {
        path: node.path.clone(),
        kind,
        major: node.major,
        minor: node.minor,
    }
}

fn position(inventory: &Inventory, is: impl Fn(&DeviceNode) -> bool) -> Option<usize> {
    let mut gpus = inventory.gpus.iter();
    gpus.position(|gpu| gpu.node.as_ref().is_some_and(&is))
}

/// GPUs that rules speaking of more than one device open for reading or writing.
fn opened_by_ranges(rules: &[DeviceRule], inventory: &Inventory) -> Vec<Gpu> {
    let is_range = |rule: &&DeviceRule| rule.is_wildcard() || !rule.is_allow();
    let ranges: Vec<DeviceRule> = rules.iter().filter(is_range).cloned().collect();
    let is_open = |node: &DeviceNode| DeviceRule::open(&ranges, node);
    let open = |gpu: &&Gpu| gpu.node.as_ref().is_some_and(is_open);
    inventory.gpus.iter().filter(open).cloned().collect()
}

fn by_names(inventory: &Inventory, names: &[String], origin: &str) -> Result<Grant, GrantError> {
    let gpu = |name: &String| {
        let found = match name.parse::<GpuUuid>() {
            Ok(uuid) => inventory.gpus.iter().find(|gpu| gpu.uuid == uuid),
            Err(_) => (name.parse::<usize>().ok()).and_then(|index| inventory.gpus.get(index)),
        };
        found.ok_or_else(|| unknown(origin, name))
    };
    Ok(Grant {
        gpus: distinct(names.iter().map(gpu))?,
        basis: Basis::Config,
    })
}

fn by_map(inventory: &Inventory, map: &RequestedMap) -> Result<Grant, GrantError> {
    let gpu = |uuid: &GpuUuid| {
        let found = inventory.gpus.iter().find(|gpu| gpu.uuid == *uuid);
        found.ok_or_else(|| unknown(&map.origin.to_string(), uuid.as_str()))
    };
    Ok(Grant {
        gpus: distinct(map.pairs.iter().map(|pair| gpu(&pair.new)))?,
        basis: Basis::Map(map.origin),
    })
}

fn unknown(origin: &str, name: &str) -> GrantError {
    GrantError::UnknownGpu {
        origin: origin.to_owned(),
        name: name.chars().take(64).collect(),
    }
}

fn distinct<'a>(found: impl Iterator<Item = Result<&'a Gpu, GrantError>>) -> Result<Vec<Gpu>, GrantError> {
    let mut gpus: Vec<Gpu> = Vec::new();
    for gpu in found {
        let gpu = gpu?;
        if !gpus.iter().any(|known| known.uuid == gpu.uuid) {
            gpus.push(gpu.clone());
        }
    }
    Ok(gpus)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_image::fixtures::{config, inventory, pods, spec, uuid};
    use serde_json::json;

    fn indices(grant: &Grant) -> Vec<u8> {
        (0..8)
            .filter(|i| grant.gpus.iter().any(|gpu| gpu.uuid == uuid(*i)))
            .collect()
    }

    fn map_to(new: u8) -> RequestedMap {
        let config = config(&[], &[(9, new)]);
        RequestedMap::find(&Spec::from(json!({})), &config, &[uuid(9)])
            .unwrap()
            .unwrap()
    }

    #[test]
    fn nodes_are_looked_up_by_numbers() {
        let grant = Grant::of_spec(&spec(195, &[0, 2]), &inventory(195, 4)).unwrap();
        assert_eq!((indices(&grant), grant.basis), (vec![0, 2], Basis::Nodes));
    }

    #[test]
    fn a_spec_without_gpus_grants_none() {
        let grant = Grant::of_spec(&Spec::from(json!({})), &inventory(195, 2)).unwrap();
        assert_eq!(indices(&grant), [] as [u8; 0]);
    }

    #[test]
    fn numbers_of_another_node_do_not_resolve_on_the_node_that_made_the_spec() {
        let error = Grant::of_spec(&spec(240, &[0]), &inventory(195, 2)).unwrap_err();
        assert_eq!(error.code(), "FIRN-GRANT-UNRESOLVED");
        assert!(error.to_string().contains("/dev/nvidia0 (c 240:0)"), "{error}");
    }

    #[test]
    fn rules_that_open_ranges_give_every_gpu() {
        for rule in [
            json!({"allow": true, "access": "rwm"}),
            json!({"allow": true, "type": "c", "major": 195, "access": "rw"}),
            json!({"allow": true, "type": "c", "major": -1, "minor": -1, "access": "r"}),
        ] {
            let mut spec = spec(195, &[1]);
            let list = spec.object_mut("linux.resources").unwrap()["devices"]
                .as_array_mut()
                .unwrap();
            list.push(rule.clone());
            let grant = Grant::of_spec(&spec, &inventory(195, 3)).unwrap();
            assert_eq!(
                (indices(&grant), grant.basis),
                (vec![0, 1, 2], Basis::Everything),
                "{rule}"
            );
        }
    }

    #[test]
    fn a_gpu_that_a_rule_closes_again_is_not_granted() {
        let rules = json!([
            {"allow": true, "access": "rwm"},
            {"allow": false, "type": "c", "major": 195, "minor": 1, "access": "rw"},
        ]);
        let spec = Spec::from(json!({"linux": {"resources": {"devices": rules}}}));
        let grant = Grant::of_spec(&spec, &inventory(195, 3)).unwrap();
        assert_eq!((indices(&grant), grant.basis), (vec![0, 2], Basis::Everything));
    }

    #[test]
    fn a_node_of_another_type_is_another_device() {
        let device = json!({"path": "/dev/nvidia0", "type": "b", "major": 195, "minor": 0});
        let spec = Spec::from(json!({"linux": {"devices": [device]}}));
        let error = Grant::of_spec(&spec, &inventory(195, 2)).unwrap_err();
        assert!(error.to_string().contains("/dev/nvidia0 (b 195:0)"), "{error}");
    }

    #[test]
    fn rules_that_only_let_nodes_be_made_open_nothing() {
        let mut spec = spec(195, &[1]);
        let list = spec.object_mut("linux.resources").unwrap()["devices"]
            .as_array_mut()
            .unwrap();
        list.push(json!({"allow": true, "type": "c", "access": "m"}));
        list.push(json!({"allow": true, "type": "b", "access": "rwm"}));
        list.push(json!({"allow": true, "type": "c", "major": 10, "access": "rwm"}));
        assert_eq!(indices(&Grant::of_spec(&spec, &inventory(195, 3)).unwrap()), [1]);
    }

    #[test]
    fn restore_line_pods_take_nodes_only() {
        for spec in pods(&spec(195, &[1])) {
            let grant =
                Grant::at_restore(&spec, &inventory(195, 4), &config(&["2"], &[]), Some(&map_to(3))).unwrap();
            assert_eq!(
                (indices(&grant), grant.basis),
                (vec![1], Basis::Nodes),
                "{spec:?}"
            );
        }
    }

    #[test]
    fn restore_line_pods_never_go_by_path() {
        for spec in pods(&firn_image::fixtures::spec(240, &[1])) {
            let error = Grant::at_restore(&spec, &inventory(195, 4), &config(&["2"], &[]), Some(&map_to(3)));
            assert!(matches!(error, Err(GrantError::Unresolved { .. })), "{spec:?}");
        }
    }

    #[test]
    fn restore_line_configuration_in_its_order_without_doubles() {
        let second = uuid(2).to_string();
        let config = config(&["3", &second, "2"], &[]);
        let grant =
            Grant::at_restore(&spec(240, &[0]), &inventory(195, 4), &config, Some(&map_to(1))).unwrap();
        assert_eq!(
            grant.gpus.iter().map(|g| g.uuid.clone()).collect::<Vec<_>>(),
            [uuid(3), uuid(2)]
        );
        assert_eq!(grant.basis, Basis::Config);
    }

    #[test]
    fn a_pool_is_narrowed_to_what_the_checkpoint_had() {
        let narrowed = |pool: &[&str], sources: &[u8]| {
            let at = Grant::at_restore(&spec(195, &[0]), &inventory(195, 4), &config(pool, &[]), None);
            let mut grant = at.unwrap();
            grant.narrow(&sources.iter().map(|i| uuid(*i)).collect::<Vec<_>>());
            grant.gpus.iter().map(|gpu| gpu.minor).collect::<Vec<_>>()
        };
        assert_eq!(narrowed(&["3", "1", "2"], &[9]), [3]);
        assert_eq!(narrowed(&["3", "1", "2"], &[9, 2]), [2, 3]);
        assert_eq!(narrowed(&["3"], &[8, 9]), [3], "too few stay too few");
        assert_eq!(
            narrowed(&["3", "1"], &[9, 1]),
            [3, 1],
            "as many stay in their order"
        );
        for basis in [Basis::Everything, Basis::Map(MapOrigin::Config)] {
            let gpus = inventory(195, 3).gpus;
            let mut grant = Grant { gpus, basis };
            grant.narrow(&[uuid(2)]);
            assert_eq!(indices(&grant), [0, 1, 2], "{basis:?}");
        }
        let mut nodes = Grant::of_spec(&spec(195, &[0, 1]), &inventory(195, 4)).unwrap();
        nodes.narrow(&[uuid(0)]);
        assert_eq!(indices(&nodes), [0, 1], "what a spec grants is not cut");
    }

    #[test]
    fn restore_line_map() {
        let grant = Grant::at_restore(
            &spec(195, &[0]),
            &inventory(195, 4),
            &config(&[], &[]),
            Some(&map_to(3)),
        );
        let grant = grant.unwrap();
        assert_eq!(
            (indices(&grant), grant.basis),
            (vec![3], Basis::Map(MapOrigin::Config))
        );
    }

    #[test]
    fn restore_line_nodes_by_numbers_then_by_path() {
        let restore = |spec| Grant::at_restore(&spec, &inventory(195, 4), &config(&[], &[]), None);
        assert_eq!(indices(&restore(spec(195, &[2])).unwrap()), [2]);
        assert_eq!(indices(&restore(spec(240, &[2])).unwrap()), [2]);
        assert!(restore(spec(240, &[7])).is_err());
    }

    #[test]
    fn gpus_that_the_node_lacks_are_named() {
        let at = |config: &Restore, map| Grant::at_restore(&spec(195, &[0]), &inventory(195, 2), config, map);
        for name in ["2", "-1", "GPU-nonsense", uuid(5).as_str()] {
            let error = at(&config(&[name], &[]), None).unwrap_err();
            assert_eq!(error.code(), "FIRN-GPU-UNKNOWN");
            assert!(error.to_string().contains(name), "{error}");
        }
        let long = "9".repeat(1000);
        let error = at(&config(&[&long], &[]), None).unwrap_err();
        assert!(error.to_string().len() < 200, "{error}");
        assert_eq!(
            at(&config(&[], &[]), Some(&map_to(5))).unwrap_err().code(),
            "FIRN-GPU-UNKNOWN"
        );
    }

    #[test]
    fn each_refused_grant_has_its_hint() {
        let unresolved = Grant::of_spec(&spec(240, &[0]), &inventory(195, 2)).unwrap_err();
        let unknown =
            Grant::at_restore(&spec(195, &[0]), &inventory(195, 2), &config(&["9"], &[]), None).unwrap_err();
        let malformed = Spec::from(json!({"linux": {"devices": [1]}}));
        let malformed = Grant::of_spec(&malformed, &inventory(195, 2)).unwrap_err();
        for (error, remedy) in [
            (unresolved, "firn.dev/gpu-map"),
            (unknown, "`firn doctor` lists the GPUs"),
            (malformed, "create the container again"),
        ] {
            assert!(error.hint().contains(remedy), "{error}: {}", error.hint());
        }
    }

    #[test]
    fn without_devices_the_spec_alone_grants() {
        let granted = |spec: &Spec, node: &Inventory, pool: &[&str]| {
            let grant = Grant::of_device_free(spec, node, &config(pool, &[(9, 1)])).unwrap();
            grant.gpus.iter().map(|gpu| gpu.minor).collect::<Vec<_>>()
        };
        let (here, none) = (inventory(195, 4), Inventory::default());
        assert_eq!(granted(&spec(195, &[0, 2]), &here, &[]), [0, 2]);
        assert_eq!(granted(&spec(240, &[2, 7]), &here, &[]), [2], "by path, or none");
        assert_eq!(granted(&spec(195, &[0, 2]), &none, &[]), [] as [u32; 0]);
        assert_eq!(granted(&Spec::from(json!({})), &here, &["3"]), [] as [u32; 0]);
        assert_eq!(granted(&spec(240, &[0, 1]), &here, &["3", "1", "0"]), [3, 1]);
        for pod in pods(&spec(240, &[2])) {
            let refused = Grant::of_device_free(&pod, &here, &config(&["3"], &[])).unwrap_err();
            assert_eq!(refused.code(), "FIRN-GRANT-UNRESOLVED", "{pod:?}");
        }
    }

    /// Also where the source's GPU 1 has the numbers that GPU 0 has here.
    #[test]
    fn a_spec_whose_gpus_were_replaced_grants_the_new_ones() {
        let mut swapped = inventory(195, 2);
        for gpu in &mut swapped.gpus {
            let node = gpu.node.as_mut().unwrap();
            node.minor = 1 - node.minor;
        }
        for (source, here, targets) in [
            (spec(240, &[0, 1]), inventory(195, 4), &[2, 3][..]),
            (spec(195, &[1]), swapped, &[1]),
        ] {
            let gpus: Vec<Gpu> = targets.iter().map(|&at| here.gpus[at].clone()).collect();
            let mut spec = source;
            firn_oci::edit::replace_gpus(&mut spec, &gpus, &here.common_nodes).unwrap();
            let grant = Grant::of_spec(&spec, &here).unwrap();
            assert_eq!((grant.gpus, grant.basis), (gpus, Basis::Nodes));
        }
    }
}
