//! The signals of an audit: what was looked for, what was found, and whether it refuses a checkpoint or
//! restore.

use firn_config::Config;
use firn_gpu::{Gpu, GpuUuid, Inventory, SourceGpu, Topology};
use firn_host::{Problem, ProblemLine, ProblemReport, procfs};
use firn_oci::{GpuRequest, Rules, Spec};
use firn_preflight::{Assertions, Finding, LostSettings, Node, Outcome, Refusal, Workload};
use firn_remap::plan::{MapPolicy, PlanRequest, plan};
use serde::Serialize;

use super::annotations::Wrong;
use super::subject::Unready;
use super::{TargetPlan, Verdict};
use crate::text;

/// How sure a signal is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Certainty {
    /// Nothing was found.
    None,
    /// It may be there.
    Suspected,
    /// It is there.
    Certain,
}

/// What was looked for, and what was found.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Signal {
    /// What was looked for, as `driver_without_checkpoint`.
    pub signal: &'static str,
    /// How sure it is.
    pub certainty: Certainty,
    /// Whether a checkpoint or restore is refused for it.
    pub refused: bool,
    /// What it was read from.
    pub source: &'static str,
    /// Why it is refused; absent if it is not.
    pub failure: Option<ProblemReport>,
    /// More about what was found, for people; absent if there is nothing.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[cfg_attr(test, schemars(default))]
    pub detail: String,
}

impl Signal {
    /// Whether nothing was found.
    pub fn is_quiet(&self) -> bool {
        !self.refused && self.certainty == Certainty::None && self.detail.is_empty()
    }
}

#[derive(Debug, Default)]
pub struct Signals {
    pub all: Vec<Signal>,
}

/// Signals of the node and of its driver.
const NODE: [Topic; 2] = [
    Topic("driver_without_checkpoint", "libcuda's symbols"),
    Topic("mig", "NVML"),
];

/// Signals of how the container got its GPUs.
const GRANT: [Topic; 2] = [
    Topic("gpus_from_a_hook", BUNDLE_SPEC),
    Topic("unknown_gpus", BUNDLE_SPEC),
];

const CRIU: [Topic; 1] = [Topic("no_criu", "PATH of containerd")];

const BUNDLE_SPEC: &str = "config.json of the bundle";

/// Signals of what the processes have open and mapped.
const FINDINGS: [Topic; 11] = [
    Topic("managed_memory", "/proc/PID/maps"),
    Topic(
        "refused_by_the_driver_before",
        "firn-gpu-refused.json of the bundle",
    ),
    Topic("mps", "/proc/PID/fd and environ"),
    Topic(SHARED, "the number of CUDA processes, /proc/PID/maps and environ"),
    Topic(PEERS, "/proc/PID/maps"),
    Topic(IMEX, "/proc/PID/fd"),
    Topic(OF_CRIU[0], "/proc/PID/fd"),
    Topic(OF_CRIU[1], "/proc/PID/fd and maps"),
    Topic(OF_CRIU[2], "/proc/PID/smaps"),
    Topic(INHERITED, "/proc/PID/fd and maps, firn's plugin for CRIU"),
    Topic(
        "gpu_descriptors_without_cuda",
        "/proc/PID/fd, the driver's restore threads",
    ),
];

/// What the driver makes of a GPU with several processes (docs/evidence/gpu-runs.md).
const UNINTERRUPTED: &str = "After a checkpoint or restore the driver interrupts no kernel of this \
    container for the others: they wait until it ends, and after some 5 s of that the driver ends its \
    process (Xid 109)";

/// Those of [`FINDINGS`] that matter without GPUs, too.
const OF_CRIU: [&str; 3] = ["rdma", "io_uring", "protection_keys"];

const SHARED: &str = "shared_gpu_memory";
const IMEX: &str = "imex";
const PEERS: &str = "peer_access";
const INHERITED: &str = "inherited_gpus";

const OBJECTS: [Topic; 3] = [
    Topic("user_namespace", "/proc/PID/ns"),
    Topic("seccomp_agent", BUNDLE_SPEC),
    Topic(
        "objects_without_a_copy",
        "/proc/PID/fd, fdinfo, maps, ns, net/icmp and root, unix_diag",
    ),
];

/// Of a job that lets go of every device in its hook.
const DEVICES: [Topic; 1] = [Topic(
    "devices_held_after_the_hook",
    "/proc/PID/fd and maps, the driver's restore threads",
)];

const CONNECTIONS: [Topic; 1] = [Topic("tcp_connections", "/proc/PID/fd and net/tcp")];

