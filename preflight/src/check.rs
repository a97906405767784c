//! The rules. The audit applies all of them to one [`Workload`], in the order of this file.
//!
//! The transaction applies them in several calls, each with the part of the workload that it sets: other
//! vendors before everything else, processes and findings in every inspection, capacity, mounts and streams
//! in the first inspection.

use std::cell::OnceCell;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use firn_config::{Tcp, in_path};
use firn_gpu::{Gpu, Inventory};
use firn_host::Problem;
use firn_oci::{Spec, SpecError, job_hook};
use firn_remap::Grant;

use crate::environment::{self, Known, MemoryLimit, Needs, OtherGpus, Tree};
use crate::finding::{
    self, Connection, Finding, Inherited, Lookup, Processes, RefusedBefore, UnixSocket, Unreadable,
};
use crate::{Assertions, Refusal, Workload};

/// The node of a container, and the GPUs that it has there.
#[derive(Debug)]
pub struct Node {
    /// The GPUs that the spec grants; without a spec all GPUs of the node.
    pub gpus: Vec<Gpu>,
    pub refusals: Vec<Refusal>,
}

impl Node {
    /// Bytes of memory in use on the container's GPUs, by any process.
    pub fn gpu_memory_in_use(&self) -> u64 {
        let in_use = |gpu: &Gpu| gpu.memory_total.saturating_sub(gpu.memory_free);
        self.gpus.iter().map(in_use).sum()
    }

    /// The first refusal as an error.
    pub fn accepted(mut self) -> Result<Self, Refusal> {
        if self.refusals.is_empty() {
            Ok(self)
        } else {
            Err(self.refusals.swap_remove(0))
        }
    }
}

/// Checks the driver of the node and how the container got its GPUs. `spec` is `None` for processes outside
/// of a container.
pub fn check_node(inventory: &Inventory, spec: Option<&Spec>) -> Node {
    let mut refusals = Vec::new();
    // Without anything at the driver, it has nothing to checkpoint.
    let is_device_free = spec.is_some_and(job_hook::releases_devices);
    if !inventory.checkpoint_api && !is_device_free {
        let version = inventory.driver_version.clone();
        refusals.push(Refusal::NoCheckpointApi { version });
    }
    // Create has not converted the hook.
    if spec.is_some_and(Spec::gpu_by_hook) {
        refusals.push(Refusal::ByHook);
    }
    let gpus = match spec.map(|spec| Grant::of_spec(spec, inventory)) {
        None => inventory.gpus.clone(),
        Some(Ok(grant)) => grant.gpus,
        Some(Err(error)) => {
            refusals.push(Refusal::Grant(error));
            Vec::new()
        }
    };
    let divided = gpus.iter().find(|gpu| gpu.mig && !is_device_free);
    refusals.extend(divided.map(|divided| Refusal::Mig {
        uuid: divided.uuid.to_string(),
    }));
    Node { gpus, refusals }
}

/// Why nothing is dumped on a node without CRIU in these directories, which are separated by colons.
pub fn expect_criu(path: &OsStr) -> Result<(), Refusal> {
    match in_path("criu", path) {
        Some(_) => Ok(()),
        None => Err(Refusal::NoCriu { path: path.into() }),
    }
}

/// What a check has found.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Why the container is not checkpointed.
    pub refusals: Vec<Refusal>,
    /// What the processes have open and mapped that matters and refuses nothing.
    pub findings: Vec<Finding>,
    /// GPUs that processes without CUDA have inherited, and that firn's plugin for CRIU dumps.
    pub inherited: Vec<Inherited>,
    /// Processes that may be in cuInit, where the workload has
    /// [`may_start`](Workload::may_start).
    pub starting: Vec<i32>,
    /// What the hook `prepare` has to release before a checkpoint, for the audit: shared GPU memory, and
    /// devices.
    pub to_be_released: Option<Refusal>,
    pub devices_to_be_released: Option<Refusal>,
    /// CRIU has to make links of files whose name was deleted.
    pub link_remap: bool,
    /// Where CRIU finds the files that processes watch, in the order in which it should look.
    pub watched: Vec<PathBuf>,
    /// TCP connections of the processes.
    pub connections: Vec<Connection>,
    /// Unix sockets that lead outside. If nothing is refused, the copy finds them closed.
    pub unix_sockets: Vec<UnixSocket>,
    /// Processes that CRIU leaves out.
    pub left_out: Vec<i32>,
    /// How the container's GPUs of other vendors are dumped.
    pub other_gpus: OtherGpus,
}

