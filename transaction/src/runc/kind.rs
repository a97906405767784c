//! Which OCI runtime a program is, where its checkpoints differ from runc's.

use std::process::{Command, Stdio};
use std::time::Duration;

use super::Runc;
use crate::reaper::OutputError;

/// How long the question may take.
const LIMIT: Duration = Duration::from_secs(5);

/// An OCI runtime, by what it says of itself: a file name tells little.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuntimeKind {
    /// runc, a wrapper around it, or a runtime that has its command line.
    Runc,
    /// Checkpoints through libcriu and knows no configuration file for CRIU.
    Crun,
    /// Restores no container.
    Youki,
}

impl RuntimeKind {
    /// From what `--version` prints.
    fn read(text: &str) -> Self {
        let names = [("crun", Self::Crun), ("youki", Self::Youki)];
        let named = |line: &str| {
            let first = line.split_whitespace().next()?;
            names.into_iter().find(|(name, _)| *name == first)
        };
        text.lines().find_map(named).map_or(Self::Runc, |(_, kind)| kind)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Runc => "runc",
            Self::Crun => "crun",
            Self::Youki => "youki",
        }
    }
}

impl Runc {
    /// Asks the runtime, until it has answered once. One that gives no answer is taken for runc, and its own errors are
    /// told.
    pub async fn kind(&self) -> RuntimeKind {
        match self.kind.get_or_try_init(|| self.query()).await {
            Ok(kind) => *kind,
            Err(error) => {
                log::warn!("cannot ask {} for its version: {error}", self.binary.display());
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
            ("youki version: 0.5.7\ncommit: unknown\n", RuntimeKind::Youki),
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
