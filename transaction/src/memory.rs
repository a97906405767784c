//! Copies of memory next to CRIU, made by `firn-hook memory`: threads and buffers are not the shim's.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use firn_config::names;
use firn_host::{Chain, Problem, ProblemReport};
use firn_image::memory::call::{Order, Request};
use firn_image::memory::progress::{self, Progress, ProgressFile};
use firn_process::blocking::{remove, tidy};
use firn_process::cancel::{CancellationToken, Interrupted};
use firn_process::reaper::{OutputError, Reaper};
use serde::de::DeserializeOwned;
use tokio::time::sleep;

use crate::journal::Journal;
use crate::phase::Phase;
use crate::steps::Step;

/// How often it is logged how far a copy is.
const STEP: Duration = Duration::from_secs(2);

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
}

impl CopyError {
    /// Whether memory is not as firn's copy needs it, or its program has failed: CRIU may still copy it.
    pub(crate) fn is_odd(&self) -> bool {
        match self {
            Self::Failed(report) => ["FIRN-MEMORY", "FIRN-IMAGE-CORRUPT"].contains(&report.code.as_str()),
            Self::Program { .. } => true,
            Self::Late { .. } => false,
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
    pub container: String,
    pub bundle: PathBuf,
    /// Of the transaction, if it is one that copies.
    pub journal: Option<Journal>,
}

impl Copier {
    /// Does what is asked for, unless the container is to end meanwhile.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        request: Request,
        cancel: &CancellationToken,
    ) -> Result<T, Interrupted<CopyError>> {
        let printed = self.printed(request, cancel).await?;
        let done: Result<T, ProblemReport> =
            serde_json::from_slice(&printed).map_err(|error| program(error.to_string()))?;
        Ok(done.map_err(CopyError::Failed)?)
    }

    /// What firn-hook prints. Apart, because it is compiled once and not for each type of result.
    async fn printed(
        &self,
        request: Request,
        cancel: &CancellationToken,
    ) -> Result<Vec<u8>, Interrupted<CopyError>> {
        let shown = phase(&request).map(|phase| ProgressFile {
            file: self.bundle.join(names::BUNDLE_PROGRESS),
            phase: phase.name().to_owned(),
        });
        let file = shown.as_ref().map(|shown| shown.file.clone());
        let order = Order { request, shown };
        let input = serde_json::to_vec(&order).map_err(|error| program(error.to_string()))?;
        let mut command = Command::new(&self.hook);
        command.arg("memory");
        let output = self.reaper.output_with_input(&mut command, &input, self.limit);
        let output = cancel.unless_cancelled(self.logged(file.clone(), output)).await;
        if let Some(file) = file {
            remove("remove the progress of a copy", file, progress::remove).await;
        }
        let output = output.ok_or(Interrupted::Cancelled)?;
        let output = output.map_err(|error| match error {
            OutputError::TimedOut { .. } => CopyError::Late { limit: self.limit },
            error => program(Chain(&error).to_string()),
        })?;
        Ok(output.printed().map_err(program)?)
    }

    /// Waits for a copy, and logs how far it is if it takes long.
    async fn logged<T>(&self, file: Option<PathBuf>, copy: impl Future<Output = T>) -> T {
        let log = async {
            loop {
                sleep(STEP).await;
                let file = file.clone();
                let read = move || file.as_deref().and_then(Progress::read);
                if let Some(progress) = tidy("read the progress of a copy", read).await {
                    self.log(&progress);
                    if let Some(journal) = &self.journal {
                        journal.step(Step::Copied(&progress));
                    }
                }
            }
        };
        tokio::select! {
            biased;
            done = copy => done,
            never = log => never,
        }
    }

    fn log(&self, progress: &Progress) {
        let (container, Progress { phase, done, all, .. }) = (&self.container, progress);
        let seconds = progress.elapsed().as_secs();
        let left = progress
            .left()
            .map_or_else(String::new, |left| format!(" left_s={}", left.as_secs()));
        let rate = progress.rate().unwrap_or(0);
        log::info!(
            "container={container} phase={phase} s={seconds} bytes={done} of={all} per_s={rate}{left}"
        );
    }
}

fn program(why: String) -> CopyError {
    CopyError::Program { why }
}

/// The phase whose progress is shown.
fn phase(request: &Request) -> Option<Phase> {
    match request {
        Request::Save(_) | Request::Rest(_) => Some(Phase::CopyMemory),
        Request::Fill(_) => Some(Phase::FillMemory),
        Request::Ready(_) | Request::Look(_) => None,
    }
}
