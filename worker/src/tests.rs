//! The worker over a real socket pair, with a fake driver behind the traits.

mod discovery;
pub(super) mod fake;
mod restore;

use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::session::serve;
use fake::{Fake, Gate};
use firn_gpu::protocol::{DriverError, GpuMemory, ProcessReply, Reply, Request};
use firn_gpu::{CudaState, GpuPair, GpuUuid};

/// Longest wait for something that happens at once unless the code is wrong.
const DEADLINE: Duration = Duration::from_secs(20);

/// The shim's end of a session.
struct Shim {
    stream: BufReader<UnixStream>,
    worker: Option<JoinHandle<()>>,
}

impl Shim {
    fn start(fake: &Arc<Fake>) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(DEADLINE)).unwrap();
        let node = fake.node();
        let worker = thread::spawn(move || serve(theirs, None, node).unwrap());
        Self {
            stream: BufReader::new(ours),
            worker: Some(worker),
        }
    }

    fn write(&mut self, line: &[u8]) {
        self.stream.get_mut().write_all(line).unwrap();
    }

    fn send(&mut self, request: &Request) {
        let mut line = serde_json::to_vec(request).unwrap();
        line.push(b'\n');
        self.write(&line);
    }

    fn read(&mut self) -> Reply {
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    fn read_process(&mut self) -> ProcessReply {
        match self.read() {
            Reply::Process(reply) => reply,
            other => panic!("{other:?}"),
        }
    }

    /// All replies to a request: those of processes by pid, and the last one.
    fn call(&mut self, request: &Request) -> (Vec<ProcessReply>, Reply) {
        self.send(request);
        let mut processes = Vec::new();
        loop {
            match self.read() {
                Reply::Process(reply) => processes.push(reply),
                last => {
                    processes.sort_by_key(|reply| reply.pid);
                    return (processes, last);
                }
            }
        }
    }

    /// Like `call`, for a request that must succeed.
    fn succeed(&mut self, request: &Request) -> Vec<ProcessReply> {
        let (processes, last) = self.call(request);
        assert!(matches!(last, Reply::Done { .. }), "{last:?}");
        processes
    }

    fn fail(&mut self, request: &Request) -> (String, String) {
        let (processes, last) = self.call(request);
        assert_eq!(processes, []);
        let Reply::Failed { message, hint } = last else {
            panic!("{last:?}")
        };
        (message, hint)
    }

    /// Closes the shim's end and waits until the worker has ended.
    fn close(mut self) {
        self.stream.get_ref().shutdown(Shutdown::Both).unwrap();
        let worker = self.worker.take().unwrap();
        let (left, has_left) = std::sync::mpsc::channel();
        thread::spawn(move || left.send(worker.join()));
        has_left
            .recv_timeout(DEADLINE)
            .expect("the worker does not end")
            .unwrap();
    }
}

fn lock(pids: &[i32]) -> Request {
    Request::Lock {
        pids: pids.to_vec(),
        timeout_ms: 1000,
    }
}

fn states(replies: &[ProcessReply]) -> Vec<(i32, Option<CudaState>)> {
    replies.iter().map(|reply| (reply.pid, reply.state)).collect()
}

fn pair(old: u8, new: u8) -> GpuPair {
    GpuPair {
        old: GpuUuid::from_bytes([old; 16]),
        new: GpuUuid::from_bytes([new; 16]),
    }
}

#[test]
fn a_process_goes_through_all_states_and_keeps_its_map() {
    let fake = Fake::with_processes(&[11, 12]);
    let mut shim = Shim::start(&fake);
    let pids = vec![11, 12];
    let all = |state| vec![(11, Some(state)), (12, Some(state))];

    assert_eq!(states(&shim.succeed(&lock(&pids))), all(CudaState::Locked));
    assert_eq!(
        states(&shim.succeed(&Request::Checkpoint { pids: pids.clone() })),
        all(CudaState::Checkpointed)
    );
    let pairs = vec![pair(1, 2)];
    let restore = Request::Restore {
        pids: pids.clone(),
        pairs: pairs.clone(),
        needs: GpuMemory::new(),
        own: Vec::new(),
    };
    assert_eq!(states(&shim.succeed(&restore)), all(CudaState::Locked));
    assert_eq!(fake.restored(), [(11, pairs.clone()), (12, pairs)]);
    assert_eq!(
        states(&shim.succeed(&Request::Unlock { pids: pids.clone() })),
        all(CudaState::Running)
    );
    assert_eq!(
        states(&shim.succeed(&Request::State { pids })),
        all(CudaState::Running)
    );
    shim.close();
}

