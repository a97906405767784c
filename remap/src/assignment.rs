//! Which GPUs a restore gets: grant, map and planner put together, for the shim and for
//! `firn restore --dry-run`.

use crate::plan;
use crate::plan::{MapPolicy, PlanError, PlanRequest, Warning};
use firn_config::Restore;
use firn_gpu::protocol::GpuMemory;
use firn_gpu::{Gpu, GpuPair, GpuUuid, Inventory, SourceGpu, Topology};
use firn_host::Problem;

use crate::policy::{self, PolicyError};
use crate::{Grant, GrantError, MapError, RequestedMap};
use firn_image::manifest::Manifest;
use firn_oci::Spec;

/// What a restore does with the GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuAssignment {
    /// What the container may use.
    pub grant: Grant,
    /// A pair for every GPU of the checkpoint.
    pub map: plan::GpuMap,
    /// What the restore does not keep.
    pub warnings: Vec<Warning>,
}

/// A restore whose GPUs cannot be decided.
#[derive(Debug, thiserror::Error, Problem)]
pub enum AssignmentError {
    #[error("cannot find out how to choose GPUs")]
    Policy(#[from] PolicyError),
    #[error("cannot find out which GPUs the container may use")]
    Grant(#[from] GrantError),
    /// The GPUs of the checkpoint find no place in the grant.
    #[error("the GPUs of the source find no place among those of the target")]
    Plan(#[from] PlanError),
    /// Pairs that a client has written.
    #[error("cannot read the GPU map")]
    Map(#[from] MapError),
    /// A GPU has less memory free than the checkpoint needs of it.
    #[error("{0}")]
    #[problem(
        "FIRN-GPU-OCCUPIED",
        "end or pause what uses it, which `firn ps` and nvidia-smi list, or name a GPU that has room (--gpus)"
    )]
    Occupied(Box<Occupied>),
}

/// A GPU without room for what the checkpoint's processes had on theirs.
#[derive(Debug)]
pub struct Occupied {
    pub gpu: Gpu,
    /// Bytes that are needed.
    pub needed: u64,
    /// Who has it, as far as the caller knows: `container ID of namespace NAME`.
    pub holders: Vec<String>,
    /// Other GPUs of its model on this node that have room.
    pub others: Vec<GpuUuid>,
}

impl std::fmt::Display for Occupied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (free, needed) = (self.gpu.memory_free >> 20, self.needed.div_ceil(1 << 20));
        let uuid = &self.gpu.uuid;
        write!(
            f,
            "{uuid} has {free} MiB of memory free, and the checkpoint needs {needed} MiB"
        )?;
        if !self.holders.is_empty() {
            write!(f, "; {} has it", self.holders.join(" and "))?;
        }
        let others: Vec<&str> = self.others.iter().map(GpuUuid::as_str).collect();
        if !others.is_empty() {
            write!(f, "; there is room on {}", others.join(", "))?;
        }
        Ok(())
    }
}

impl GpuAssignment {
    /// Decides for a container with this spec on a node with this inventory and `[restore]` configuration.
    pub fn make(
        spec: &Spec,
        manifest: &Manifest,
        inventory: &Inventory,
        config: &Restore,
    ) -> Result<Self, AssignmentError> {
        let uuids: Vec<GpuUuid> = manifest.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let (policy, written) = policy::find(spec, config, &uuids)?;
        let grant = Grant::at_restore(spec, inventory, config, written.as_ref())?;
        // GPUs with room may be of another model, or joined in another way: then the whole pool decides.
        let with_room = match policy {
            MapPolicy::Auto | MapPolicy::Subset => grant.with_room(&manifest.gpus),
            MapPolicy::Strict | MapPolicy::Explicit(_) => None,
        };
        let roomy = with_room.and_then(|grant| Self::of_grant(grant, manifest, inventory, &policy).ok());
        match roomy {
            Some(made) => Ok(made),
            None => Self::of_grant(grant, manifest, inventory, &policy),
        }
    }

