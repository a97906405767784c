mod links;
mod policies;

use proptest::prelude::*;

use firn_host::Problem;

use super::*;

const MIB: u64 = 1 << 20;
const H200: u32 = 0x2335_10de;

fn uuid(n: u8) -> GpuUuid {
    GpuUuid::from_bytes([n; 16])
}

fn gpu(n: u8, memory_mib: u64) -> Gpu {
    Gpu {
        uuid: uuid(n),
        name: "NVIDIA H200".to_owned(),
        pci_device_id: H200,
        pci_address: format!("00000000:{n:02X}:00.0"),
        memory_total: memory_mib * MIB,
        memory_free: memory_mib * MIB,
        minor: u32::from(n),
        mig: false,
        persistence: true,
        node: None,
    }
}

fn source(n: u8, memory_mib: u64) -> SourceGpu {
    SourceGpu::from(&gpu(n, memory_mib))
}

fn pair(old: u8, new: u8) -> GpuPair {
    GpuPair {
        old: uuid(old),
        new: uuid(new),
    }
}

fn planned(source: &[SourceGpu], grant: &[Gpu], policy: &MapPolicy) -> Result<GpuMap, PlanError> {
    linked(source, grant, [&Topology::default(); 2], policy).map(|plan| plan.map)
}

/// With the ways between the GPUs of both sides.
fn linked(
    source: &[SourceGpu],
    grant: &[Gpu],
    topologies: [&Topology; 2],
    policy: &MapPolicy,
) -> Result<Plan, PlanError> {
    let driver = "580.95.05";
    plan(&PlanRequest {
        source,
        source_topology: topologies[0],
        source_driver: driver,
        grant,
        target_topology: topologies[1],
        target_driver: driver,
        policy,
    })
}

fn explicit_map(pairs: &[(u8, u8)]) -> MapPolicy {
    MapPolicy::Explicit(pairs.iter().map(|(old, new)| pair(*old, *new)).collect())
}

#[test]
fn the_same_gpus_need_no_pairs() {
    let map = planned(
        &[source(1, 80), source(0, 80)],
        &[gpu(0, 80), gpu(1, 80)],
        &MapPolicy::Auto,
    )
    .unwrap();
    assert!(map.is_identity());
    assert_eq!(map.pairs(), [pair(0, 0), pair(1, 1)]);
    assert_eq!(map.for_driver(), []);
}

#[test]
fn gpus_that_stay_are_paired_first_and_are_given_to_the_driver_too() {
    // In minor order alone, 1 would go to 2.
    let map = planned(
        &[source(1, 80), source(2, 80)],
        &[gpu(2, 80), gpu(3, 80)],
        &MapPolicy::Auto,
    )
    .unwrap();
    assert_eq!(map.pairs(), [pair(1, 3), pair(2, 2)]);
    assert_eq!(map.for_driver(), map.pairs());
}

#[test]
fn others_are_paired_in_minor_order() {
    let map = planned(
        &[source(1, 80), source(0, 80)],
        &[gpu(9, 80), gpu(7, 80)],
        &MapPolicy::Auto,
    )
    .unwrap();
    assert_eq!(map.pairs(), [pair(0, 7), pair(1, 9)]);
}

#[test]
fn a_small_gpu_does_not_take_the_place_of_a_large_one() {
    let map = planned(
        &[source(0, 40), source(1, 80)],
        &[gpu(7, 80), gpu(8, 40)],
        &MapPolicy::Auto,
    )
    .unwrap();
    assert_eq!(map.pairs(), [pair(0, 8), pair(1, 7)]);
}

#[test]
fn no_gpus_on_both_sides_is_the_empty_map() {
    let map = planned(&[], &[], &MapPolicy::Auto).unwrap();
    assert!(map.is_identity() && map.pairs().is_empty());
}

#[test]
fn an_explicit_map_may_permute_and_leave_gpus_unused() {
    let (had, granted) = (
        [source(0, 80), source(1, 80)],
        [gpu(0, 80), gpu(1, 80), gpu(2, 80)],
    );
    let map = planned(&had, &granted, &explicit_map(&[(1, 0), (0, 1)])).unwrap();
    assert_eq!(map.for_driver(), [pair(0, 1), pair(1, 0)]);
}

