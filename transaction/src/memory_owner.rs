//! Whose memory a checkpoint puts into the store, and whose a restore may have from there.
//!
//! | who has chosen the checkpoint | memory in the store that it may name |
//! |---|---|
//! | root: by a client of the node, by the directory or the signature for a pod's namespace | all |
//! | a pod, by the image in its Create | that of the pod's namespace |
//! | a pod, by `image:` | that of the pod's namespace, with `[restore] images-from-store` |

use firn_config::Config;
use firn_oci::Spec;
use firn_store::{Owner, Reader};

/// Who has chosen a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chosen {
    /// The client that creates the container.
    ByClient,
    /// A pod, among images that the operator permits.
    ByPod,
    /// The operator, for the pods of this namespace.
    ByOperator,
}

/// Whose memory that of a container with this spec is. Where nobody knows, only root may have it again.
pub(crate) fn owner(spec: &Spec, containerd: &str) -> Option<Owner> {
    match (spec.author().owns_node(), spec.pod_namespace()) {
        (true, _) if containerd.is_empty() => None,
        (true, _) => Some(Owner::Containerd(containerd.to_owned())),
        (false, namespace) => namespace.map(|name| Owner::Kubernetes(name.to_owned())),
    }
}

/// Whose memory a checkpoint may name that is restored into a container with this spec. None: nobody's.
pub(crate) fn reader(spec: &Spec, chosen: Chosen, config: &Config) -> Option<Reader> {
    match chosen {
        Chosen::ByOperator => Some(Reader::Root),
        Chosen::ByClient if spec.author().owns_node() => Some(Reader::Root),
        Chosen::ByPod if !config.restore.images_from_store => None,
        Chosen::ByClient | Chosen::ByPod => Some(Reader::Pod(spec.pod_namespace().map(str::to_owned))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod() -> Spec {
        Spec::from(json!({"annotations": {
            "io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-namespace": "ml"}}))
    }

    #[test]
    fn memory_is_that_of_the_namespace_of_kubernetes_or_containerd() {
        assert_eq!(owner(&pod(), "k8s.io"), Some(Owner::Kubernetes("ml".to_owned())));
        let client = Spec::from(json!({}));
        assert_eq!(
            owner(&client, "default"),
            Some(Owner::Containerd("default".to_owned()))
        );
        assert_eq!(owner(&client, ""), None, "podman has none");
        let unknown = Spec::from(json!({"annotations": {"io.kubernetes.pod.namespace": "ml"}}));
        assert_eq!(owner(&unknown, "k8s.io"), None);
    }

    #[test]
    fn only_root_gives_a_pod_the_memory_of_others() {
        let mut config = Config::default();
        let client = Spec::from(json!({}));
        let own = Some(Reader::Pod(Some("ml".to_owned())));
        assert_eq!(reader(&client, Chosen::ByClient, &config), Some(Reader::Root));
        assert_eq!(reader(&pod(), Chosen::ByOperator, &config), Some(Reader::Root));
        assert_eq!(reader(&pod(), Chosen::ByClient, &config), own);
        assert_eq!(reader(&pod(), Chosen::ByPod, &config), None);
        config.restore.images_from_store = true;
        assert_eq!(reader(&pod(), Chosen::ByPod, &config), own);
        // Nobody knows whose.
        let crio = Spec::from(json!({"annotations": {"io.kubernetes.cri-o.Name": "c"}}));
        assert_eq!(reader(&crio, Chosen::ByPod, &config), Some(Reader::Pod(None)));
    }
}
