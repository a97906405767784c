//! The search for the map that keeps the links between GPUs.
//!
//! The search is exhaustive, with pruning: a choice for one GPU removes the places that it makes impossible
//! for the others, and a partial map that already costs as much as the best complete one is dropped. Only
//! maps that fit and keep all NVLinks count. The best of them lets most GPUs stay; among these it has the
//! fewest pairs that are farther apart on PCI Express than before, then the fewest GPUs at another NUMA node,
//! then the fewest that are out of order, and then it comes first in the order of minors.
//!
//! The limit of the search is a number of steps, one for each place that is tried. It is not a time, so the
//! same input gives the same map on a busy machine too.

use firn_gpu::{Gpu, GpuUuid, Link, SourceGpu, Topology};

use super::PlanRequest;
use super::fit::{fits, own_place};

/// More GPUs than this on a side are not searched.
const MOST_GPUS: usize = 16;

/// Places that are tried at most: about 3 ms in a release build.
pub(super) const MOST_STEPS: u32 = 20_000;

/// Places in the grant, as bits.
type Places = u32;

/// The result of the search: places in the grant, one for every source GPU.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// No map is better.
    Best(Vec<usize>),
    /// A map that keeps all NVLinks; the limit was reached before all others were tried.
    SoFar(Vec<usize>),
    /// No map keeps all NVLinks.
    None,
    /// The limit was reached before any map was found.
    Cut,
}

/// Costs of a map, the worst in the highest bits; none has more than 120.
const MOVED: u32 = 1 << 24;
const FARTHER: u32 = 1 << 16;
const NUMA: u32 = 1 << 8;
const OUT_OF_ORDER: u32 = 1;

/// Places that are left for, or looked at of, each GPU.
type Row = [Places; MOST_GPUS];

/// What is compared, by places of both sides.
struct Tables {
    /// Places that each GPU may take.
    fitting: Row,
    /// Where each GPU stays.
    own: [Option<usize>; MOST_GPUS],
    /// By [`at`]`(i, t)`: places that are left for each GPU when GPU i takes t.
    keeping: Vec<Row>,
    /// By the same: those of them where that GPU is farther from i than it was.
    farther: Vec<Row>,
    /// Places at another NUMA node.
    elsewhere: Row,
    /// GPUs in the order in which they are placed: first those that stay.
    order: Vec<usize>,
}

fn at(gpu: usize, place: usize) -> usize {
    gpu * MOST_GPUS + place
}

impl Tables {
    fn of(request: &PlanRequest<'_>, source: &[&SourceGpu], grant: &[&Gpu]) -> Self {
        let old: Vec<&GpuUuid> = source.iter().map(|gpu| &gpu.uuid).collect();
        let new: Vec<&GpuUuid> = grant.iter().map(|gpu| &gpu.uuid).collect();
        let (before, after) = (request.source_topology, request.target_topology);
        let (was, is) = (matrix(before, &old), matrix(after, &new));
        let (was_node, is_node) = (nodes(before, &old), nodes(after, &new));
        let mut tables = Self {
            fitting: [0; MOST_GPUS],
            own: [None; MOST_GPUS],
            keeping: vec![[0; MOST_GPUS]; MOST_GPUS * MOST_GPUS],
            farther: vec![[0; MOST_GPUS]; MOST_GPUS * MOST_GPUS],
            elsewhere: [0; MOST_GPUS],
            order: (0..source.len()).collect(),
        };
        for i in 0..source.len() {
            tables.own[i] = own_place(source[i], grant);
            for t in 0..grant.len() {
                tables.fitting[i] |= bit(t, fits(source[i], grant[t]));
                let moves = was_node[i].zip(is_node[t]).is_some_and(|(was, is)| was != is);
                tables.elsewhere[i] |= bit(t, moves);
                for j in 0..source.len() {
                    for u in 0..grant.len() {
                        let (was, is) = (was[i][j], is[t][u]);
                        tables.keeping[at(i, t)][j] |= bit(u, t != u && keeps(was, is));
                        tables.farther[at(i, t)][j] |= bit(u, is_farther(was, is));
                    }
                }
            }
        }
        let own = tables.own;
        firn_host::ordered::sort_few_by_key(&mut tables.order, |i| own[*i].is_none());
        tables
    }
}

fn bit(place: usize, is_set: bool) -> Places {
    Places::from(is_set) << place
}

fn keeps(was: Option<&Link>, is: Option<&Link>) -> bool {
    let nvlinks = |link: Option<&Link>| link.and_then(|link| link.nvlinks);
    nvlinks(was).is_none_or(|was| nvlinks(is).is_none_or(|is| is >= was))
}

