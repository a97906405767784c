//! Why a container is not restored.

use std::io;

use firn_config::ConfigError;
use firn_host::{Problem, ProblemLine, ProblemReport};
use firn_image::form::FormError;
use firn_image::manifest::{ImageError as DirError, ManifestError};
use firn_remap::AssignmentError;

use crate::containerd::CallError;
use crate::oci_image::ImageError;
use crate::place::Ambiguous;

#[derive(Debug, thiserror::Error, Problem)]
pub enum RestoreError {
    #[error("containerd knows no container {id} in namespace {namespace}")]
    #[problem(
        "FIRN-NO-CONTAINER",
        "see `ctr containers list` and --namespace; make the container again with `ctr containers create`, \
         with the same image and options, and restore into that"
    )]
    NoContainer { id: String, namespace: String },
    #[error("several containers are called {word}")]
    #[problem(
        "FIRN-SEVERAL-CONTAINERS",
        "give the whole id: `ctr containers list` shows them"
    )]
    Several { word: String },
    #[error("the root file system of container {id} does not begin with {base}, as that of the checkpoint")]
    #[problem(
        "FIRN-RESTORE-CLIENT",
        "make it from that image, with the options of the source"
    )]
    OtherBase { id: String, base: String },
    #[error("nerdctl has removed the files of container {id}: {dir}")]
    #[problem(
        "FIRN-RESTORE-CLIENT",
        "make a container with the options of the source, `nerdctl create --name NAME ... IMAGE`, and \
         restore into it: `firn restore CHECKPOINT --into NAME`"
    )]
    Nerdctl { id: String, dir: String },
    #[error("another command of firn works on container {id}")]
    #[problem("FIRN-BUSY", "try again when it has ended; `firn ps` shows how far it is")]
    Busy { id: String },
    #[error("somebody else has changed container {id} meanwhile")]
    #[problem("FIRN-BUSY", "try again: `ctr containers info ID` shows what it is now")]
    Changed { id: String },
    #[error("cannot lock the container")]
    #[problem("FIRN-FILE", "run it as root; `/run` has to be writable")]
    Lock(#[source] io::Error),
    #[error("container {id} has a task that has not ended")]
    #[problem(
        "FIRN-TASK-EXISTS",
        "end it: `ctr tasks delete --force ID`; the image is not touched"
    )]
    HasTask { id: String },
    #[error("{what} is there already")]
    #[problem(
        "FIRN-EXISTS",
        "add --name for another id; or --into ID, if it is a container that has ended; or remove it: \
         `ctr tasks delete --force ID`, `ctr containers delete ID`, `ctr snapshots rm ID`"
    )]
    Exists { what: String },
    #[error("the image directory {dir} does not name its container")]
    #[problem(
        "FIRN-RESTORE-NAME",
        "add --into ID, the container to restore into; or, for a dry run, --spec FILE"
    )]
    NoName { dir: String },
    #[error("container {id} was not restored, and its task may be left: {message}")]
    #[problem(
        "FIRN-RESTORE-LEFT",
        "see `ctr tasks list`; `ctr tasks delete --force ID` ends it"
    )]
    Left { id: String, message: String },
    #[error("{id:?} cannot be the id of a container")]
    #[problem("FIRN-RESTORE-NAME", "add --name ID")]
    NoId { id: String },
    #[error("container {id} is one of Kubernetes', whose tasks the kubelet alone makes")]
    #[problem(
        "FIRN-RESTORE-CLIENT",
        "let the kubelet restore it: a pod names its checkpoint in the annotation firn.dev/restore-from"
    )]
    Kubernetes { id: String },
    #[error(
        "the runtime of container {id} has options of the type {type_url}, to which no image can be added"
    )]
    #[problem(
        "FIRN-RESTORE-CLIENT",
        "make the container with options of runc's shim, or with none"
    )]
    Options { id: String, type_url: String },
    #[error(
        "the shim of container {id} ({runtime}) does not restore: it would have started the container afresh"
    )]
    #[problem(
        "FIRN-RESTORE-CLIENT",
        "run it with io.containerd.firn.v2, and install the shim of this version"
    )]
    Afresh { id: String, runtime: String },
    #[error("the checkpoint has no GPU state for which GPUs could be chosen")]
    #[problem("FIRN-RESTORE-CLIENT", "leave --gpus and --gpu-map out")]
    NoGpuState,
    #[error("--gpus names {named}, and the checkpoint has {had}")]
    #[problem(
        "FIRN-GPU-COUNT",
        "name as many GPUs as the checkpoint has: `--dry-run` shows them"
    )]
    GpuCount { named: usize, had: usize },
    #[error("the restore of container {id} was interrupted")]
    #[problem("FIRN-INTERRUPTED", "nothing of it is left; the checkpoint is as it was")]
    Interrupted { id: String },
    #[error("cannot handle signals")]
    #[problem("FIRN-FILE", "see the cause")]
    Signals(#[from] io::Error),
    #[error("{0}")]
    #[problem("FIRN-RESTORE-NODE", "see the message; `firn doctor` checks this node")]
    Node(String),
    #[error(transparent)]
    Location(#[from] Ambiguous),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error(transparent)]
    Gpus(#[from] AssignmentError),
    #[error("{}", .0.message)]
    #[problem(_0.remedy())]
    Plan(ProblemReport),
    #[error(transparent)]
    Directory(#[from] DirError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    #[problem("FIRN-CONTAINERD", "see containerd's log; --address names its socket")]
    Call(#[from] CallError),
}

impl RestoreError {
    /// Whether the restore is refused for it. Otherwise it was not found out whether it would be.
    pub fn is_refusal(&self) -> bool {
        !matches!(
            self,
            Self::Lock(_)
                | Self::Busy { .. }
                | Self::Interrupted { .. }
                | Self::Signals(_)
                | Self::Node(_)
                | Self::Location(_)
                | Self::Config(_)
                | Self::Image(
                    ImageError::NoImage { .. }
                        | ImageError::File { .. }
                        | ImageError::Form(FormError::Look { .. })
                        | ImageError::Call(_)
                )
                | Self::Call(_)
        )
    }

    /// Whether the restore is refused and nothing is touched, by firn or by the shim. `has_begun`: something
    /// was made.
    pub fn is_refused(&self, has_begun: bool) -> bool {
        match self {
            Self::Call(call) | Self::Image(ImageError::Call(call)) => call.is_refusal(),
            Self::Lock(_)
            | Self::Interrupted { .. }
            | Self::Signals(_)
            | Self::Node(_)
            | Self::Left { .. }
            | Self::Afresh { .. }
            | Self::Image(ImageError::File { .. } | ImageError::Form(FormError::Look { .. })) => false,
            _ => !has_begun,
        }
    }

    /// With its code and hint, unless the shim has given both.
    pub fn shown(&self) -> String {
        let call = match self {
            Self::Call(call) | Self::Image(ImageError::Call(call)) => Some(call),
            _ => None,
        };
        match call {
            Some(call @ CallError::Call { .. }) if call.to_string().contains("FIRN-") => call.to_string(),
            _ => ProblemLine(self).to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_refused_that_may_have_left_something() {
        let id = || "job".to_owned();
        let call = |status: tonic::Status| {
            let status = Box::new(status);
            let call = "Tasks/Create";
            RestoreError::from(CallError::Call { call, status })
        };
        let code = "FIRN-GPU-COUNT: too few. hint: grant more";
        for (error, before, after) in [
            (RestoreError::NoGpuState, true, false),
            (RestoreError::HasTask { id: id() }, true, false),
            (RestoreError::Interrupted { id: id() }, false, false),
            (
                RestoreError::Left {
                    id: id(),
                    message: String::new(),
                },
                false,
                false,
            ),
            (call(tonic::Status::failed_precondition(code)), true, true),
            (call(tonic::Status::aborted(code)), false, false),
            (call(tonic::Status::failed_precondition("no task")), false, false),
            (call(tonic::Status::unavailable("closed")), false, false),
        ] {
            assert_eq!(
                (error.is_refused(false), error.is_refused(true)),
                (before, after),
                "{error}"
            );
        }
    }

    #[test]
    fn refusals_of_the_shim_keep_their_code_and_hint() {
        let refused = |message: &str| {
            let status = Box::new(tonic::Status::unknown(message));
            let call = "Tasks/Create";
            RestoreError::from(CallError::Call { call, status }).shown()
        };
        let message = refused("FIRN-GPU-COUNT: too few. hint: grant more");
        assert!(
            message.ends_with("FIRN-GPU-COUNT: too few. hint: grant more")
                && !message.contains("FIRN-CONTAINERD")
        );
        let message = refused("snapshot does not exist");
        assert!(
            message.starts_with("FIRN-CONTAINERD: ") && message.contains("hint: "),
            "{message}"
        );
    }
}