const DELETED_NAMES: [Topic; 2] = [
    Topic("deleted_names", "/proc/PID/fd and map_files"),
    Topic(
        "names_of_criu_links",
        "/proc/PID/fd and map_files, directories of the container",
    ),
];
const UNIX_SOCKETS: [Topic; 1] = [Topic(OUTSIDE, "/proc/PID/fd and unix_diag")];

const OUTSIDE: &str = "unix_sockets_to_outside";

const LEFT_OUT: [Topic; 1] = [Topic("processes_of_exec", "/proc/PID/status")];

const OTHER_VENDORS: [Topic; 2] = [
    Topic("gpus_of_other_vendors", "/proc/PID/fd"),
    Topic("amd_gpus_without_plugin", "CRIU's plugin directories"),
];

const CAPACITY: [Topic; 2] = [
    Topic(
        "too_little_memory",
        "/proc/meminfo, memory limits of the cgroup and those above",
    ),
    Topic(
        "too_little_image_space",
        "the file systems of --image-dir and of the bundle",
    ),
];

const MOUNTS: [Topic; 2] = [
    Topic(
        "external_mounts",
        "/proc/PID/mountinfo, config.json of the bundle",
    ),
    Topic("streams_in_host_files", "/proc/PID/fd and fdinfo"),
];

/// The name of a signal, and what it is read from.
#[derive(Clone, Copy, Debug)]
struct Topic(&'static str, &'static str);

/// The signal that a refusal belongs to.
fn signal_of(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::NoCheckpointApi { .. } => "driver_without_checkpoint",
        Refusal::NoCriu { .. } => CRIU[0].0,
        Refusal::ByHook => "gpus_from_a_hook",
        Refusal::Grant(_) => "unknown_gpus",
        Refusal::Mig { .. } => "mig",
        Refusal::MixedGpus { .. } | Refusal::UnknownGpu { .. } => "gpus_of_other_vendors",
        Refusal::AmdPlugin(_) => "amd_gpus_without_plugin",
        Refusal::DeviceHeld { .. } => DEVICES[0].0,
        Refusal::CudaExec { .. } | Refusal::Exec { .. } => "processes_of_exec",
        Refusal::ManagedMemory { .. } => "managed_memory",
        Refusal::RefusedBefore { .. } => "refused_by_the_driver_before",
        Refusal::Mps { .. } => "mps",
        Refusal::UserNamespace => OBJECTS[0].0,
        Refusal::SeccompAgent => OBJECTS[1].0,
        Refusal::Object { .. } => OBJECTS[2].0,
        Refusal::Rdma { .. } => OF_CRIU[0],
        Refusal::IoUring { .. } => OF_CRIU[1],
        Refusal::ProtectionKey { .. } => OF_CRIU[2],
        Refusal::InheritedGpu { .. } => INHERITED,
        // The audit moves nothing.
        Refusal::LeakedGpu { .. } | Refusal::KeptGpu { .. } | Refusal::Vfork { .. } => {
            "gpu_descriptors_without_cuda"
        }
        Refusal::Connections { .. } | Refusal::PlainConnections { .. } => "tcp_connections",
        Refusal::CriuLink { .. } => "names_of_criu_links",
        Refusal::DeletedName { .. } => "deleted_names",
        Refusal::UnixSockets { .. }
        | Refusal::UnixSocketsKept { .. }
        | Refusal::UnixSocketsUnseen { .. }
        | Refusal::UnixSocketsPlugin { .. }
        | Refusal::PlainUnixSockets { .. } => OUTSIDE,
        Refusal::PeerAccess { .. } => PEERS,
        Refusal::Imex { .. } => IMEX,
        Refusal::Nccl { .. }
        | Refusal::SharingLibrary { .. }
        | Refusal::Ipc { .. }
        | Refusal::Held { .. } => SHARED,
        Refusal::CgroupMemory { .. } | Refusal::HostMemory { .. } => "too_little_memory",
        Refusal::Space { .. } => "too_little_image_space",
        Refusal::ExternalMount { .. } | Refusal::TooManyMounts { .. } => "external_mounts",
        Refusal::ExternalStream { .. } => "streams_in_host_files",
    }
}

impl Signals {
    /// The verdict that follows from all signals.
    pub fn verdict(&self) -> Verdict {
        let any = |is: fn(&Signal) -> bool| self.all.iter().any(is);
        if any(|signal| signal.refused) {
            Verdict::Cannot
        } else if any(|signal| signal.certainty == Certainty::Suspected) {
            Verdict::Suspected
        } else {
            Verdict::Can
        }
    }

