//! Who wrote a spec, as far as its annotations show.
//!
//! A spec that Kubernetes' side wrote holds the devices that were granted to a pod on this node, and nothing
//! in it may be widened: the pod's author must not reach beyond it. Both implementations of the CRI put
//! annotations of their own on every container. A pod's author may set more of them and change values where
//! the runtime permits it, but cannot take any away. So a name that is there decides, and its value does not.
//!
//! | the first that applies | author |
//! |---|---|
//! | a name of either CRI: one that begins with one of [`CRIS`], except those of podman | orchestrator |
//! | another name of Kubernetes, or another `io.container.manager` than `libpod` | unknown |
//! | anything else | client |
//!
//! podman's names are the four of [`PODMANS`], if `io.container.manager` is `libpod`. Whoever is unknown is
//! trusted with as little as an orchestrator: ask [`Author::owns_node`].

use firn_config::names;

use super::Spec;

/// Annotations that podman has taken over from CRI-O. CRI-O itself puts many more on each container.
const PODMANS: [&str; 4] = [
    "io.kubernetes.cri-o.ContainerType",
    "io.kubernetes.cri-o.Created",
    "io.kubernetes.cri-o.SandboxID",
    "io.kubernetes.cri-o.TTY",
];

/// What podman writes as [`names::ANNOTATION_MANAGER`].
const PODMAN: &str = "libpod";

const CRIS: [&str; 2] = ["io.kubernetes.cri.", "io.kubernetes.cri-o."];
const KUBERNETES: &str = "io.kubernetes.";

/// Who wrote a spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Author {
    /// A CRI, for a pod.
    Orchestrator,
    /// Somebody with access to the node's runtime, who may use every device of the node.
    Client,
    /// The annotations show neither.
    Unknown,
}

impl Author {
    /// Whether the author may use every device of the node. Nobody else's spec is widened.
    pub fn owns_node(self) -> bool {
        self == Self::Client
    }
}

impl Spec {
    /// Who wrote it, by the table in the module head.
    pub fn author(&self) -> Author {
        let manager = self
            .annotations()
            .and_then(|all| all.get(names::ANNOTATION_MANAGER));
        let is_podmans = manager.is_some_and(|manager| manager == PODMAN);
        let keys = || self.annotations().into_iter().flat_map(serde_json::Map::keys);
        let is_cri = |key: &&String| CRIS.iter().any(|cri| key.starts_with(cri));
        let is_known = |key: &&String| is_podmans && PODMANS.contains(&&***key);
        if keys().filter(is_cri).any(|key| !is_known(&key)) {
            return Author::Orchestrator;
        }
        let is_strange = |key: &String| key.starts_with(KUBERNETES) && !is_cri(&key);
        if keys().any(is_strange) || manager.is_some_and(|manager| manager != PODMAN) {
            Author::Unknown
        } else {
            Author::Client
        }
    }
}

impl Spec {
    /// The namespace of Kubernetes of a pod's container. Each CRI sets an annotation of its own last, so that
    /// a pod's author cannot change it, but may add that of the other: nobody knows which of two is right.
    pub fn pod_namespace(&self) -> Option<&str> {
        if self.author() != Author::Orchestrator {
            return None;
        }
        let of = |key| self.annotation(key);
        match (
            of(names::ANNOTATION_CRI_NAMESPACE),
            of(names::ANNOTATION_POD_NAMESPACE),
        ) {
            (Some(one), Some(other)) => (one == other).then_some(one),
            (one, other) => one.or(other),
        }
        .filter(|namespace| !namespace.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn author(annotations: Value) -> Author {
        Spec::from(json!({ "annotations": annotations })).author()
    }

    #[test]
    fn both_cris_are_orchestrators_whatever_a_pod_adds() {
        let containerd = json!({"io.kubernetes.cri.container-type": "container"});
        let crio = json!({"io.container.manager": "cri-o", "io.kubernetes.cri-o.ContainerType": "container",
            "io.kubernetes.cri-o.Metadata": "{}", "io.kubernetes.pod.name": "job"});
        for of_cri in [containerd, crio] {
            assert_eq!(author(of_cri.clone()), Author::Orchestrator);
            for (name, value) in [
                ("io.container.manager", json!("libpod")),
                ("io.kubernetes.cri.container-type", json!("")),
                ("io.kubernetes.cri-o.TTY", json!(7)),
                ("io.kubernetes.other", json!("x")),
            ] {
                let mut forged = of_cri.clone();
                forged[name] = value;
                assert_eq!(author(forged.clone()), Author::Orchestrator, "{forged}");
            }
        }
        // Nothing but what podman writes, and not by podman.
        for alone in PODMANS {
            assert_eq!(author(json!({ alone: "x" })), Author::Orchestrator);
            let other = json!({alone: "x", "io.container.manager": "cri-o"});
            assert_eq!(author(other), Author::Orchestrator);
        }
        assert!(!Author::Orchestrator.owns_node());
    }

    #[test]
    fn podman_and_others_on_the_node_are_clients() {
        let podman = json!({"io.container.manager": "libpod", "io.kubernetes.cri-o.Created": "2026",
            "io.kubernetes.cri-o.TTY": "false", "io.podman.annotations.init": "FALSE",
            "io.kubernetes.cri-o.ContainerType": "container", "io.kubernetes.cri-o.SandboxID": "0"});
        let ctr = json!({"nerdctl/name": "job", "io.kubernetesx": "", "cdi.k8s.io/a": "nvidia.com/gpu=0"});
        for client in [podman, ctr, json!({}), Value::Null] {
            assert_eq!(author(client.clone()), Author::Client, "{client}");
        }
        assert!(Author::Client.owns_node());
    }

    #[test]
    fn a_pod_does_not_choose_its_namespace() {
        let namespace = |annotations: Value| {
            let spec = Spec::from(json!({ "annotations": annotations }));
            spec.pod_namespace().map(str::to_owned)
        };
        let containerd = "io.kubernetes.cri.sandbox-namespace";
        let crio = "io.kubernetes.pod.namespace";
        let of_crio = json!({"io.kubernetes.cri-o.Name": "c", crio: "ml"});
        for given in [json!({ containerd: "ml" }), of_crio.clone()] {
            assert_eq!(namespace(given.clone()).as_deref(), Some("ml"));
            let mut forged = given.clone();
            let other = if given.get(crio).is_some() {
                containerd
            } else {
                crio
            };
            forged[other] = json!("web");
            assert_eq!(namespace(forged), None, "{other}");
            let mut same = given;
            same[other] = json!("ml");
            assert_eq!(namespace(same).as_deref(), Some("ml"));
        }
        assert_eq!(namespace(json!({ crio: "ml" })), None, "of neither CRI");
        assert_eq!(namespace(json!({ containerd: "" })), None);
        assert_eq!(namespace(json!({})), None);
    }

    #[test]
    fn whoever_cannot_be_identified_is_unknown() {
        for unknown in [
            json!({"io.kubernetes.container.name": "job"}),
            json!({"io.kubernetes.pod.uid": 7}),
            json!({"io.container.manager": "other"}),
            json!({"io.container.manager": null}),
            json!({"io.container.manager": "libpod", "io.kubernetes.pod.name": "job"}),
        ] {
            assert_eq!(author(unknown.clone()), Author::Unknown, "{unknown}");
        }
        assert!(!Author::Unknown.owns_node());
    }
}