#[test]
fn processes_of_one_request_are_handled_concurrently() {
    let pids = [11, 12, 13, 14];
    let fake = Fake::with_processes(&pids);
    // Each call waits in the driver until all four have entered it.
    fake.meet_in_checkpoint(4);
    let mut shim = Shim::start(&fake);
    shim.succeed(&lock(&pids));
    let replies = shim.succeed(&Request::Checkpoint { pids: pids.to_vec() });
    assert_eq!(replies.len(), 4);
    assert!(replies.iter().all(|reply| reply.error.is_none()), "{replies:?}");
    shim.close();
}

#[test]
fn a_finished_process_is_reported_while_another_call_hangs() {
    let fake = Fake::with_processes(&[11, 12]);
    let mut shim = Shim::start(&fake);
    shim.succeed(&lock(&[11, 12]));
    let gate = fake.hang(12);
    shim.send(&Request::Checkpoint { pids: vec![11, 12] });
    assert_eq!(
        states(&[shim.read_process()]),
        [(11, Some(CudaState::Checkpointed))]
    );
    gate.wait_for_entry();
    gate.open();
    assert_eq!(
        states(&[shim.read_process()]),
        [(12, Some(CudaState::Checkpointed))]
    );
    assert!(matches!(shim.read(), Reply::Done { .. }));
    shim.close();
}

#[test]
fn the_worker_ends_when_the_socket_closes_although_a_call_hangs() {
    let fake = Fake::with_processes(&[11]);
    let gate: Arc<Gate> = fake.hang(11);
    let mut shim = Shim::start(&fake);
    shim.send(&lock(&[11]));
    gate.wait_for_entry();
    shim.close();
    gate.open();
}

#[test]
fn requests_are_answered_in_their_order() {
    let fake = Fake::with_processes(&[11]);
    let mut shim = Shim::start(&fake);
    shim.send(&lock(&[11]));
    shim.send(&Request::Checkpoint { pids: vec![11] });
    assert_eq!(shim.read_process().state, Some(CudaState::Locked));
    assert!(matches!(shim.read(), Reply::Done { .. }));
    assert_eq!(shim.read_process().state, Some(CudaState::Checkpointed));
    assert!(matches!(shim.read(), Reply::Done { .. }));
    shim.close();
}

#[test]
fn a_refused_call_is_reported_with_the_resulting_state() {
    let fake = Fake::with_processes(&[11, 12]);
    let mut shim = Shim::start(&fake);
    shim.succeed(&lock(&[11]));
    let replies = shim.succeed(&Request::Checkpoint { pids: vec![11, 12] });
    assert_eq!(
        states(&replies),
        [
            (11, Some(CudaState::Checkpointed)),
            (12, Some(CudaState::Running))
        ]
    );
    assert_eq!(replies[0].error, None);
    let expected = DriverError {
        call: "cuCheckpointProcessCheckpoint".into(),
        code: 401,
        name: "CUDA_ERROR_ILLEGAL_STATE".into(),
    };
    assert_eq!(replies[1].error, Some(expected));
    shim.close();
}

#[test]
fn the_state_of_an_unknown_process_is_an_error_of_that_process() {
    let fake = Fake::with_processes(&[11]);
    let mut shim = Shim::start(&fake);
    let replies = shim.succeed(&Request::State { pids: vec![11, 99] });
    assert_eq!(states(&replies), [(11, Some(CudaState::Running)), (99, None)]);
    assert_eq!(replies[1].error.as_ref().map(|error| error.code), Some(1));
    shim.close();
}

#[test]
fn a_call_after_which_the_state_cannot_be_read_is_no_success() {
    let fake = Fake::with_processes(&[11]);
    fake.refuse_state();
    let mut shim = Shim::start(&fake);
    let replies = shim.succeed(&lock(&[11]));
    assert_eq!(states(&replies), [(11, None)]);
    let call = replies[0].error.as_ref().map(|error| error.call.as_str());
    assert_eq!(call, Some("cuCheckpointProcessGetState"));
    shim.close();
}

