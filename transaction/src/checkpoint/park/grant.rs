//! Gives a parked container other GPUs of its node: device rules, nodes in /dev, spec.

use firn_config::Config;
use firn_gpu::{DeviceNode, Gpu, GpuUuid, Inventory, SourceGpu};
use firn_oci::{Spec, dev_repair, edit};
use firn_remap::{GpuAssignment, Grant};

use super::error::GrantChangeError;
use crate::blocking::{Left, stoppable};
use crate::cancel::CancellationToken;
use crate::checkpoint::error::EffectError;
use crate::container::Container;
use crate::warn::OrWarn;

/// Other GPUs for a container.
#[derive(Clone, Debug)]
pub(super) struct NewGrant {
    /// The spec as it was, and as it will be.
    old: Spec,
    pub(super) new: Spec,
    /// The GPUs before and after, in one order.
    pub(super) from: Vec<SourceGpu>,
    pub(super) to: Vec<SourceGpu>,
    /// Those that the container gets.
    pub(super) gpus: Vec<Gpu>,
}

impl NewGrant {
    /// Decides which GPU takes the place of which. `wanted` lists GPUs by UUID or index, or pairs
    /// `GPU-old=GPU-new`.
    pub(super) fn plan(
        container: &Container,
        spec: &Spec,
        inventory: &Inventory,
        wanted: &str,
    ) -> Result<Self, GrantChangeError> {
        let assignment = GpuAssignment::on_this_node(spec, inventory, wanted)?;
        Self::of(container, spec, inventory, &assignment)
    }

    /// As many of these GPUs of the node's pool as the container has, without those that are `taken`.
    pub(super) fn among(
        container: &Container,
        spec: &Spec,
        inventory: &Inventory,
        pool: &[String],
        taken: impl Fn(&DeviceNode) -> bool,
    ) -> Result<Self, GrantChangeError> {
        let mut grant = Grant::named(inventory, pool, "gpus in the configuration")?;
        grant.gpus.retain(|gpu| !gpu.node.as_ref().is_some_and(&taken));
        Self::of(
            container,
            spec,
            inventory,
            &GpuAssignment::among(spec, inventory, grant)?,
        )
    }

    fn of(
        container: &Container,
        spec: &Spec,
        inventory: &Inventory,
        assignment: &GpuAssignment,
    ) -> Result<Self, GrantChangeError> {
        if spec.is_cri() {
            return Err(GrantChangeError::Pod);
        }
        if container.options.systemd_cgroup {
            return Err(GrantChangeError::Systemd);
        }
        if spec.opens_all_devices() {
            return Err(GrantChangeError::Privileged);
        }
        for warning in &assignment.warnings {
            log::warn!("move to other GPUs: {warning}");
        }
        let find = |uuid: &GpuUuid| {
            let gpu = inventory.gpus.iter().find(|gpu| gpu.uuid == *uuid);
            gpu.map(SourceGpu::from)
        };
        let pairs = assignment.map.pairs();
        let mut new = spec.clone();
        edit::replace_gpus(&mut new, &assignment.targets(), &inventory.common_nodes)?;
        Ok(Self {
            old: spec.clone(),
            new,
            from: pairs.iter().filter_map(|pair| find(&pair.old)).collect(),
            to: pairs.iter().filter_map(|pair| find(&pair.new)).collect(),
            gpus: assignment.targets(),
        })
    }

    /// The new GPUs in the places of these old ones.
    pub(super) fn in_order_of(&self, old: &[SourceGpu]) -> Vec<SourceGpu> {
        let new = |old: &SourceGpu| {
            let at = self.from.iter().position(|from| from.uuid == old.uuid);
            at.map_or_else(|| old.clone(), |at| self.to[at].clone())
        };
        old.iter().map(new).collect()
    }

    /// Whether no GPU changes.
    pub(super) fn is_same(&self) -> bool {
        self.from == self.to
    }

    /// Nodes of GPUs that the container gives up.
    pub(super) fn given_up(&self) -> Vec<DeviceNode> {
        let stays = |gpu: &&SourceGpu| !self.to.iter().any(|new| new.uuid == gpu.uuid);
        let given_up = self.from.iter().filter(stays);
        given_up.filter_map(|gpu| gpu.node.clone()).collect()
    }

    /// Gives the container its new GPUs. After an error it has its old ones.
    pub(super) async fn apply(
        &self,
        container: &Container,
        config: &Config,
        cancel: &CancellationToken,
    ) -> Result<(), EffectError> {
        let done = replace(container, config, cancel, (&self.old, &self.new)).await;
        if done.is_err() {
            self.revert(container, config).await;
        }
        done
    }

    /// Gives the container its old GPUs again, as far as possible.
    pub(super) async fn revert(&self, container: &Container, config: &Config) {
        let cancel = CancellationToken::default();
        let reverted = replace(container, config, &cancel, (&self.new, &self.old)).await;
        reverted.or_warn(format_args!("cannot give {} its GPUs again", container.id));
    }
}

/// Order matters: a device that the rules do not allow cannot be opened, whatever nodes there are; and the
/// spec is what a later checkpoint takes for true.
async fn replace(
    container: &Container,
    config: &Config,
    cancel: &CancellationToken,
    (from, to): (&Spec, &Spec),
) -> Result<(), EffectError> {
    let (old, new) = (
        from.device_rules().map_err(GrantChangeError::from)?,
        to.device_rules().map_err(GrantChangeError::from)?,
    );
    let cgroup = container.cgroup()?;
    cgroup
        .replace_device_rules(&old, &new)
        .map_err(GrantChangeError::Rules)?;
    let (init, spec, limit) = (container.init.pid(), to.clone(), config.deadlines.look);
    let repaired = stoppable(limit, cancel, move |_| dev_repair::repair(init, &spec)).await;
    let repaired = repaired.map_err(|left| match left {
        Left::Cancelled => EffectError::Killed,
        Left::Late => GrantChangeError::Late { limit }.into(),
    })?;
    repaired.map_err(GrantChangeError::from)?;
    to.save(&container.bundle).map_err(GrantChangeError::from)?;
    Ok(())
}
