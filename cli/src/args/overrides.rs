//! Settings of one checkpoint, instead of the container's annotations.

use std::collections::HashMap;

use clap::Args;
use firn_config::names;
use firn_host::ProblemReport;
use firn_oci::Spec;
use firn_transaction::checkpoint::Overrides;

/// Where `--help` lists them.
const HEADING: &str = "For this checkpoint, instead of the container's annotations";

const TCP: [&str; 4] = ["refuse", "close", "keep", "auto"];

#[derive(Clone, Debug, Default, Args)]
pub struct OverrideArgs {
    /// TCP connections, and Unix sockets that lead outside: refuse the checkpoint for them, close them in the
    /// copy, keep them, or auto: keep those inside of the container (firn.dev/tcp).
    #[arg(long, value_name = "WORD", value_parser = TCP, help_heading = HEADING)]
    pub tcp: Option<String>,
    /// Processes of `exec`: refuse the checkpoint for them, or omit them in the copy (firn.dev/exec).
    #[arg(long, value_name = "WORD", value_parser = ["refuse", "omit"], help_heading = HEADING)]
    pub exec: Option<String>,
    /// The CUDA processes share no GPU memory with each other (firn.dev/ipc). If they do, the job is lost.
    #[arg(long, value_name = "none", value_parser = ["none"], help_heading = HEADING)]
    pub ipc: Option<String>,
    /// No GPU of a process accesses the memory of another one (firn.dev/peer-access). If it does, the job is
    /// lost.
    #[arg(long, value_name = "none", value_parser = ["none"], help_heading = HEADING)]
    pub peer_access: Option<String>,
}

impl OverrideArgs {
    /// Those that are given, by annotation.
    pub fn annotations(&self) -> HashMap<String, String> {
        let given = [
            (names::ANNOTATION_TCP, &self.tcp),
            (names::ANNOTATION_EXEC, &self.exec),
            (names::ANNOTATION_IPC, &self.ipc),
            (names::ANNOTATION_PEER_ACCESS, &self.peer_access),
        ];
        let given = given
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.clone()?)));
        given.map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// The spec as it counts for the checkpoint.
    pub fn apply(&self, spec: &mut Spec) -> Result<(), ProblemReport> {
        Overrides::of(&self.annotations())?.apply(spec)?;
        Ok(())
    }
}
