use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::thread;
use std::time::{Duration, Instant};
use std::vec::Vec;

use super::*;

/// Which functions the threads call is of no interest here.
const ROW: u32 = 7;
const ROUNDS: usize = 50_000;

fn gate(slots: usize) -> Gate<Vec<Slot>> {
    let mut all = Vec::new();
    all.resize_with(slots, Slot::new);
    Gate::new(all)
}

fn slot(gate: &Gate<Vec<Slot>>, tid: u32) -> &Slot {
    gate.take_slot(tid, |_| false).unwrap()
}

/// Waits until this is so.
fn until(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "not within 60 s: {what}"
        );
        thread::yield_now();
    }
}

/// In each round a thread enters while the gate is shut: it is either seen inside, or waits outside.
fn race(gate: &Gate<Vec<Slot>>, rounds: usize) {
    let [round, inside, looked, left] = [const { AtomicUsize::new(0) }; 4];
    let reaches = |counter: &AtomicUsize, n: usize| {
        let is_reached = || counter.load(Ordering::SeqCst) >= n;
        // Both at the same moment, if there are two CPUs.
        (0..2000).any(|_| is_reached()) || {
            until("the other thread", is_reached);
            true
        }
    };
    let overtaken = thread::scope(|scope| {
        scope.spawn(|| {
            let slot = slot(gate, 1);
            for n in 1..=rounds {
                reaches(&round, n);
                gate.enter(slot, ROW);
                inside.store(n, Ordering::Relaxed);
                reaches(&looked, n);
                slot.leave();
                left.store(n, Ordering::SeqCst);
            }
        });
        let caught = |n: &usize| {
            // Its slot is in the cache of this CPU as well: the next store to it takes its time.
            assert!(gate.busy().next().is_none());
            round.store(*n, Ordering::SeqCst);
            for _ in 0..n % 50 {
                core::hint::spin_loop();
            }
            gate.shut().unwrap();
            let is_idle = gate.busy().next().is_none();
            // As long as a store may take to be seen.
            for _ in 0..100 {
                core::hint::spin_loop();
            }
            let is_inside = inside.load(Ordering::SeqCst) == *n;
            looked.store(*n, Ordering::SeqCst);
            gate.open();
            reaches(&left, *n);
            is_idle && is_inside
        };
        (1..=rounds).filter(caught).count()
    });
    assert_eq!(
        overtaken, 0,
        "rounds in which a thread was inside of a gate that was shut and idle"
    );
}

#[test]
fn nobody_is_inside_of_a_gate_that_is_shut() {
    let gate = gate(8);
    race(&gate, ROUNDS);
    assert_eq!(
        gate.state.load(Ordering::Relaxed),
        0,
        "membarrier can be used here"
    );
}

#[test]
fn without_membarrier_the_passages_have_fences() {
    let gate = gate(8);
    gate.state.store(FENCED, Ordering::Relaxed);
    race(&gate, ROUNDS);
}

#[test]
fn who_is_inside_is_known_with_the_outermost_call() {
    let gate = gate(2);
    let (one, _other) = (slot(&gate, 11), slot(&gate, 12));
    gate.enter(one, 3);
    gate.enter(one, 4);
    gate.shut().unwrap();
    let busy: Vec<Busy> = gate.busy().collect();
    assert_eq!(busy, [Busy { tid: 11, row: 3 }]);
    // A call inside of another one is let in: the gate would never be idle otherwise.
    gate.enter(one, 5);
    for _ in 0..3 {
        assert_eq!(gate.busy().count(), 1);
        one.leave();
    }
    assert_eq!(gate.busy().count(), 0);
}

#[test]
fn a_thread_waits_outside_until_the_gate_is_open() {
    let gate = gate(1);
    gate.shut().unwrap();
    let entered = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let slot = slot(&gate, 1);
            gate.enter(slot, ROW);
            entered.store(true, Ordering::SeqCst);
            slot.leave();
        });
        until("it has come", || gate.slots[0].row.load(Ordering::Relaxed) == ROW);
        until("it is outside", || gate.busy().next().is_none());
        assert!(!entered.load(Ordering::SeqCst));
        gate.open();
    });
    assert!(entered.load(Ordering::SeqCst));
}

#[test]
fn a_handler_of_a_signal_asks_for_itself() {
    let gate = gate(1);
    let slot = slot(&gate, 1);
    // Interrupted where it asks, before it sees that the gate has been shut.
    slot.depth.store(ASKING, Ordering::Relaxed);
    gate.shut().unwrap();
    assert_eq!(gate.busy().count(), 1, "it may be about to enter");
    let entered = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            gate.enter(slot, ROW);
            entered.store(true, Ordering::SeqCst);
        });
        until("the handler waits", || gate.busy().next().is_none());
        assert!(!entered.load(Ordering::SeqCst));
        gate.open();
    });
    assert_eq!(gate.busy().count(), 1);
    slot.leave();
    assert_eq!(gate.busy().count(), 1, "what it has interrupted still asks");
    slot.leave();
    assert_eq!(slot.depth.load(Ordering::Relaxed), ASKING, "it was in no call");
}

#[test]
fn slots_of_threads_that_are_gone_are_taken_again() {
    let gate = gate(2);
    let first = slot(&gate, 1);
    gate.enter(first, ROW);
    slot(&gate, 2);
    assert!(gate.take_slot(3, |_| false).is_none());
    assert_eq!(gate.used().count(), 2);
    // The kernel gives a number again.
    assert!(core::ptr::eq(first, slot(&gate, 1)));
    assert_eq!(gate.busy().count(), 0);
    gate.enter(first, ROW);
    let again = gate.take_slot(3, |tid| tid == 1).unwrap();
    assert!(core::ptr::eq(first, again));
    assert_eq!(gate.busy().count(), 0, "its thread has ended inside of a call");
}

#[test]
fn a_gate_that_does_not_see_a_thread_stays_open() {
    let gate = gate(0);
    assert!(gate.take_slot(1, |_| false).is_none());
    gate.shut().unwrap();
    let entered = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            gate.enter_unseen();
            entered.store(true, Ordering::SeqCst);
        });
        until("it has come", || gate.state.load(Ordering::Relaxed) & UNSEEN != 0);
        assert!(!entered.load(Ordering::SeqCst));
        gate.open();
    });
    // It is in the driver, for all that is known.
    assert_eq!(gate.shut(), Err(Errno::USERS));
    assert_eq!(gate.state.load(Ordering::Relaxed), UNSEEN);
}
