//! What tests have a shim do that was built for them when it enters a phase. What ships does not look.

use std::fs;
use std::time::Duration;

use crate::phase::Phase;

/// Names phases that panic, each once for every time that it is named.
const PANIC: &str = "/run/firn-panic";

/// Names a phase that waits for as long as it is named.
const HOLD: &str = "/run/firn-hold";

/// Tells the test that it waits.
const HELD: &str = "/run/firn-held";

/// Tells the test that one has panicked.
const PANICKED: &str = "/run/firn-panicked";

/// Waits at this point for as long as it is named.
pub(super) async fn hold(point: &str) {
    let is_held = || fs::read_to_string(HOLD).is_ok_and(|named| point == named);
    if is_held() {
        let _ = fs::write(HELD, "");
    }
    while is_held() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Does in this phase what the files say.
pub(super) async fn trigger(phase: Phase) {
    let phase = phase.name();
    hold(phase).await;
    let Ok(told) = fs::read_to_string(PANIC) else {
        return;
    };
    let mut phases: Vec<&str> = told.split_whitespace().collect();
    let named = phases.iter().position(|named| phase == *named);
    if let Some(at) = named {
        phases.remove(at);
        let _ = fs::write(PANIC, phases.join(" "));
        let _ = fs::write(PANICKED, "");
    }
    assert!(named.is_none(), "told to panic");
}
