//! The audit of a container or of processes outside of a container.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use firn_config::{Bulk, Config, Tcp, find_criu_plugin, names};
use firn_gpu::protocol::ProcessReply;
use firn_gpu::{GpuUuid, Inventory, SourceGpu};
use firn_host::{ProblemReport, procfs};
use firn_interposer_client::Library;
use firn_oci::criu_config::{users_external_unix, users_link_remap, users_scanned, users_tcp};
use firn_oci::{Spec, job_hook};
use firn_preflight::{
    Assertions, Capacity, Node, OtherVendors, Outcome, STARTS, STARTS_LOOK, Workload, check, check_node,
    expect_criu, image_bytes, lost_settings,
};
use firn_process::cgroup::Cgroup;

use super::annotations;
use super::findings::Signals;
use super::subject::Subject;
use super::{Process, Report};
use crate::args::AuditArgs;
use crate::daemon::Daemon;
use crate::program::{self, criu_limits};

pub(super) fn audit(args: &AuditArgs, config: &Config) -> Result<Report> {
    let subject = Subject::of(args)?;
    if let Some(dir) = args.image_dir.as_deref().filter(|dir| !dir.is_dir()) {
        bail!(
            "--image-dir {} is no directory. hint: name the one that the image goes to, or one on the same \
             file system",
            dir.display()
        );
    }
    let mut signals = Signals::default();
    if let Some(failure) = subject.unfit() {
        signals.of_subject(&failure);
        return Ok(unready(subject, signals));
    }
    let unfinished = subject.unfinished_transaction();
    let unfinished = unfinished.context("cannot read the journal of the container")?;
    signals.of_transaction(unfinished.as_ref());
    // Its processes are not as they are otherwise.
    if unfinished.is_some() {
        return Ok(unready(subject, signals));
    }

    let nvidia = if subject.spec.as_ref().is_none_or(Spec::requests_gpu) {
        Some(Nvidia::of(&subject, config)?)
    } else {
        None
    };
    let path = Daemon::find(&args.subject.containerd.socket.address).path;
    signals.of_criu(&Vec::from_iter(expect_criu(&path).err()));
    let no_inet = criu_limits(&path, config).no_inet;
    if let Some(nvidia) = &nvidia {
        signals.of_shim(subject.under_another_shim().as_ref());
        signals.of_node(&nvidia.node, subject.spec.as_ref(), config);
    }
    let (nvidia, workload, outcome) = checked(&subject, nvidia, no_inet, args, config)?;
    signals.of_workload(&workload, &outcome);
    if let Some(nvidia) = &nvidia {
        signals.of_shared_gpus(nvidia.shared_gpus(config).as_deref());
    }
    let socket = &args.subject.containerd.socket.address;
    signals.of_annotations(annotations::of(&subject, socket));
    signals.of_settings(&lost_settings(&subject.tree, cpus(subject.init).as_deref()));
    report(subject, nvidia, args, signals)
}

/// The CPUs that the processes of a cgroup may use, as the kernel writes the list. None: it has no cpuset.
fn cpus(init: i32) -> Option<String> {
    const FILES: [&str; 2] = ["cpuset.cpus.effective", "cpuset.effective_cpus"];
    let dir = Cgroup::of_pid(init).ok()?.dir("cpuset")?;
    let read = |dir: &Path| {
        FILES
            .iter()
            .find_map(|file| fs::read_to_string(dir.join(file)).ok())
    };
    Some(dir.ancestors().find_map(read)?.trim().to_owned())
}

/// The check, once no process is in cuInit any more, or for too long.
fn checked(
    subject: &Subject,
    mut nvidia: Option<Nvidia>,
    no_inet: bool,
    args: &AuditArgs,
    config: &Config,
) -> Result<(Option<Nvidia>, Workload, Outcome)> {
    let until = Instant::now() + STARTS;
    loop {
        let mut workload = workload(subject, nvidia.as_ref(), args, config);
        (workload.may_start, workload.no_inet) = (Instant::now() < until, no_inet);
        let outcome = check(&workload).map_err(ProblemReport::from)?;
        if outcome.starting.is_empty() {
            return Ok((nvidia, workload, outcome));
        }
        sleep(STARTS_LOOK);
        if let Some(nvidia) = &mut nvidia {
            nvidia.discover(subject, config)?;
        }
    }
}

/// The report of one that is not looked at.
fn unready(subject: Subject, signals: Signals) -> Report {
    Report {
        subject: subject.name,
        verdict: signals.verdict(),
        signals: signals.all,
        ..Report::default()
    }
}

