//! The search for the map that keeps the links between GPUs.
//!
//! Exhaustive with pruning: a choice for one GPU takes from the others the places that it makes impossible, and a partial
//! map that is no better than the best whole one is left. Of the maps that fit and keep all NVLinks the best one lets most
//! GPUs stay where they are, then has the fewest pairs that are farther apart on PCI Express than before, then the fewest
//! GPUs at another NUMA node, then the fewest that are out of order, and among equals comes first in the order of minors.
//!
//! What the search takes is counted in steps, one for each place that is tried, and not in time: the same input gives the
//! same map on a busy machine too.

use super::choose::{fits, own_place};
use super::{Demand, SourceGpu};
use crate::{Gpu, GpuUuid, Link, Topology};

/// More GPUs than this on a side are not searched.
const MOST_GPUS: usize = 16;

/// Places that are tried at most; some milliseconds.
pub(super) const MOST_STEPS: u32 = 20_000;

/// Places in the grant, as bits.
type Places = u32;

/// What came of the search: places in the grant, one for every source GPU.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// None is better.
    Best(Vec<usize>),
    /// All is kept; a better one was not looked for to the end.
    SoFar(Vec<usize>),
    /// No map keeps all NVLinks.
    None,
    /// It ended before it found any.
    Cut,
}

/// Costs of a map, the worst in the highest bits; none has more than 120.
const MOVED: u32 = 1 << 24;
const FARTHER: u32 = 1 << 16;
const NUMA: u32 = 1 << 8;
const OUT_OF_ORDER: u32 = 1;

/// What is compared, by places of both sides.
struct Tables {
    /// Places that each GPU may take.
    fitting: Vec<Places>,
    /// Where each GPU stays.
    own: Vec<Option<usize>>,
    /// `[i][t][j]`: places that are left for GPU j when GPU i takes t.
    keeping: Vec<Vec<Vec<Places>>>,
    /// `[i][t][j]`: those of them where j is farther from i than it was.
    farther: Vec<Vec<Vec<Places>>>,
    /// Places at another NUMA node.
    elsewhere: Vec<Places>,
    /// GPUs in the order in which they are placed: first those that stay.
    order: Vec<usize>,
}

impl Tables {
    fn of(demand: &Demand<'_>, source: &[&SourceGpu], grant: &[&Gpu]) -> Self {
        let old: Vec<&GpuUuid> = source.iter().map(|gpu| &gpu.uuid).collect();
        let new: Vec<&GpuUuid> = grant.iter().map(|gpu| &gpu.uuid).collect();
        let (before, after) = (demand.source_topology, demand.target_topology);
        let (was, is) = (matrix(before, &old), matrix(after, &new));
        let keeps = |i: usize, t: usize, j: usize, u: usize| {
            let was = was[i][j].and_then(|link| link.nvlinks);
            let is = is[t][u].and_then(|link| link.nvlinks);
            t != u && was.is_none_or(|was| is.is_none_or(|is| is >= was))
        };
        let is_farther = |i: usize, t: usize, j: usize, u: usize| {
            let (Some(was), Some(is)) = (was[i][j], is[t][u]) else {
                return false;
            };
            // Over NVLink the way through PCI Express is of no matter.
            is.nvlinks.unwrap_or(0) == 0 && was.path.zip(is.path).is_some_and(|(was, is)| is > was)
        };
        let is_elsewhere = |i: usize, t: usize| {
            let nodes = before.numa.get(old[i]).zip(after.numa.get(new[t]));
            nodes.is_some_and(|(was, is)| was != is)
        };
        let own: Vec<Option<usize>> = source.iter().map(|old| own_place(old, grant)).collect();
        let mut order: Vec<usize> = (0..source.len()).collect();
        order.sort_by_key(|i| own[*i].is_none());
        let each = || 0..source.len();
        let places = |is_one: &dyn Fn(usize) -> bool| -> Places {
            (0..grant.len())
                .filter(|t| is_one(*t))
                .fold(0, |all, t| all | 1 << t)
        };
        let table = |is_one: &dyn Fn(usize, usize, usize, usize) -> bool| -> Vec<Vec<Vec<Places>>> {
            let row = |i, t| each().map(|j| places(&|u| is_one(i, t, j, u))).collect();
            each()
                .map(|i| (0..grant.len()).map(|t| row(i, t)).collect())
                .collect()
        };
        Self {
            fitting: each().map(|i| places(&|t| fits(source[i], grant[t]))).collect(),
            keeping: table(&keeps),
            farther: table(&is_farther),
            elsewhere: each().map(|i| places(&|t| is_elsewhere(i, t))).collect(),
            own,
            order,
        }
    }
}

