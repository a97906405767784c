//! The kind of OCI runtime, which decides how checkpoints are made.

use std::process::{Command, Stdio};
use std::time::Duration;

use firn_host::Problem;
use firn_process::reaper::OutputError;

use super::Runc;

/// Deadline of the query.
const LIMIT: Duration = Duration::from_secs(5);

/// An OCI runtime, identified by its `--version` output: the file name is not reliable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuntimeKind {
    /// runc, a wrapper around it, or a runtime with the same command line.
    Runc,
    /// Checkpoints through libcriu and reads no configuration file of CRIU.
    Crun,
}

impl RuntimeKind {
    /// Parses the output of `--version`.
    fn read(text: &str) -> Self {
        let is_crun = |line: &str| line.split_whitespace().next() == Some("crun");
        if text.lines().any(is_crun) {
            Self::Crun
        } else {
            Self::Runc
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Runc => "runc",
            Self::Crun => "crun",
        }
    }
}

/// The OCI runtime cannot checkpoint or restore such a container.
#[derive(Debug, thiserror::Error, Problem)]
#[error("{} cannot do it", .0.name())]
#[problem(
    "FIRN-RUNTIME",
    "run the container with runc: leave BinaryName out of the runtime's options"
)]
pub struct UnfitRuntime(pub RuntimeKind);

impl Runc {
    /// Refuses every other kind.
    pub(crate) async fn expect_runc(&self) -> Result<(), UnfitRuntime> {
        match self.kind().await {
            RuntimeKind::Runc => Ok(()),
            kind => Err(UnfitRuntime(kind)),
        }
    }

    /// Queries the runtime, until it has answered once. A runtime that does not answer is treated as runc;
    /// its own errors are reported by later calls.
    pub async fn kind(&self) -> RuntimeKind {
        match self.kind.get_or_try_init(|| self.query()).await {
            Ok(kind) => *kind,
            Err(error) => {
                log::warn!("cannot query the version of {}: {error}", self.binary.display());
                RuntimeKind::Runc
            }
        }
    }

    async fn query(&self) -> Result<RuntimeKind, OutputError> {
        let mut command = Command::new(&self.binary);
        command.arg("--version").stdin(Stdio::null());
        let output = self.reaper.output(&mut command, LIMIT).await?;
        Ok(RuntimeKind::read(&String::from_utf8_lossy(&output.stdout)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtimes_are_known_by_their_version() {
        for (text, kind) in [
            ("runc version 1.3.6\nspec: 1.2.1\n", RuntimeKind::Runc),
            (
                "crun version 1.28\ncommit: 54f16ff\n+SYSTEMD +CRIU\n",
                RuntimeKind::Crun,
            ),
            (
                "NVIDIA Container Runtime version 1.17.8\n\nrunc version 1.2.5\n",
                RuntimeKind::Runc,
            ),
            (
                "NVIDIA Container Runtime version 1.17.8\n\ncrun version 1.14\n",
                RuntimeKind::Crun,
            ),
            ("", RuntimeKind::Runc),
        ] {
            assert_eq!(RuntimeKind::read(text), kind, "{text:?}");
        }
    }
}
