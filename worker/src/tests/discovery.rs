//! Discovery of the processes that use CUDA.

use firn_gpu::protocol::Request;

use super::fake::Fake;
use super::{Shim, lock, states};

#[test]
fn discovery_queries_likely_processes_and_returns_restore_threads() {
    let fake = Fake::with_processes(&[11]);
    fake.maps(11, "/dev/nvidiactl");
    // Has loaded libcuda and does not use it; the driver would report a state nevertheless.
    fake.maps(12, "/usr/lib/libcuda.so.580.95.05");
    fake.maps(13, "/usr/lib/libc.so.6");
    let mut shim = Shim::start(&fake);
    let replies = shim.succeed(&Request::Discover {
        pids: vec![13, 12, 11, 4711],
    });
    let pids: Vec<_> = replies.iter().map(|reply| reply.pid).collect();
    assert_eq!(pids, [11, 12, 13, 4711]);
    assert!(
        replies.iter().all(|reply| reply.state.is_none()),
        "the state was read, which hangs while a process is frozen"
    );
    let tids: Vec<_> = replies.iter().map(|reply| reply.restore_tid).collect();
    assert_eq!(tids, [Some(1011), None, None, None]);
    assert!(replies.iter().all(|reply| reply.error.is_none()), "{replies:?}");
    assert_eq!(fake.asked_for_tid(), [11, 12, 12], "once more after cuInit");
    shim.close();
}

#[test]
fn an_error_of_the_driver_is_not_taken_for_a_process_without_cuda() {
    let fake = Fake::with_processes(&[11]);
    fake.maps(11, "/dev/nvidia-uvm");
    fake.refuse_tid();
    let mut shim = Shim::start(&fake);
    let replies = shim.succeed(&Request::Discover { pids: vec![11] });
    let error = replies[0].error.as_ref().map(|error| error.code);
    assert_eq!((replies[0].restore_tid, error), (None, Some(999)));
    shim.close();
}

#[test]
fn a_failed_cuinit_is_an_error_of_the_process() {
    let fake = Fake::with_processes(&[]);
    fake.maps(12, "/usr/lib/libcuda.so.1");
    fake.refuse_init();
    let mut shim = Shim::start(&fake);
    let replies = shim.succeed(&Request::Discover { pids: vec![12] });
    let error = replies[0].error.as_ref().map(|error| error.call.as_str());
    assert_eq!(error, Some("cuInit"));
    shim.close();
}

#[test]
fn a_checkpointed_process_is_discovered_by_its_library_alone() {
    let fake = Fake::with_processes(&[11]);
    fake.maps(11, "/usr/local/cuda/compat/libcuda.so.1");
    let mut shim = Shim::start(&fake);
    shim.succeed(&lock(&[11]));
    shim.succeed(&Request::Checkpoint { pids: vec![11] });
    let replies = shim.succeed(&Request::Discover { pids: vec![11] });
    assert_eq!(replies[0].restore_tid, Some(1011));
    shim.close();
}

#[test]
fn a_node_without_driver_has_no_cuda_processes() {
    let fake = Fake::without_driver();
    fake.maps(12, "/usr/lib/libcuda.so.1");
    let mut shim = Shim::start(&fake);
    let replies = shim.succeed(&Request::Discover { pids: vec![12, 13] });
    assert_eq!(states(&replies), [(12, None), (13, None)]);
    shim.close();
}

#[test]
fn a_process_with_a_gpu_and_no_driver_is_an_error() {
    let fake = Fake::without_driver();
    fake.maps(11, "/dev/nvidia0");
    let mut shim = Shim::start(&fake);
    let (message, hint) = shim.fail(&Request::Discover { pids: vec![11] });
    assert!(
        message.starts_with("no CUDA driver: cannot open libcuda.so.1"),
        "{message}"
    );
    assert!(hint.contains("install the NVIDIA driver"), "{hint}");
    shim.close();
}