    fn add(
        &mut self,
        signal: &'static str,
        source: &'static str,
        failure: Option<ProblemReport>,
    ) -> &mut Signal {
        self.all.push_mut(Signal {
            signal,
            certainty: match failure {
                Some(_) => Certainty::Certain,
                None => Certainty::None,
            },
            refused: failure.is_some(),
            source,
            failure,
            detail: String::new(),
        })
    }

    /// One signal for each topic, with the first refusal that belongs to it, and the others in short.
    fn add_all(&mut self, topics: &[Topic], refusals: &[Refusal]) {
        for Topic(signal, source) in topics {
            let mut of_topic = refusals.iter().filter(|refusal| signal_of(refusal) == *signal);
            let first = of_topic.next().map(Problem::report);
            let others = of_topic.map(ToString::to_string).collect();
            self.add(signal, source, first).detail = text::some_of("also: ", others);
        }
    }

    /// The node's driver, and how the container got its GPUs.
    pub fn of_node(&mut self, node: &Node, spec: Option<&Spec>, config: &Config) {
        self.add_all(&NODE, &node.refusals);
        let Some(spec) = spec else {
            return;
        };
        self.add_all(&GRANT, &node.refusals);
        let hook = signal_of(&Refusal::ByHook);
        let refused = |signal: &&mut Signal| signal.signal == hook && signal.refused;
        if let Some(signal) = self.all.iter_mut().find(refused) {
            signal.detail = created_again(spec, config);
        }
    }

    /// What the check of a workload has found, for the parts of it that were checked.
    pub fn of_workload(&mut self, workload: &Workload, outcome: &Outcome) {
        let refusals = &outcome.refusals;
        if let Some(assertions) = &workload.processes {
            self.of_devices(outcome, assertions);
            self.of_findings(outcome, assertions);
        }
        if workload.by_criu.is_some() {
            let of_criu = FINDINGS.into_iter().filter(|topic| OF_CRIU.contains(&topic.0));
            self.add_all(&of_criu.collect::<Vec<_>>(), refusals);
        }
        if let Some(assertions) = workload.processes.as_ref().or(workload.by_criu.as_ref()) {
            self.of_connections(outcome, assertions);
            self.add_all(&DELETED_NAMES, refusals);
            self.of_unix_sockets(outcome);
            self.of_left_out(outcome);
            self.add_all(&OBJECTS, refusals);
        }
        if workload.other_vendors.is_some() {
            self.add_all(&OTHER_VENDORS, refusals);
        }
        if workload.bundle.is_some() {
            self.add_all(&MOUNTS, refusals);
        }
        if workload.capacity.is_some() {
            self.add_all(&CAPACITY, refusals);
        }
    }

    /// Annotations that mean nothing. Nothing is refused for them.
    pub fn of_annotations(&mut self, wrong: Wrong) {
        let Wrong { lines, unasked } = wrong;
        let source = "config.json of the bundle, containerd's container and its pod's";
        let signal = self.add("annotations_without_effect", source, None);
        if !lines.is_empty() {
            signal.certainty = Certainty::Certain;
            signal.detail = text::some_of("", lines);
        }
        if let Some(why) = unasked {
            let before = if signal.detail.is_empty() { "" } else { "; " };
            signal
                .detail
                .push_str(&format!("{before}not looked at in containerd: {why}"));
        }
    }

    /// Settings that a copy has not. Nothing is refused for them.
    pub fn of_settings(&mut self, lost: &[LostSettings]) {
        let signal = self.add(
            "settings_that_a_copy_lacks",
            "/proc/PID/status and its like",
            None,
        );
        let shown =
            |lost: &LostSettings| format!("process {} ({}): {}", lost.pid, lost.comm, lost.what.join(", "));
        if !lost.is_empty() {
            signal.certainty = Certainty::Certain;
            signal.detail = text::some_of("", lost.iter().map(shown).collect());
        }
    }

    /// GPUs with several processes, of which the subject has one. Nothing is refused for them.
    pub fn of_shared_gpus(&mut self, shared: Option<&[(GpuUuid, Vec<i32>)]>) {
        let signal = self.add("processes_that_share_a_gpu", "NVML", None);
        let shown = |(gpu, pids): &(GpuUuid, Vec<i32>)| {
            let processes = pids.iter().map(|pid| format!("{pid} ({})", procfs::comm(*pid)));
            format!("{gpu}: processes {}", processes.collect::<Vec<_>>().join(", "))
        };
        match shared {
            None => signal.detail = "which processes have memory of a GPU cannot be read here".to_owned(),
            Some([]) => {}
            Some(shared) => {
                signal.certainty = Certainty::Certain;
                let shown = text::some_of("", shared.iter().map(shown).collect());
                signal.detail = format!("{shown}. {UNINTERRUPTED}");
            }
        }
    }