/// The check failed: it is unknown whether the container can be checkpointed.
#[derive(Debug, thiserror::Error, Problem)]
pub enum CheckError {
    #[error("cannot look at the processes")]
    #[problem("FIRN-PROC", read_again(_0))]
    Unreadable(#[from] Unreadable),
    #[error("cannot read the memory limits of the container")]
    #[problem("FIRN-FREEZER", "see that the cgroup hierarchies are mounted and readable")]
    Limit(#[source] io::Error),
    #[error("cannot read the spec")]
    Spec(#[from] SpecError),
}

fn read_again(error: &Unreadable) -> &'static str {
    match error.source.kind() {
        io::ErrorKind::FileTooLarge => "no program needs so much of it: end the process",
        _ => "the process may have ended meanwhile: try again",
    }
}

/// Applies all rules to the parts of a workload that are set.
pub fn check(workload: &Workload) -> Result<Outcome, CheckError> {
    Run::new(workload, &|_| {}, false).apply()
}

/// As [`check`], but stops at the first refusal. Calls `announce` with what it looks at next: files that a
/// container or a file server controls may hang.
pub fn check_until_refused(workload: &Workload, announce: &dyn Fn(&Path)) -> Result<Outcome, CheckError> {
    Run::new(workload, announce, true).apply()
}

/// One check of a workload.
struct Run<'a> {
    workload: &'a Workload,
    announce: &'a dyn Fn(&Path),
    /// Only the first refusal matters.
    until_refused: bool,
    proc_root: &'a Path,
    tree: OnceCell<Tree>,
    outcome: Outcome,
}

type Rule<'a> = fn(&mut Run<'a>) -> Result<(), CheckError>;

impl<'a> Run<'a> {
    fn new(workload: &'a Workload, announce: &'a dyn Fn(&Path), until_refused: bool) -> Self {
        Self {
            workload,
            announce,
            until_refused,
            proc_root: Path::new("/proc"),
            tree: OnceCell::new(),
            outcome: Outcome::default(),
        }
    }

    fn apply(mut self) -> Result<Outcome, CheckError> {
        let rules: [Rule<'a>; 13] = [
            Self::leaves,
            Self::other_vendors,
            Self::held_devices,
            Self::left_out,
            Self::objects,
            Self::findings,
            Self::connections,
            Self::watches,
            Self::deleted_names,
            Self::unix_sockets,
            Self::capacity,
            Self::mounts,
            Self::streams,
        ];
        for rule in rules {
            rule(&mut self)?;
            if self.until_refused && !self.outcome.refusals.is_empty() {
                break;
            }
        }
        Ok(self.outcome)
    }

    fn announce(&self, what: impl AsRef<Path>) {
        (self.announce)(what.as_ref());
    }

    fn tree(&self) -> &Tree {
        let Workload { init, pids, .. } = self.workload;
        self.tree.get_or_init(|| Tree::of(*init, pids))
    }

    /// The processes that are dumped, or all that are paused.
    fn dumped(&self) -> Vec<i32> {
        if self.workload.pause {
            return self.workload.pids.clone();
        }
        self.tree().dumped.iter().copied().collect()
    }

    fn leaves(&mut self) -> Result<(), CheckError> {
        let Workload { pids, leaves, .. } = self.workload;
        if !leaves.is_empty() {
            self.announce("a file that a process has open or mapped");
            let kept = finding::kept(self.proc_root, pids, leaves)?;
            self.outcome.refusals.extend(kept);
        }
        Ok(())
    }

    fn other_vendors(&mut self) -> Result<(), CheckError> {
        let Some(part) = &self.workload.other_vendors else {
            return Ok(());
        };
        match environment::by_vendor(&self.workload.pids, part) {
            Ok(found) => self.outcome.other_gpus = found,
            Err(refusal) => self.outcome.refusals.push(refusal),
        }
        Ok(())
    }

