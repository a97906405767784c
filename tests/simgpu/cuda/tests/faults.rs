//! Scripted faults, as tests of firn's failure paths use them.

mod support;

use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use support::{Counter, Node, PATIENCE, TWO, missing};

fn start() -> (Node, Counter) {
    let node = Node::new(TWO);
    let counter = node.busy_counter(&[]);
    (node, counter)
}

#[test]
fn an_error_instead_of_the_call_leaves_the_state() {
    require!(missing());
    let (node, counter) = start();
    node.simgpu(&[
        "fault",
        "add",
        "--call",
        "checkpoint",
        "--times",
        "1",
        "--error",
        "CUDA_ERROR_LAUNCH_FAILED",
    ]);
    assert_eq!(
        node.step("lock,checkpoint,state,checkpoint,state", counter.pid(), &[]),
        ["SUCCESS", "LAUNCH_FAILED", "1", "SUCCESS", "2"]
    );
}

#[test]
fn an_error_after_the_call_hides_that_it_was_done() {
    require!(missing());
    let (node, counter) = start();
    node.simgpu(&[
        "fault",
        "add",
        "--call",
        "lock",
        "--after",
        "--error",
        "CUDA_ERROR_UNKNOWN",
    ]);
    assert_eq!(node.step("lock,state", counter.pid(), &[]), ["UNKNOWN", "1"]);
}

#[test]
fn rules_pick_process_and_occasion() {
    require!(missing());
    let (node, counter) = start();
    let other = node.counter(&[]);
    other.iteration();
    let pid = counter.pid().to_string();
    node.simgpu(&[
        "fault",
        "add",
        "--call",
        "lock",
        "--pid",
        &pid,
        "--nth",
        "2",
        "--error",
        "CUDA_ERROR_NOT_READY",
    ]);
    node.simgpu(&[
        "fault",
        "add",
        "--call",
        "unlock",
        "--comm",
        "another",
        "--error",
        "CUDA_ERROR_UNKNOWN",
    ]);
    assert_eq!(
        node.step("lock,unlock,lock,state", counter.pid(), &[]),
        ["SUCCESS", "SUCCESS", "NOT_READY", "0"]
    );
    assert_eq!(
        node.step("lock,unlock,lock,unlock", other.pid(), &[]),
        ["SUCCESS"; 4]
    );
    node.simgpu(&["fault", "clear"]);
    assert_eq!(node.step("lock", counter.pid(), &[]), ["SUCCESS"]);
}

#[test]
fn calls_can_be_late_hang_or_crash_their_caller() {
    require!(missing());
    let (node, counter) = start();
    node.simgpu(&["fault", "add", "--call", "tid", "--delay-ms", "300"]);
    let before = Instant::now();
    node.step("tid", counter.pid(), &[]);
    assert!(before.elapsed() >= Duration::from_millis(300));

    node.simgpu(&["fault", "add", "--call", "checkpoint", "--hang"]);
    let mut caller = node.caller("lock,checkpoint", counter.pid(), &[]);
    assert_eq!(caller.answers(Duration::from_secs(1)), None);
    caller.kill();
    assert_eq!(node.state(counter.pid()), "1");

    node.simgpu(&["fault", "add", "--call", "unlock", "--after", "--crash"]);
    let mut caller = node.caller("unlock", counter.pid(), &[]);
    assert_eq!(caller.answers(PATIENCE), Some(Vec::new()));
    assert_eq!(caller.wait().signal(), Some(6));
    assert_eq!(node.state(counter.pid()), "0");
}

#[test]
fn a_script_that_cannot_be_read_fails_the_call() {
    require!(missing());
    let (node, counter) = start();
    std::fs::write(node.state_dir().join("faults.json"), "{\"rules\": 1}").unwrap();
    assert_eq!(node.step("lock", counter.pid(), &[]), ["UNKNOWN"]);
}
