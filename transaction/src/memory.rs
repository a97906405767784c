//! Copies of memory next to CRIU, made by `firn-hook memory`: threads and buffers are not the shim's.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use firn_host::{Chain, Problem, ProblemReport};
use firn_image::memory::call::Request;
use serde::de::DeserializeOwned;

use crate::cancel::CancellationToken;
use crate::reaper::{OutputError, Reaper};

/// A copy that failed.
#[derive(Debug, thiserror::Error, Problem)]
pub enum CopyError {
    #[error("{}", _0.message)]
    #[problem(_0.remedy())]
    Failed(ProblemReport),
    #[error("firn-hook cannot copy memory: {why}")]
    #[problem(
        "FIRN-MEMORY",
        "see whether the node has memory left; without the store (`firn.dev/bulk=inline`) less is needed"
    )]
    Program { why: String },
    #[error("cannot copy the memory within {} s", limit.as_secs_f32())]
    #[problem(
        "FIRN-MEMORY",
        "see whether the store's file system is slow, or raise criu-dump and criu-restore under \
         [deadlines] in the configuration"
    )]
    Late { limit: Duration },
    #[error("the container was killed")]
    #[problem("FIRN-ENDED", "the checkpoint can be used again")]
    Killed,
}

impl CopyError {
    /// Whether memory is not as firn's copy needs it, or its program has failed: CRIU may still copy it.
    pub(crate) fn is_odd(&self) -> bool {
        match self {
            Self::Failed(report) => ["FIRN-MEMORY", "FIRN-IMAGE-CORRUPT"].contains(&report.code.as_str()),
            Self::Program { .. } => true,
            Self::Late { .. } | Self::Killed => false,
        }
    }
}

/// Who copies, and for how long.
#[derive(Clone)]
pub(crate) struct Copier {
    /// firn-hook.
    pub hook: PathBuf,
    pub reaper: Reaper,
    pub limit: Duration,
}

impl Copier {
    /// Does what is asked for, unless the container is to end meanwhile.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        request: &Request,
        cancel: &CancellationToken,
    ) -> Result<T, CopyError> {
        let program = |why: String| CopyError::Program { why };
        let input = serde_json::to_vec(request).map_err(|error| program(error.to_string()))?;
        let mut command = Command::new(&self.hook);
        command.arg("memory");
        let output = self.reaper.output_with_input(&mut command, &input, self.limit);
        let output = cancel.unless_cancelled(output).await.ok_or(CopyError::Killed)?;
        let output = output.map_err(|error| match error {
            OutputError::TimedOut { .. } => CopyError::Late { limit: self.limit },
            error => program(Chain(&error).to_string()),
        })?;
        let printed = output.printed().map_err(program)?;
        let done: Result<T, ProblemReport> =
            serde_json::from_slice(&printed).map_err(|error| program(error.to_string()))?;
        done.map_err(CopyError::Failed)
    }
}
