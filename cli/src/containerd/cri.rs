//! The calls of containerd's CRI plugin, and its records of containers.

use std::collections::HashMap;

use prost::Message;

use super::{Any, CallError, Containerd};

/// Under this key the plugin keeps what it knows of a container.
const METADATA: &str = "io.cri-containerd.container.metadata";

/// `containerd.services.containers.v1.Container`, with what the CRI plugin notes.
#[derive(Clone, PartialEq, Message)]
pub struct Recorded {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(message, optional, tag = "5")]
    spec: Option<Any>,
    #[prost(map = "string, message", tag = "10")]
    extensions: HashMap<String, Any>,
}

impl Recorded {
    /// The OCI spec, as JSON.
    pub fn spec(&self) -> &[u8] {
        self.spec.as_ref().map_or(&[], |spec| &spec.value)
    }

    /// What the plugin notes, as JSON.
    pub fn metadata(&self) -> &[u8] {
        self.extensions.get(METADATA).map_or(&[], |noted| &noted.value)
    }
}

#[derive(Clone, PartialEq, Message)]
struct GotRecorded {
    #[prost(message, optional, tag = "1")]
    container: Option<Recorded>,
}

#[derive(Clone, PartialEq, Message)]
struct RunPodSandbox {
    #[prost(bytes = "vec", tag = "1")]
    config: Vec<u8>,
    #[prost(string, tag = "2")]
    runtime_handler: String,
}

#[derive(Clone, PartialEq, Message)]
struct CreateContainer {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(bytes = "vec", tag = "2")]
    config: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    sandbox_config: Vec<u8>,
}

impl Containerd {
    pub async fn recorded(&self, id: &str) -> Result<Recorded, CallError> {
        let call = "/containerd.services.containers.v1.Containers/Get";
        let got: GotRecorded = self.call(call, id.to_owned()).await?;
        Ok(got.container.unwrap_or_default())
    }

    /// Runs a sandbox by its `PodSandboxConfig`. Returns its id.
    pub async fn run_sandbox(&self, config: Vec<u8>, runtime_handler: String) -> Result<String, CallError> {
        let request = RunPodSandbox {
            config,
            runtime_handler,
        };
        self.call("/runtime.v1.RuntimeService/RunPodSandbox", request)
            .await
    }

    /// Stops a sandbox with its containers, and removes both.
    pub async fn remove_sandbox(&self, id: &str) -> Result<(), CallError> {
        let (stop, remove) = (
            "/runtime.v1.RuntimeService/StopPodSandbox",
            "/runtime.v1.RuntimeService/RemovePodSandbox",
        );
        self.call::<_, ()>(stop, id.to_owned()).await?;
        self.call(remove, id.to_owned()).await
    }

    /// Creates a container by its `ContainerConfig` in a sandbox. Returns its id.
    pub async fn create_in_sandbox(
        &self,
        sandbox: &str,
        config: Vec<u8>,
        sandbox_config: Vec<u8>,
    ) -> Result<String, CallError> {
        let request = CreateContainer {
            pod_sandbox_id: sandbox.to_owned(),
            config,
            sandbox_config,
        };
        let call = "/runtime.v1.RuntimeService/CreateContainer";
        self.call(call, request).await
    }
}
