//! How the GPUs of a restore are chosen: what the container's owner and the node's operator have said of it.
//!
//! The first that there is: the annotation `firn.dev/gpu-map`, the annotation `firn.dev/remap-policy`, a pair of `gpu-map`
//! in the configuration that names a GPU of the checkpoint, `policy` in the configuration. A policy chooses among the
//! GPUs of the grant and adds none.

use crate::plan::Policy;
use firn_config::{RemapPolicy, Restore, names};
use firn_gpu::GpuUuid;
use firn_host::{Problem, Remedy, remedy};

use crate::{GpuMap, MapError, MapOrigin};
use firn_oci::Spec;

/// A choice that cannot be made out.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// A map cannot be read.
    #[error("cannot read the GPU map")]
    Map(#[from] MapError),
    /// The annotation holds a word that is no policy.
    #[error("annotation firn.dev/remap-policy is {word:?}, which is no policy")]
    Unknown { word: String },
    /// Two annotations say different things.
    #[error("annotation firn.dev/remap-policy is {word}, and annotation firn.dev/gpu-map is there too")]
    Contradiction { word: &'static str },
    /// A map is wanted, and there is none for this checkpoint.
    #[error("the policy explicit wants a GPU map, and none names a GPU of the checkpoint")]
    NoMap,
}

impl Problem for PolicyError {
    fn remedy(&self) -> Remedy<'_> {
        match self {
            Self::Map(error) => error.remedy(),
            Self::Unknown { .. } => remedy(
                "FIRN-REMAP-POLICY",
                "write auto, subset, strict, index or explicit",
            ),
            Self::Contradiction { .. } => {
                remedy("FIRN-REMAP-POLICY", "leave one of the two out, or write explicit")
            }
            Self::NoMap => remedy(
                "FIRN-MAP-MISSING",
                "give the container the annotation firn.dev/gpu-map, or the configuration pairs for these GPUs",
            ),
        }
    }
}

/// The policy for this container on this node, with its map if it has one; `sources` are the GPUs of the checkpoint.
pub(crate) fn find(
    spec: &Spec,
    config: &Restore,
    sources: &[GpuUuid],
) -> Result<(Policy, Option<GpuMap>), PolicyError> {
    let asked = match spec.annotation(names::ANNOTATION_REMAP_POLICY) {
        None => None,
        Some(word) => Some(RemapPolicy::of_word(word).ok_or_else(|| PolicyError::Unknown {
            word: word.chars().take(64).collect(),
        })?),
    };
    let map = GpuMap::find(spec, config, sources)?;
    let of_container = (map.as_ref()).is_some_and(|map| map.origin == MapOrigin::Annotation);
    let map = match (asked, of_container) {
        (None | Some(RemapPolicy::Explicit), _) => map,
        (Some(other), true) => return Err(PolicyError::Contradiction { word: other.word() }),
        (Some(_), false) => None,
    };
    if let Some(map) = map {
        return Ok((Policy::Explicit(map.pairs.clone()), Some(map)));
    }
    let policy = match asked.unwrap_or(config.policy) {
        RemapPolicy::Auto => Policy::Auto,
        RemapPolicy::Subset => Policy::Subset,
        RemapPolicy::Strict => Policy::Strict,
        RemapPolicy::Index => Policy::Index,
        RemapPolicy::Explicit => return Err(PolicyError::NoMap),
    };
    Ok((policy, None))
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_image::fixtures::{config, uuid};
    use serde_json::json;

    fn found(annotations: &[(&str, &str)], config: &Restore) -> Result<Policy, PolicyError> {
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
            let map = GpuMap::find(&Spec::from(json!({})), &config, &[uuid(0)]);
            Policy::Explicit(map.unwrap().unwrap().pairs)
        };
        let of_node = node(RemapPolicy::Strict, &[(0, 3)]);
        assert_eq!(found(&[(MAP, &map)], &of_node).unwrap(), explicit(7));
        assert_eq!(
            found(&[(MAP, &map), (POLICY, "explicit")], &of_node).unwrap(),
            explicit(7)
        );
        assert_eq!(found(&[(POLICY, "subset")], &of_node).unwrap(), Policy::Subset);
        assert_eq!(found(&[(POLICY, "explicit")], &of_node).unwrap(), explicit(3));
        assert_eq!(found(&[], &of_node).unwrap(), explicit(3));
        let without_pairs = node(RemapPolicy::Strict, &[(9, 3)]);
        assert_eq!(found(&[], &without_pairs).unwrap(), Policy::Strict);
        assert_eq!(
            found(&[(POLICY, "index")], &without_pairs).unwrap(),
            Policy::Index
        );
        assert_eq!(found(&[], &config(&[], &[])).unwrap(), Policy::Auto);
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        let map = format!("{}={}", uuid(0), uuid(7));
        let of_node = node(RemapPolicy::Auto, &[]);
        for (annotations, code) in [
            (&[(POLICY, "Strict")][..], "FIRN-REMAP-POLICY"),
            (&[(POLICY, "")], "FIRN-REMAP-POLICY"),
            (&[(POLICY, "strict"), (MAP, &map)], "FIRN-REMAP-POLICY"),
            (&[(POLICY, "explicit")], "FIRN-MAP-MISSING"),
            (&[(MAP, "GPU-0=1")], "FIRN-MAP-SYNTAX"),
        ] {
            let error = found(annotations, &of_node).unwrap_err();
            assert_eq!(error.code(), code, "{annotations:?}: {error}");
            assert!(!error.hint().is_empty());
        }
        let error = found(&[], &node(RemapPolicy::Explicit, &[(9, 1)])).unwrap_err();
        assert_eq!(error.code(), "FIRN-MAP-MISSING");
    }
}
