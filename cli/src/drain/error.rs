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
    #[error("no pod goes on in the place of {pod} after {seconds} s{seen}; its checkpoints are kept")]
    #[problem("FIRN-DRAIN-LATE", "`kubectl describe pod` has the reason; see --timeout")]
    Late { pod: String, seconds: u64, seen: String },
}

#[cfg(test)]
mod tests {
    use firn_host::ProblemLine;

    use super::*;

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
