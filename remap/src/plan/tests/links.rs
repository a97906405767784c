//! Maps that keep the links between GPUs.

use std::collections::BTreeMap;

use super::super::search::search;
use super::super::strategies;
use firn_host::Problem;

use super::*;
use firn_gpu::{Link, PciePath};

/// A link with so many NVLinks and, unless it is none, this path.
fn link(a: u8, b: u8, nvlinks: u32, path: impl Into<Option<PciePath>>) -> Link {
    let mut link = Link::between(uuid(a), uuid(b));
    link.nvlinks = Some(nvlinks);
    link.path = path.into();
    link
}

fn topology(links: Vec<Link>) -> Topology {
    Topology {
        links,
        numa: BTreeMap::new(),
    }
}

/// Bridges between neighbours: 0-1, 2-3 and so on have four links, all others none.
fn bridged(gpus: &[u8]) -> Topology {
    let mut links = Vec::new();
    for (at, a) in gpus.iter().enumerate() {
        for b in &gpus[at + 1..] {
            let nvlinks = if a / 2 == b / 2 { 4 } else { 0 };
            links.push(link(*a, *b, nvlinks, None));
        }
    }
    topology(links)
}

fn sources(numbers: &[u8]) -> Vec<SourceGpu> {
    numbers.iter().map(|n| source(*n, 80)).collect()
}

fn gpus(numbers: &[u8]) -> Vec<Gpu> {
    numbers.iter().map(|n| gpu(*n, 80)).collect()
}

#[test]
fn gpus_that_were_bridged_are_bridged_again() {
    let before = bridged(&[0, 1, 2, 3]);
    // On the target the bridges are elsewhere: 10-13 and 11-12.
    let after = topology(vec![
        link(10, 11, 0, None),
        link(10, 12, 0, None),
        link(10, 13, 4, None),
        link(11, 12, 4, None),
        link(11, 13, 0, None),
        link(12, 13, 0, None),
    ]);
    let (had, granted) = (sources(&[0, 1, 2, 3]), gpus(&[10, 11, 12, 13]));
    let plan = linked(&had, &granted, [&before, &after], &MapPolicy::Auto).unwrap();
    assert_eq!(
        plan.map.pairs(),
        [pair(0, 10), pair(1, 13), pair(2, 11), pair(3, 12)]
    );
    let in_order = explicit_map(&[(0, 10), (1, 11), (2, 12), (3, 13)]);
    let by_map = linked(&had, &granted, [&before, &after], &in_order).unwrap();
    let lost = by_map
        .warnings
        .iter()
        .filter(|warning| matches!(warning, Warning::NvLinks(_)));
    assert_eq!(
        lost.count(),
        2,
        "the operator's map is used, and what it loses is reported"
    );
}

#[test]
fn a_grant_without_the_nvlinks_is_refused_and_both_sides_are_named() {
    let (before, after) = (bridged(&[0, 1]), bridged(&[11, 12]));
    let (had, granted) = (sources(&[0, 1]), gpus(&[11, 12]));
    let error = linked(&had, &granted, [&before, &after], &MapPolicy::Auto).unwrap_err();
    assert_eq!(error.code(), "FIRN-GPU-TOPOLOGY");
    let text = error.to_string();
    for name in [0, 1, 11, 12].map(|n| uuid(n).to_string()) {
        assert!(text.contains(&name), "{name} is not in: {text}");
    }
    assert!(
        text.contains("had 4 NVLinks") && text.contains("have 0"),
        "{text}"
    );
    assert!(error.hint().contains("gpu-map"));
}

#[test]
fn a_subset_is_chosen_by_its_links() {
    let before = bridged(&[0, 1]);
    let after = bridged(&[11, 12, 13, 15]);
    let granted = gpus(&[11, 12, 13, 15]);
    let plan = linked(&sources(&[0, 1]), &granted, [&before, &after], &MapPolicy::Subset).unwrap();
    assert_eq!(plan.map.pairs(), [pair(0, 12), pair(1, 13)]);
}

#[test]
fn what_is_not_known_asks_for_nothing() {
    let (known, nothing) = (bridged(&[0, 1]), Topology::default());
    let granted = gpus(&[11, 12]);
    for topologies in [[&known, &nothing], [&nothing, &bridged(&[11, 12])]] {
        let plan = linked(&sources(&[0, 1]), &granted, topologies, &MapPolicy::Auto).unwrap();
        assert_eq!(plan.map.pairs(), [pair(0, 11), pair(1, 12)]);
    }
}

#[test]
fn gpus_stay_unless_that_would_cost_an_nvlink() {
    let before = bridged(&[0, 1]);
    // GPU 1 is there too, and has lost its bridge.
    let after = topology(vec![
        link(1, 8, 0, None),
        link(1, 9, 0, None),
        link(8, 9, 4, None),
    ]);
    let granted = gpus(&[1, 8, 9]);
    let plan = linked(&sources(&[0, 1]), &granted, [&before, &after], &MapPolicy::Subset).unwrap();
    assert_eq!(plan.map.pairs(), [pair(0, 8), pair(1, 9)]);
}

