//! Locks, the freezer and held threads: what hangs, what continues, and what a killed caller leaves behind.

mod support;

use std::time::Duration;

use support::control::{self, Held, Running};
use support::freezer::{self, Group};
use support::{Counter, Node, PATIENCE, TWO, eventually, field, missing};

/// Longer than any call that does not hang, and than the lock timeout that the callers give (200 ms).
const A_WHILE: Duration = Duration::from_millis(1500);

fn start() -> (Node, Counter, i32) {
    let node = Node::new(TWO);
    let counter = node.busy_counter(&[]);
    let restore_tid = node.restore_tid(counter.pid());
    (node, counter, restore_tid)
}

fn expect_unharmed(node: &Node, counter: &Counter) {
    assert_eq!(node.state(counter.pid()), "0");
    counter.drain();
    counter.iteration();
    assert_eq!(
        node.step("lock,checkpoint,restore,unlock", counter.pid(), &[]),
        ["SUCCESS"; 4]
    );
}

#[test]
fn a_lock_of_a_stopped_process_hangs_and_dies_with_its_caller() {
    require!(missing());
    let (node, counter, _) = start();
    control::stop(counter.pid());
    let mut caller = node.caller("lock", counter.pid(), &[]);
    assert_eq!(
        caller.answers(A_WHILE),
        None,
        "the driver ignores the lock's timeout"
    );
    caller.kill();
    control::go_on(counter.pid());
    expect_unharmed(&node, &counter);
}

#[test]
fn a_lock_of_a_frozen_process_hangs_and_dies_with_its_caller() {
    require!(missing().or_else(freezer::no_freezer));
    let (node, counter, restore_tid) = start();
    let group = Group::with("freezer", counter.pid());
    group.freeze();
    let mut caller = node.caller("lock", counter.pid(), &[]);
    assert_eq!(caller.answers(A_WHILE), None);
    caller.kill();
    assert_eq!(node.step("tid", counter.pid(), &[]), [restore_tid.to_string()]);
    let mut caller = node.caller("state", counter.pid(), &[]);
    assert_eq!(
        caller.answers(A_WHILE),
        None,
        "a frozen process reports its state"
    );
    group.thaw();
    assert_eq!(caller.answers(PATIENCE).unwrap(), ["0"]);
    expect_unharmed(&node, &counter);
}

#[test]
fn a_checkpoint_of_a_frozen_process_waits_for_the_thaw() {
    require!(missing().or_else(freezer::no_freezer));
    let (node, counter, _) = start();
    assert_eq!(node.step("lock", counter.pid(), &[]), ["SUCCESS"]);
    let group = Group::with("freezer", counter.pid());
    group.freeze();
    let mut caller = node.caller("checkpoint", counter.pid(), &[]);
    assert_eq!(caller.answers(A_WHILE), None);
    group.thaw();
    assert_eq!(caller.answers(PATIENCE).unwrap(), ["SUCCESS"]);
    assert_eq!(node.step("restore,unlock", counter.pid(), &[]), ["SUCCESS"; 2]);
    expect_unharmed(&node, &counter);
}

#[test]
fn a_lock_needs_the_application_s_threads() {
    require!(missing());
    let (node, counter, restore_tid) = start();
    let held = Held::all_but(counter.pid(), restore_tid);
    let mut caller = node.caller("lock", counter.pid(), &[]);
    assert_eq!(caller.answers(A_WHILE), None);
    held.release();
    assert_eq!(caller.answers(PATIENCE).unwrap(), ["SUCCESS"]);
    assert_eq!(node.step("unlock", counter.pid(), &[]), ["SUCCESS"]);
    expect_unharmed(&node, &counter);
}

#[test]
fn a_lock_given_up_while_threads_are_held_is_dropped() {
    require!(missing());
    let (node, counter, restore_tid) = start();
    let held = Held::all_but(counter.pid(), restore_tid);
    let mut caller = node.caller("lock", counter.pid(), &[]);
    assert_eq!(caller.answers(A_WHILE), None);
    caller.kill();
    // The restore thread answers one call after the other: this one when it has dropped the lock.
    assert_eq!(node.state(counter.pid()), "0");
    held.release();
    expect_unharmed(&node, &counter);
}