fn is_farther(was: Option<&Link>, is: Option<&Link>) -> bool {
    let (Some(was), Some(is)) = (was, is) else {
        return false;
    };
    // Over NVLink the way through PCI Express is of no matter.
    is.nvlinks.unwrap_or(0) == 0 && was.path.zip(is.path).is_some_and(|(was, is)| is > was)
}

/// What is known of the ways between each two of these GPUs.
fn matrix<'a>(topology: &'a Topology, gpus: &[&GpuUuid]) -> [[Option<&'a Link>; MOST_GPUS]; MOST_GPUS] {
    let mut matrix = [[None; MOST_GPUS]; MOST_GPUS];
    let place = |of: &GpuUuid| gpus.iter().position(|gpu| *gpu == of);
    for link in &topology.links {
        let [a, b] = &link.gpus;
        if let (Some(a), Some(b)) = (place(a), place(b)) {
            // Of two that are about the same GPUs the first counts.
            for (a, b) in [(a, b), (b, a)] {
                matrix[a][b] = matrix[a][b].or(Some(link));
            }
        }
    }
    matrix
}

/// The NUMA nodes of these GPUs, as far as they are known.
fn nodes(topology: &Topology, gpus: &[&GpuUuid]) -> [Option<u32>; MOST_GPUS] {
    let mut nodes = [None; MOST_GPUS];
    for (node, gpu) in nodes.iter_mut().zip(gpus) {
        *node = topology.numa.get(*gpu).copied();
    }
    nodes
}

struct Search<'a> {
    tables: &'a Tables,
    /// Where each GPU goes; of no meaning for those that have no place yet.
    chosen: [usize; MOST_GPUS],
    best: Option<(u32, [usize; MOST_GPUS])>,
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
        return Outcome::Cut;
    }
    let tables = Tables::of(request, source, grant);
    let mut search = Search {
        tables: &tables,
        chosen: [0; MOST_GPUS],
        best: None,
        left: steps,
    };
    search.place(0, tables.fitting, 0);
    let targets = |chosen: [usize; MOST_GPUS]| chosen[..source.len()].to_vec();
    match (search.best, search.left) {
        // A map without costs is the best, however many steps are left.
        (Some((0, chosen)), _) => Outcome::Best(targets(chosen)),
        (Some((_, chosen)), 0) => Outcome::SoFar(targets(chosen)),
        (Some((_, chosen)), _) => Outcome::Best(targets(chosen)),
        (None, 0) => Outcome::Cut,
        (None, _) => Outcome::None,
    }
}

impl Search<'_> {
    /// Places the GPUs from the `depth`th on, of which each may take the places in `open`.
    fn place(&mut self, depth: usize, open: Row, cost: u32) {
        let tables = self.tables;
        let Some((&i, later)) = tables.order[depth..].split_first() else {
            // It was not dropped on the way, so it is better than the best.
            self.best = Some((cost, self.chosen));
            return;
        };
        let mut places = open[i];
        // Where it stays first, then in the order of minors.
        let mut own = tables.own[i].filter(|t| places & 1 << t != 0);
        while places != 0 {
            let t = own.take().unwrap_or(places.trailing_zeros() as usize);
            places &= !(1 << t);
            if self.left == 0 || self.best.is_some_and(|(best, _)| best == 0) {
                return;
            }
            self.left -= 1;
            let cost = cost + self.cost(depth, i, t);
            if self.best.is_some_and(|(best, _)| best <= cost) {
                continue;
            }
            let mut narrowed = open;
            let keeping = &tables.keeping[at(i, t)];
            let is_left = later.iter().all(|&j| {
                narrowed[j] &= keeping[j];
                narrowed[j] != 0
            });
            if is_left {
                self.chosen[i] = t;
                self.place(depth + 1, narrowed, cost);
            }
        }
    }

    /// What it adds to the cost that GPU `i` takes place `t`, given the places of the GPUs before it.
    fn cost(&self, depth: usize, i: usize, t: usize) -> u32 {
        let tables = self.tables;
        let mut cost = 0;
        if tables.own[i].is_some_and(|own| own != t) {
            cost += MOVED;
        }
        if tables.elsewhere[i] & 1 << t != 0 {
            cost += NUMA;
        }
        let farther = &tables.farther[at(i, t)];
        let stays = tables.own[i] == Some(t);
        for &j in &tables.order[..depth] {
            let u = self.chosen[j];
            if farther[j] & 1 << u != 0 {
                cost += FARTHER;
            }
            // Those that stay are where they are, whatever their order.
            if !stays && tables.own[j] != Some(u) && (i < j) != (t < u) {
                cost += OUT_OF_ORDER;
            }
        }
        cost
    }
}
