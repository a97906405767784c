//! The search for the map that keeps the links between GPUs.
//!
//! The search is exhaustive, with pruning: a partial map that loses an NVLink, or that already costs as much
//! as the best complete one, is dropped. Only maps that fit and keep all NVLinks count. The best of them lets
//! most GPUs stay; among these it has the fewest pairs that are farther apart on PCI Express than before,
//! then the fewest GPUs at another NUMA node, then the fewest that are out of order, and then it comes first
//! in the order of minors.
//!
//! The limit of the search is a number of steps, one for each place that a GPU can take. It is not a time, so
//! the same input gives the same map on a busy machine too.

use firn_gpu::{Gpu, GpuUuid, Link, SourceGpu, Topology};

use super::PlanRequest;
use super::fit::{fits, own_place};
use super::warning::{farther, fewer_nvlinks};

/// More GPUs than this on a side are not searched.
const MOST_GPUS: usize = 16;

/// Steps at most.
pub(super) const MOST_STEPS: u32 = 20_000;

/// What the search has found.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Outcome {
    /// The best map that keeps all NVLinks: places in the grant, one for every source GPU.
    pub map: Option<Vec<usize>>,
    /// Whether the limit was reached before all maps that may be better were tried.
    pub is_cut: bool,
}

/// What a map costs; what comes first counts most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    moved: u32,
    farther: u32,
    other_numa_node: u32,
    out_of_order: u32,
}

/// What is known of the ways between each two GPUs of a side, by their places.
type Links<'a> = Vec<Vec<Option<&'a Link>>>;

fn links<'a>(topology: &'a Topology, gpus: &[&GpuUuid]) -> Links<'a> {
    let of = |a: &&GpuUuid| gpus.iter().map(|b| topology.link(a, b)).collect();
    gpus.iter().map(of).collect()
}

struct Search<'a> {
    request: &'a PlanRequest<'a>,
    source: &'a [&'a SourceGpu],
    grant: &'a [&'a Gpu],
    was: Links<'a>,
    is: Links<'a>,
    /// Where each GPU stays.
    own: Vec<Option<usize>>,
    /// GPUs in the order in which they are placed: first those that stay.
    order: Vec<usize>,
    /// Where each GPU goes; of no meaning for those that have no place yet.
    chosen: Vec<usize>,
    best: Option<(Cost, Vec<usize>)>,
    left: u32,
}

/// Looks for the best map in so many steps.
pub(super) fn search(
    request: &PlanRequest<'_>,
    source: &[&SourceGpu],
    grant: &[&Gpu],
    steps: u32,
) -> Outcome {
    if source.len() > MOST_GPUS || grant.len() > MOST_GPUS {
        return Outcome {
            map: None,
            is_cut: true,
        };
    }
    let old: Vec<&GpuUuid> = source.iter().map(|gpu| &gpu.uuid).collect();
    let new: Vec<&GpuUuid> = grant.iter().map(|gpu| &gpu.uuid).collect();
    let own: Vec<Option<usize>> = source.iter().map(|gpu| own_place(gpu, grant)).collect();
    let mut order: Vec<usize> = (0..source.len()).collect();
    firn_host::ordered::sort_few_by_key(&mut order, |i| own[*i].is_none());
    let mut search = Search {
        request,
        source,
        grant,
        was: links(request.source_topology, &old),
        is: links(request.target_topology, &new),
        own,
        order,
        chosen: vec![0; source.len()],
        best: None,
        left: steps,
    };
    search.place(0, Cost::default());
    Outcome {
        is_cut: search.left == 0 && !search.is_perfect(),
        map: search.best.map(|(_, map)| map),
    }
}

impl Search<'_> {
    /// A map without costs is the best, however many steps are left.
    fn is_perfect(&self) -> bool {
        self.best
            .as_ref()
            .is_some_and(|(cost, _)| *cost == Cost::default())
    }

    /// Places the GPUs from the `depth`th on; those before it cost `cost`.
    fn place(&mut self, depth: usize, cost: Cost) {
        let Some(&i) = self.order.get(depth) else {
            // It was not dropped on the way, so it is better than the best.
            self.best = Some((cost, self.chosen.clone()));
            return;
        };
        // Where it stays first, then in the order of minors.
        let own = self.own[i];
        let others = (0..self.grant.len()).filter(|t| Some(*t) != own);
        for t in own.into_iter().chain(others) {
            let Some(cost) = self.with(depth, i, t, cost) else {
                continue;
            };
            if self.left == 0 || self.is_perfect() {
                return;
            }
            self.left -= 1;
            if self.best.as_ref().is_none_or(|(best, _)| cost < *best) {
                self.chosen[i] = t;
                self.place(depth + 1, cost);
            }
        }
    }

    /// The cost when GPU `i` takes place `t`, given the places of the GPUs before it; none when it cannot.
    fn with(&self, depth: usize, i: usize, t: usize, mut cost: Cost) -> Option<Cost> {
        let (old, new) = (self.source[i], self.grant[t]);
        if !fits(old, new) {
            return None;
        }
        let stays = self.own[i] == Some(t);
        for &j in &self.order[..depth] {
            let u = self.chosen[j];
            let (was, is) = (self.was[i][j], self.is[t][u]);
            if t == u || fewer_nvlinks(was, is).is_some() {
                return None;
            }
            cost.farther += u32::from(farther(was, is).is_some());
            // Those that stay are where they are, whatever their order.
            let moved = !stays && self.own[j] != Some(u);
            cost.out_of_order += u32::from(moved && (i < j) != (t < u));
        }
        let nodes = (self.request.source_topology.numa.get(&old.uuid))
            .zip(self.request.target_topology.numa.get(&new.uuid));
        cost.other_numa_node += u32::from(nodes.is_some_and(|(was, is)| was != is));
        cost.moved += u32::from(self.own[i].is_some() && !stays);
        Some(cost)
    }
}