#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn every_refusal_has_its_code_and_names_both_sides() {
    let (h0, h1) = (source(0, 80), source(1, 80));
    let other_model = |n| Gpu {
        name: "NVIDIA A10".to_owned(),
        pci_device_id: 1,
        ..gpu(n, 80)
    };
    let auto = &MapPolicy::Auto;
    let cases: Vec<(Result<GpuMap, PlanError>, &str, Vec<String>)> = vec![
        (
            planned(std::slice::from_ref(&h0), &[], auto),
            "FIRN-GPU-COUNT",
            vec![uuid(0).to_string(), "none".into()],
        ),
        (
            planned(std::slice::from_ref(&h0), &[gpu(5, 80), gpu(6, 80)], auto),
            "FIRN-GPU-COUNT",
            vec![uuid(0).to_string(), uuid(6).to_string()],
        ),
        (
            planned(
                &[h0.clone(), h1.clone()],
                &[gpu(5, 80)],
                &explicit_map(&[(0, 5), (1, 5)]),
            ),
            "FIRN-GPU-COUNT",
            vec![uuid(1).to_string(), uuid(5).to_string()],
        ),
        (
            planned(std::slice::from_ref(&h0), &[other_model(5)], auto),
            "FIRN-GPU-MODEL",
            vec![
                uuid(0).to_string(),
                "NVIDIA H200".into(),
                uuid(5).to_string(),
                "NVIDIA A10".into(),
            ],
        ),
        (
            planned(std::slice::from_ref(&h0), &[gpu(5, 79)], auto),
            "FIRN-GPU-MEMORY",
            vec![
                uuid(0).to_string(),
                "80 MiB".into(),
                uuid(5).to_string(),
                "79 MiB".into(),
            ],
        ),
        (
            planned(std::slice::from_ref(&h0), &[gpu(5, 79)], &explicit_map(&[(0, 5)])),
            "FIRN-GPU-MEMORY",
            vec![uuid(0).to_string(), uuid(5).to_string()],
        ),
        (
            planned(
                &[h0.clone(), h1.clone()],
                &[gpu(0, 80), gpu(5, 80)],
                &explicit_map(&[(1, 5)]),
            ),
            "FIRN-MAP-INCOMPLETE",
            vec![uuid(0).to_string()],
        ),
        (
            planned(std::slice::from_ref(&h0), &[gpu(5, 80)], &explicit_map(&[(0, 6)])),
            "FIRN-MAP-UNKNOWN-TARGET",
            vec![uuid(6).to_string(), uuid(5).to_string()],
        ),
        (
            planned(std::slice::from_ref(&h0), &[gpu(5, 80)], &explicit_map(&[(3, 5)])),
            "FIRN-MAP-UNKNOWN-SOURCE",
            vec![uuid(3).to_string(), uuid(0).to_string()],
        ),
        (
            planned(
                &[h0.clone(), h1.clone()],
                &[gpu(5, 80), gpu(6, 80)],
                &explicit_map(&[(0, 5), (0, 6)]),
            ),
            "FIRN-MAP-DUPLICATE",
            vec![uuid(0).to_string(), "source".into()],
        ),
        (
            planned(
                &[h0.clone(), h1.clone()],
                &[gpu(5, 80), gpu(6, 80)],
                &explicit_map(&[(0, 5), (1, 5)]),
            ),
            "FIRN-MAP-DUPLICATE",
            vec![uuid(5).to_string(), "target".into()],
        ),
        (
            planned(
                std::slice::from_ref(&h0),
                &[Gpu {
                    mig: true,
                    ..gpu(5, 80)
                }],
                auto,
            ),
            "FIRN-GPU-MIG",
            vec![uuid(5).to_string(), "target".into()],
        ),
        (
            planned(
                &[SourceGpu {
                    mig: true,
                    ..h0.clone()
                }],
                &[gpu(5, 80)],
                auto,
            ),
            "FIRN-GPU-MIG",
            vec![uuid(0).to_string(), "source".into()],
        ),
        (
            planned(&[h0.clone(), h0.clone()], &[gpu(5, 80), gpu(6, 80)], auto),
            "FIRN-GPU-LISTED-TWICE",
            vec![uuid(0).to_string(), "source".into()],
        ),
        (
            planned(&[h0.clone(), h1.clone()], &[gpu(5, 80), gpu(5, 80)], auto),
            "FIRN-GPU-LISTED-TWICE",
            vec![uuid(5).to_string(), "target".into()],
        ),
    ];
    for (result, code, named) in cases {
        let error = result.unwrap_err();
        let text = error.to_string();
        assert_eq!(error.code(), code, "{text}");
        for name in named {
            assert!(text.contains(&name), "{name} is not in: {text}");
        }
        assert!(!error.hint().is_empty());
    }
}

#[test]
fn the_driver_must_be_the_same_and_new_enough_to_change_gpus() {
    let (had, granted) = ([source(0, 80)], [gpu(5, 80)]);
    let nothing = Topology::default();
    let request = |source_driver, target_driver, grant| {
        plan(&PlanRequest {
            source: &had,
            source_topology: &nothing,
            source_driver,
            grant,
            target_topology: &nothing,
            target_driver,
            policy: &MapPolicy::Auto,
        })
        .map(|plan| plan.map)
    };
    let error = request("580.95.05", "580.105.08", &granted).unwrap_err();
    assert_eq!(error.code(), "FIRN-DRIVER-VERSION");
    assert!(error.to_string().contains("580.95.05") && error.to_string().contains("580.105.08"));

    let error = request("575.57.08", "575.57.08", &granted).unwrap_err();
    assert_eq!(error.code(), "FIRN-DRIVER-TOO-OLD");
    assert!(error.to_string().contains("575.57.08"));
    let stays = [gpu(0, 80)];
    assert!(request("575.57.08", "575.57.08", &stays).unwrap().is_identity());
    assert!(!request("610.43", "610.43", &granted).unwrap().is_identity());
}

