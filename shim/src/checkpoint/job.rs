//! The launch job of a new container that asks for one: its file is made before the container, by the driver's own tool.
//!
//! A restored container gets the file of its image instead (`firn_oci::job`).

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use firn_config::{Config, find_program, names};
use firn_gpu::protocol::Reply;
use firn_oci::Spec;
use firn_oci::job::{self, JobError};

use super::CheckpointError;
use crate::logger::Chain;
use crate::reaper::Reaper;

/// How long the tool may take. It starts the driver once.
const LIMIT: Duration = Duration::from_secs(60);

/// The spec of a new container, as a launch job where it asks to be one.
pub(crate) async fn begin(mut spec: Spec, bundle: &Path, reaper: &Reaper) -> Result<Spec, CheckpointError> {
    if !job::is_asked(&spec) {
        return Ok(spec);
    }
    let config = Config::load().map_err(CheckpointError::Config)?;
    let tool = config.create.launch_jobs.as_deref().ok_or(JobError::Off)?;
    job::add(&mut spec, bundle)?;
    let worker = find_program(names::WORKER_PROGRAM, config.worker.path.as_deref())
        .map_err(CheckpointError::Program)?;
    let mut command = Command::new(worker);
    command
        .args(["job", "--tool"])
        .arg(tool)
        .arg("--file")
        .arg(bundle.join(names::BUNDLE_JOB));
    let output = reaper.output(&mut command, LIMIT).await;
    let output = output.map_err(|error| refused(Chain(&error).to_string()))?;
    if !output.success() {
        return Err(match serde_json::from_slice(&output.stdout) {
            Ok(Reply::Failed { message, hint }) => JobError::Refused { message, hint },
            _ => refused(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        }
        .into());
    }
    log::info!(
        "the container is a launch job: {} is {}",
        job::VARIABLE,
        job::FILE
    );
    Ok(spec)
}

fn refused(message: String) -> JobError {
    JobError::Refused {
        message,
        hint: "see that firn-gpu is of the shim's version".to_owned(),
    }
}
