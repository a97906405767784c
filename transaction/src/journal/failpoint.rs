//! Failpoints: at a phase that a test names, a shim that is built for tests waits or panics. A released shim
//! has none.

use std::fs;
use std::time::Duration;

use crate::phase::Phase;

/// File with the phases that panic, each as often as it is named.
const PANIC: &str = "/run/firn-panic";

/// File with a phase or point at which the shim waits, for as long as it is named.
const HOLD: &str = "/run/firn-hold";

/// File that reports to the test that the shim waits.
const HELD: &str = "/run/firn-held";

/// File that reports to the test that a phase has panicked.
const PANICKED: &str = "/run/firn-panicked";

/// Waits at this point for as long as a test names it.
pub(super) async fn hold(point: &str) {
    let is_held = || fs::read_to_string(HOLD).is_ok_and(|named| point == named);
    if is_held() {
        let _ = fs::write(HELD, "");
    }
    while is_held() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits or panics in this phase if a test names it.
pub(super) async fn trigger(phase: Phase) {
    let phase = phase.name();
    hold(phase).await;
    let Ok(text) = fs::read_to_string(PANIC) else {
        return;
    };
    let mut phases: Vec<&str> = text.split_whitespace().collect();
    let named = phases.iter().position(|named| phase == *named);
    if let Some(at) = named {
        phases.remove(at);
        let _ = fs::write(PANIC, phases.join(" "));
        let _ = fs::write(PANICKED, "");
    }
    assert!(named.is_none(), "a test names this phase to panic");
}
