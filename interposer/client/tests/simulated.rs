//! The library over the simulated driver: memory leaves a process, the driver checkpoints and restores it, on
//! the same GPU or another, and memory comes back.
#![allow(
    clippy::unwrap_used,
    reason = "a fixture that cannot be started is a test that fails"
)]

#[path = "../../tests/common/mod.rs"]
mod common;
#[path = "../../../tests/simgpu/cuda/tests/support/mod.rs"]
mod support;

use std::collections::BTreeSet;

use firn_interposer::abi::{Answer, Request};
use firn_interposer_client::{Library, Process};
use firn_workloads::counter::checksum;
use rustix::process::Pid;
use support::{Node, TWO, eventually, field, missing};

/// Milliseconds that a step has. A machine under load takes its time.
const WAIT: u32 = 60_000;

const SWAP: &[(usize, usize)] = &[(0, 1), (1, 0)];

fn demand(process: &mut Process, request: Request) {
    assert_eq!(process.ask(request).unwrap(), Answer::Done, "{request:?}");
}

#[test]
fn memory_is_out_while_the_driver_checkpoints() {
    require!(missing());
    let node = Node::new(TWO);
    let file = common::library();
    let library = Library::read(&file).unwrap();
    let counter = node.counter_of(&[("LD_PRELOAD", &file)], &["--mib", "16"]);
    counter.iteration();
    let pid = Pid::from_raw(counter.pid()).unwrap();
    let mut process = eventually("the library", || library.process(pid).unwrap());
    assert_eq!((node.used(0), node.used(1)), (20, 0));
    for (pairs, used) in [
        (&[][..], (20, 0)),
        (SWAP, (0, 20)),
        (SWAP, (20, 0)),
        (&[], (20, 0)),
    ] {
        demand(&mut process, Request::Shut { wait: WAIT });
        demand(&mut process, Request::Rehearse { wait: WAIT });
        let pieces = process.lend(0, WAIT).unwrap().unwrap();
        assert_eq!(pieces.len(), 1);
        demand(&mut process, Request::Detach { wait: WAIT });
        let left = node.used(0) + node.used(1);
        assert_eq!(left, 4, "results and context");
        let steps = node.step("lock,checkpoint,restore,unlock", counter.pid(), pairs);
        assert_eq!(steps, ["SUCCESS"; 4]);
        counter.drain();
        assert_eq!(process.attach(0, &pieces, WAIT).unwrap(), Answer::Done);
        drop(pieces);
        demand(&mut process, Request::Open);
        let line = counter.line();
        let computed = checksum(16 << 20, field(&line, "iter").parse().unwrap());
        assert_eq!(field(&line, "checksum"), computed.to_string());
        assert_eq!((node.used(0), node.used(1)), used);
    }
}

/// A handle that another process has opened: neither can be taken apart, and both continue.
#[test]
fn memory_that_processes_share_stays() {
    require!(missing());
    let node = Node::new(TWO);
    let file = common::library();
    let library = Library::read(&file).unwrap();
    let counter = node.counter_of(&[("LD_PRELOAD", &file)], &["--ipc"]);
    let importer = field(&counter.line_of("importer"), "pid").parse().unwrap();
    for pid in [counter.pid(), importer].map(Pid::from_raw) {
        let pid = pid.unwrap();
        let mut process = eventually("the library", || library.process(pid).unwrap());
        demand(&mut process, Request::Shut { wait: WAIT });
        demand(&mut process, Request::Rehearse { wait: WAIT });
        let refused = Answer::Refused { status: 801 };
        assert_eq!(process.lend(0, WAIT).unwrap().unwrap_err(), refused);
        demand(&mut process, Request::Open);
    }
    let words: BTreeSet<String> = (0..50)
        .map(|_| field(&counter.line_of("importer"), "first"))
        .collect();
    assert!(words.len() > 1, "it sees nothing of the other one: {words:?}");
}