/// What the driver reports about the node and the processes.
struct Nvidia {
    inventory: Inventory,
    node: Node,
    processes: Vec<ProcessReply>,
    /// Processes of the tree that use CUDA.
    cuda: Vec<i32>,
}

impl Nvidia {
    fn of(subject: &Subject, config: &Config) -> Result<Self> {
        let inventory = program::inventory(config).context("cannot read the GPUs of this node")?;
        let mut found = Self {
            node: check_node(&inventory, subject.spec.as_ref()),
            cuda: Vec::new(),
            inventory,
            processes: Vec::new(),
        };
        found.discover(subject, config)?;
        Ok(found)
    }

    /// Asks the driver which processes use CUDA.
    fn discover(&mut self, subject: &Subject, config: &Config) -> Result<()> {
        let mut processes = program::discover(config, &subject.pids())
            .context("cannot read the state of the processes from the driver")?;
        processes.retain(|process| process.restore_tid.is_some());
        let pids = processes.iter().map(|process| process.pid);
        self.cuda = pids.filter(|pid| subject.tree.contains(pid)).collect();
        self.processes = processes;
        Ok(())
    }

    /// The GPUs that processes of the subject share with each other or with others, each with all its
    /// processes; none if that is not known.
    fn shared_gpus(&self, config: &Config) -> Option<Vec<(GpuUuid, Vec<i32>)>> {
        let mut users: BTreeMap<GpuUuid, Vec<i32>> = BTreeMap::new();
        if self.cuda.is_empty() {
            return Some(Vec::new());
        }
        for process in program::discover(config, &procfs::all()).ok()? {
            for uuid in process.gpu_memory.into_keys() {
                users.entry(uuid).or_default().push(process.pid);
            }
        }
        let is_own = |pids: &Vec<i32>| pids.iter().any(|pid| self.cuda.contains(pid));
        // In some virtual machines NVML lists no memory of a process.
        users.values().any(is_own).then_some(())?;
        let is_shared = |pids: &Vec<i32>| pids.len() > 1 && is_own(pids);
        Some(users.into_iter().filter(|(_, pids)| is_shared(pids)).collect())
    }

    fn bytes_of(&self, pid: i32) -> Option<u64> {
        let process = self.processes.iter().find(|process| process.pid == pid)?;
        let memory = &process.gpu_memory;
        (!memory.is_empty()).then(|| memory.values().sum())
    }

    /// GPU memory of all processes. In some virtual machines the driver reports it only for all processes of
    /// a GPU.
    fn gpu_bytes(&self) -> u64 {
        let reported: Vec<u64> = self.cuda.iter().filter_map(|pid| self.bytes_of(*pid)).collect();
        if reported.is_empty() && !self.cuda.is_empty() {
            self.node.gpu_memory_in_use()
        } else {
            reported.iter().sum()
        }
    }
}

/// GPU memory that a checkpoint puts into host memory: none if the job has let go of it.
fn gpu_bytes(subject: &Subject, nvidia: Option<&Nvidia>) -> u64 {
    let releases = subject.spec.as_ref().is_some_and(job_hook::releases_devices);
    nvidia.filter(|_| !releases).map_or(0, Nvidia::gpu_bytes)
}

/// What the owner of the container and CRIU's user assert. `by_firn`: by firn's rules, not by CRIU's alone.
fn asserted(subject: &Subject, by_firn: bool, args: &AuditArgs, config: &Config) -> Assertions {
    let (spec, bundle) = (subject.spec.as_ref(), subject.bundle.as_deref());
    let users_tcp = spec.and_then(|spec| users_tcp(spec, bundle));
    let asserted = if by_firn {
        Assertions::of(spec, config, users_tcp)
    } else {
        Assertions::by_criu(match args.overrides.tcp.as_deref() {
            None => users_tcp,
            Some("keep") => Some(Tcp::Keep),
            // Its checkpoint refuses the other words.
            Some(_) => Some(Tcp::Refuse),
        })
    };
    Assertions {
        external_unix: spec.is_some_and(|spec| users_external_unix(spec, bundle)),
        link_remap: spec.is_some_and(|spec| users_link_remap(spec, bundle)),
        ..asserted
    }
}

