//! Which GPUs a restore gets: grant, map and planner put together, for the shim and for
//! `firn restore --dry-run`.

use crate::plan;
use crate::plan::{MapPolicy, PlanError, PlanRequest, Warning};
use firn_config::Restore;
use firn_gpu::{Gpu, GpuUuid, Inventory, SourceGpu, Topology};
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
        let mut grant = Grant::at_restore(spec, inventory, config, written.as_ref())?;
        match policy {
            MapPolicy::Auto | MapPolicy::Strict => grant.narrow(&uuids),
            MapPolicy::Subset | MapPolicy::Explicit(_) => {}
        }
        let driver = manifest.driver.as_ref().map_or("", |driver| &driver.driver);
        Self::planned(
            &manifest.gpus,
            &manifest.topology,
            driver,
            inventory,
            grant,
            &policy,
        )
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
