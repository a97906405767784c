//! Why jobs are not moved.

use std::io;

use firn_host::Problem;

/// Why jobs are not moved.
#[derive(Debug, thiserror::Error, Problem)]
pub enum DrainError {
    #[error("cannot run kubectl")]
    #[problem("FIRN-DRAIN-KUBECTL", "install kubectl; firn drain calls it")]
    NoKubectl(#[source] io::Error),
    #[error("`kubectl {call}`: {message}")]
    #[problem(
        "FIRN-DRAIN-KUBECTL",
        "the job runs on where it was; --context names the cluster"
    )]
    Kubectl { call: String, message: String },
    #[error("node {node} has no agent of firn")]
    #[problem(
        "FIRN-DRAIN-NODE",
        "`kubectl apply -f agents.yaml`, which firn has in config/kubernetes"
    )]
    NoAgent { node: String },
    #[error("no other node has an agent of firn and can take pods")]
    #[problem("FIRN-DRAIN-NODE", "uncordon one, and see `kubectl get pods -n firn-agents`")]
    NoTarget,
    #[error("node {node} has a checkpoint {path} already")]
    #[problem("FIRN-DRAIN-NODE", "remove it there if nothing is restored from it any more")]
    Taken { node: String, path: String },
    #[error("the kubelet answers {answer:?}")]
    #[problem("FIRN-DRAIN-KUBECTL", "the job runs on where it was")]
    Answer { answer: String },
    #[error("the memory of the checkpoint of container {container} lies in store {store} of its node")]
    #[problem(
        "FIRN-DRAIN-STORE",
        "the job runs on where it was: set `[images] bulk = \"inline\"` in the configuration of its node"
    )]
    Store { container: String, store: String },
    #[error("the checkpoint of container {container} is not whole on node {node}: {why}")]
    #[problem(
        "FIRN-DRAIN-COPY",
        "the job runs on where it was; see the room and the log of the file system there"
    )]
    Copy {
        container: String,
        node: String,
        why: String,
    },
    #[error(
        "container {container} of pod {pod} has started cold on node {node}; checkpoint {path} is kept there"
    )]
    #[problem(
        "FIRN-DRAIN-COLD",
        "containerd's log there has the reason; once that is repaired, delete the pod: the next is restored"
    )]
    Cold {
        pod: String,
        container: String,
        node: String,
        path: String,
    },
    #[error(
        "container {container} of pod {pod} runs on node {node}, which got no checkpoint; {path} is kept on \
         {kept}"
    )]
    #[problem(
        "FIRN-DRAIN-COLD",
        "cordon other nodes or select those with an agent, and delete the pod: the next is restored"
    )]
    Elsewhere {
        pod: String,
        container: String,
        node: String,
        path: String,
        kept: String,
    },
    #[error("no pod continues in the place of {pod} after {seconds} s{seen}; its checkpoints are kept")]
    #[problem("FIRN-DRAIN-LATE", "`kubectl describe pod` has the reason; see --timeout")]
    Late { pod: String, seconds: u64, seen: String },
    #[error("pod {pod} {state}: {cause}. Kept checkpoints: {kept}")]
    #[problem(
        "FIRN-DRAIN-UNKNOWN",
        "see `kubectl get pod`: if it runs on, remove them; else the pod in its place is restored from them"
    )]
    Kept {
        pod: String,
        state: &'static str,
        kept: String,
        cause: String,
    },
}

/// What kubectl prints before the reason of a refusal by the API server.
const REFUSED: &str = "Error from server (";
/// The reasons of the API server's answers 400 to 499, of requests that were not carried out.
const REASONS: [&str; 11] = [
    "AlreadyExists",
    "BadRequest",
    "Conflict",
    "Forbidden",
    "Gone",
    "Invalid",
    "MethodNotAllowed",
    "NotFound",
    "RequestEntityTooLarge",
    "TooManyRequests",
    "Unauthorized",
];

impl DrainError {
    /// Whether what was asked for was certainly not done.
    pub fn is_refusal(&self) -> bool {
        let reason = |line: &str| {
            let (reason, _) = line.strip_prefix(REFUSED)?.split_once(')')?;
            Some(REASONS.contains(&reason))
        };
        match self {
            Self::NoKubectl(_) => true,
            Self::Kubectl { message, .. } => message.lines().find_map(reason).unwrap_or(false),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use firn_host::ProblemLine;

    use super::*;

    #[test]
    fn only_an_answer_of_the_api_server_is_a_refusal() {
        let is_refusal = |message: &str| {
            let (call, message) = ("create".to_owned(), message.to_owned());
            DrainError::Kubectl { call, message }.is_refusal()
        };
        assert!(is_refusal(
            "Warning: old\nError from server (TooManyRequests): Cannot evict pod as it would violate the \
             pod's disruption budget."
        ));
        assert!(is_refusal(
            "Error from server (NotFound): pods \"train\" not found"
        ));
        for lost in [
            "",
            "Error from server (Timeout): the server was unable to return a response in the time allotted",
            "Error from server (InternalError): an error on the server has prevented the request",
            "Error from server (ServiceUnavailable): the server is currently unable to handle the request",
            "Error from server: etcdserver: leader changed",
            "Unable to connect to the server: unexpected EOF",
            "The connection to the server 10.0.0.1:6443 was refused",
            "a hook reports: Error from server (NotFound): x",
        ] {
            assert!(!is_refusal(lost), "{lost}");
        }
    }

    #[test]
    fn what_a_checkpoint_lacks_is_shown_with_what_becomes_of_the_job() {
        let (container, node) = ("train".to_owned(), "south".to_owned());
        let why = "pages-1.img has not its 7 bytes".to_owned();
        let copy = DrainError::Copy {
            container: container.clone(),
            node,
            why,
        };
        let store = DrainError::Store {
            container,
            store: "abc".to_owned(),
        };
        for (error, code) in [(copy, "FIRN-DRAIN-COPY: "), (store, "FIRN-DRAIN-STORE: ")] {
            let shown = ProblemLine(&error).to_string();
            assert!(
                shown.starts_with(code) && shown.contains("the job runs on"),
                "{shown}"
            );
        }
    }
}