/// The parts that the transaction would check. Without NVIDIA GPUs these are only the GPUs of other vendors,
/// unless the job lets go of every device.
fn workload(subject: &Subject, nvidia: Option<&Nvidia>, args: &AuditArgs, config: &Config) -> Workload {
    let image = args.image_dir.clone().unwrap_or_else(std::env::temp_dir);
    let work = subject.bundle.clone().unwrap_or_else(|| image.clone());
    let has_nvidia = |nvidia: &Nvidia| subject.spec.is_some() || !nvidia.cuda.is_empty();
    let other_vendors = OtherVendors {
        nvidia: nvidia.is_some_and(has_nvidia),
        amdgpu_plugin: config.criu.amdgpu_plugin.clone(),
    };
    let spec = subject.spec.as_ref();
    let device_free = spec.is_some_and(job_hook::releases_devices);
    let may_have_others = spec.is_none_or(Spec::has_other_gpus) && !device_free;
    // Others are dumped as by the stock shim.
    let by_firn = nvidia.is_some() || device_free;
    let asserted = asserted(subject, by_firn, args, config);
    Workload {
        init: subject.init,
        pids: subject.pids(),
        cuda: nvidia.map_or_else(Vec::new, |nvidia| {
            nvidia.processes.iter().map(|process| process.pid).collect()
        }),
        other_vendors: may_have_others.then_some(other_vendors),
        processes: by_firn.then_some(asserted),
        by_criu: (!by_firn).then_some(asserted),
        scanned: spec.map_or_else(Vec::new, |spec| users_scanned(spec, subject.bundle.as_deref())),
        seccomp_agent: spec.is_some_and(Spec::has_seccomp_agent),
        inherited: subject
            .bundle
            .as_deref()
            .map(|bundle| bundle.join(names::BUNDLE_INHERITED)),
        refused_before: subject
            .bundle
            .as_deref()
            .map(|bundle| bundle.join(names::BUNDLE_REFUSED)),
        criu_plugin: find_criu_plugin(config.criu.libs_dir.as_deref()).is_some(),
        // By itself CRIU makes links nowhere.
        tmpfs: spec
            .filter(|_| by_firn)
            .and_then(|spec| spec.kept_tmpfs().ok())
            .unwrap_or_default(),
        capacity: by_firn.then(|| Capacity {
            gpu_memory: gpu_bytes(subject, nvidia),
            stored: config
                .images
                .bulk_for(spec.and_then(|spec| spec.annotation(names::ANNOTATION_BULK)))
                == Some(Bulk::Store),
            image,
            work,
        }),
        bundle: subject.bundle.clone().filter(|_| by_firn),
        ..Workload::default()
    }
}

fn report(
    subject: Subject,
    nvidia: Option<Nvidia>,
    args: &AuditArgs,
    mut signals: Signals,
) -> Result<Report> {
    let gpus: Vec<SourceGpu> = nvidia
        .iter()
        .flat_map(|nvidia| nvidia.node.gpus.iter().map(Into::into))
        .collect();
    // A device-free checkpoint has a place on every node.
    let needs_gpus = !gpus.is_empty() && !subject.spec.as_ref().is_some_and(job_hook::releases_devices);
    let plan = match (&args.target, &nvidia) {
        (Some(target), Some(Nvidia { inventory, .. })) if needs_gpus => {
            let target = program::read_inventory(target)?;
            signals.of_plan(&gpus, &inventory.topology, &inventory.driver_version, &target)
        }
        _ => None,
    };
    let gpu_bytes = gpu_bytes(&subject, nvidia.as_ref());
    let image_bytes = image_bytes(&subject.tree, gpu_bytes);
    let bundle = subject.bundle.as_deref();
    let library = bundle.and_then(|bundle| Library::read(&bundle.join(names::CUDA_LIBRARY)).ok());
    let process = |&pid: &i32| Process {
        pid,
        comm: procfs::comm(pid),
        cuda: nvidia.as_ref().is_some_and(|nvidia| nvidia.cuda.contains(&pid)),
        gpu_bytes: nvidia.as_ref().and_then(|nvidia| nvidia.bytes_of(pid)),
        anonymous_bytes: procfs::anonymous(pid),
        interposed: library.as_ref().is_some_and(|library| library.is_in(pid)),
    };
    Ok(Report {
        processes: subject.tree.iter().map(process).collect(),
        subject: subject.name,
        verdict: signals.verdict(),
        gpus: gpus.iter().map(|gpu| gpu.uuid.to_string()).collect(),
        gpu_bytes,
        image_bytes: Some(image_bytes),
        signals: signals.all,
        plan,
    })
}