    fn of_findings(&mut self, outcome: &Outcome, assertions: &Assertions) {
        self.add_all(&FINDINGS, &outcome.refusals);
        let start = self.all.len() - FINDINGS.len();
        for signal in &mut self.all[start..] {
            let of_signal = |finding: &&Finding| signal_of(&finding.refusal) == signal.signal;
            let found: Vec<&Finding> = outcome.findings.iter().filter(of_signal).collect();
            signal.certainty = certainty(signal, &found, assertions);
            if signal.refused {
                continue;
            }
            signal.detail = match (signal.signal, &outcome.to_be_released) {
                (SHARED, Some(Refusal::Held { pid, comm, what })) => {
                    format!("the hook prepare has to release what process {pid} ({comm}) shares: {what}")
                }
                (SHARED, _) if assertions.released => {
                    "released by the hook prepare; nothing is held now".to_owned()
                }
                (SHARED, _) if found.iter().any(is_several) => {
                    "several CUDA processes, which share none".to_owned()
                }
                (SHARED, _) => String::new(),
                _ => found.first().copied().map(described).unwrap_or_default(),
            };
        }
    }

    fn of_devices(&mut self, outcome: &Outcome, assertions: &Assertions) {
        self.add_all(&DEVICES, &outcome.refusals);
        let signal = self.all.last_mut().filter(|_| assertions.device_free);
        if let Some(signal) = signal {
            let held = match &outcome.devices_to_be_released {
                Some(Refusal::DeviceHeld { pid, comm, what }) => {
                    format!("the hook prepare has to release what process {pid} ({comm}) has: {what}")
                }
                _ => "no process holds a device now".to_owned(),
            };
            signal.detail = format!("device-free, for any device or none: {held}");
        }
    }

    fn of_connections(&mut self, outcome: &Outcome, assertions: &Assertions) {
        self.add_all(&CONNECTIONS, &outcome.refusals);
        let all = &outcome.connections;
        if let Some(signal) = self
            .all
            .last_mut()
            .filter(|signal| !signal.refused && !all.is_empty())
        {
            let (kept, closed): (Vec<_>, Vec<_>) = all.iter().partition(|one| one.continues(assertions.tcp));
            signal.detail = format!("in a copy {} continue, {} are closed", kept.len(), closed.len());
            if let Some(one) = closed.first() {
                signal.detail.push_str(&format!(
                    " ({one}{})",
                    if closed.len() > 1 { ", ..." } else { "" }
                ));
            }
            let losing = all.iter().filter(|one| one.loses_bytes(assertions.tcp));
            let losing = text::some_of(
                "; received and not read, lost: ",
                losing.map(ToString::to_string).collect(),
            );
            signal.detail.push_str(&losing);
        }
    }

    fn of_left_out(&mut self, outcome: &Outcome) {
        self.add_all(&LEFT_OUT, &outcome.refusals);
        let signal = self.all.last_mut().filter(|signal| !signal.refused);
        if let (Some(signal), false) = (signal, outcome.left_out.is_empty()) {
            let shown = |pid: &i32| format!("process {pid} ({})", procfs::comm(*pid));
            let all = outcome.left_out.iter().map(shown).collect();
            signal.detail = format!("a copy is without {}", text::some_of("", all));
        }
    }

    fn of_unix_sockets(&mut self, outcome: &Outcome) {
        self.add_all(&UNIX_SOCKETS, &outcome.refusals);
        let signal = self.all.last_mut().filter(|signal| !signal.refused);
        if let (Some(signal), [one, others @ ..]) = (signal, &outcome.unix_sockets[..]) {
            let more = if others.is_empty() { "" } else { ", ..." };
            signal.detail = format!("in a copy {} are closed ({one}{more})", others.len() + 1);
        }
    }

    /// Whether GPUs with this topology and driver find a place on the target, if all of its whole GPUs are
    /// granted. Returns the plan.
    pub fn of_plan(
        &mut self,
        source: &[SourceGpu],
        topology: &Topology,
        driver: &str,
        target: &Inventory,
    ) -> Option<TargetPlan> {
        let whole: Vec<Gpu> = target.gpus.iter().filter(|gpu| !gpu.mig).cloned().collect();
        let plan = plan(&PlanRequest {
            source,
            source_topology: topology,
            source_driver: driver,
            grant: &whole,
            target_topology: &target.topology,
            target_driver: &target.driver_version,
            policy: &MapPolicy::Subset,
        });
        let failure = plan.as_ref().err().map(Problem::report);
        let signal = self.add(
            "gpus_without_place_on_the_target",
            "the target's inventory",
            failure,
        );
        let plan = plan.ok()?;
        signal.detail = format!("driver {}, {} GPUs", target.driver_version, target.gpus.len());
        Some(TargetPlan {
            warnings: plan.warnings.iter().map(ToString::to_string).collect(),
            map: plan.map,
        })
    }

