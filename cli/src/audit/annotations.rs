//! Annotations that mean nothing to firn: unknown names and values, and those of a pod that its containers do
//! not get. The bundle has what the shim has left of them, containerd what its client has given.

use std::path::Path;
use std::time::Duration;

use firn_config::names;
use firn_containerd::containers::Container;
use firn_oci::{Spec, annotations};
use serde_json::Value;
use tokio::time::timeout;

use super::subject::Subject;
use crate::containerd::{CallError, ContainerSpec, Containerd, block_on};

/// How long containerd may take. Without its answer only the bundle counts.
const LIMIT: Duration = Duration::from_secs(5);

/// Where containerd notes what the kubelet has given for a pod.
const POD: &str = "io.cri-containerd.sandbox.metadata";

/// What is wrong with the annotations of a subject, a line for each.
pub fn of(subject: &Subject, socket: &Path) -> Vec<String> {
    let Some(spec) = &subject.spec else {
        return Vec::new();
    };
    let mut lines = annotations::with_unknown_values(spec);
    let asked = subject.called().map(|(namespace, id)| {
        let asked = async { timeout(LIMIT, given(socket, namespace, id)).await };
        block_on(asked)
    });
    if let Some(Ok(Ok(Ok(given)))) = asked {
        lines.extend(given.lost(spec));
    }
    lines
}

/// What clients of containerd have given.
struct Given {
    container: Spec,
    /// Of a container of a pod: what the pod has.
    pod: Option<Spec>,
}

async fn given(socket: &Path, namespace: &str, id: &str) -> Result<Given, CallError> {
    let containerd = Containerd::connect(socket, namespace).await?;
    let container = containerd.container(id).await?.spec();
    let pod = match container.annotation(names::ANNOTATION_CRI_SANDBOX) {
        Some(sandbox) => Some(pod(&containerd.container(sandbox).await?)),
        None => None,
    };
    Ok(Given { container, pod })
}

/// A spec with the annotations of a pod.
fn pod(sandbox: &Container) -> Spec {
    let noted = sandbox.extensions.get(POD).map_or(&[][..], |noted| &noted.value);
    let noted: Value = serde_json::from_slice(noted).unwrap_or_default();
    let annotations = noted.pointer("/Metadata/Config/annotations").cloned();
    Spec::from(serde_json::json!({ "annotations": annotations }))
}

impl Given {
    /// What has not come as far as the container's spec.
    fn lost(&self, spec: &Spec) -> Vec<String> {
        let unknown = |spec| annotations::named(spec).filter(|name| !annotations::is_known(name));
        let of_container = unknown(&self.container).map(|name| format!("{name} is no annotation of firn"));
        let mut lines: Vec<String> = of_container.collect();
        let Some(pod) = &self.pod else {
            return lines;
        };
        lines.extend(unknown(pod).map(|name| format!("{name} of the pod is no annotation of firn")));
        let lost = annotations::named(pod)
            .filter(|name| annotations::is_known(name) && spec.annotation(name).is_none())
            .map(|name| {
                format!(
                    "{name} of the pod is not passed on: add it to pod_annotations of the runtime handler in \
                     containerd's configuration"
                )
            });
        lines.extend(lost);
        lines
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use firn_containerd::Any;
    use serde_json::json;

    use super::*;

    #[test]
    fn annotations_that_got_lost_are_named() {
        let spec = Spec::from(json!({"annotations": {"firn.dev/ipc": "none"}}));
        let noted = json!({"Version": "v1", "Metadata": {"Config": {"annotations": {
            "firn.dev/ipc": "none", "firn.dev/tcp": "close", "firn.dev/bulc": "store", "other": "x",
        }}}});
        let value = noted.to_string().into_bytes();
        let type_url = String::new();
        let sandbox = Container {
            extensions: HashMap::from([(POD.to_owned(), Any { type_url, value })]),
            ..Container::default()
        };
        let given = Given {
            container: Spec::from(json!({"annotations": {"firn.dev/ipc": "none", "firn.dev/x": "y"}})),
            pod: Some(pod(&sandbox)),
        };
        let lost = given.lost(&spec);
        assert_eq!(
            lost[..2],
            [
                "firn.dev/x is no annotation of firn",
                "firn.dev/bulc of the pod is no annotation of firn"
            ]
        );
        assert!(
            lost[2].starts_with("firn.dev/tcp of the pod is not passed on: "),
            "{lost:?}"
        );
        assert_eq!(lost.len(), 3);
        // What is noted there is containerd's business, and may change.
        let given = Given {
            pod: Some(pod(&Container::default())),
            ..given
        };
        assert_eq!(given.lost(&spec).len(), 1);
    }
}