/// What is known of the ways between each two of these GPUs.
fn matrix<'a>(topology: &'a Topology, gpus: &[&GpuUuid]) -> Vec<Vec<Option<&'a Link>>> {
    let row = |a: &&GpuUuid| gpus.iter().map(|b| topology.link(a, b)).collect();
    gpus.iter().map(row).collect()
}

struct Search<'a> {
    tables: &'a Tables,
    chosen: Vec<Option<usize>>,
    best: Option<(u32, Vec<usize>)>,
    left: u32,
}

/// Looks for the best map in so many steps.
pub(super) fn search(demand: &Demand<'_>, source: &[&SourceGpu], grant: &[&Gpu], steps: u32) -> Outcome {
    if source.len() > MOST_GPUS || grant.len() > MOST_GPUS {
        return Outcome::Cut;
    }
    let tables = Tables::of(demand, source, grant);
    let mut search = Search {
        tables: &tables,
        chosen: vec![None; source.len()],
        best: None,
        left: steps,
    };
    let mut open = [0; MOST_GPUS];
    open[..source.len()].copy_from_slice(&tables.fitting);
    search.place(0, open, 0);
    match (search.best, search.left) {
        // A map without costs is the best, however many steps are left.
        (Some((0, targets)), _) => Outcome::Best(targets),
        (Some((_, targets)), 0) => Outcome::SoFar(targets),
        (Some((_, targets)), _) => Outcome::Best(targets),
        (None, 0) => Outcome::Cut,
        (None, _) => Outcome::None,
    }
}

impl Search<'_> {
    /// Places the GPUs from the `depth`th on, of which each may take the places in `open`.
    fn place(&mut self, depth: usize, open: [Places; MOST_GPUS], cost: u32) {
        let Some(&i) = self.tables.order.get(depth) else {
            // It was not left on the way, so that it is better than the best.
            self.best = Some((cost, self.chosen.iter().flatten().copied().collect()));
            return;
        };
        // Where it stays first, then in the order of minors.
        let own = self.tables.own[i].filter(|at| open[i] & 1 << at != 0);
        let others = (0..MOST_GPUS).filter(|t| open[i] & 1 << t != 0 && Some(*t) != own);
        for t in own.into_iter().chain(others) {
            if self.left == 0 || self.best.as_ref().is_some_and(|(best, _)| *best == 0) {
                return;
            }
            self.left -= 1;
            let cost = cost + self.cost(i, t);
            if self.best.as_ref().is_some_and(|(best, _)| *best <= cost) {
                continue;
            }
            let mut narrowed = open;
            let later = &self.tables.order[depth + 1..];
            for &j in later {
                narrowed[j] &= self.tables.keeping[i][t][j];
            }
            if later.iter().all(|j| narrowed[*j] != 0) {
                self.chosen[i] = Some(t);
                self.place(depth + 1, narrowed, cost);
                self.chosen[i] = None;
            }
        }
    }

    /// What it costs to let GPU `i` take place `t`, beside the GPUs that have one.
    fn cost(&self, i: usize, t: usize) -> u32 {
        let tables = self.tables;
        let mut cost = 0;
        if tables.own[i].is_some_and(|own| own != t) {
            cost += MOVED;
        }
        if tables.elsewhere[i] & 1 << t != 0 {
            cost += NUMA;
        }
        for (j, u) in self.chosen.iter().enumerate() {
            let Some(u) = *u else { continue };
            if tables.farther[i][t][j] & 1 << u != 0 {
                cost += FARTHER;
            }
            // Those that stay are where they are, whatever their order.
            let stays = tables.own[i] == Some(t) || tables.own[j] == Some(u);
            if !stays && (i < j) != (t < u) {
                cost += OUT_OF_ORDER;
            }
        }
        cost
    }
}