#[test]
fn maps_are_read_from_text() {
    let text = format!(" {}={} ,{} = {},", uuid(0), uuid(5), uuid(1), uuid(6));
    assert_eq!(parse_map(&text).unwrap(), [pair(0, 5), pair(1, 6)]);
    assert_eq!(parse_map("").unwrap(), []);
    let upper = format!("GPU-{}={}", uuid(0xab).as_str()[4..].to_uppercase(), uuid(1));
    assert_eq!(parse_map(&upper).unwrap(), [pair(0xab, 1)]);
    for bad in [
        "GPU-0",
        "GPU-0=GPU-1",
        uuid(0).as_str(),
        &format!("{}=all", uuid(0)),
    ] {
        let error = parse_map(bad).unwrap_err();
        assert_eq!(error.code(), "FIRN-MAP-SYNTAX", "{error}");
    }
}

/// Whether any bijection has fitting pairs only, by trying all.
fn exists(source: &[SourceGpu], grant: &[Gpu]) -> bool {
    let Some((old, rest)) = source.split_first() else {
        return true;
    };
    (0..grant.len()).any(|at| {
        let new = &grant[at];
        let fits = new.pci_device_id == old.pci_device_id
            && new.name == old.name
            && new.memory_total >= old.memory_total;
        let mut others = grant.to_vec();
        others.remove(at);
        fits && exists(rest, &others)
    })
}

/// A GPU of one of two models and three sizes; its properties follow from its number, as a real GPU's do.
fn any_gpu(n: u8, traits: u8) -> Gpu {
    let base = gpu(n, [40, 80, 96][usize::from(traits % 3)]);
    if traits & 4 == 0 {
        base
    } else {
        Gpu {
            name: "NVIDIA A10".to_owned(),
            pci_device_id: 1,
            ..base
        }
    }
}

fn two_sides() -> impl Strategy<Value = (Vec<SourceGpu>, Vec<Gpu>)> {
    (
        proptest::collection::vec(0u8..8, 10),
        0usize..6,
        proptest::sample::subsequence((0u8..10).collect::<Vec<_>>(), 5),
    )
        .prop_flat_map(|(traits, count, target)| {
            let sources: Vec<u8> = (0..10).collect();
            (
                Just(traits),
                proptest::sample::subsequence(sources, count.min(5)).prop_shuffle(),
                Just(target).prop_shuffle(),
                Just(count.min(5)),
            )
        })
        .prop_map(|(traits, source, target, count)| {
            let make = |n: &u8| any_gpu(*n, traits[usize::from(*n)]);
            (
                source.iter().map(|n| SourceGpu::from(&make(n))).collect(),
                target.iter().take(count).map(make).collect(),
            )
        })
}

proptest! {
    #[test]
    fn an_automatic_map_is_a_fitting_bijection_found_whenever_there_is_one((had, granted) in two_sides()) {
        let result = planned(&had, &granted, &MapPolicy::Auto);
        prop_assert_eq!(result.is_ok(), exists(&had, &granted));
        if let Ok(map) = &result {
            prop_assert_eq!(map.pairs().len(), had.len());
            for old in &had {
                let new: Vec<_> = map.pairs().iter().filter(|pair| pair.old == old.uuid).collect();
                prop_assert_eq!(new.len(), 1);
                let new = granted.iter().find(|gpu| gpu.uuid == new[0].new);
                prop_assert!(new.is_some_and(|new| new.pci_device_id == old.pci_device_id
                    && new.name == old.name
                    && new.memory_total >= old.memory_total));
                // What both sides have stays.
                if granted.iter().any(|gpu| gpu.uuid == old.uuid) {
                    prop_assert_eq!(new.map(|new| &new.uuid), Some(&old.uuid));
                }
            }
            let mut targets: Vec<_> = map.pairs().iter().map(|pair| &pair.new).collect();
            targets.sort();
            targets.dedup();
            prop_assert_eq!(targets.len(), had.len());
        }

        let (mut had, mut granted) = (had, granted);
        had.reverse();
        granted.reverse();
        prop_assert_eq!(planned(&had, &granted, &MapPolicy::Auto), result);
    }

    #[test]
    fn the_automatic_map_is_accepted_as_an_explicit_one((had, granted) in two_sides()) {
        if let Ok(map) = planned(&had, &granted, &MapPolicy::Auto) {
            let again = planned(&had, &granted, &MapPolicy::Explicit(map.pairs().to_vec()));
            prop_assert_eq!(again, Ok(map));
        }
    }

    #[test]
    fn reading_a_map_never_panics(text in ".{0,80}") {
        let _ = parse_map(&text);
    }
}