    /// What the owner asserts; none where nothing is dumped, or the processes are not checked.
    fn dump(&self) -> Option<&'a Assertions> {
        let asserted = self.workload.processes.as_ref();
        asserted.filter(|_| !self.workload.pause)
    }

    /// What CRIU's user has set, for a container that CRIU dumps without firn's rules.
    fn dump_by_criu(&self) -> Option<&'a Assertions> {
        let set = self.workload.by_criu.as_ref();
        set.filter(|_| !self.workload.pause)
    }

    /// What is asserted for a dump, by whoever makes it; none where nothing is dumped, or is not checked.
    fn any_dump(&self) -> Option<&'a Assertions> {
        self.dump().or(self.dump_by_criu())
    }

    /// Also processes that CRIU leaves out: they would keep the device from whoever gets it next.
    fn held_devices(&mut self) -> Result<(), CheckError> {
        if !self.is_device_free() {
            return Ok(());
        }
        let held = finding::held_devices(self.proc_root, &self.workload.pids, &self.workload.cuda)?;
        if self.until_refused {
            self.outcome.refusals.extend(held)
        } else {
            // The audit calls no hook.
            self.outcome.devices_to_be_released = held
        }
        Ok(())
    }

    fn is_device_free(&self) -> bool {
        self.dump().is_some_and(|assertions| assertions.device_free)
    }

    /// Those that use CUDA when CRIU dumps them.
    fn cuda(&self) -> &[i32] {
        if self.is_device_free() {
            &[]
        } else {
            &self.workload.cuda
        }
    }

    fn left_out(&mut self) -> Result<(), CheckError> {
        let Some(assertions) = self.any_dump() else {
            return Ok(());
        };
        self.announce("the memory maps and environments of processes");
        let left_out = self.tree().outside.clone();
        if self.dump_by_criu().is_none() {
            let refused = environment::by_left_out(&left_out, self.cuda(), assertions.exec);
            self.outcome.refusals.extend(refused);
        }
        self.outcome.left_out = left_out;
        Ok(())
    }

    fn objects(&mut self) -> Result<(), CheckError> {
        if self.any_dump().is_some() {
            let Workload { init, no_inet, .. } = self.workload;
            let found = finding::objects(self.proc_root, *init, &self.dumped(), *no_inet)?;
            let agent = self.workload.seccomp_agent.then_some(Refusal::SeccompAgent);
            self.outcome.refusals.extend(agent.into_iter().chain(found));
        }
        Ok(())
    }

    fn findings(&mut self) -> Result<(), CheckError> {
        let Some(assertions) = &self.workload.processes else {
            if self.dump_by_criu().is_some() {
                let refusals = finding::of_criu(self.proc_root, &self.dumped())?;
                self.outcome.refusals.extend(refusals);
            }
            return Ok(());
        };
        let dumped = self.dumped();
        let cuda: Vec<i32> = (self.cuda().iter().copied())
            .filter(|pid| dumped.contains(pid))
            .collect();
        if let Some(path) = &self.workload.refused_before {
            self.outcome.refusals.extend(RefusedBefore::first_of(path, &cuda));
        }
        let before = self
            .workload
            .inherited
            .as_deref()
            .map(Inherited::read)
            .unwrap_or_default();
        let processes = Processes {
            dumped: &dumped,
            cuda: &cuda,
            ranks: assertions.nccl_sockets,
            criu_plugin: self.workload.criu_plugin,
            inherited_before: &before,
            may_start: self.workload.may_start && !self.workload.pause && !self.is_device_free(),
        };
        let (mut findings, of_gpus) = finding::inspect(self.proc_root, &processes)?;
        if self.is_device_free() {
            // What shows that has been reported already, and goes with the devices.
            findings.retain(|found| !found.is_of_a_gpu());
        }
        if assertions.no_peer_access {
            finding::without_peer_access(&mut findings);
        }
        finding::without_peer_access_of(&mut findings, &self.workload.taken_out);
        let (mut refusals, findings) = finding::evaluate(findings, assertions.shares_nothing);
        refusals.retain(|refusal| !(self.workload.pause && refusal.is_crius()));
        self.outcome.refusals.extend(refusals);
        self.outcome.findings = findings;
        if assertions.released {
            let held = finding::held(self.proc_root, &dumped)?;
            if self.until_refused {
                self.outcome.refusals.extend(held)
            } else {
                // The audit calls no hook.
                self.outcome.to_be_released = held
            }
        }
        (self.outcome.inherited, self.outcome.starting) = (of_gpus.inherited, of_gpus.starting);
        Ok(())
    }

    fn connections(&mut self) -> Result<(), CheckError> {
        let Some(assertions) = self.any_dump() else {
            return Ok(());
        };
        let refuses = assertions.tcp == Tcp::Refuse;
        // A dump takes them as they are then: only the audit shows them.
        if self.until_refused && !refuses {
            return Ok(());
        }
        let found = finding::connections(self.proc_root, &self.dumped())?;
        if refuses && !found.is_empty() {
            let connections = found.clone();
            self.outcome.refusals.push(match self.dump_by_criu() {
                None => Refusal::Connections { connections },
                Some(_) => Refusal::PlainConnections { connections },
            });
        }
        self.outcome.connections = found;
        Ok(())
    }

    fn watches(&mut self) -> Result<(), CheckError> {
        let Workload { init, scanned, .. } = self.workload;
        let lookup = match (self.dump(), self.dump_by_criu()) {
            (Some(_), _) => Lookup::ByFirn(scanned),
            (None, Some(_)) => Lookup::ByCriu(scanned),
            (None, None) => return Ok(()),
        };
        let announce = || self.announce("the container's root file system, for the name of a watched file");
        let found = finding::watches(self.proc_root, *init, &self.dumped(), lookup, announce)?;
        let (watched, refusals) = found;
        self.outcome.refusals.extend(refusals);
        self.outcome.watched = watched;
        Ok(())
    }

    fn deleted_names(&mut self) -> Result<(), CheckError> {
        let Some(assertions) = self.any_dump() else {
            return Ok(());
        };
        self.announce("a file that a process has open or mapped by a deleted name");
        let Workload { init, tmpfs, .. } = self.workload;
        match finding::link_remap(*init, &self.dumped(), tmpfs, assertions.link_remap) {
            Ok(link_remap) => self.outcome.link_remap = link_remap,
            Err(refusal) => self.outcome.refusals.push(refusal),
        }
        Ok(())
    }

    fn unix_sockets(&mut self) -> Result<(), CheckError> {
        let Some(assertions) = self.any_dump() else {
            return Ok(());
        };
        let dumped = self.dumped();
        let (found, refusal) = match self.dump_by_criu() {
            None => {
                let plugin = self.workload.criu_plugin;
                finding::unix_sockets(self.proc_root, &dumped, assertions, plugin)?
            }
            Some(set) => finding::unix_sockets_by_criu(self.proc_root, &dumped, set.external_unix)?,
        };
        self.outcome.refusals.extend(refusal);
        self.outcome.unix_sockets = found;
        Ok(())
    }

    fn capacity(&mut self) -> Result<(), CheckError> {
        let Some(part) = &self.workload.capacity else {
            return Ok(());
        };
        self.announce("a file that a process has open or mapped");
        let needs = Needs::of(&self.dumped(), part.gpu_memory);
        let limit = MemoryLimit::of(self.cuda()).map_err(CheckError::Limit)?;
        if self.workload.pause || part.stored {
            let refused = environment::by_memory(needs, limit);
            self.outcome.refusals.extend(refused);
            return Ok(());
        }
        self.announce(&part.image);
        let refusals = environment::by_capacity(needs, limit, &part.image, &part.work);
        self.outcome.refusals.extend(refusals);
        Ok(())
    }

    fn mounts(&mut self) -> Result<(), CheckError> {
        let Some(bundle) = &self.workload.bundle else {
            return Ok(());
        };
        let known = Known::of(&Spec::load(bundle)?)?;
        let refused = environment::by_mounts(self.workload.init, &known);
        self.outcome.refusals.extend(refused.err());
        Ok(())
    }

    fn streams(&mut self) -> Result<(), CheckError> {
        if self.workload.bundle.is_none() {
            return Ok(());
        }
        self.announce("standard input, output or error of a process");
        let refused = environment::by_streams(self.workload.init, &self.dumped());
        self.outcome.refusals.extend(refused.err());
        Ok(())
    }
}

#[cfg(test)]
mod tests;
