//! Times of day as numbers, for files that another process reads.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Now, in milliseconds since 1970.
pub fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// What has passed since then; nothing if the clock was set back.
pub fn since(then: u64) -> Duration {
    Duration::from_millis(now().saturating_sub(then))
}
