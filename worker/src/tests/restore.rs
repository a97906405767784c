//! Restores, and the `cuInit` that some of them need.

use firn_gpu::protocol::{GpuMemory, Reply, Request};
use firn_gpu::{CudaState, GpuPair, GpuUuid};

use super::fake::Fake;
use super::{Shim, lock, pair, states};

#[test]
fn cuinit_is_called_for_a_restore_onto_a_gpu_without_persistence_mode_only() {
    let fake = Fake::with_processes(&[11]);
    fake.set_persistence(1, true);
    fake.set_persistence(2, false);
    fake.lose_no_gpu();
    let mut shim = Shim::start(&fake);
    let restore = |pairs: &[GpuPair]| Request::Restore {
        pids: vec![11],
        pairs: pairs.to_vec(),
        needs: GpuMemory::new(),
        own: Vec::new(),
    };
    let cycle = |shim: &mut Shim, pairs: &[GpuPair]| {
        shim.succeed(&lock(&[11]));
        shim.succeed(&Request::Checkpoint { pids: vec![11] });
        shim.succeed(&restore(pairs));
        shim.succeed(&Request::Unlock { pids: vec![11] });
    };
    cycle(&mut shim, &[pair(2, 1)]);
    assert_eq!(fake.inits(), 0);
    // Without a map the restore may use any GPU of the node.
    cycle(&mut shim, &[]);
    assert_eq!(fake.inits(), 1);
    cycle(&mut shim, &[pair(1, 2)]);
    assert_eq!(fake.inits(), 1, "cuInit was called twice");
    shim.close();
}

#[test]
fn a_restore_whose_cuinit_fails_changes_nothing() {
    let fake = Fake::with_processes(&[11]);
    fake.refuse_init();
    let mut shim = Shim::start(&fake);
    shim.succeed(&lock(&[11]));
    shim.succeed(&Request::Checkpoint { pids: vec![11] });
    let (message, hint) = shim.fail(&Request::Restore {
        pids: vec![11],
        pairs: vec![],
        needs: GpuMemory::new(),
        own: Vec::new(),
    });
    assert!(
        message.ends_with("cuInit answered CUDA_ERROR_NO_DEVICE"),
        "{message}"
    );
    assert!(hint.contains("nvidia-smi"), "{hint}");
    assert_eq!(fake.restored(), []);
    shim.close();
}

#[test]
fn a_driver_that_requires_cuinit_is_called_again_after_it() {
    let fake = Fake::with_processes(&[11]);
    fake.demand_init();
    let mut shim = Shim::start(&fake);
    let replies = shim.succeed(&lock(&[11]));
    assert_eq!(states(&replies), [(11, Some(CudaState::Locked))]);
    assert_eq!(replies[0].error, None);
    assert_eq!(fake.inits(), 1);
    shim.close();
}

/// The fake's GPUs have 140 GiB free each; process 7 uses GPU 1.
#[test]
fn a_restore_without_enough_gpu_memory_never_reaches_the_driver() {
    let fake = Fake::with_processes(&[11]);
    let mut shim = Shim::start(&fake);
    shim.succeed(&lock(&[11]));
    shim.succeed(&Request::Checkpoint { pids: vec![11] });
    let gpu = |n: u8| GpuUuid::from_bytes([n; 16]);
    let restore = |n: u8, bytes: u64| Request::Restore {
        pids: vec![11],
        pairs: Vec::new(),
        needs: GpuMemory::from([(gpu(n), bytes)]),
        own: vec![11],
    };
    let all = 140 << 30;
    shim.send(&restore(2, all + 1));
    let refused = shim.read();
    let expected = Reply::NoMemory {
        gpu: gpu(2),
        free: all,
        needed: all + 1,
    };
    assert_eq!(refused, expected);
    // Another process uses this GPU: its context and the worker's need some megabytes that NVML
    // reports for no process.
    shim.send(&restore(1, all));
    let refused = shim.read();
    assert!(
        matches!(refused, Reply::NoMemory { needed, .. } if needed > all),
        "{refused:?}"
    );
    assert_eq!(fake.restored(), []);
    shim.succeed(&restore(2, all));
    assert_eq!(fake.restored(), [(11, Vec::new())]);
    shim.close();
}

/// Process 7, which has 3 GiB of GPU 1 still, is of the same container: there is room for both.
#[test]
fn memory_of_the_same_container_is_no_obstacle() {
    let fake = Fake::with_processes(&[11]);
    let mut shim = Shim::start(&fake);
    shim.succeed(&lock(&[11]));
    shim.succeed(&Request::Checkpoint { pids: vec![11] });
    let restore = |bytes| Request::Restore {
        pids: vec![11],
        pairs: Vec::new(),
        needs: GpuMemory::from([(GpuUuid::from_bytes([1; 16]), bytes)]),
        own: vec![7, 11],
    };
    let all = 143 << 30;
    shim.send(&restore(all + 1));
    let refused = shim.read();
    assert!(
        matches!(refused, Reply::NoMemory { needed, .. } if needed == (140 << 30) + 1),
        "{refused:?}"
    );
    shim.succeed(&restore(all));
    assert_eq!(fake.restored(), [(11, Vec::new())]);
    shim.close();
}