    /// Decides among these GPUs.
    fn of_grant(
        mut grant: Grant,
        manifest: &Manifest,
        inventory: &Inventory,
        policy: &MapPolicy,
    ) -> Result<Self, AssignmentError> {
        if matches!(policy, MapPolicy::Auto | MapPolicy::Strict) {
            let uuids: Vec<GpuUuid> = manifest.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
            grant.narrow(&uuids);
        }
        let driver = manifest.driver.as_ref().map_or("", |driver| &driver.driver);
        let made = Self::planned(
            &manifest.gpus,
            &manifest.topology,
            driver,
            inventory,
            grant,
            policy,
        )?;
        match made.occupied(&manifest.gpus, inventory) {
            Some(occupied) => Err(AssignmentError::Occupied(Box::new(occupied))),
            None => Ok(made),
        }
    }

    /// The first GPU that has less memory free than is needed.
    fn occupied(&self, source: &[SourceGpu], inventory: &Inventory) -> Option<Occupied> {
        let targets = self.targets();
        let of_pair = |pair: &GpuPair| {
            let old = source.iter().find(|gpu| gpu.uuid == pair.old)?;
            let new = targets.iter().find(|gpu| gpu.uuid == pair.new)?;
            (!old.finds_room_on(new)).then_some((old, new))
        };
        let (old, new) = self.map.pairs().iter().find_map(of_pair)?;
        let is_taken = |gpu: &Gpu| targets.iter().any(|target| target.uuid == gpu.uuid);
        let has_room = |gpu: &&Gpu| gpu.name == new.name && !is_taken(gpu) && old.finds_room_on(gpu);
        Some(Occupied {
            gpu: new.clone(),
            needed: old.memory_used,
            holders: Vec::new(),
            others: inventory
                .gpus
                .iter()
                .filter(has_room)
                .map(|gpu| gpu.uuid.clone())
                .collect(),
        })
    }

    /// Bytes that the checkpoint's processes need together on each GPU, as far as the image has it.
    pub fn needs(&self, source: &[SourceGpu]) -> GpuMemory {
        let of_pair = |pair: &GpuPair| {
            let old = source.iter().find(|gpu| gpu.uuid == pair.old)?;
            (old.memory_used > 0).then(|| (pair.new.clone(), old.memory_used))
        };
        self.map.pairs().iter().filter_map(of_pair).collect()
    }

    /// Decides which GPUs a container of this node gets in the place of its own: `wanted`, a list of UUIDs or
    /// indices, or pairs `GPU-old=GPU-new`.
    pub fn on_this_node(spec: &Spec, inventory: &Inventory, wanted: &str) -> Result<Self, AssignmentError> {
        if wanted.contains('=') {
            let map = RequestedMap::of_client(wanted)?;
            let grant = Grant::of_map(inventory, &map)?;
            return Self::within(spec, inventory, grant, MapPolicy::Explicit(map.pairs));
        }
        let names = wanted.split(',').map(|name| name.trim().to_owned());
        let names: Vec<String> = names.filter(|name| !name.is_empty()).collect();
        let grant = Grant::named(inventory, &names, "the request")?;
        Self::within(spec, inventory, grant, MapPolicy::Auto)
    }

    /// As [`GpuAssignment::on_this_node`], as many of these GPUs as the container has.
    pub fn among(spec: &Spec, inventory: &Inventory, grant: Grant) -> Result<Self, AssignmentError> {
        Self::within(spec, inventory, grant, MapPolicy::Subset)
    }

    fn within(
        spec: &Spec,
        inventory: &Inventory,
        grant: Grant,
        policy: MapPolicy,
    ) -> Result<Self, AssignmentError> {
        let own = Grant::of_spec(spec, inventory)?;
        let uuids: Vec<GpuUuid> = own.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let source: Vec<SourceGpu> = own.gpus.iter().map(SourceGpu::from).collect();
        let topology = inventory.topology.of(&uuids);
        let driver = &inventory.driver_version;
        Self::planned(&source, &topology, driver, inventory, grant, &policy)
    }

