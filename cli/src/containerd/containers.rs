//! What containerd knows of a container: its spec, and how that is replaced.

use firn_containerd::FieldMask;
use firn_containerd::containers::{UPDATE, UpdateRequest};
use firn_oci::Spec;

use super::{CallError, Container, Containerd};

/// The OCI spec that containerd has of a container.
pub trait ContainerSpec {
    /// Its spec; an empty one if it has none.
    fn spec(&self) -> Spec;

    /// The same container with another spec.
    fn with_spec(&self, spec: Spec) -> Self;
}

impl ContainerSpec for Container {
    fn spec(&self) -> Spec {
        let bytes = self.spec.as_ref().map_or(&[][..], |spec| &spec.value);
        Spec::from(serde_json::from_slice::<serde_json::Value>(bytes).unwrap_or_default())
    }

    fn with_spec(&self, spec: Spec) -> Self {
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
        let request = UpdateRequest {
            container: Some(container.clone()),
            update_mask: Some(FieldMask {
                paths: vec!["spec".to_owned(), "snapshotkey".to_owned()],
            }),
        };
        self.call(UPDATE, request).await
    }
}
