//! Gives a parked container other GPUs of its node: device rules, nodes in /dev, spec.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use firn_gpu::{DeviceNode, Gpu, GpuPair, GpuUuid, Inventory, SourceGpu};
use firn_oci::dev_repair::{self, DevError};
use firn_oci::{Spec, edit};
use firn_process::OrWarn;
use firn_process::blocking::{Left, stoppable};
use firn_process::cancel::CancellationToken;
use firn_remap::{GpuAssignment, Grant};
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::error::GrantChangeError;
use crate::checkpoint::container::ContainerEffects;
use crate::checkpoint::error::EffectError;
use crate::transaction::Transaction;

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
    pub(super) fn plan(spec: &Spec, inventory: &Inventory, wanted: &str) -> Result<Self, GrantChangeError> {
        let assignment = GpuAssignment::on_this_node(spec, inventory, wanted)?;
        Self::of(spec, inventory, &assignment)
    }

    /// As many of these GPUs of the node's pool as the container has, without those that are `taken`.
    pub(super) fn among(
        spec: &Spec,
        inventory: &Inventory,
        pool: &[String],
        taken: impl Fn(&DeviceNode) -> bool,
    ) -> Result<Self, GrantChangeError> {
        let mut grant = Grant::named(inventory, pool, "gpus in the configuration")?;
        grant.gpus.retain(|gpu| !gpu.node.as_ref().is_some_and(&taken));
        Self::of(spec, inventory, &GpuAssignment::among(spec, inventory, grant)?)
    }

    fn of(spec: &Spec, inventory: &Inventory, assignment: &GpuAssignment) -> Result<Self, GrantChangeError> {
        if !spec.author().owns_node() {
            return Err(GrantChangeError::Pod);
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

    /// The GPUs before, each with the one after.
    pub(super) fn pairs(&self) -> Vec<GpuPair> {
        let pair = |(old, new): (&SourceGpu, &SourceGpu)| GpuPair {
            old: old.uuid.clone(),
            new: new.uuid.clone(),
        };
        self.from.iter().zip(&self.to).map(pair).collect()
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

    /// Checks that the nodes in the container's /dev can be replaced. Changes nothing.
    pub(super) async fn check(&self, effects: &ContainerEffects<'_>) -> Result<(), EffectError> {
        let (init, spec) = (effects.transaction.container.init.pid(), self.new.clone());
        on_dev(effects, effects.transaction.cancel(), move |_| {
            dev_repair::can_repair(init, &spec)
        })
        .await
    }

    /// Gives the container its new GPUs. After an error it has its old ones.
    pub(super) async fn apply(&self, effects: &ContainerEffects<'_>) -> Result<(), EffectError> {
        let done = replace(effects, effects.transaction.cancel(), &self.old, &self.new).await;
        if done.is_err() {
            self.revert(effects).await;
        }
        done
    }

    /// Gives the container its old GPUs again, as far as possible.
    pub(super) async fn revert(&self, effects: &ContainerEffects<'_>) {
        let cancel = CancellationToken::default();
        let reverted = replace(effects, &cancel, &self.new, &self.old).await;
        let id = &effects.transaction.container.id;
        reverted.or_warn(format_args!("cannot give {id} its GPUs again"));
    }
}

/// Order matters: a device that the rules do not allow cannot be opened, whatever nodes there are; and the
/// spec is what a later checkpoint takes for true.
async fn replace(
    effects: &ContainerEffects<'_>,
    cancel: &CancellationToken,
    from: &Spec,
    to: &Spec,
) -> Result<(), EffectError> {
    let Transaction {
        container,
        config,
        reaper,
        ..
    } = effects.transaction;
    let (old, new) = (
        from.device_rules().map_err(GrantChangeError::from)?,
        to.device_rules().map_err(GrantChangeError::from)?,
    );
    let cgroup = container.cgroup()?;
    if container.options.systemd_cgroup {
        let limit = config.deadlines.look;
        let allowed = cgroup.allow_in_unit(reaper, &old, &new, limit).await;
        allowed.map_err(GrantChangeError::Unit)?;
    }
    cgroup
        .replace_device_rules(&old, &new)
        .map_err(GrantChangeError::Rules)?;
    let (init, spec) = (container.init.pid(), to.clone());
    let repair = move |stop: &AtomicBool| dev_repair::repair_unless(stop, init, &spec);
    on_dev(effects, cancel, repair).await?;
    to.save(&container.bundle).map_err(GrantChangeError::from)?;
    Ok(())
}

/// Does `work` on the container's /dev.
async fn on_dev<T: Send + 'static>(
    effects: &ContainerEffects<'_>,
    cancel: &CancellationToken,
    work: impl FnOnce(&AtomicBool) -> Result<T, DevError> + Send + 'static,
) -> Result<T, EffectError> {
    let limit = effects.transaction.config.deadlines.look;
    let done = in_turn(&effects.transaction.container.dev, limit, cancel, work).await;
    let done = done.map_err(|left| match left {
        Left::Cancelled => EffectError::Killed,
        Left::Late => GrantChangeError::Late { limit }.into(),
    })?;
    Ok(done.map_err(GrantChangeError::from)?)
}

/// Does `work` once earlier work is over, also work that nobody waits for any more: that could change what
/// comes after it. So whoever calls first is first, however late its thread begins.
async fn in_turn<T: Send + 'static>(
    turn: &Arc<Mutex<()>>,
    limit: Duration,
    cancel: &CancellationToken,
    work: impl FnOnce(&AtomicBool) -> T + Send + 'static,
) -> Result<T, Left> {
    let begun = Instant::now();
    let turn = tokio::select! {
        biased;
        () = cancel.cancelled() => return Err(Left::Cancelled),
        turn = timeout(limit, turn.clone().lock_owned()) => turn.map_err(|_elapsed| Left::Late)?,
    };
    stoppable(limit.saturating_sub(begun.elapsed()), cancel, move |stop| {
        let _turn = turn;
        work(stop)
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::sync::mpsc;

    use firn_host::Problem;
    use firn_image::fixtures::{inventory, pods, spec, uuid};
    use firn_process::cgroup::CgroupError;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_new_grant_has_the_wanted_gpus_and_no_other() {
        let (own, node) = (spec(195, &[0, 2]), inventory(195, 4));
        let plan = |wanted: &str| NewGrant::plan(&own, &node, wanted).unwrap();
        let grant = plan("3,2");
        let to = |grant: &NewGrant| grant.to.iter().map(|gpu| gpu.uuid.clone()).collect::<Vec<_>>();
        // A GPU that the container has stays.
        assert_eq!(to(&grant), [uuid(3), uuid(2)]);
        let given_up: Vec<_> = grant.given_up().into_iter().map(|node| node.minor).collect();
        assert_eq!(given_up, [0]);
        let nodes = grant.new.devices().unwrap();
        let gpus = nodes.iter().filter(|device| device.node.path.starts_with("/dev"));
        let gpus = gpus.map(|device| device.node.path.display().to_string());
        let gpus: Vec<String> = gpus.filter(|path| path.ends_with(char::is_numeric)).collect();
        assert_eq!(gpus, ["/dev/nvidia3", "/dev/nvidia2"]);
        assert!(!grant.is_same() && plan("0,2").is_same());

        let swap = plan(&format!("{}={},{}={}", uuid(0), uuid(2), uuid(2), uuid(0)));
        assert_eq!(to(&swap), [uuid(2), uuid(0)]);
        assert!(swap.given_up().is_empty() && !swap.is_same());
        let mut reversed = grant.from.clone();
        reversed.reverse();
        let in_order = swap.in_order_of(&reversed);
        assert_eq!(in_order[0].uuid, uuid(0));
    }

    #[test]
    fn the_pool_without_what_is_taken() {
        let (own, node) = (spec(195, &[0]), inventory(195, 4));
        let pool = ["0", "1", "3"].map(str::to_owned);
        let taken = |minors: &'static [u64]| move |node: &DeviceNode| minors.contains(&node.minor);
        let grant = NewGrant::among(&own, &node, &pool, taken(&[0, 1])).unwrap();
        assert_eq!(grant.to[0].uuid, uuid(3));
        let none = NewGrant::among(&own, &node, &pool, taken(&[0, 1, 3])).unwrap_err();
        assert_eq!(none.code(), "FIRN-GPU-COUNT");
    }

    #[test]
    fn pods_and_privileged_containers_are_not_moved() {
        let node = inventory(195, 4);
        let code = |spec: &Spec, wanted: &str| {
            let error = NewGrant::plan(spec, &node, wanted).unwrap_err();
            error.code().to_owned()
        };
        for pod in pods(&spec(195, &[0])) {
            assert_eq!(code(&pod, "1"), "FIRN-MOVE-POD", "{pod:?}");
        }
        let mut all = spec(195, &[0]);
        let resources = all.object_mut("linux.resources").unwrap();
        resources.insert("devices".into(), json!([{"allow": true, "access": "rwm"}]));
        assert_eq!(code(&all, "0,1,2,3"), "FIRN-MOVE-PRIVILEGED");
        assert_eq!(code(&spec(195, &[0]), "9"), "FIRN-GPU-UNKNOWN");
        assert_eq!(code(&spec(195, &[0]), "GPU-x=GPU-y"), "FIRN-MAP-SYNTAX");
    }

    /// The first hangs, as in a file system that does not answer.
    #[tokio::test]
    async fn late_work_on_dev_is_over_before_other_work_begins() {
        let (turn, cancel) = (Arc::default(), CancellationToken::default());
        let (answer, hang) = mpsc::channel::<()>();
        let (log, logged) = mpsc::channel();
        let second_log = log.clone();
        let hangs = move |stop: &AtomicBool| {
            hang.recv().unwrap();
            log.send(("first", stop.load(Ordering::Relaxed))).unwrap();
        };
        let late = in_turn(&turn, Duration::from_millis(10), &cancel, hangs).await;
        assert_eq!(late, Err(Left::Late));
        let reverts = move |stop: &AtomicBool| {
            second_log.send(("second", stop.load(Ordering::Relaxed))).unwrap();
        };
        let second = in_turn(&turn, Duration::from_secs(60), &cancel, reverts);
        let answers = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert!(logged.try_recv().is_err(), "it did not wait");
            answer.send(()).unwrap();
        };
        let (second, ()) = tokio::join!(second, answers);
        second.unwrap();
        assert_eq!(
            logged.iter().collect::<Vec<_>>(),
            [("first", true), ("second", false)]
        );
    }

    #[test]
    fn what_the_cgroup_refuses_has_a_code() {
        let gone = || CgroupError::Gone { path: "/box".into() };
        assert_eq!(GrantChangeError::Rules(gone()).code(), "FIRN-DEVICE-RULES");
        assert_eq!(GrantChangeError::Unit(gone()).code(), "FIRN-MOVE-SYSTEMD");
    }
}
