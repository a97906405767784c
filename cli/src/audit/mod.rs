//! `firn audit`: whether a workload can be checkpointed here, and restored here or there, before anything is stopped.
//!
//! The signs and what is refused for them are those of the shim's transaction ([`firn_preflight::process`],
//! [`firn_preflight::environment`]). Nothing is touched:
//! files of /proc and of the bundle are read, and the driver is asked which processes it knows.

mod estimate;
mod findings;
mod subject;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use firn_config::{Config, names};
use firn_gpu::{Gpu, Inventory, SourceGpu};
use firn_host::procfs;
use firn_oci::{Spec, nccl};
use firn_preflight::environment;
use firn_preflight::environment::{Known, MemoryLimit, Needs};
use firn_preflight::process as preflight;
use firn_preflight::process::Owner;
use firn_remap::Grant;
use firn_remap::plan;
use firn_remap::plan::{Demand, Plan, Policy};
use serde::Serialize;
use serde_json::json;

use crate::args::AuditArgs;
use crate::output::{self, line};
use crate::{image, program, text};
use estimate::Estimate;
use findings::{Certainty, Signal, Signals};
use firn_host::ProblemReport;
use subject::Subject;

/// What the audit comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Can,
    Cannot,
    /// Nothing refuses it, and something speaks against it.
    Suspected,
}

#[derive(Debug, Serialize)]
struct Process {
    pid: i32,
    comm: String,
    cuda: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu_bytes: Option<u64>,
    anonymous_bytes: u64,
}

