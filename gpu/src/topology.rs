//! How the GPUs of a node reach each other and the host's memory.
//!
//! Read from NVML and sysfs with the inventory, kept in the manifest, compared by the planner. Whatever a
//! driver or a machine does not report is absent, and sets no condition for a map.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::GpuUuid;

/// What is known of the ways between GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Topology {
    /// At most one for a pair of GPUs.
    pub links: Vec<Link>,
    /// The host's NUMA node that each GPU is at.
    pub numa: BTreeMap<GpuUuid, u32>,
}

/// The ways between two GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Link {
    /// The smaller UUID first.
    pub gpus: [GpuUuid; 2],
    /// NVLinks between the two, directly or through switches; absent where the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlinks: Option<u32>,
    /// How far the two are apart on PCI Express.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PciePath>,
}

/// What two GPUs have in common on the way to each other, the nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum PciePath {
    /// One board.
    Board,
    /// One PCIe switch.
    Switch,
    /// Several PCIe switches, no host bridge.
    Switches,
    /// One host bridge.
    HostBridge,
    /// One NUMA node.
    Node,
    /// The link between NUMA nodes.
    System,
}

impl std::fmt::Display for PciePath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Board => "one board",
            Self::Switch => "one PCIe switch",
            Self::Switches => "several PCIe switches",
            Self::HostBridge => "one PCIe host bridge",
            Self::Node => "one NUMA node",
            Self::System => "different NUMA nodes",
        })
    }
}

impl Link {
    /// Of two GPUs, in whatever order.
    pub fn between(a: GpuUuid, b: GpuUuid) -> Self {
        let gpus = if b < a { [b, a] } else { [a, b] };
        Self {
            gpus,
            nvlinks: None,
            path: None,
        }
    }
}

impl Topology {
    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.links.is_empty() && self.numa.is_empty()
    }

    /// What is known of the ways between two GPUs.
    pub fn link(&self, a: &GpuUuid, b: &GpuUuid) -> Option<&Link> {
        self.links.iter().find(|link| {
            let [one, other] = &link.gpus;
            (one, other) == (a, b) || (one, other) == (b, a)
        })
    }

    /// What concerns these GPUs alone.
    pub fn of(&self, gpus: &[GpuUuid]) -> Self {
        let both = |link: &&Link| link.gpus.iter().all(|gpu| gpus.contains(gpu));
        let mut numa = self.numa.clone();
        numa.retain(|gpu, _| gpus.contains(gpu));
        Self {
            links: self.links.iter().filter(both).cloned().collect(),
            numa,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uuid(n: u8) -> GpuUuid {
        GpuUuid::from_bytes([n; 16])
    }

    #[test]
    fn a_link_is_found_from_both_ends_and_a_part_knows_its_own_gpus_only() {
        let links = vec![Link::between(uuid(2), uuid(1)), Link::between(uuid(2), uuid(3))];
        let topology = Topology {
            links,
            numa: [(uuid(1), 0), (uuid(3), 1)].into(),
        };
        assert_eq!(topology.links[0].gpus, [uuid(1), uuid(2)]);
        assert_eq!(
            topology.link(&uuid(1), &uuid(2)),
            topology.link(&uuid(2), &uuid(1))
        );
        assert!(topology.link(&uuid(1), &uuid(2)).is_some());
        assert_eq!(topology.link(&uuid(1), &uuid(3)), None);
        let part = topology.of(&[uuid(1), uuid(2)]);
        assert_eq!((part.links.len(), part.numa), (1, [(uuid(1), 0)].into()));
        assert!(topology.of(&[uuid(2)]).is_empty());
    }

    #[test]
    fn what_is_missing_in_a_file_is_not_known() {
        let read: Topology = serde_json::from_str(r#"{"links":[],"numa":{}}"#).unwrap();
        assert!(read.is_empty());
        let without_links = serde_json::from_str::<Topology>("{}").unwrap_err();
        assert!(
            without_links.to_string().contains("missing field `links`"),
            "{without_links}"
        );
        let text = format!(r#"{{"gpus":["{}","{}"]}}"#, uuid(1), uuid(2));
        let link: Link = serde_json::from_str(&text).unwrap();
        assert_eq!((link.nvlinks, link.path), (None, None));
        assert_eq!(serde_json::to_string(&link).unwrap(), text);
    }
}
