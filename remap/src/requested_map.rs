//! The GPU map that an operator or a user has written down: `GPU-old=GPU-new,GPU-old=GPU-new`.
//!
//! It comes from the annotation `firn.dev/gpu-map` of the container, or else from `gpu-map` in the node's
//! configuration. Of the latter, only pairs whose old GPU the checkpoint holds count. The planner checks
//! whether the map covers all GPUs and whether the GPUs fit each other.

use crate::plan::{MapSyntax, parse_map};
use firn_config::names;
use firn_gpu::{GpuPair, GpuUuid};
use firn_host::Problem;

use firn_oci::Spec;

/// Who wrote a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapOrigin {
    /// The container's annotation.
    Annotation,
    /// The node's configuration file.
    Config,
    /// Who asks for a move.
    Client,
}

impl std::fmt::Display for MapOrigin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Annotation => "annotation firn.dev/gpu-map",
            Self::Config => "gpu-map in the configuration",
            Self::Client => "the request",
        })
    }
}

/// A map that someone wrote down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestedMap {
    /// Who wrote it.
    pub origin: MapOrigin,
    /// In the order written.
    pub pairs: Vec<GpuPair>,
}

/// A map that cannot be read.
#[derive(Debug, thiserror::Error, Problem)]
#[error("{origin} is no GPU map")]
#[problem(source.remedy())]
pub struct MapError {
    /// Where it is written.
    pub origin: MapOrigin,
    source: MapSyntax,
}

impl RequestedMap {
    /// The map that holds for this container on this node, if anyone wrote one. `sources` are the GPUs of the
    /// checkpoint.
    pub fn find(
        spec: &Spec,
        config: &firn_config::Restore,
        sources: &[GpuUuid],
    ) -> Result<Option<Self>, MapError> {
        if let Some(text) = spec.annotation(names::ANNOTATION_GPU_MAP) {
            return Self::parse(MapOrigin::Annotation, text).map(Some);
        }
        let mut map = Self::parse(MapOrigin::Config, &config.gpu_map.join(","))?;
        map.pairs.retain(|pair| sources.contains(&pair.old));
        Ok(Some(map).filter(|map| !map.pairs.is_empty()))
    }

    /// The map that a client asks for.
    pub fn of_client(text: &str) -> Result<Self, MapError> {
        Self::parse(MapOrigin::Client, text)
    }

    fn parse(origin: MapOrigin, text: &str) -> Result<Self, MapError> {
        let pairs = parse_map(text).map_err(|source| MapError { origin, source })?;
        Ok(Self { origin, pairs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_image::fixtures::{config, uuid};
    use serde_json::json;

    fn annotated(text: &str) -> Spec {
        Spec::from(json!({"annotations": {"firn.dev/gpu-map": text}}))
    }

    fn pairs(map: Option<RequestedMap>) -> Vec<(GpuUuid, GpuUuid)> {
        map.map_or(Vec::new(), |m| {
            m.pairs.into_iter().map(|p| (p.old, p.new)).collect()
        })
    }

    #[test]
    fn the_annotation_comes_before_the_configuration() {
        let config = config(&[], &[(0, 3)]);
        let text = format!("{}={}, {} = {}", uuid(0), uuid(1), uuid(1), uuid(0));
        let found = RequestedMap::find(&annotated(&text), &config, &[uuid(0)]).unwrap();
        assert_eq!(found.as_ref().map(|m| m.origin), Some(MapOrigin::Annotation));
        assert_eq!(pairs(found), [(uuid(0), uuid(1)), (uuid(1), uuid(0))]);
    }

    #[test]
    fn the_configuration_counts_for_the_gpus_of_the_checkpoint_only() {
        let spec = Spec::from(json!({}));
        let config = config(&[], &[(0, 2), (1, 3)]);
        assert_eq!(
            pairs(RequestedMap::find(&spec, &config, &[uuid(1)]).unwrap()),
            [(uuid(1), uuid(3))]
        );
        assert_eq!(RequestedMap::find(&spec, &config, &[uuid(2)]).unwrap(), None);
    }

    #[test]
    fn what_is_no_map_is_refused_and_its_origin_named() {
        let text = format!("{}=1", uuid(0));
        let error = RequestedMap::find(&annotated(&text), &config(&[], &[]), &[]).unwrap_err();
        assert_eq!(
            (error.code(), error.origin),
            ("FIRN-MAP-SYNTAX", MapOrigin::Annotation)
        );
        let config = firn_config::Restore {
            gpu_map: vec![text],
            ..config(&[], &[])
        };
        let error = RequestedMap::find(&Spec::from(json!({})), &config, &[]).unwrap_err();
        assert_eq!(
            (error.code(), error.origin),
            ("FIRN-MAP-SYNTAX", MapOrigin::Config)
        );
    }
}