#[test]
fn of_maps_that_keep_the_nvlinks_the_one_with_near_gpus_is_taken() {
    use PciePath::{Switch, System};
    let before = topology(vec![
        link(0, 1, 0, Switch),
        link(0, 2, 0, System),
        link(1, 2, 0, System),
    ]);
    let after = topology(vec![
        link(10, 11, 0, System),
        link(10, 12, 0, Switch),
        link(11, 12, 0, System),
    ]);
    let (had, granted) = (sources(&[0, 1, 2]), gpus(&[10, 11, 12]));
    let plan = linked(&had, &granted, [&before, &after], &MapPolicy::Auto).unwrap();
    assert_eq!(plan.map.pairs(), [pair(0, 10), pair(1, 12), pair(2, 11)]);

    let in_order = explicit_map(&[(0, 10), (1, 11), (2, 12)]);
    let by_map = linked(&had, &granted, [&before, &after], &in_order).unwrap();
    let farther = |warning: &&Warning| {
        matches!(
            warning,
            Warning::Farther {
                was: Switch,
                is: System,
                ..
            }
        )
    };
    assert_eq!(by_map.warnings.iter().filter(farther).count(), 1);
}

#[test]
fn gpus_of_the_same_numa_node_are_preferred() {
    let numa = |nodes: &[(u8, u32)]| Topology {
        links: vec![],
        numa: nodes.iter().map(|(gpu, node)| (uuid(*gpu), *node)).collect(),
    };
    let (before, after) = (numa(&[(0, 1)]), numa(&[(10, 0), (11, 1)]));
    let plan = linked(
        &sources(&[0]),
        &gpus(&[10, 11]),
        [&before, &after],
        &MapPolicy::Subset,
    )
    .unwrap();
    assert_eq!(plan.map.pairs(), [pair(0, 11)]);
}

/// Sixteen GPUs, every two of them with a number of NVLinks and a path drawn by the seed.
fn drawn(base: u8, seed: u64) -> Topology {
    let mut state = seed | 1;
    let mut draw = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let mut links = Vec::new();
    for a in base..base + 16 {
        for b in a + 1..base + 16 {
            let path =
                [PciePath::Switch, PciePath::Node, PciePath::System][usize::try_from(draw(3)).unwrap()];
            links.push(link(a, b, u32::try_from(draw(2)).unwrap(), path));
        }
    }
    topology(links)
}

#[test]
fn the_search_ends_after_its_steps_whatever_the_links() {
    let (had, granted) = (
        sources(&(0..16).collect::<Vec<_>>()),
        gpus(&(20..36).collect::<Vec<_>>()),
    );
    for seed in 1..20 {
        let (before, after) = (drawn(0, seed), drawn(20, seed + 100));
        let request = PlanRequest {
            source: &had,
            source_topology: &before,
            source_driver: "580.95.05",
            grant: &granted,
            target_topology: &after,
            target_driver: "580.95.05",
            policy: &MapPolicy::Auto,
        };
        let (had, granted): (Vec<_>, Vec<_>) = (had.iter().collect(), granted.iter().collect());
        for steps in [0, 1, 17, 1000] {
            let found = search(&request, &had, &granted, steps);
            assert_eq!(found, search(&request, &had, &granted, steps), "the same again");
            let begun = steps > 16 || found.map.is_none();
            assert!(begun, "a map in {steps} steps: {found:?}");
        }
        // Random links are never kept: the answer is that there is none, or that it was not found.
        let found = strategies::best(&request, &had, &granted);
        assert!(
            matches!(&found, Err(PlanError::TopologyUnsatisfied { .. }))
                || matches!(&found, Ok((_, Some(Warning::SearchCut { .. })))),
            "{found:?}"
        );
    }
}

/// How long the hardest searches take. `cargo test --release -p firn-gpu --lib -- --ignored what_the_search`
#[test]
#[ignore = "measures time, which a busy machine has none of"]
fn what_the_search_takes() {
    let (had, granted) = (
        sources(&(0..16).collect::<Vec<_>>()),
        gpus(&(20..36).collect::<Vec<_>>()),
    );
    let mut worst = std::time::Duration::ZERO;
    for seed in 1..200 {
        // No NVLinks at all on the source: everything is kept, and the nearest map is looked for to the last
        // step.
        let mut before = drawn(0, seed);
        before
            .links
            .iter_mut()
            .filter(|_| seed % 2 == 0)
            .for_each(|link| link.nvlinks = Some(0));
        let mut after = drawn(20, seed + 500);
        after.links.iter_mut().for_each(|link| link.nvlinks = Some(0));
        let begun = std::time::Instant::now();
        let _ = linked(&had, &granted, [&before, &after], &MapPolicy::Auto);
        worst = worst.max(begun.elapsed());
    }
    println!("the longest of 199 searches over 16 GPUs took {worst:?}");
    assert!(worst < std::time::Duration::from_millis(50), "{worst:?}");
}

