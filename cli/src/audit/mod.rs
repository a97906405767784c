//! `firn audit`: whether a workload can be checkpointed here, and restored here or on another node.
//!
//! The rules are those of the shim's transaction ([`firn_preflight`]). The audit stops and changes nothing:
//! it reads files of /proc and of the bundle, and queries the driver which processes use CUDA.

mod findings;
mod print;
mod subject;
mod workload;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use firn_config::{Config, Keys, names};
use firn_host::ProblemReport;
use serde::Serialize;

use crate::args::AuditArgs;
use crate::{image, output, program};
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
    let report = match image_dir(&args.subject) {
        Some(dir) => of_image(&dir, args, &config)?,
        None => workload::audit(args, &config)?,
    };
    if args.json {
        output::json(&report)?;
    } else {
        print::print(&report);
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

fn of_image(dir: &Path, args: &AuditArgs, config: &Config) -> Result<Report> {
    let mut signals = Signals::default();
    let (found, failure) = image::look(dir);
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
        subject: format!("image {}", dir.display()),
        verdict: signals.verdict(),
        gpus: gpus.iter().map(|gpu| gpu.uuid.to_string()).collect(),
        image_bytes: is_whole.then(|| found.bytes()),
        signals: signals.all,
        plan,
        ..Report::default()
    })
}
