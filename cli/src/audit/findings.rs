//! The signals of an audit: what was looked for, where, what was found, and whether it refuses a checkpoint or restore.

use firn_config::Config;
use firn_gpu::protocol::ProcessReply;
use firn_gpu::{Gpu, Inventory};
use firn_host::procfs::comm;
use firn_oci::{GpuRequest, Rules, Spec, criu_config};
use firn_preflight::environment;
use firn_preflight::environment::{Others, Refusal as Refused, exec_policy};
use firn_preflight::process as preflight;
use firn_preflight::process::{Finding, Owner, Refusal, Sign};
use firn_remap::GrantError;
use firn_remap::plan::{Plan, PlanError};
use serde::Serialize;

use super::subject::Subject;
use super::{Verdict, shown};
use crate::text;
use firn_host::{Problem, ProblemLine, ProblemReport};

/// How sure it is that what is looked for is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Certainty {
    None,
    Suspected,
    Certain,
}

#[derive(Debug, Serialize)]
pub struct Signal {
    pub signal: &'static str,
    pub certainty: Certainty,
    /// Whether a checkpoint or restore is refused for it.
    pub refused: bool,
    /// What told it.
    pub source: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<ProblemReport>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

impl Signal {
    /// Whether there is nothing to say of it.
    pub fn is_quiet(&self) -> bool {
        !self.refused && self.certainty == Certainty::None && self.detail.is_empty()
    }
}

#[derive(Debug, Default)]
pub struct Signals {
    pub all: Vec<Signal>,
}

/// What the preflight looks for, and where; in the order of [`kind`].
const KINDS: [(&str, &str); 7] = [
    ("managed_memory", "/proc/PID/maps"),
    ("mps", "/proc/PID/fd and environ"),
    (
        "shared_gpu_memory",
        "the number of CUDA processes, /proc/PID/maps and environ",
    ),
    ("imex", "/proc/PID/fd"),
    ("rdma", "/proc/PID/fd"),
    ("io_uring", "/proc/PID/fd and maps"),
    (
        "gpu_descriptors_without_cuda",
        "/proc/PID/fd, the driver's restore threads",
    ),
];

/// Of signs and of what they refuse.
fn kind(sign: &Sign) -> usize {
    match sign {
        Sign::ManagedMemory { .. } => 0,
        Sign::Mps { .. } => 1,
        Sign::Nccl { .. } | Sign::SharingLibrary { .. } | Sign::MultipleCudaProcesses { .. } => 2,
        Sign::Imex { .. } => 3,
        Sign::Rdma { .. } => 4,
        Sign::IoUring => 5,
        Sign::LeakedGpu { .. } => 6,
    }
}

fn kind_refused(refusal: &Refusal) -> usize {
    match refusal {
        Refusal::ManagedMemory { .. } => 0,
        Refusal::Mps { .. } => 1,
        Refusal::Nccl { .. } | Refusal::SharingLibrary { .. } | Refusal::Ipc { .. } => 2,
        Refusal::Imex { .. } => 3,
        Refusal::Rdma { .. } => 4,
        Refusal::IoUring { .. } => 5,
        Refusal::LeakedGpu { .. } => 6,
    }
}

impl Signals {
    /// What it comes to.
    pub fn verdict(&self) -> Verdict {
        if self.all.iter().any(|signal| signal.refused) {
            Verdict::Cannot
        } else if self
            .all
            .iter()
            .any(|signal| signal.certainty == Certainty::Suspected)
        {
            Verdict::Suspected
        } else {
            Verdict::Can
        }
    }

    fn add(&mut self, signal: &'static str, source: &'static str, failure: Option<ProblemReport>) {
        self.all.push(Signal {
            signal,
            certainty: if failure.is_some() {
                Certainty::Certain
            } else {
                Certainty::None
            },
            refused: failure.is_some(),
            source,
            failure,
            detail: String::new(),
        });
    }