    /// Whether CRIU is there.
    pub fn of_criu(&mut self, refusals: &[Refusal]) {
        self.add_all(&CRIU, refusals);
    }

    /// A shim of somebody else serves the container.
    pub fn of_shim(&mut self, failure: Option<&Unready>) {
        let failure = failure.map(Problem::report);
        self.add("other_shim", "/proc/PID/exe of the shim", failure);
    }

    /// The subject is no workload.
    pub fn of_subject(&mut self, failure: &Unready) {
        self.add("no_workload", "/proc/PID/stat", Some(failure.report()));
    }

    /// A checkpoint or restore of the container that has not ended.
    pub fn of_transaction(&mut self, failure: Option<&Unready>) {
        let failure = failure.map(Problem::report);
        self.add("unfinished_transaction", "firn-journal of the bundle", failure);
    }

    /// Whether an image is complete.
    pub fn of_image(&mut self, failure: Option<ProblemReport>, has_manifest: bool) {
        let is_whole = failure.is_none();
        let signal = self.add(
            "damaged_image",
            "firn.json and the checksums of all files",
            failure,
        );
        if is_whole && !has_manifest {
            signal.certainty = Certainty::Suspected;
            signal.detail = "no firn.json: it restores only into a container that requests no GPU".to_owned();
        }
    }
}

/// Why a signal of findings is certain, suspected or neither.
fn certainty(signal: &Signal, found: &[&Finding], assertions: &Assertions) -> Certainty {
    let is_certain = |finding: &&Finding| finding.certainty == firn_preflight::Certainty::Certain;
    match signal.signal {
        // Only the means of sharing memory can be found, never the sharing itself.
        SHARED | IMEX | PEERS if signal.refused => Certainty::Suspected,
        SHARED => Certainty::None,
        IMEX if assertions.shares_nothing => Certainty::None,
        _ if signal.refused => Certainty::Certain,
        _ if found.is_empty() => Certainty::None,
        _ if found.iter().any(is_certain) => Certainty::Certain,
        _ => Certainty::Suspected,
    }
}

fn is_several(finding: &&Finding) -> bool {
    matches!(finding.refusal, Refusal::Ipc { .. })
}

/// What Create would do with the hook if the container were created again.
fn created_again(spec: &Spec, config: &Config) -> String {
    let rules = match Rules::of(spec, None) {
        Ok(rules) => rules,
        Err(error) => return format!("created again it would be refused: {}", ProblemLine(&error)),
    };
    let GpuRequest::Named(request) = GpuRequest::of(spec, &rules) else {
        return "its hook names no devices".to_owned();
    };
    if !request.source.is_enabled(&config.create) {
        return "the configuration keeps hooks: [create] hooks".to_owned();
    }
    match firn_cdi::convert(spec.clone(), config, &rules, false) {
        Ok(converted) => {
            let names: Vec<String> = converted.names.iter().map(ToString::to_string).collect();
            format!("created again it would get CDI devices {}", names.join(", "))
        }
        Err(error) => format!("created again it would not be converted: {}", ProblemLine(&error)),
    }
}

/// A finding that refuses nothing, in one line.
fn described(finding: &Finding) -> String {
    let (pid, comm, what) = match &finding.refusal {
        Refusal::ManagedMemory {
            pid,
            comm,
            ranges,
            bytes,
        } => {
            let bytes = text::bytes(*bytes);
            let what = format!("{ranges} mappings of {bytes} that may be the driver's own");
            (pid, comm, what)
        }
        Refusal::Mps { pid, comm, directory } => {
            let what = format!("pipes of an MPS daemon may be used: {}", directory.display());
            (pid, comm, what)
        }
        Refusal::LeakedGpu { pid, comm, file } => {
            let what = format!("{file} is open, and the driver knows no CUDA there");
            (pid, comm, what)
        }
        Refusal::Imex { pid, comm, file } => (pid, comm, file.clone()),
        _ => return String::new(),
    };
    format!("process {pid} ({comm}): {what}")
}

#[cfg(test)]
mod tests;
