//! The messages of `runtime.v1.RuntimeService` that are answered here (k8s.io/cri-api v0.37.2).
//!
//! Messages inside of them are bytes where they continue to containerd: so fields that this program does not
//! know go along.

use std::collections::HashMap;

use prost::Message;

pub const CHECKPOINT: &str = "/runtime.v1.RuntimeService/CheckpointPod";
pub const RESTORE: &str = "/runtime.v1.RuntimeService/RestorePod";

#[derive(Clone, PartialEq, Message)]
pub struct CheckpointPodRequest {
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
    #[prost(string, tag = "2")]
    pub output_path: String,
    #[prost(string, repeated, tag = "3")]
    pub container_ids: Vec<String>,
    #[prost(map = "string, string", tag = "4")]
    pub options: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct CheckpointPodResponse {}

#[derive(Clone, PartialEq, Message)]
pub struct RestorePodRequest {
    #[prost(string, tag = "1")]
    pub checkpoint_path: String,
    /// `PodSandboxConfig`
    #[prost(bytes = "vec", tag = "2")]
    pub config: Vec<u8>,
    #[prost(string, tag = "3")]
    pub runtime_handler: String,
    #[prost(map = "string, string", tag = "4")]
    pub options: HashMap<String, String>,
    /// `ContainerConfig`
    #[prost(bytes = "vec", repeated, tag = "5")]
    pub container_configs: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub struct RestoredContainer {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub container_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct RestorePodResponse {
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
    #[prost(message, repeated, tag = "2")]
    pub restored_containers: Vec<RestoredContainer>,
}

/// The name in a `ContainerConfig`; none if it has none or is no message.
pub fn name_of(container_config: &[u8]) -> Option<String> {
    #[derive(Clone, PartialEq, Message)]
    struct Config {
        #[prost(message, optional, tag = "1")]
        metadata: Option<Metadata>,
    }
    #[derive(Clone, PartialEq, Message)]
    struct Metadata {
        #[prost(string, tag = "1")]
        name: String,
    }
    let name = Config::decode(container_config).ok()?.metadata?.name;
    (!name.is_empty()).then_some(name)
}

/// A `PodSandboxConfig` with one annotation more, or with another value of it.
pub fn annotated(sandbox_config: &[u8], key: &str, value: &str) -> Vec<u8> {
    #[derive(Clone, PartialEq, Message)]
    struct Annotations {
        #[prost(map = "string, string", tag = "7")]
        annotations: HashMap<String, String>,
    }
    // Messages that follow each other are one: of a key that comes twice the last value counts.
    let annotations = HashMap::from([(key.to_owned(), value.to_owned())]);
    let more = Annotations { annotations }.encode_to_vec();
    [sandbox_config, &more].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, PartialEq, Message)]
    struct SandboxConfig {
        #[prost(string, tag = "2")]
        hostname: String,
        #[prost(map = "string, string", tag = "7")]
        annotations: HashMap<String, String>,
    }

    #[test]
    fn an_annotation_of_a_pod_is_replaced_and_all_else_stays() {
        let of = |pairs: &[(&str, &str)]| {
            let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
            pairs.iter().map(owned).collect()
        };
        let config = SandboxConfig {
            hostname: "h".to_owned(),
            annotations: of(&[("a", "1"), ("b", "2")]),
        };
        let annotated = annotated(&config.encode_to_vec(), "b", "3");
        let read = SandboxConfig::decode(&*annotated).unwrap();
        assert_eq!(read.hostname, "h");
        assert_eq!(read.annotations, of(&[("a", "1"), ("b", "3")]));
    }

    #[test]
    fn a_container_without_a_name_has_none() {
        assert_eq!(name_of(&[]), None);
        assert_eq!(name_of(&[0xff]), None);
        assert_eq!(name_of(&[0x0a, 0x03, 0x0a, 0x01, b'c']).as_deref(), Some("c"));
    }
}
