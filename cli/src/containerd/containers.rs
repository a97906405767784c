//! What containerd knows of a container: its spec, and how that is replaced.

use firn_oci::Spec;
use prost::Message;

use super::{CallError, Container, Containerd};

/// `containerd.services.containers.v1.UpdateContainerRequest`
#[derive(Clone, PartialEq, Message)]
struct UpdateContainer {
    #[prost(message, optional, tag = "1")]
    container: Option<Container>,
    #[prost(message, optional, tag = "2")]
    update_mask: Option<FieldMask>,
}

/// `google.protobuf.FieldMask`
#[derive(Clone, PartialEq, Message)]
struct FieldMask {
    #[prost(string, repeated, tag = "1")]
    paths: Vec<String>,
}

impl Container {
    /// Its spec; an empty one if it has none.
    pub fn spec(&self) -> Spec {
        let bytes = self.spec.as_ref().map_or(&[][..], |spec| &spec.value);
        Spec::from(serde_json::from_slice::<serde_json::Value>(bytes).unwrap_or_default())
    }

    /// The same container with another spec.
    pub fn with_spec(&self, spec: Spec) -> Self {
        let mut other = self.clone();
        if let Some(any) = &mut other.spec {
            any.value = spec.into_value().to_string().into_bytes();
        }
        other
    }
}

impl Containerd {
    /// Gives a container that is known the spec and the snapshot of this one.
    pub async fn update(&self, container: &Container) -> Result<(), CallError> {
        let call = "/containerd.services.containers.v1.Containers/Update";
        let request = UpdateContainer {
            container: Some(container.clone()),
            update_mask: Some(FieldMask {
                paths: vec!["spec".to_owned(), "snapshotkey".to_owned()],
            }),
        };
        self.call(call, request).await
    }
}
