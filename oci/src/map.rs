//! The GPU map that an operator or a user has written down: `GPU-old=GPU-new,GPU-old=GPU-new`.
//!
//! Where it comes from, the first that there is: the annotation `firn.dev/gpu-map` of the container, then `gpu-map` in
//! the node's configuration, of which only the pairs count whose old GPU the checkpoint holds. Whether the map covers
//! all GPUs and whether the GPUs fit each other is for the planner to say.

use firn_config::names;
use firn_gpu::{BadUuid, GpuPair, GpuUuid};

use crate::Spec;

/// Most pairs that are read.
const MAX_PAIRS: usize = 64;

/// Who wrote a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapOrigin {
    /// The container's annotation.
    Annotation,
    /// The node's configuration file.
    Config,
}

impl std::fmt::Display for MapOrigin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Annotation => "annotation firn.dev/gpu-map",
            Self::Config => "gpu-map in the configuration",
        })
    }
}

/// A map that someone wrote down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuMap {
    /// Who wrote it.
    pub origin: MapOrigin,
    /// In the order written; no GPU is twice on the left or twice on the right.
    pub pairs: Vec<GpuPair>,
}

/// A map that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// An item that is not `GPU-old=GPU-new`.
    #[error("{origin}: {item:?} is not of the form GPU-old=GPU-new")]
    Shape { origin: MapOrigin, item: String },
    /// One side of an item is no UUID.
    #[error("{origin}: bad item {item:?}")]
    Uuid {
        origin: MapOrigin,
        item: String,
        source: BadUuid,
    },
    /// A GPU is named twice on the same side.
    #[error("{origin}: {uuid} is named twice on one side")]
    Twice { origin: MapOrigin, uuid: GpuUuid },
    /// More pairs than any machine has GPUs.
    #[error("{origin}: more than {MAX_PAIRS} pairs")]
    TooMany { origin: MapOrigin },
}

impl MapError {
    /// The code shown to users.
    pub fn code(&self) -> &'static str {
        "FIRN-MAP-INVALID"
    }

    /// What the operator can do.
    pub fn hint(&self) -> &'static str {
        "write pairs GPU-old=GPU-new separated by commas; `nvidia-smi -L` shows the UUIDs"
    }
}

impl GpuMap {
    /// The map that holds for this container on this node, if anyone wrote one. `sources` are the GPUs of the
    /// checkpoint.
    pub fn find(
        spec: &Spec,
        config: &firn_config::Restore,
        sources: &[GpuUuid],
    ) -> Result<Option<Self>, MapError> {
        if let Some(text) = spec.annotation(names::ANNOTATION_GPU_MAP) {
            return Ok(Some(Self::parse(MapOrigin::Annotation, text.split(','))?));
        }
        let mut pairs = parse_pairs(MapOrigin::Config, config.gpu_map.iter().map(String::as_str))?;
        pairs.retain(|pair| sources.contains(&pair.old));
        if pairs.is_empty() {
            return Ok(None);
        }
        Self::checked(MapOrigin::Config, pairs).map(Some)
    }

    fn parse<'a>(origin: MapOrigin, items: impl Iterator<Item = &'a str>) -> Result<Self, MapError> {
        Self::checked(origin, parse_pairs(origin, items)?)
    }

    fn checked(origin: MapOrigin, pairs: Vec<GpuPair>) -> Result<Self, MapError> {
        if pairs.len() > MAX_PAIRS {
            return Err(MapError::TooMany { origin });
        }
        for (i, pair) in pairs.iter().enumerate() {
            let twice = |uuid: &GpuUuid| {
                Err(MapError::Twice {
                    origin,
                    uuid: uuid.clone(),
                })
            };
            if pairs[..i].iter().any(|earlier| earlier.old == pair.old) {
                return twice(&pair.old);
            }
            if pairs[..i].iter().any(|earlier| earlier.new == pair.new) {
                return twice(&pair.new);
            }
        }
        Ok(Self { origin, pairs })
    }
}

fn parse_pairs<'a>(
    origin: MapOrigin,
    items: impl Iterator<Item = &'a str>,
) -> Result<Vec<GpuPair>, MapError> {
    let pair = |item: &str| {
        let shown = || item.chars().take(100).collect::<String>();
        let (old, new) = item.split_once('=').ok_or_else(|| MapError::Shape {
            origin,
            item: shown(),
        })?;
        let uuid = |text: &str| {
            text.trim().parse().map_err(|source| MapError::Uuid {
                origin,
                item: shown(),
                source,
            })
        };
        Ok(GpuPair {
            old: uuid(old)?,
            new: uuid(new)?,
        })
    };
    items.map(str::trim).map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{config, uuid};
    use serde_json::json;

    fn annotated(text: &str) -> Spec {
        Spec::from(json!({"annotations": {"firn.dev/gpu-map": text}}))
    }

    fn pairs(map: Option<GpuMap>) -> Vec<(GpuUuid, GpuUuid)> {
        map.map_or(Vec::new(), |m| {
            m.pairs.into_iter().map(|p| (p.old, p.new)).collect()
        })
    }

    #[test]
    fn the_annotation_comes_before_the_configuration() {
        let config = config(&[], &[(0, 3)]);
        let text = format!("{}={}, {} = {}", uuid(0), uuid(1), uuid(1), uuid(0));
        let found = GpuMap::find(&annotated(&text), &config, &[uuid(0)]).unwrap();
        assert_eq!(found.as_ref().map(|m| m.origin), Some(MapOrigin::Annotation));
        assert_eq!(pairs(found), [(uuid(0), uuid(1)), (uuid(1), uuid(0))]);
    }

    #[test]
    fn the_configuration_counts_for_the_gpus_of_the_checkpoint_only() {
        let spec = Spec::from(json!({}));
        let config = config(&[], &[(0, 3), (1, 3)]);
        assert_eq!(
            pairs(GpuMap::find(&spec, &config, &[uuid(1)]).unwrap()),
            [(uuid(1), uuid(3))]
        );
        assert_eq!(GpuMap::find(&spec, &config, &[uuid(2)]).unwrap(), None);
        assert!(GpuMap::find(&spec, &config, &[uuid(0), uuid(1)]).is_err());
    }

    #[test]
    fn what_is_no_map_is_refused() {
        let (a, b, c) = (uuid(0), uuid(1), uuid(2));
        for text in [
            String::new(),
            format!("{a}"),
            format!("{a}=1"),
            format!("{a}={b},"),
            format!("{a}={b}={c}"),
            format!("{a}={b},{a}={c}"),
            format!("{a}={c},{b}={c}"),
        ] {
            let error = GpuMap::find(&annotated(&text), &config(&[], &[]), &[]).unwrap_err();
            assert_eq!(error.code(), "FIRN-MAP-INVALID", "{text}");
        }
    }
}
