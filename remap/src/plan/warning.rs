//! What a restore with a map does not keep, and nobody can repair.

use std::fmt;

use serde::Serialize;

use super::PlanRequest;
use firn_gpu::{Gpu, GpuPair, GpuUuid, Link, PciePath, SourceGpu};

/// Something that the operator should know about a map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "warning", rename_all = "snake_case")]
pub enum Warning {
    /// The process still reports the PCI address that it had. What it looks up by that address (NCCL in NVML)
    /// is not found, or is another GPU.
    BusId {
        /// The GPU and its successor.
        pair: GpuPair,
        /// PCI address of the GPU.
        was: String,
        /// PCI address of its successor.
        is: String,
    },
    /// Two GPUs have fewer NVLinks than their predecessors.
    NvLinks(LostLink),
    /// Two GPUs are farther apart than their predecessors.
    Farther {
        /// The two GPUs of this node.
        gpus: [GpuUuid; 2],
        /// What their predecessors had in common.
        was: PciePath,
        /// What they have in common.
        is: PciePath,
    },
    /// The search for the map reached its limit. The map fits, but may not be the best.
    SearchCut {
        /// The limit.
        steps: u32,
    },
}

/// Two GPUs whose places have fewer NVLinks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LostLink {
    /// The two GPUs of the source.
    pub old: [GpuUuid; 2],
    /// Number of NVLinks between them.
    pub was: u32,
    /// Their successors.
    pub new: [GpuUuid; 2],
    /// Number of NVLinks between these.
    pub is: u32,
}

impl fmt::Display for LostLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([a, b], [x, y]) = (&self.old, &self.new);
        write!(
            f,
            "{a} and {b} had {} NVLinks between them, {x} and {y} have {}",
            self.was, self.is
        )
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BusId { pair, was, is } => write!(
                f,
                "GPU {} was at {was}, its successor {} is at {is}: the processes continue to use {was}, \
                 and one that asks NVML by that address (NCCL, for a new communicator) does not find it",
                pair.old, pair.new
            ),
            Self::NvLinks(lost) => write!(f, "GPUs {lost}: programs that reach a GPU from another may fail"),
            Self::Farther {
                gpus: [a, b],
                was,
                is,
            } => {
                write!(
                    f,
                    "GPUs {a} and {b} have {is} in common, their predecessors had {was}"
                )
            }
            Self::SearchCut { steps } => write!(
                f,
                "the search for the best GPUs ended after {steps} steps; the map fits and may not be the best"
            ),
        }
    }
}

/// Of GPUs and their successors.
pub(super) fn of(request: &PlanRequest<'_>, chosen: &[(&SourceGpu, &Gpu)]) -> Vec<Warning> {
    let moved = chosen
        .iter()
        .filter(|(old, new)| !old.pci_address.eq_ignore_ascii_case(&new.pci_address));
    let bus_ids = moved.map(|(old, new)| Warning::BusId {
        pair: super::pair(old, new),
        was: old.pci_address.clone(),
        is: new.pci_address.clone(),
    });
    let links = lost_links(request, chosen).into_iter().map(Warning::NvLinks);
    let farther = each_two(chosen).filter_map(|two| {
        let (was, is) = ways(request, two);
        let (was, is) = farther(was, is)?;
        let gpus = two.map(|(_, new)| new.uuid.clone());
        Some(Warning::Farther { gpus, was, is })
    });
    bus_ids.chain(links).chain(farther).collect()
}

/// Pairs of GPUs that have fewer NVLinks than their predecessors.
pub(super) fn lost_links(request: &PlanRequest<'_>, chosen: &[(&SourceGpu, &Gpu)]) -> Vec<LostLink> {
    let lost = |two: Two<'_>| {
        let (was, is) = ways(request, two);
        let (was, is) = fewer_nvlinks(was, is)?;
        Some(LostLink {
            old: two.map(|(old, _)| old.uuid.clone()),
            was,
            new: two.map(|(_, new)| new.uuid.clone()),
            is,
        })
    };
    each_two(chosen).filter_map(lost).collect()
}

/// The numbers of NVLinks, if there are fewer; those of which nothing is known have lost none.
pub(super) fn fewer_nvlinks(was: Option<&Link>, is: Option<&Link>) -> Option<(u32, u32)> {
    let (was, is) = (was?.nvlinks?, is?.nvlinks?);
    (is < was).then_some((was, is))
}

/// The ways on PCI Express, if it has become longer.
pub(super) fn farther(was: Option<&Link>, is: Option<&Link>) -> Option<(PciePath, PciePath)> {
    let (was, is) = (was?, is?);
    // Over NVLink the way through PCI Express is of no matter.
    if is.nvlinks.is_some_and(|links| links > 0) {
        return None;
    }
    let (was, is) = (was.path?, is.path?);
    (is > was).then_some((was, is))
}

/// Two GPUs and their successors.
type Two<'a> = [(&'a SourceGpu, &'a Gpu); 2];

/// What is known of the way between two GPUs, and of that between their successors.
fn ways<'a>(request: &PlanRequest<'a>, [one, other]: Two<'_>) -> (Option<&'a Link>, Option<&'a Link>) {
    (
        request.source_topology.link(&one.0.uuid, &other.0.uuid),
        request.target_topology.link(&one.1.uuid, &other.1.uuid),
    )
}

fn each_two<'a>(chosen: &'a [(&'a SourceGpu, &'a Gpu)]) -> impl Iterator<Item = Two<'a>> {
    let after = |(at, one): (usize, &'a _)| chosen[at + 1..].iter().map(move |other| [*one, *other]);
    chosen.iter().enumerate().flat_map(after)
}