/// Whether any injection has fitting pairs and keeps all NVLinks, by trying all.
fn exists_keeping(had: &[SourceGpu], granted: &[Gpu], topologies: [&Topology; 2]) -> bool {
    fn go(
        had: &[SourceGpu],
        granted: &[Gpu],
        topologies: [&Topology; 2],
        chosen: &mut Vec<(SourceGpu, Gpu)>,
    ) -> bool {
        let Some((old, rest)) = had.split_first() else {
            return true;
        };
        granted.iter().any(|new| {
            let free = chosen.iter().all(|(_, taken)| taken.uuid != new.uuid);
            let keeps = chosen.iter().all(|(other_old, other_new)| {
                let of = |topology: &Topology, a, b| topology.link(a, b).and_then(|link| link.nvlinks);
                let was = of(topologies[0], &old.uuid, &other_old.uuid);
                let is = of(topologies[1], &new.uuid, &other_new.uuid);
                was.is_none_or(|was| is.is_none_or(|is| is >= was))
            });
            if !(free && keeps && fit::fits(old, new)) {
                return false;
            }
            chosen.push((old.clone(), new.clone()));
            let found = go(rest, granted, topologies, chosen);
            chosen.pop();
            found
        })
    }
    go(had, granted, topologies, &mut Vec::new())
}

const PATHS: [Option<PciePath>; 4] = [
    None,
    Some(PciePath::Switch),
    Some(PciePath::Node),
    Some(PciePath::System),
];

prop_compose! {
    /// Some GPUs of two models and two sizes, with links drawn from few values, so that maps exist often
    /// enough.
    fn side(base: u8, most: usize)(count in 0..=most)(
        traits in proptest::collection::vec(0u8..8, count),
        ways in proptest::collection::vec((0u32..8, 0u8..4), count * count),
        numa in proptest::collection::vec(0u32..3, count),
        count in Just(count),
    ) -> (Vec<Gpu>, Topology) {
        let numbers: Vec<u8> = (0..count).map(|n| base + u8::try_from(n).unwrap()).collect();
        let gpus = numbers.iter().zip(&traits).map(|(n, traits)| match traits {
            0 => gpu(*n, 96),
            1 => Gpu { name: "NVIDIA A10".to_owned(), pci_device_id: 1, ..gpu(*n, 80) },
            _ => gpu(*n, 80),
        });
        let mut links = Vec::new();
        for a in 0..count {
            for b in a + 1..count {
                let (lanes, path) = ways[a * count + b];
                let path = PATHS[usize::from(path)];
                // Most have none; one in eight is not known.
                let mut way = link(numbers[a], numbers[b], if lanes == 1 { 4 } else { 0 }, path);
                if lanes == 2 {
                    way.nvlinks = None;
                }
                links.push(way);
            }
        }
        let known = numbers.iter().zip(numa).filter(|(_, node)| *node < 2);
        let numa = known.map(|(n, node)| (uuid(*n), node)).collect();
        (gpus.collect(), Topology { links, numa })
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_map_over_any_topology_is_an_injection_that_fits_and_keeps_the_links(
        (old, before) in side(0, 16),
        (new, after) in side(10, 16),
    ) {
        let had: Vec<SourceGpu> = old.iter().map(SourceGpu::from).collect();
        let result = linked(&had, &new, [&before, &after], &MapPolicy::Subset);
        if let Ok(plan) = &result {
            let pairs = plan.map.pairs();
            prop_assert_eq!(pairs.len(), had.len());
            let mut targets: Vec<_> = pairs.iter().map(|pair| &pair.new).collect();
            targets.sort();
            targets.dedup();
            prop_assert_eq!(targets.len(), had.len());
            let chosen: Vec<(&SourceGpu, &Gpu)> = pairs.iter().map(|pair| {
                let old = had.iter().find(|gpu| gpu.uuid == pair.old).unwrap();
                (old, new.iter().find(|gpu| gpu.uuid == pair.new).unwrap())
            }).collect();
            prop_assert!(chosen.iter().all(|(old, new)| fit::fits(old, new)));
            let cut = plan.warnings.iter().any(|warning| matches!(warning, Warning::SearchCut { .. }));
            let lost = plan.warnings.iter().any(|warning| matches!(warning, Warning::NvLinks(_)));
            prop_assert!(cut || !lost, "{:?}", plan.warnings);
        }
        let (mut old, mut new, mut before, mut after) = (had, new, before, after);
        old.reverse();
        new.reverse();
        before.links.reverse();
        after.links.reverse();
        prop_assert_eq!(linked(&old, &new, [&before, &after], &MapPolicy::Subset), result);
    }

    #[test]
    fn a_map_is_found_whenever_there_is_one((old, before) in side(0, 5), (new, after) in side(3, 6)) {
        let had: Vec<SourceGpu> = old.iter().map(SourceGpu::from).collect();
        let result = linked(&had, &new, [&before, &after], &MapPolicy::Subset);
        // Sides that report one GPU differently: if it stays, it may take the place that another GPU needs.
        let changed = old.iter().any(|old| {
            let there = new.iter().find(|new| new.uuid == old.uuid);
            there.is_some_and(|there| (&there.name, there.memory_total) != (&old.name, old.memory_total))
        });
        if !changed {
            prop_assert_eq!(result.is_ok(), exists_keeping(&had, &new, [&before, &after]), "{:?}", result);
        }
    }
}
