//! How the GPUs of a restore are chosen, as the container's owner and the node's operator request it.
//!
//! The first of these that exists: the annotation `firn.dev/gpu-map`, the annotation `firn.dev/remap-policy`,
//! a pair of `gpu-map` in the configuration that names a GPU of the checkpoint, `policy` in the
//! configuration. A policy chooses among the GPUs of the grant and adds none.

use crate::plan::MapPolicy;
use firn_config::{RemapPolicy, Restore, names};
use firn_gpu::GpuUuid;
use firn_host::Problem;

use crate::{MapError, MapOrigin, RequestedMap};
use firn_oci::Spec;

/// A request that cannot be used.
#[derive(Debug, thiserror::Error, Problem)]
pub enum PolicyError {
    #[error("cannot read the GPU map")]
    Map(#[from] MapError),
    #[error("annotation firn.dev/remap-policy is {word:?}, which is no policy")]
    #[problem("FIRN-REMAP-POLICY", "write auto, subset or strict")]
    Unknown { word: String },
    #[error("annotation firn.dev/remap-policy is {word}, and annotation firn.dev/gpu-map is set too")]
    #[problem("FIRN-REMAP-POLICY", "omit one of the two annotations")]
    Contradiction { word: &'static str },
}

/// The policy for this container on this node, with its map if it has one; `sources` are the GPUs of the
/// checkpoint.
pub(crate) fn find(
    spec: &Spec,
    config: &Restore,
    sources: &[GpuUuid],
) -> Result<(MapPolicy, Option<RequestedMap>), PolicyError> {
    let annotated = match spec.annotation(names::ANNOTATION_REMAP_POLICY) {
        None => None,
        Some(word) => Some(RemapPolicy::of_word(word).ok_or_else(|| PolicyError::Unknown {
            word: word.chars().take(64).collect(),
        })?),
    };
    let map = RequestedMap::find(spec, config, sources)?;
    let policy = match (annotated, map) {
        (Some(policy), Some(map)) if map.origin == MapOrigin::Annotation => {
            return Err(PolicyError::Contradiction { word: policy.word() });
        }
        (None, Some(map)) => return Ok((MapPolicy::Explicit(map.pairs.clone()), Some(map))),
        (Some(policy), _) => policy,
        (None, None) => config.policy,
    };
    let policy = match policy {
        RemapPolicy::Auto => MapPolicy::Auto,
        RemapPolicy::Subset => MapPolicy::Subset,
        RemapPolicy::Strict => MapPolicy::Strict,
    };
    Ok((policy, None))
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_image::fixtures::{config, uuid};
    use serde_json::json;

    fn found(annotations: &[(&str, &str)], config: &Restore) -> Result<MapPolicy, PolicyError> {
        let annotations: serde_json::Map<_, _> = annotations
            .iter()
            .map(|(k, v)| (k.to_string(), json!(v)))
            .collect();
        let spec = Spec::from(json!({ "annotations": annotations }));
        find(&spec, config, &[uuid(0)]).map(|(policy, _)| policy)
    }

    fn node(policy: RemapPolicy, pairs: &[(u8, u8)]) -> Restore {
        Restore {
            policy,
            ..config(&[], pairs)
        }
    }

    const POLICY: &str = "firn.dev/remap-policy";
    const MAP: &str = "firn.dev/gpu-map";

    #[test]
    fn what_is_nearest_to_the_container_counts() {
        let map = format!("{}={}", uuid(0), uuid(7));
        let explicit = |new: u8| {
            let config = config(&[], &[(0, new)]);
            let map = RequestedMap::find(&Spec::from(json!({})), &config, &[uuid(0)]);
            MapPolicy::Explicit(map.unwrap().unwrap().pairs)
        };
        let of_node = node(RemapPolicy::Strict, &[(0, 3)]);
        assert_eq!(found(&[(MAP, &map)], &of_node).unwrap(), explicit(7));
        assert_eq!(found(&[(POLICY, "subset")], &of_node).unwrap(), MapPolicy::Subset);
        assert_eq!(found(&[], &of_node).unwrap(), explicit(3));
        let without_pairs = node(RemapPolicy::Strict, &[(9, 3)]);
        assert_eq!(found(&[], &without_pairs).unwrap(), MapPolicy::Strict);
        assert_eq!(found(&[], &config(&[], &[])).unwrap(), MapPolicy::Auto);
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        let map = format!("{}={}", uuid(0), uuid(7));
        let of_node = node(RemapPolicy::Auto, &[]);
        for (annotations, code) in [
            (&[(POLICY, "Strict")][..], "FIRN-REMAP-POLICY"),
            (&[(POLICY, "")], "FIRN-REMAP-POLICY"),
            (&[(POLICY, "strict"), (MAP, &map)], "FIRN-REMAP-POLICY"),
            (&[(POLICY, "explicit")], "FIRN-REMAP-POLICY"),
            (&[(MAP, "GPU-0=1")], "FIRN-MAP-SYNTAX"),
        ] {
            let error = found(annotations, &of_node).unwrap_err();
            assert_eq!(error.code(), code, "{annotations:?}: {error}");
            assert!(!error.hint().is_empty());
        }
    }
}
