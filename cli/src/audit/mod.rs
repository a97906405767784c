//! `firn audit`: whether a workload can be checkpointed here, and restored here or on another node.
//!
//! The rules are those of the shim's transaction ([`firn_preflight`]). The audit stops and changes nothing:
//! it reads files of /proc and of the bundle, asks `criu` for its version and containerd for annotations, and
//! queries the driver which processes use CUDA.

mod annotations;
mod findings;
mod print;
mod subject;
mod workload;

use anyhow::{Context, Result};
use firn_config::{Config, Keys};
use firn_host::ProblemReport;
use firn_remap::plan::GpuMap;
use serde::Serialize;

use crate::args::AuditArgs;
use crate::output::{self, printed};
use crate::place::Location;
use crate::program;
use crate::view::{Subject, View};
use findings::{Signal, Signals};

/// The result of an audit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Verdict {
    /// Nothing speaks against it, as far as can be seen.
    #[default]
    Can,
    /// It would be refused.
    Cannot,
    /// Nothing refuses it, and something may prevent it.
    Suspected,
}

/// A process of the workload.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Process {
    /// Its pid on the node.
    pid: i32,
    /// Its name.
    comm: String,
    /// Whether it uses CUDA.
    cuda: bool,
    /// Bytes of GPU memory that it uses; absent if the driver does not report them.
    gpu_bytes: Option<u64>,
    /// Bytes of anonymous memory that it has.
    anonymous_bytes: u64,
    /// Whether it has firn's library between it and NVIDIA's driver, and uses CUDA through it.
    interposed: bool,
}

/// Whether a workload can be checkpointed, or a checkpoint be restored.
#[derive(Debug, Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Report {
    /// What was looked at, for people.
    subject: String,
    /// The result.
    verdict: Verdict,
    /// The processes of the workload. Empty for a checkpoint.
    processes: Vec<Process>,
    /// UUIDs of its GPUs.
    gpus: Vec<String>,
    /// Bytes of GPU memory that a checkpoint puts into host memory; 0 for a checkpoint.
    gpu_bytes: u64,
    /// Least size of the checkpoint in bytes; absent for a damaged one, and if there is no workload.
    image_bytes: Option<u64>,
    /// What was looked for, and what was found.
    signals: Vec<Signal>,
    /// The GPUs on which it would be restored; absent if there is no target, no GPU, or no place for it.
    plan: Option<TargetPlan>,
}

printed! { Report: "audit" }

/// The GPUs on which a workload would be restored.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct TargetPlan {
    /// A pair for every GPU of the source.
    map: GpuMap,
    /// What a restore with this map does not keep, for people.
    warnings: Vec<String>,
}

/// Prints the report and returns its verdict.
pub fn run(args: &AuditArgs) -> Result<Verdict> {
    let config = Config::load(Keys::CHECKPOINT).map_err(ProblemReport::from)?;
    let report = match Subject::of(&args.subject) {
        Subject::Container(_) => workload::audit(args, &config)?,
        Subject::Checkpoint(Location::Ref(name)) if name.parse::<i32>().is_ok() => {
            workload::audit(args, &config)?
        }
        Subject::Checkpoint(place) => match View::open(&place, &args.subject.containerd) {
            Ok(view) => of_checkpoint(&view, args, &config)?,
            Err(_) if is_bare(&place, args) => workload::audit(args, &config)?,
            Err(error) => return Err(error),
        },
    };
    if args.json {
        output::json(&report)?;
    } else {
        print::print(&report, args.verbose);
    }
    Ok(report.verdict)
}

/// Whether a name is that of a container rather than that of an image: then the error is about a container.
fn is_bare(place: &Location, args: &AuditArgs) -> bool {
    args.subject.kind.is_none() && matches!(place, Location::Ref(name) if !name.contains(['/', ':']))
}

fn of_checkpoint(view: &View, args: &AuditArgs, config: &Config) -> Result<Report> {
    let mut signals = Signals::default();
    let (found, failure) = view.look();
    let is_whole = failure.is_none();
    signals.of_image(failure, found.manifest.is_some());
    let manifest = found.manifest.as_ref().filter(|_| is_whole);
    let gpus = manifest.map_or(&[][..], |manifest| &manifest.gpus);
    let mut plan = None;
    if let Some(manifest) = manifest.filter(|manifest| !manifest.gpus.is_empty()) {
        let target = match &args.target {
            Some(file) => program::read_inventory(file)?,
            None => program::inventory(config).context("cannot read the GPUs of this node")?,
        };
        let driver = manifest.driver.as_ref().map_or("", |driver| &driver.driver);
        plan = signals.of_plan(gpus, &manifest.topology, driver, &target);
    }
    Ok(Report {
        subject: view.what.clone(),
        verdict: signals.verdict(),
        gpus: gpus.iter().map(|gpu| gpu.uuid.to_string()).collect(),
        image_bytes: is_whole.then(|| found.bytes()),
        signals: signals.all,
        plan,
        ..Report::default()
    })
}
