//! What a restore with a map does not keep, and nobody can repair.

use std::fmt;

use serde::Serialize;

use super::PlanRequest;
use firn_gpu::SourceGpu;
use firn_gpu::{Gpu, GpuPair, GpuUuid, PciePath};

/// Something that the operator should know about a map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "warning", rename_all = "snake_case")]
pub enum Warning {
    /// The process still reports the PCI address that it had. What it looks up by that address (NCCL in NVML)
    /// is not found, or is another GPU.
    BusId { pair: GpuPair, was: String, is: String },
    /// Two GPUs have fewer NVLinks than their predecessors.
    NvLinks(LostLink),
    /// Two GPUs are farther apart than their predecessors.
    Farther {
        gpus: [GpuUuid; 2],
        was: PciePath,
        is: PciePath,
    },
    /// The search for the map reached its limit. The map fits, but may not be the best.
    SearchCut { steps: u32 },
}

/// Two GPUs whose places have fewer NVLinks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LostLink {
    pub old: [GpuUuid; 2],
    pub was: u32,
    pub new: [GpuUuid; 2],
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
    bus_ids.chain(links).chain(farther(request, chosen)).collect()
}

/// Pairs of GPUs that have fewer NVLinks than their predecessors; those of which nothing is known have lost
/// none.
pub(super) fn lost_links(request: &PlanRequest<'_>, chosen: &[(&SourceGpu, &Gpu)]) -> Vec<LostLink> {
    let lost = |((old, new), (other_old, other_new)): Both<'_>| {
        let was = request
            .source_topology
            .link(&old.uuid, &other_old.uuid)?
            .nvlinks?;
        let is = request
            .target_topology
            .link(&new.uuid, &other_new.uuid)?
            .nvlinks?;
        (is < was).then(|| LostLink {
            old: [old.uuid.clone(), other_old.uuid.clone()],
            was,
            new: [new.uuid.clone(), other_new.uuid.clone()],
            is,
        })
    };
    each_two(chosen).filter_map(lost).collect()
}

fn farther<'a>(
    request: &'a PlanRequest<'_>,
    chosen: &'a [(&'a SourceGpu, &'a Gpu)],
) -> impl Iterator<Item = Warning> + 'a {
    each_two(chosen).filter_map(|((old, new), (other_old, other_new))| {
        let was = request.source_topology.link(&old.uuid, &other_old.uuid)?;
        let now = request.target_topology.link(&new.uuid, &other_new.uuid)?;
        // Over NVLink the way through PCI Express is of no matter.
        if now.nvlinks.is_some_and(|links| links > 0) {
            return None;
        }
        let (was, is) = (was.path?, now.path?);
        (is > was).then(|| Warning::Farther {
            gpus: [new.uuid.clone(), other_new.uuid.clone()],
            was,
            is,
        })
    })
}

type One<'a> = (&'a SourceGpu, &'a Gpu);
type Both<'a> = (One<'a>, One<'a>);

fn each_two<'a>(chosen: &'a [One<'a>]) -> impl Iterator<Item = Both<'a>> {
    let after = |(at, one): (usize, &'a One<'a>)| chosen[at + 1..].iter().map(move |other| (*one, *other));
    chosen.iter().enumerate().flat_map(after)
}