/// Two ranks, of which the second waits on its GPU for the first, that sleeps.
#[test]
fn a_lock_that_waits_for_the_gpu_stays_when_its_caller_is_killed() {
    require!(missing());
    let node = Node::new(TWO);
    let job = node.counter(&[
        "--ranks",
        "2",
        "--gpu",
        "0,1",
        "--collectives",
        "2",
        "--straggle-ms",
        "3000",
    ]);
    let pid_of = |gpu: &str| -> i32 {
        let is_of = |line: &String| field(line, "gpu") == gpu;
        field(
            &eventually("a line of the rank", || Some(job.line()).filter(is_of)),
            "pid",
        )
        .parse()
        .unwrap()
    };
    let (first, second) = (pid_of("0"), pid_of("1"));
    eventually("the rank to wait", || {
        let mut caller = node.caller("lock,unlock", second, &[]);
        let answers = caller.answers(PATIENCE).unwrap();
        (answers[0] == "NOT_READY").then_some(())
    });
    assert_eq!(
        node.step("lock,unlock", first, &[]),
        ["SUCCESS"; 2],
        "a rank that sleeps"
    );
    let mut caller = node.patient_caller("lock", second, &[]);
    assert_eq!(caller.answers(Duration::from_millis(100)), None);
    caller.kill();
    // It succeeds when the first rank comes, or its time is over, and whoever asks for the state waits.
    let state = node
        .patient_caller("state", second, &[])
        .answers(PATIENCE)
        .unwrap();
    if state == ["1"] {
        assert_eq!(node.step("unlock", second, &[]), ["SUCCESS"]);
    }
    job.drain();
    pid_of("1");
}

#[test]
fn everything_but_a_lock_needs_the_restore_thread_only() {
    require!(missing());
    let (node, counter, restore_tid) = start();
    let pid = counter.pid();
    assert_eq!(node.step("lock", pid, &[]), ["SUCCESS"]);
    let held = Held::all_but(pid, restore_tid);
    assert_eq!(
        node.step("checkpoint,restore,unlock,state", pid, &[]),
        ["SUCCESS", "SUCCESS", "SUCCESS", "0"]
    );
    counter.drain();
    held.release();
    expect_unharmed(&node, &counter);
}

#[test]
fn a_restore_of_a_stopped_process_waits_for_its_continuation() {
    require!(missing());
    let (node, counter, _) = start();
    let pid = counter.pid();
    assert_eq!(node.step("lock,checkpoint", pid, &[]), ["SUCCESS"; 2]);
    control::stop(pid);
    let mut caller = node.caller("restore", pid, &[]);
    assert_eq!(caller.answers(A_WHILE), None);
    control::go_on(pid);
    assert_eq!(caller.answers(PATIENCE).unwrap(), ["SUCCESS"]);
    assert_eq!(node.step("unlock", pid, &[]), ["SUCCESS"]);
    expect_unharmed(&node, &counter);
}

#[test]
fn a_restore_of_a_stopped_process_works_with_its_restore_thread_running() {
    require!(missing());
    let (node, counter, restore_tid) = start();
    let pid = counter.pid();
    assert_eq!(node.step("lock,checkpoint", pid, &[]), ["SUCCESS"; 2]);
    control::stop(pid);
    let running = Running::only(pid, restore_tid);
    assert_eq!(
        node.step("restore,unlock,state", pid, &[(0, 1), (1, 0)]),
        ["SUCCESS", "SUCCESS", "0"]
    );
    running.release();
    let others = control::threads(pid);
    assert!(
        others.iter().all(|tid| control::thread_state(pid, *tid) == 'T'),
        "no other thread may have run"
    );
    control::go_on(pid);
    counter.drain();
    counter.iteration();
    assert_eq!(node.used(1), 8);
}