#[test]
fn malformed_requests_are_refused_and_the_session_goes_on() {
    let fake = Fake::with_processes(&[11]);
    let mut shim = Shim::start(&fake);
    for line in [
        "\n",
        "nonsense\n",
        "{\"op\":\"reboot\"}\n",
        "{\"op\":\"lock\",\"pids\":[11]}\n",
        "{\"op\":\"lock\",\"pids\":[99999999999],\"timeout_ms\":1}\n",
        "{\"op\":\"restore\",\"pids\":[11],\"pairs\":[{\"old\":\"GPU-1\",\"new\":\"GPU-2\"}]}\n",
        "\u{fffd}\0\n",
    ] {
        shim.write(line.as_bytes());
        let Reply::Failed { message, hint } = shim.read() else {
            panic!("{line}")
        };
        assert!(message.starts_with("malformed request: "), "{message}");
        assert!(!hint.is_empty());
    }
    let (message, _) = shim.fail(&Request::State { pids: vec![11, 0] });
    assert_eq!(message, "0 is no process id");
    assert_eq!(
        states(&shim.succeed(&lock(&[11]))),
        [(11, Some(CudaState::Locked))]
    );
    shim.close();
}

#[test]
fn an_endless_line_is_refused() {
    let fake = Fake::with_processes(&[]);
    let mut shim = Shim::start(&fake);
    shim.write(&vec![b' '; (1 << 20) + 1]);
    let Reply::Failed { message, .. } = shim.read() else {
        panic!()
    };
    assert_eq!(message, "the request is longer than 1048576 bytes");
    shim.close();
}

#[test]
fn a_pid_that_is_named_twice_is_handled_once() {
    let fake = Fake::with_processes(&[11]);
    let mut shim = Shim::start(&fake);
    let replies = shim.succeed(&lock(&[11, 11]));
    assert_eq!(states(&replies), [(11, Some(CudaState::Locked))]);
    assert_eq!(replies[0].error, None);
    shim.close();
}

#[test]
fn requests_that_need_a_missing_driver_are_refused_with_a_hint() {
    let fake = Fake::without_driver();
    let mut shim = Shim::start(&fake);
    let (message, hint) = shim.fail(&lock(&[11]));
    assert!(
        message.starts_with("no CUDA driver: cannot open libcuda.so.1"),
        "{message}"
    );
    assert!(hint.contains("LD_LIBRARY_PATH"), "{hint}");
    let (message, hint) = shim.fail(&Request::Inventory);
    assert!(
        message.starts_with("no inventory of GPUs: cannot open libnvidia-ml.so.1"),
        "{message}"
    );
    assert!(hint.contains("LD_LIBRARY_PATH"), "{hint}");
    shim.close();
}

#[test]
fn a_driver_without_the_checkpoint_calls_is_named() {
    let fake = Fake::with_old_driver();
    let mut shim = Shim::start(&fake);
    let (message, hint) = shim.fail(&lock(&[11]));
    assert!(
        message.contains("libcuda.so.1 has no cuCheckpointProcessLock"),
        "{message}"
    );
    assert!(hint.contains("570"), "{hint}");
    let (_, last) = shim.call(&Request::Inventory);
    let Reply::Inventory { inventory } = last else {
        panic!("{last:?}")
    };
    assert!(!inventory.checkpoint_api);
    assert!(matches!(shim.read(), Reply::Done { .. }));
    shim.close();
}

#[test]
fn the_inventory_joins_gpus_with_nodes() {
    let fake = Fake::with_processes(&[]);
    let mut shim = Shim::start(&fake);
    let (_, last) = shim.call(&Request::Inventory);
    let Reply::Inventory { inventory } = last else {
        panic!("{last:?}")
    };
    assert!(matches!(shim.read(), Reply::Done { .. }));
    assert_eq!(inventory.driver_version, "580.95.05");
    assert_eq!(inventory.cuda_version, 13000);
    assert!(inventory.checkpoint_api);
    // The fake lists three GPUs, of which the second is lost.
    let uuids: Vec<_> = inventory.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    assert_eq!(
        uuids,
        [GpuUuid::from_bytes([1; 16]), GpuUuid::from_bytes([2; 16])]
    );
    assert!(inventory.gpus.iter().all(|gpu| gpu.node.is_none()));
    assert_eq!(inventory.common_nodes, []);
    let link = inventory.topology.link(&uuids[0], &uuids[1]).unwrap();
    assert_eq!((link.nvlinks, link.path), (Some(18), None));
    shim.close();
}
