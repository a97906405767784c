//! Whose memory an index describes, and for whom it is read.
//!
//! The name of an index is in logs, listings and images that others may read: it lets nobody have the memory.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Whose container was checkpointed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Owner {
    /// The pods of this namespace of Kubernetes.
    Kubernetes(String),
    /// The clients of this namespace of containerd, who are root on the node.
    Containerd(String),
}

impl Owner {
    /// The namespace.
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Kubernetes(name) | Self::Containerd(name) => name,
        }
    }
}

/// For whom memory is read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reader {
    /// Root, or somebody to whom root has given this checkpoint. The default is for orders of a shim that is
    /// older than this.
    #[default]
    Root,
    /// A pod of this namespace, which has named the checkpoint itself; none: nobody knows of which.
    Pod(Option<String>),
}

impl Reader {
    /// Whether the memory may be read for it. Older indexes have no owner.
    pub fn may_have(&self, owner: Option<&Owner>) -> bool {
        match (self, owner) {
            (Self::Root, _) => true,
            (Self::Pod(Some(namespace)), Some(Owner::Kubernetes(of))) => namespace == of,
            (Self::Pod(_), _) => false,
        }
    }
}

/// For messages.
impl fmt::Display for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => f.write_str("root"),
            Self::Pod(Some(namespace)) => write!(f, "namespace {namespace}"),
            Self::Pod(None) => f.write_str("a pod whose namespace is not known"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_has_the_memory_of_its_namespace_alone() {
        let kubernetes = |name: &str| Owner::Kubernetes(name.to_owned());
        let containerd = Owner::Containerd("web".to_owned());
        let pod = |name: Option<&str>| Reader::Pod(name.map(str::to_owned));
        for (reader, owner, may) in [
            (pod(Some("web")), Some(kubernetes("web")), true),
            (pod(Some("web")), Some(kubernetes("ml")), false),
            (pod(Some("web")), Some(containerd.clone()), false),
            (pod(Some("web")), None, false),
            (pod(None), Some(kubernetes("web")), false),
            (pod(None), None, false),
            (Reader::Root, Some(kubernetes("web")), true),
            (Reader::Root, Some(containerd), true),
            (Reader::Root, None, true),
        ] {
            assert_eq!(reader.may_have(owner.as_ref()), may, "{reader} and {owner:?}");
        }
    }
}
