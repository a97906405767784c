//! Why firn-runc fails.

use std::io;
use std::path::PathBuf;

use firn_host::{Problem, ProblemLine};
use firn_transaction::checkpoint::CheckpointError;
use firn_transaction::create::PrepareError;
use firn_transaction::restore::RestoreError;

/// A call that failed, as the client gets it.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("{}", ProblemLine(.0))]
    Here(Trouble),
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Restore(#[from] RestoreError),
}

// Not `#[from]`: the line has the causes already.
impl From<Trouble> for Failure {
    fn from(trouble: Trouble) -> Self {
        Self::Here(trouble)
    }
}

/// What is firn-runc's own trouble.
#[derive(Debug, thiserror::Error, Problem)]
pub enum Trouble {
    #[error("there is no runc in {}", firn_config::search_path().display())]
    #[problem(
        "FIRN-RUNC-MISSING",
        "install runc, or set path under [runc] in the configuration"
    )]
    NoRunc,
    #[error("cannot run {program}")]
    #[problem("FIRN-RUNC-MISSING", "see that it is a program of this machine")]
    Exec { program: PathBuf, source: io::Error },
    #[error(transparent)]
    Config(#[from] firn_config::ConfigError),
    #[error("container {id} uses GPUs, and firn does not know the option --{option} for it")]
    #[problem("FIRN-RUNC-OPTION", "leave the option out")]
    Option { id: String, option: &'static str },
    #[error("container {id} uses GPUs, and is restored only with the option --{option}")]
    #[problem("FIRN-RUNC-OPTION", "add the option")]
    Missing { id: String, option: &'static str },
    #[error("container {id} names a checkpoint in an annotation, which is for containerd's shim alone")]
    #[problem("FIRN-RUNC-OPTION", "restore it by the client's own command")]
    Annotation { id: String },
    #[error("another checkpoint or restore of container {id} is under way")]
    #[problem("FIRN-BUSY", "try again when that is over")]
    Busy { id: String },
    #[error("the process that did this for container {id} died, and what it had done is rolled back")]
    #[problem("FIRN-RUNC-KILLED", "try again")]
    Killed { id: String },
    #[error("the process that did this for container {id} died, and what it had done is not rolled back")]
    #[problem(
        "FIRN-RUNC-KILLED",
        "the next call for the container tries to roll it back; the output names why"
    )]
    Left { id: String },
    #[error(
        "cannot use the notes on open transactions in {}",
        firn_config::names::RUNC_TRANSACTIONS
    )]
    #[problem("FIRN-RUNC-NOTES", "see that /run is writable and not full")]
    Notes(#[from] io::Error),
    #[error("cannot read the state of container {id}: {output}")]
    #[problem("FIRN-RUNC-STATE", "see what `runc state` reports")]
    State { id: String, output: String },
    #[error("cannot start")]
    #[problem("FIRN-INTERNAL", "report it with the output")]
    Start(#[source] io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Code, subject and remedy of a line.
    fn check(trouble: Trouble, code: &str, subject: &str) {
        let line = Failure::from(trouble).to_string();
        let (start, hint) = line.split_once(". hint: ").unwrap();
        assert!(
            start.starts_with(&format!("{code}: ")) && start.contains(subject) && !hint.is_empty(),
            "{line}"
        );
    }

    #[test]
    fn what_a_client_gets_has_code_subject_and_remedy() {
        let id = || "job".to_owned();
        let broken = || io::Error::other("broken");
        let (program, source) = (PathBuf::from("/sbin/runc"), broken());
        let output = "no JSON".to_owned();
        check(Trouble::NoRunc, "FIRN-RUNC-MISSING", "no runc in /");
        check(
            Trouble::Exec { program, source },
            "FIRN-RUNC-MISSING",
            "/sbin/runc: broken",
        );
        let option = "detach";
        check(
            Trouble::Missing { id: id(), option },
            "FIRN-RUNC-OPTION",
            "--detach",
        );
        check(Trouble::Annotation { id: id() }, "FIRN-RUNC-OPTION", "job");
        check(Trouble::Busy { id: id() }, "FIRN-BUSY", "container job");
        check(Trouble::Killed { id: id() }, "FIRN-RUNC-KILLED", "is rolled back");
        check(
            Trouble::Left { id: id() },
            "FIRN-RUNC-KILLED",
            "is not rolled back",
        );
        check(
            Trouble::Notes(broken()),
            "FIRN-RUNC-NOTES",
            "/run/firn/runc: broken",
        );
        check(
            Trouble::State { id: id(), output },
            "FIRN-RUNC-STATE",
            "job: no JSON",
        );
    }
}
