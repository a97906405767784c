//! `firn audit`: whether a workload can be checkpointed here, and restored here or on another node.
//!
//! The rules are those of the shim's transaction ([`firn_preflight`]). The audit stops and changes nothing:
//! it reads files of /proc and of the bundle, and queries the driver which processes use CUDA.

mod findings;
mod print;
mod subject;
mod workload;

use anyhow::{Context, Result};
use firn_config::{Config, Keys};
use firn_host::ProblemReport;
use serde::Serialize;

use crate::args::AuditArgs;
use crate::place::Place;
use crate::view::{Subject, View};
use crate::{output, program};
use findings::{Signal, Signals};

/// The result of an audit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    #[default]
    Can,
    Cannot,
    /// Nothing refuses it, and something may prevent it.
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

#[derive(Debug, Default, Serialize)]
struct Report {
    subject: String,
    verdict: Verdict,
    processes: Vec<Process>,
    gpus: Vec<String>,
    gpu_bytes: u64,
    /// Least size of the image; `None` for a damaged image.
    image_bytes: Option<u64>,
    signals: Vec<Signal>,
    /// The GPUs on which it would be restored.
    plan: Option<serde_json::Value>,
}

/// Prints the report and returns its verdict.
pub fn run(args: &AuditArgs) -> Result<Verdict> {
    let config = Config::load(Keys::CHECKPOINT).map_err(ProblemReport::from)?;
    let report = match Subject::of(&args.subject) {
        Subject::Container(_) => workload::audit(args, &config)?,
        Subject::Checkpoint(Place::Ref(name)) if name.parse::<i32>().is_ok() => {
            workload::audit(args, &config)?
        }
        Subject::Checkpoint(place) => match View::open(&place, &args.subject) {
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
fn is_bare(place: &Place, args: &AuditArgs) -> bool {
    args.subject.kind.is_none() && matches!(place, Place::Ref(name) if !name.contains(['/', ':']))
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
        plan = signals.of_plan((gpus, &manifest.topology, driver), &target);
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