    /// `source`: GPUs, how they reach each other, and the version of the driver that knew them.
    fn planned(
        source: &[SourceGpu],
        source_topology: &Topology,
        source_driver: &str,
        inventory: &Inventory,
        grant: Grant,
        policy: &MapPolicy,
    ) -> Result<Self, AssignmentError> {
        let plan = plan::plan(&PlanRequest {
            source,
            source_topology,
            source_driver,
            grant: &grant.gpus,
            target_topology: &inventory.topology,
            target_driver: &inventory.driver_version,
            policy,
        })?;
        Ok(Self {
            grant,
            map: plan.map,
            warnings: plan.warnings,
        })
    }

    /// The GPUs that the container gets: those on the right side of the map, in the order of the grant.
    pub fn targets(&self) -> Vec<Gpu> {
        let mapped = |gpu: &&Gpu| self.map.pairs().iter().any(|pair| pair.new == gpu.uuid);
        self.grant.gpus.iter().filter(mapped).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Basis;
    use firn_config::RemapPolicy;
    use firn_image::fixtures::{config, inventory, manifest, pods, spec, uuid};
    use serde_json::json;

    fn made(
        spec: &Spec,
        sources: &[u8],
        config: &Restore,
    ) -> Result<Vec<(GpuUuid, GpuUuid)>, AssignmentError> {
        let decision = GpuAssignment::make(spec, &manifest(sources), &inventory(195, 4), config)?;
        let pairs = decision.map.pairs().iter();
        let targets: Vec<GpuUuid> = decision.targets().into_iter().map(|gpu| gpu.uuid).collect();
        assert!(
            decision
                .map
                .pairs()
                .iter()
                .all(|pair| targets.contains(&pair.new))
        );
        assert_eq!(targets.len(), decision.map.pairs().len());
        Ok(pairs.map(|pair| (pair.old.clone(), pair.new.clone())).collect())
    }

    #[test]
    fn on_the_same_node_every_gpu_stays() {
        let pairs = made(&spec(195, &[0, 2]), &[0, 2], &config(&[], &[])).unwrap();
        assert_eq!(pairs, [(uuid(0), uuid(0)), (uuid(2), uuid(2))]);
    }

    #[test]
    fn a_pool_of_the_configuration_gives_as_many_as_needed() {
        let pairs = made(&spec(240, &[0]), &[9], &config(&["3", "1"], &[])).unwrap();
        assert_eq!(pairs, [(uuid(9), uuid(3))]);
    }

    #[test]
    fn policies_choose_inside_the_pool_and_inside_the_nodes_of_the_spec() {
        let with = |policy, gpus: &[&str]| Restore {
            policy,
            ..config(gpus, &[])
        };
        // The whole pool is looked at, and the lowest minor taken; else the left of it.
        let pool = &["3", "1"];
        let pairs = made(&spec(240, &[0]), &[9], &with(RemapPolicy::Subset, pool)).unwrap();
        assert_eq!(pairs, [(uuid(9), uuid(1))]);
        let pairs = made(&spec(240, &[0]), &[9], &with(RemapPolicy::Auto, pool)).unwrap();
        assert_eq!(pairs, [(uuid(9), uuid(3))]);
        let pairs = made(&spec(240, &[0]), &[1], &with(RemapPolicy::Strict, pool)).unwrap();
        assert_eq!(pairs, [(uuid(1), uuid(1))]);
        let error = made(&spec(240, &[0]), &[9], &with(RemapPolicy::Strict, pool)).unwrap_err();
        assert_eq!(error.code(), "FIRN-GPU-STRICT");

        for mut pod in pods(&spec(195, &[1, 2])) {
            let annotations = pod.object_mut("annotations").unwrap();
            annotations.insert("firn.dev/remap-policy".into(), json!("subset"));
            let pairs = made(&pod, &[0], &with(RemapPolicy::Strict, &["0"])).unwrap();
            assert_eq!(pairs, [(uuid(0), uuid(1))], "GPU 0 is not the pod's");
        }
    }

    #[test]
    fn links_of_the_checkpoint_are_found_again_on_the_node() {
        use firn_gpu::Link;
        let link = |a, b, nvlinks| Link {
            nvlinks: Some(nvlinks),
            ..Link::between(uuid(a), uuid(b))
        };
        let mut made_there = manifest(&[8, 9]);
        made_there.topology.links = vec![link(8, 9, 18)];
        let mut node = inventory(195, 4);
        node.topology.links = vec![link(0, 1, 0), link(0, 2, 0), link(1, 2, 18)];
        let decide = |policy| {
            let restore = Restore {
                policy,
                ..config(&["0", "1", "2"], &[])
            };
            GpuAssignment::make(&spec(240, &[0]), &made_there, &node, &restore)
        };
        let decision = decide(RemapPolicy::Subset).unwrap();
        let targets: Vec<GpuUuid> = decision.targets().into_iter().map(|gpu| gpu.uuid).collect();
        assert_eq!(targets, [uuid(1), uuid(2)]);
        // Both are elsewhere on the bus.
        assert_eq!(decision.warnings.len(), 2, "{:?}", decision.warnings);
        // By the left of the pool.
        assert_eq!(decide(RemapPolicy::Auto).unwrap_err().code(), "FIRN-GPU-TOPOLOGY");
    }

    #[test]
    fn a_map_chooses_inside_the_pool_only() {
        let pairs = made(&spec(240, &[0]), &[9], &config(&["3", "1"], &[(9, 1)])).unwrap();
        assert_eq!(pairs, [(uuid(9), uuid(1))]);
        let error = made(&spec(240, &[0]), &[9], &config(&["3"], &[(9, 1)])).unwrap_err();
        assert_eq!(error.code(), "FIRN-MAP-UNKNOWN-TARGET");
    }

    #[test]
    fn a_pod_cannot_map_itself_onto_a_gpu_that_it_was_not_granted() {
        for mut pod in pods(&spec(195, &[1])) {
            let annotations = pod.object_mut("annotations").unwrap();
            let map = format!("{}={}", uuid(9), uuid(3));
            annotations.insert("firn.dev/gpu-map".into(), json!(map));
            let error = made(&pod, &[9], &config(&[], &[])).unwrap_err();
            assert_eq!(error.code(), "FIRN-MAP-UNKNOWN-TARGET", "{pod:?}");
        }
    }

    /// A checkpoint of these GPUs whose processes had so many GiB on each, on a node whose GPUs have so many
    /// free.
    fn with_room(
        used: &[(u8, u64)],
        free: &[u64],
        restore: &Restore,
    ) -> Result<GpuAssignment, AssignmentError> {
        let sources: Vec<u8> = used.iter().map(|(gpu, _)| *gpu).collect();
        let (mut made_there, mut node) = (manifest(&sources), inventory(195, 4));
        for (gpu, (_, gib)) in made_there.gpus.iter_mut().zip(used) {
            gpu.memory_used = gib << 30;
        }
        for (gpu, gib) in node.gpus.iter_mut().zip(free) {
            gpu.memory_free = gib << 30;
        }
        let minors: Vec<u64> = sources.iter().map(|_| 0).collect();
        GpuAssignment::make(&spec(195, &minors), &made_there, &node, restore)
    }

    #[test]
    fn a_gpu_without_room_is_refused_with_those_that_have_some() {
        let refused = with_room(&[(0, 6)], &[5, 8, 3, 6], &config(&[], &[])).unwrap_err();
        assert_eq!(refused.code(), "FIRN-GPU-OCCUPIED");
        let shown = refused.to_string();
        for part in [
            "has 5120 MiB of memory free, and the checkpoint needs 6144 MiB",
            &format!("there is room on {}, {}", uuid(1), uuid(3)),
        ] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        let AssignmentError::Occupied(mut occupied) = refused else {
            panic!("{refused}")
        };
        occupied.holders = vec!["container a of namespace b".to_owned()];
        occupied.others.clear();
        let shown = occupied.to_string();
        assert!(
            shown.ends_with("MiB; container a of namespace b has it"),
            "{shown}"
        );
        // As much as there is, and an image that does not have the figure.
        assert!(with_room(&[(0, 5)], &[5], &config(&[], &[])).is_ok());
        assert!(with_room(&[(0, 0)], &[0], &config(&[], &[])).is_ok());
    }

    #[test]
    fn a_pool_is_searched_for_gpus_with_room() {
        let subset = |gpus: &[&str]| Restore {
            policy: RemapPolicy::Subset,
            ..config(gpus, &[])
        };
        let all = &["0", "1", "2", "3"];
        let target = |used, free: &[u64], restore: &Restore| {
            let made = with_room(used, free, restore)?;
            let uuids: Vec<GpuUuid> = made.targets().into_iter().map(|gpu| gpu.uuid).collect();
            Ok::<_, AssignmentError>(uuids)
        };
        // Its own GPU is full.
        let free = &[1, 2, 8, 6];
        assert_eq!(target(&[(0, 6)], free, &subset(all)).unwrap(), [uuid(2)]);
        assert_eq!(target(&[(0, 6)], free, &config(all, &[])).unwrap(), [uuid(2)]);
        let two = target(&[(0, 6), (1, 6)], free, &subset(all)).unwrap();
        assert_eq!(two, [uuid(2), uuid(3)]);
        let refused = target(&[(0, 7), (1, 7)], free, &subset(all)).unwrap_err();
        assert_eq!(refused.code(), "FIRN-GPU-OCCUPIED");
        // The operator's map is not searched.
        let refused = target(&[(0, 6)], free, &config(all, &[(0, 1)])).unwrap_err();
        assert_eq!(refused.code(), "FIRN-GPU-OCCUPIED");
    }

    #[test]
    fn what_is_needed_is_that_of_the_new_gpus() {
        let made = with_room(&[(0, 6), (1, 0)], &[8, 8, 8, 8], &config(&["2", "3"], &[])).unwrap();
        let needs = made.needs(&{
            let mut source = manifest(&[0, 1]).gpus;
            source[0].memory_used = 6 << 30;
            source
        });
        assert_eq!(needs, GpuMemory::from([(uuid(2), 6 << 30)]));
    }

    #[test]
    fn an_incomplete_map_and_too_few_gpus_are_refused() {
        let error = made(&spec(195, &[0]), &[8, 9], &config(&[], &[(9, 1)])).unwrap_err();
        assert_eq!(error.code(), "FIRN-GPU-COUNT");
        let error = made(&spec(195, &[0]), &[8, 9], &config(&["0", "1"], &[(9, 1)])).unwrap_err();
        assert_eq!(error.code(), "FIRN-MAP-INCOMPLETE");
        let error = made(&Spec::from(json!({})), &[9], &config(&[], &[])).unwrap_err();
        assert_eq!(error.code(), "FIRN-GPU-COUNT");
    }

    #[test]
    fn another_driver_is_refused() {
        let mut other = inventory(195, 4);
        other.driver_version = "570.1.2".into();
        let error =
            GpuAssignment::make(&spec(195, &[0]), &manifest(&[0]), &other, &config(&[], &[])).unwrap_err();
        assert_eq!(error.code(), "FIRN-DRIVER-VERSION");
    }

    #[test]
    fn what_the_grant_rests_on_is_kept() {
        let decision = GpuAssignment::make(
            &spec(240, &[0]),
            &manifest(&[9]),
            &inventory(195, 4),
            &config(&["2"], &[]),
        );
        assert_eq!(decision.unwrap().grant.basis, Basis::Config);
    }

    #[test]
    fn each_refusal_has_the_hint_for_its_cause() {
        let mut unknown = spec(195, &[0]);
        let annotations = unknown.object_mut("annotations").unwrap();
        annotations.insert("firn.dev/remap-policy".into(), json!("any"));
        for (spec, sources, remedy) in [
            (unknown, &[9][..], "write auto, subset or strict"),
            (spec(240, &[7]), &[9], "firn.dev/gpu-map"),
            (spec(195, &[0]), &[8, 9], "grant as many GPUs"),
        ] {
            let error = made(&spec, sources, &config(&[], &[])).unwrap_err();
            assert!(error.hint().contains(remedy), "{error}: {}", error.hint());
        }
    }
}