    /// What the shim's transaction would see.
    pub fn of_preflight(&mut self, findings: &[Finding], refusals: &[Refusal], owner: Owner) {
        let several = (findings.iter()).any(|f| matches!(f.sign, Sign::MultipleCudaProcesses { .. }));
        for (at, (signal, source)) in KINDS.into_iter().enumerate() {
            let seen: Vec<&Finding> = findings.iter().filter(|f| kind(&f.sign) == at).collect();
            let refusal = refusals.iter().find(|refusal| kind_refused(refusal) == at);
            let certain = seen.iter().any(|f| f.certainty == preflight::Certainty::Certain);
            // That memory is shared is never seen, only what may share it; and the driver takes what its owner answers for.
            let certainty = match (at, refusal.is_some()) {
                (2, true) | (3, true) => Certainty::Suspected,
                (2, false) => Certainty::None,
                (3, false) if owner.shares_nothing => Certainty::None,
                _ if seen.is_empty() => Certainty::None,
                _ if certain => Certainty::Certain,
                _ => Certainty::Suspected,
            };
            let detail = match at {
                2 if several && refusal.is_none() => "several CUDA processes, which share none".to_owned(),
                2 => String::new(),
                _ if refusal.is_some() => String::new(),
                _ => seen.first().map(|finding| described(finding)).unwrap_or_default(),
            };
            self.all.push(Signal {
                signal,
                certainty,
                refused: refusal.is_some(),
                source,
                failure: refusal.map(|refusal| refusal.report()),
                detail,
            });
        }
    }

    pub fn of_driver(&mut self, inventory: &Inventory) {
        let failure = refused(environment::by_driver(inventory));
        self.add("driver_without_checkpoint", "libcuda's symbols", failure);
    }

    /// Processes that CRIU leaves out.
    pub fn of_execs(&mut self, subject: &Subject, known: &[ProcessReply], config: &Config) {
        let of_cuda = known.iter().filter(|process| process.restore_tid.is_some());
        let cuda: Vec<i32> = of_cuda.map(|process| process.pid).collect();
        let exec = exec_policy(subject.spec.as_ref(), config);
        let failure = refused(environment::by_outside(&subject.outside, &cuda, exec));
        self.add("processes_of_exec", "/proc/PID/status", failure);
    }

    /// Create has left the hook as it was; what it would do with it now tells why, or that it has to be done anew.
    pub fn of_hook(&mut self, spec: &Spec, config: &Config) {
        let failure = refused(environment::by_hook(spec));
        let detail = failure.as_ref().map(|_| created_anew(spec, config));
        self.add("gpus_from_a_hook", "config.json of the bundle", failure);
        if let (Some(signal), Some(detail)) = (self.all.last_mut(), detail) {
            signal.detail = detail;
        }
    }

    pub fn of_grant(&mut self, grant: Result<(), GrantError>) {
        let failure = grant.err().map(ProblemReport::from);
        self.add("unknown_gpus", "config.json of the bundle", failure);
    }

    pub fn of_gpus(&mut self, gpus: &[Gpu]) {
        self.add("mig", "NVML", refused(environment::by_mig(gpus)));
    }

    /// Room for what a checkpoint makes.
    pub fn of_room(&mut self, refusals: &[Refused]) {
        let first = |memory: bool| {
            let is_of = |refusal: &&Refused| matches!(refusal, Refused::Space { .. }) != memory;
            refusals.iter().find(is_of).map(of_refused)
        };
        self.add(
            "too_little_memory",
            "/proc/meminfo, memory limits of the cgroup and those above",
            first(true),
        );
        self.add(
            "too_little_image_space",
            "the file systems of --image-dir and of the bundle",
            first(false),
        );
    }

    /// Mounts and streams from outside the container.
    pub fn of_outside(&mut self, mounts: Result<(), Refused>, stdio: Result<(), Refused>) {
        self.add(
            "foreign_mounts",
            "/proc/PID/mountinfo, config.json of the bundle",
            refused(mounts),
        );
        self.add("streams_in_host_files", "/proc/PID/fd and fdinfo", refused(stdio));
    }

    /// GPUs that are not NVIDIA's, and what CRIU needs for AMD's.
    pub fn of_vendors(&mut self, found: Result<Others, Refused>, config: &Config) {
        let plugin =
            || criu_config::amd_plugin(config.criu.amdgpu_plugin.as_deref(), &criu_config::PLUGIN_DIRS).err();
        let plugin = matches!(found, Ok(Others::Amd)).then(plugin).flatten();
        self.add("gpus_of_other_vendors", "/proc/PID/fd", refused(found));
        let failure = plugin.map(ProblemReport::from);
        self.add("amd_gpus_without_plugin", "CRIU's plugin directories", failure);
    }

    /// Whether the GPUs find a place. Gives the plan as JSON.
    pub fn of_plan(
        &mut self,
        plan: Result<Plan, PlanError>,
        target: &Inventory,
    ) -> Option<serde_json::Value> {
        const NAME: &str = "gpus_without_place_on_the_target";
        const SOURCE: &str = "the target's inventory";
        match plan {
            Ok(plan) => {
                self.add(NAME, SOURCE, None);
                if let Some(signal) = self.all.last_mut() {
                    signal.detail = format!("driver {}, {} GPUs", target.driver_version, target.gpus.len());
                }
                Some(shown(&plan))
            }
            Err(error) => {
                self.add(NAME, SOURCE, Some(error.report()));
                None
            }
        }
    }