impl Process {
    /// One that uses no CUDA.
    fn of(pid: i32) -> Self {
        Self {
            pid,
            comm: procfs::comm(pid),
            cuda: false,
            gpu_bytes: None,
            anonymous_bytes: procfs::anonymous(pid),
        }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    subject: String,
    verdict: Verdict,
    processes: Vec<Process>,
    gpus: Vec<String>,
    gpu_bytes: u64,
    /// None where it cannot be told.
    image_bytes: Option<u64>,
    estimate: Option<Estimate>,
    signals: Vec<Signal>,
    /// Onto which GPUs it would be restored.
    plan: Option<serde_json::Value>,
}

impl Report {
    /// Of what is no workload.
    fn without_workload(subject: String, signals: Signals) -> Self {
        Self {
            subject,
            verdict: signals.verdict(),
            processes: Vec::new(),
            gpus: Vec::new(),
            gpu_bytes: 0,
            image_bytes: None,
            estimate: None,
            signals: signals.all,
            plan: None,
        }
    }
}

/// The verdict, after it has been printed.
pub fn run(args: &AuditArgs) -> Result<Verdict> {
    let config = Config::load()
        .map_err(ProblemReport::from)
        .map_err(|failure| anyhow::anyhow!("{failure}"))?;
    let report = match image_dir(&args.subject) {
        Some(dir) => of_image(&dir, args, &config)?,
        None => of_workload(args, &config)?,
    };
    if args.json {
        output::json(&report)?;
    } else {
        print(&report);
    }
    Ok(report.verdict)
}

/// The directory, if the subject is one that holds an image.
fn image_dir(subject: &str) -> Option<PathBuf> {
    let dir = Path::new(subject);
    let is_image = [names::MANIFEST, "inventory.img"]
        .iter()
        .any(|name| dir.join(name).is_file());
    is_image.then(|| dir.to_owned())
}

fn of_workload(args: &AuditArgs, config: &Config) -> Result<Report> {
    let subject = match args.subject.parse() {
        Ok(pid) => Subject::of_pid(pid, &args.state)?,
        Err(_) => Subject::of_container(&args.subject, &args.namespace, &args.state)?,
    };
    if let Some(dir) = args.image_dir.as_deref().filter(|dir| !dir.is_dir()) {
        bail!(
            "--image-dir {} is no directory. hint: name the one that the image goes to, or one on the same file system",
            dir.display()
        );
    }
    let mut signals = Signals::default();
    if let Some(failure) = subject.unfit() {
        signals.of_subject(failure);
        return Ok(Report::without_workload(subject.name, signals));
    }
    signals.of_transaction(
        subject
            .under_way()
            .context("cannot read the journal of the container")?,
    );
    let mut everything = subject.tree.clone();
    everything.extend(&subject.outside);
    if subject.spec.as_ref().is_some_and(|spec| !spec.requests_gpu()) {
        return Ok(without_nvidia(subject, &everything, config, signals));
    }
    let inventory = program::inventory(config).context("cannot read the GPUs of this node")?;
    let known =
        program::discover(config, &everything).context("cannot ask the driver about the processes")?;
    let cuda: Vec<i32> = (known.iter())
        .filter(|process| process.restore_tid.is_some() && subject.tree.contains(&process.pid))
        .map(|process| process.pid)
        .collect();

    let owner = Owner {
        shares_nothing: subject.spec.as_ref().is_some_and(preflight::shares_nothing),
    };
    let looked_at = preflight::Subject {
        dumped: &subject.tree,
        cuda: &cuda,
        ranks: subject.spec.as_ref().is_some_and(nccl::is_requested),
    };
    let found = preflight::inspect(Path::new("/proc"), &looked_at)?;
    let refusals = preflight::judge(Path::new("/proc"), &found, owner);

    signals.of_preflight(&found, &refusals, owner);
    signals.of_driver(&inventory);
    signals.of_execs(&subject, &known, config);
    let gpus = granted(&subject, &inventory, config, &mut signals);
    signals.of_gpus(&gpus);
    if subject.spec.as_ref().is_none_or(Spec::has_other_gpus) {
        let nvidia = subject.spec.is_some() || !cuda.is_empty();
        signals.of_vendors(environment::by_vendor(&everything, nvidia), config);
    }
    if let Some(spec) = &subject.spec {
        let known = Known::of(spec).context("cannot use the container's spec")?;
        let mounts = environment::by_mounts(subject.init, &known);
        signals.of_outside(mounts, environment::by_stdio(subject.init, &subject.tree));
    }

    let bytes_of = |pid: i32| known.iter().find(|process| process.pid == pid)?.gpu_bytes;
    let told: Vec<u64> = cuda.iter().filter_map(|pid| bytes_of(*pid)).collect();
    let in_use = || {
        gpus.iter()
            .map(|gpu| gpu.memory_total.saturating_sub(gpu.memory_free))
            .sum()
    };
    let gpu_bytes: u64 = match (cuda.is_empty(), told.is_empty()) {
        (true, _) => 0,
        (false, true) => in_use(),
        (false, false) => told.iter().sum(),
    };
    let processes = (subject.tree.iter())
        .map(|&pid| Process {
            cuda: cuda.contains(&pid),
            gpu_bytes: bytes_of(pid),
            ..Process::of(pid)
        })
        .collect();
    let needs = Needs::of(&subject.tree, gpu_bytes);
    let image_dir = args.image_dir.clone().unwrap_or_else(std::env::temp_dir);
    let work = subject.bundle.as_deref().unwrap_or(&image_dir);
    let limit = MemoryLimit::of(&cuda).context("cannot read the memory limits of the container")?;
    signals.of_room(&environment::by_room(needs, limit, &image_dir, work));

    let sources: Vec<SourceGpu> = gpus.iter().map(Into::into).collect();
    let plan = match (&args.target, sources.is_empty()) {
        (Some(target), false) => {
            let target = program::read_inventory(target)?;
            let source = (&sources[..], &inventory.topology, &inventory.driver_version[..]);
            signals.of_plan(onto(source, &target), &target)
        }
        _ => None,
    };
    let image_bytes = needs.image();
    let largest = told.iter().copied().max().unwrap_or(gpu_bytes);
    Ok(Report {
        subject: subject.name,
        verdict: signals.verdict(),
        processes,
        gpus: sources.iter().map(|gpu| gpu.uuid.to_string()).collect(),
        gpu_bytes,
        image_bytes: Some(image_bytes),
        estimate: Some(Estimate::of(largest, image_bytes)),
        signals: signals.all,
        plan,
    })
}

/// A container that has none of NVIDIA's GPUs: the shim leaves all but those of other vendors to CRIU.
fn without_nvidia(subject: Subject, everything: &[i32], config: &Config, mut signals: Signals) -> Report {
    if subject.spec.as_ref().is_some_and(Spec::has_other_gpus) {
        signals.of_vendors(environment::by_vendor(everything, false), config);
    }
    let image_bytes = Needs::of(&subject.tree, 0).image();
    Report {
        subject: subject.name,
        verdict: signals.verdict(),
        processes: subject.tree.iter().map(|&pid| Process::of(pid)).collect(),
        gpus: Vec::new(),
        gpu_bytes: 0,
        image_bytes: Some(image_bytes),
        estimate: Some(Estimate::of(0, image_bytes)),
        signals: signals.all,
        plan: None,
    }
}

/// The GPUs that the driver wants mapped: those that the spec grants, or all where there is none.
fn granted(subject: &Subject, inventory: &Inventory, config: &Config, signals: &mut Signals) -> Vec<Gpu> {
    let Some(spec) = &subject.spec else {
        return inventory.gpus.clone();
    };
    signals.of_hook(spec, config);
    match Grant::of_spec(spec, inventory) {
        Ok(grant) => {
            signals.of_grant(Ok(()));
            grant.gpus
        }
        Err(error) => {
            signals.of_grant(Err(error));
            Vec::new()
        }
    }
}

/// Whether the GPUs find a place on a node, whichever of its GPUs they are granted.
fn onto(
    (source, topology, driver): (&[SourceGpu], &firn_gpu::Topology, &str),
    target: &Inventory,
) -> Result<Plan, plan::PlanError> {
    let whole: Vec<Gpu> = target.gpus.iter().filter(|gpu| !gpu.mig).cloned().collect();
    plan::plan(&Demand {
        source,
        source_topology: topology,
        source_driver: driver,
        grant: &whole,
        target_topology: &target.topology,
        target_driver: &target.driver_version,
        policy: &Policy::Subset,
    })
}

fn of_image(dir: &Path, args: &AuditArgs, config: &Config) -> Result<Report> {
    let mut signals = Signals::default();
    let (found, failure) = image::look(dir);
    let is_whole = failure.is_none();
    signals.of_image(failure, found.manifest.is_some());
    let manifest = found.manifest.as_ref().filter(|_| is_whole);
    let (gpus, processes) = manifest.map_or((&[][..], 0), |manifest| {
        (&manifest.gpus[..], manifest.processes.len())
    });
    let mut plan = None;
    if let Some(manifest) = manifest.filter(|manifest| !manifest.gpus.is_empty()) {
        let target = match &args.target {
            Some(file) => program::read_inventory(file)?,
            None => program::inventory(config).context("cannot read the GPUs of this node")?,
        };
        let driver = manifest.driver.as_ref().map_or("", |driver| &driver.driver);
        plan = signals.of_plan(
            onto((&manifest.gpus, &manifest.topology, driver), &target),
            &target,
        );
    }
    let image_bytes = found.bytes();
    let largest = image_bytes / u64::try_from(processes.max(1)).unwrap_or(1);
    Ok(Report {
        subject: format!("image {}", dir.display()),
        verdict: signals.verdict(),
        processes: Vec::new(),
        gpus: gpus.iter().map(|gpu| gpu.uuid.to_string()).collect(),
        gpu_bytes: 0,
        image_bytes: Some(image_bytes).filter(|_| is_whole),
        estimate: is_whole.then(|| Estimate::of_restore(largest, image_bytes)),
        signals: signals.all,
        plan,
    })
}

/// The verdict, what speaks against it, what it takes, and in one line what was looked for in vain.
fn print(report: &Report) {
    line!(
        "verdict    {}",
        match report.verdict {
            Verdict::Can => "can be checkpointed and restored, as far as can be seen",
            Verdict::Cannot => "cannot",
            Verdict::Suspected => "nothing refuses it, and something speaks against it",
        }
    );
    line!("subject    {}", report.subject);
    for signal in report.signals.iter().filter(|signal| !signal.is_quiet()) {
        print_signal(signal);
    }
    for process in report.processes.iter().filter(|process| process.cuda) {
        let memory = process.gpu_bytes.map_or_else(
            || "GPU memory not told".to_owned(),
            |b| text::bytes(b) + " of GPU memory",
        );
        line!("process    {} ({}), {memory}", process.pid, process.comm);
    }
    for gpu in &report.gpus {
        line!("gpu        {gpu}");
    }
    if report.gpu_bytes > 0 {
        line!(
            "memory     {} of the host for GPU memory",
            text::bytes(report.gpu_bytes)
        );
    }
    if let Some(bytes) = report.image_bytes {
        line!("image      {} or more", text::bytes(bytes));
    }
    if let Some(Estimate {
        checkpoint_s,
        restore_s,
        basis,
    }) = report.estimate
    {
        let checkpoint = checkpoint_s.map_or_else(String::new, |s| format!("checkpoint about {s} s, "));
        line!("time       {checkpoint}restore about {restore_s} s: {basis}");
    }
    if let Some(plan) = &report.plan {
        for pair in plan["map"].as_array().into_iter().flatten() {
            line!("map        {} -> {}", pair["old"], pair["new"]);
        }
    }
    let quiet = report.signals.iter().filter(|signal| signal.is_quiet());
    let quiet: Vec<&str> = quiet.map(|signal| signal.signal).collect();
    if !quiet.is_empty() {
        line!("none of    {}", quiet.join(", "));
    }
}

fn print_signal(signal: &Signal) {
    let Signal {
        signal,
        certainty,
        refused,
        source,
        failure,
        detail,
    } = signal;
    let word = match (refused, certainty) {
        (true, _) => "REFUSED",
        (_, Certainty::None) => "none",
        (_, Certainty::Suspected) => "suspected",
        (_, Certainty::Certain) => "there",
    };
    let detail = match (failure, detail.is_empty()) {
        (Some(failure), true) => format!(": {failure}"),
        (Some(failure), false) => format!(": {failure}; {detail}"),
        (None, false) => format!(": {detail}"),
        (None, true) => String::new(),
    };
    line!("{word:10} {signal} (by {source}){detail}");
}

/// A plan as JSON.
fn shown(plan: &Plan) -> serde_json::Value {
    let warnings: Vec<String> = plan.warnings.iter().map(ToString::to_string).collect();
    json!({"map": plan.map, "warnings": warnings})
}
