//! Each policy, and what it refuses.

use firn_host::Problem;

use super::*;

#[test]
fn strict_lets_every_gpu_stay_and_names_those_that_cannot() {
    let had = [source(0, 80), source(1, 80)];
    let map = planned(&had, &[gpu(1, 80), gpu(0, 80)], &MapPolicy::Strict).unwrap();
    assert!(map.is_identity() && map.for_driver().is_empty());

    let error = planned(&had, &[gpu(1, 80), gpu(2, 80)], &MapPolicy::Strict).unwrap_err();
    assert_eq!(error.code(), "FIRN-GPU-STRICT");
    let missing = vec![uuid(0)];
    let granted = vec![uuid(1), uuid(2)];
    assert_eq!(error, PlanError::StrictUnmet { missing, granted });
    assert!(error.hint().contains("firn.dev/remap-policy"));

    let more = [gpu(0, 80), gpu(1, 80), gpu(2, 80)];
    let error = planned(&had, &more, &MapPolicy::Strict).unwrap_err();
    assert_eq!(error.code(), "FIRN-GPU-COUNT");
}

#[test]
fn subset_takes_as_many_as_are_needed_and_those_that_stay_first() {
    let had = [source(0, 80), source(5, 80)];
    let granted = [gpu(3, 40), gpu(4, 80), gpu(5, 80), gpu(6, 80)];
    let map = planned(&had, &granted, &MapPolicy::Subset).unwrap();
    assert_eq!(map.pairs(), [pair(0, 4), pair(5, 5)]);

    let error = planned(&had, &granted, &MapPolicy::Auto).unwrap_err();
    assert_eq!(error.code(), "FIRN-GPU-COUNT");
    assert!(error.hint().contains("subset"));
    let error = planned(&had, &granted[..1], &MapPolicy::Subset).unwrap_err();
    assert_eq!(error.code(), "FIRN-GPU-COUNT");
    let error = planned(&had, &[gpu(3, 40), gpu(4, 80), gpu(7, 40)], &MapPolicy::Subset).unwrap_err();
    assert_eq!(error.code(), "FIRN-GPU-MEMORY");
}

#[test]
fn more_gpus_than_are_searched_are_paired_in_order_with_a_warning() {
    let had: Vec<SourceGpu> = (0..17).map(|n| source(n, 80)).collect();
    let granted: Vec<Gpu> = (20..37).map(|n| gpu(n, 80)).collect();
    let nothing = Topology::default();
    let plan = linked(&had, &granted, [&nothing; 2], &MapPolicy::Auto).unwrap();
    let expected: Vec<GpuPair> = (0..17).map(|n| pair(n, n + 20)).collect();
    assert_eq!(plan.map.pairs(), expected);
    assert!(matches!(plan.warnings.last(), Some(Warning::SearchCut { .. })));
}

#[test]
fn a_gpu_that_moves_to_another_bus_id_is_a_warning() {
    let nothing = Topology::default();
    let topologies = [&nothing; 2];
    let had = [source(0, 80), source(1, 80)];
    let plan = linked(&had, &[gpu(1, 80), gpu(7, 80)], topologies, &MapPolicy::Auto).unwrap();
    assert_eq!(plan.map.pairs(), [pair(0, 7), pair(1, 1)]);
    let [warning] = &plan.warnings[..] else {
        panic!("{:?}", plan.warnings)
    };
    let text = warning.to_string();
    assert!(
        text.contains("00000000:00:00.0") && text.contains("00000000:07:00.0"),
        "{text}"
    );

    let same_place = Gpu {
        pci_address: had[0].pci_address.to_lowercase(),
        ..gpu(7, 80)
    };
    let plan = linked(&had[..1], &[same_place], topologies, &MapPolicy::Auto).unwrap();
    assert_eq!(plan.warnings, []);
}