    /// What is named is no workload.
    pub fn of_subject(&mut self, failure: ProblemReport) {
        self.add("no_workload", "/proc/PID/stat", Some(failure));
    }

    /// A checkpoint or restore of the container that has not ended.
    pub fn of_transaction(&mut self, failure: Option<ProblemReport>) {
        self.add("unfinished_transaction", "firn-journal of the bundle", failure);
    }

    /// Whether an image is whole.
    pub fn of_image(&mut self, failure: Option<ProblemReport>, has_manifest: bool) {
        let none = failure.is_none() && !has_manifest;
        self.add(
            "damaged_image",
            "firn.json and the checksums of all files",
            failure,
        );
        if let Some(signal) = self.all.last_mut().filter(|_| none) {
            signal.certainty = Certainty::Suspected;
            signal.detail = "no firn.json: it restores only into a container that asks for no GPU".to_owned();
        }
    }
}

/// What the shim would make of a hook in a new container's spec.
fn created_anew(spec: &Spec, config: &Config) -> String {
    let rules = match Rules::of(spec, None) {
        Ok(rules) => rules,
        Err(error) => return format!("created anew it would be refused: {}", ProblemLine(&error)),
    };
    let GpuRequest::Named(request) = GpuRequest::of(spec, &rules) else {
        return "its hook names no devices".to_owned();
    };
    if !request.source.is_enabled(&config.create) {
        return "the configuration lets hooks be: [create] hooks".to_owned();
    }
    match firn_cdi::convert(spec.clone(), config, &rules, false) {
        Ok(converted) => {
            let names: Vec<String> = converted.names.iter().map(ToString::to_string).collect();
            format!("created anew it would get CDI devices {}", names.join(", "))
        }
        Err(error) => format!("created anew it would not be converted: {}", ProblemLine(&error)),
    }
}

fn refused<T>(found: Result<T, Refused>) -> Option<ProblemReport> {
    found.err().as_ref().map(of_refused)
}

fn of_refused(refusal: &Refused) -> ProblemReport {
    refusal.report()
}

/// What a sign shows, for one that refuses nothing.
fn described(finding: &Finding) -> String {
    let pid = finding.pid.unwrap_or_default();
    let what = match &finding.sign {
        Sign::ManagedMemory { ranges, bytes } => {
            format!(
                "{ranges} mappings of {} that may be the driver's own",
                text::bytes(*bytes)
            )
        }
        Sign::Mps { directory } => format!("pipes of an MPS daemon may be used: {}", directory.display()),
        Sign::LeakedGpu { file } => format!("{file} is open, and the driver knows no CUDA there"),
        Sign::Rdma { file } | Sign::Imex { file } | Sign::SharingLibrary { file } => file.clone(),
        Sign::IoUring | Sign::Nccl { .. } | Sign::MultipleCudaProcesses { .. } => {
            return String::new();
        }
    };
    format!("process {pid} ({}): {what}", comm(pid))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_create_would_make_of_a_hook_now_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.create.cdi_dirs = vec![dir.path().to_owned()];
        let hook = json!({"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["hook", "prestart"]});
        let spec = |devices: &str| {
            let env = [format!("NVIDIA_VISIBLE_DEVICES={devices}")];
            Spec::from(json!({"process": {"env": env}, "hooks": {"prestart": [hook]}}))
        };
        let told = |devices: &str, config: &Config| {
            let mut signals = Signals::default();
            signals.of_hook(&spec(devices), config);
            let signal = signals.all.pop().unwrap();
            assert_eq!(signal.failure.unwrap().code, "FIRN-GPU-HOOK");
            signal.detail
        };
        assert!(told("0", &config).contains("FIRN-NO-CDI-SPEC: "));
        let edits = json!({"deviceNodes": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]});
        let devices = [json!({"name": "0", "containerEdits": edits})];
        let file = json!({"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices});
        std::fs::write(dir.path().join("nvidia.json"), file.to_string()).unwrap();
        assert!(told("0", &config).ends_with("CDI devices nvidia.com/gpu=0"));
        assert!(told("7", &config).contains("FIRN-CDI-DEVICE: "));
        assert!(told("void", &config).contains("no devices"));
        config.create.hooks = firn_config::Conversion::Keep;
        assert!(told("0", &config).contains("[create] hooks"));
    }
}
