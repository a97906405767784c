//! Annotations that mean nothing to firn: unknown names and values, and those of a pod that its containers do
//! not get. The bundle has what the shim has left of them, containerd what its client has given.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use firn_config::names;
use firn_containerd::containers::Container;
use firn_host::Chain;
use firn_oci::{Spec, annotations};
use serde_json::Value;
use tokio::time::timeout;

use super::subject::Subject;
use crate::containerd::{CallError, ContainerSpec, Containerd, block_on};

/// How long containerd may take. Without its answer only the bundle counts.
const LIMIT: Duration = Duration::from_secs(5);

/// Known annotations of containers that the node's configuration decides for pods.
const NOT_OF_PODS: [&str; 1] = [names::ANNOTATION_GPU_BUSY];

/// Where containerd notes what the kubelet has given for a pod.
const POD: &str = "io.cri-containerd.sandbox.metadata";

/// What is wrong with the annotations of a subject.
#[derive(Debug, Default)]
pub struct Wrong {
    /// A line for each.
    pub lines: Vec<String>,
    /// Why containerd has not answered: there may be more.
    pub unasked: Option<String>,
}

pub fn of(subject: &Subject, socket: &Path) -> Wrong {
    let Some(spec) = &subject.spec else {
        return Wrong::default();
    };
    let mut wrong = Wrong {
        lines: annotations::with_unknown_values(spec),
        unasked: None,
    };
    if let Some((namespace, id)) = subject.called() {
        match asked(socket, namespace, id) {
            Ok(given) => wrong.lines.extend(given.lost()),
            Err(why) => wrong.unasked = Some(why),
        }
    }
    wrong
}

/// What containerd answers, or why it does not.
fn asked(socket: &Path, namespace: &str, id: &str) -> Result<Given, String> {
    block_on(async { timeout(LIMIT, given(socket, namespace, id)).await })
        .map_err(|error| error.to_string())?
        .map_err(|_| format!("containerd has not answered within {} s", LIMIT.as_secs()))?
        .map_err(|error| Chain(&error).to_string())
}

/// What clients of containerd have given.
struct Given {
    container: Spec,
    /// Of a container of a pod: what the pod has.
    pod: Option<Spec>,
    /// The names of the pod's containers, if they are needed and containerd lists them.
    names: Option<Vec<String>>,
}

async fn given(socket: &Path, namespace: &str, id: &str) -> Result<Given, CallError> {
    let containerd = Containerd::connect(socket, namespace).await?;
    let container = containerd.container(id).await?.spec();
    let Some(sandbox) = container
        .annotation(names::ANNOTATION_CRI_SANDBOX)
        .map(str::to_owned)
    else {
        return Ok(Given {
            container,
            pod: None,
            names: None,
        });
    };
    let pod = match containerd.container(&sandbox).await {
        Ok(sandbox) => Some(pod(&sandbox)),
        // A controller of another kind keeps it elsewhere.
        Err(error) if error.is_absent() => None,
        Err(error) => return Err(error),
    };
    // Without names of containers the annotation is for all of them.
    let restored = container.annotation(names::ANNOTATION_RESTORE_FROM);
    let names = if restored.is_some_and(|value| value.contains('=')) {
        containerd.containers().await.ok()
    } else {
        None
    };
    let names = names.map(|all| in_pod(&all, &sandbox));
    Ok(Given {
        container,
        pod,
        names,
    })
}

/// The names of the containers in a pod.
fn in_pod(all: &[Container], sandbox: &str) -> Vec<String> {
    let specs = all.iter().map(Container::spec);
    let of_pod = specs.filter(|spec| spec.annotation(names::ANNOTATION_CRI_SANDBOX) == Some(sandbox));
    of_pod
        .filter_map(|spec| spec.annotation(names::ANNOTATION_CRI_NAME).map(str::to_owned))
        .collect()
}

/// A spec with the annotations of a pod.
fn pod(sandbox: &Container) -> Spec {
    let noted = sandbox.extensions.get(POD).map_or(&[][..], |noted| &noted.value);
    let noted: Value = serde_json::from_slice(noted).unwrap_or_default();
    let annotations = noted.pointer("/Metadata/Config/annotations").cloned();
    Spec::from(serde_json::json!({ "annotations": annotations }))
}

impl Given {
    /// What has no effect.
    fn lost(&self) -> Vec<String> {
        let none = Spec::from(Value::Null);
        let pod = self.pod.as_ref().unwrap_or(&none);
        let is_of_pod = |name: &str| pod.annotation(name).is_some();
        let of_container = annotations::named(&self.container)
            .filter(|name| !annotations::is_known(name) && !is_of_pod(name))
            .map(|name| format!("{name} is no annotation of firn"));
        let of_pod = annotations::named(pod).filter_map(|name| {
            if !annotations::is_known(name) {
                return Some(format!("{name} of the pod is no annotation of firn"));
            }
            if NOT_OF_PODS.contains(&name) {
                return Some(format!("{name} has no effect on a pod: [pause] gpu-busy decides"));
            }
            let reaches = self.container.annotation(name).is_some();
            (!reaches).then(|| {
                let why = "the runtime handler's pod_annotations does not list it";
                format!("{name} of the pod does not reach it: {why}")
            })
        });
        let of_others = self.not_in_pod().into_iter().map(|name| {
            let restore = names::ANNOTATION_RESTORE_FROM;
            format!("{restore} names container {name:?}, and the pod has none of that name now")
        });
        of_container.chain(of_pod).chain(of_others).collect()
    }

    /// The containers that are to be restored and are not in the pod.
    fn not_in_pod(&self) -> BTreeSet<&str> {
        let value = self.container.annotation(names::ANNOTATION_RESTORE_FROM);
        let (Some(value), Some(names)) = (value, &self.names) else {
            return BTreeSet::new();
        };
        let named = value.split(',').filter_map(|part| part.trim().split_once('='));
        named
            .map(|(container, _)| container)
            .filter(|name| names.iter().all(|of_pod| of_pod != name))
            .collect()
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
        let noted = json!({"Version": "v1", "Metadata": {"Config": {"annotations": {
            "firn.dev/ipc": "none", "firn.dev/tcp": "close", "firn.dev/bulc": "store", "other": "x",
            "firn.dev/gpu-busy": "wait", "firn.dev/restore-from": "c=warm, d=warm",
        }}}});
        let value = noted.to_string().into_bytes();
        let type_url = String::new();
        let sandbox = Container {
            extensions: HashMap::from([(POD.to_owned(), Any { type_url, value })]),
            ..Container::default()
        };
        let given = Given {
            container: Spec::from(json!({"annotations": {
                "firn.dev/ipc": "none", "firn.dev/x": "y", "firn.dev/restore-from": "c=warm, d=warm, d=cold",
            }})),
            pod: Some(pod(&sandbox)),
            names: Some(vec!["c".to_owned()]),
        };
        let lost = given.lost();
        assert_eq!(
            lost[..3],
            [
                "firn.dev/x is no annotation of firn",
                "firn.dev/bulc of the pod is no annotation of firn",
                "firn.dev/gpu-busy has no effect on a pod: [pause] gpu-busy decides",
            ]
        );
        assert!(
            lost[3].starts_with("firn.dev/tcp of the pod does not reach it: "),
            "{lost:?}"
        );
        let other = "firn.dev/restore-from names container \"d\", and the pod has none of that name now";
        assert_eq!(lost[4..], [other]);
        // What is noted there is containerd's business, and may change.
        let given = Given {
            pod: Some(pod(&Container::default())),
            names: None,
            ..given
        };
        assert_eq!(given.lost().len(), 1);
    }
}
