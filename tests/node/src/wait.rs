//! Waiting for a condition, always with a deadline.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

const PAUSE: Duration = Duration::from_millis(5);
/// Longest pause after a poll that took long.
const LONG_PAUSE: Duration = Duration::from_millis(50);

/// Asks `poll` until it gives a value, fails, or `limit` has passed; `what` names the condition in that
/// error.
pub fn wait_for<T>(what: &str, limit: Duration, mut poll: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        let begun = Instant::now();
        if let Some(value) = poll()? {
            return Ok(value);
        }
        if Instant::now() > end {
            bail!("waited {} s for {what}", limit.as_secs_f32());
        }
        // A poll that starts programs leaves at least as much of the CPU to what it waits for.
        thread::sleep(begun.elapsed().clamp(PAUSE, LONG_PAUSE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gives_the_value_or_names_what_never_came() {
        let mut asked = 0;
        let third = wait_for("the third", Duration::from_secs(5), || {
            asked += 1;
            Ok((asked == 3).then_some(asked))
        });
        assert_eq!(third.unwrap(), 3);
        let late = wait_for("godot", Duration::from_millis(20), || Ok(None::<()>))
            .unwrap_err()
            .to_string();
        assert!(late.contains("for godot"), "{late}");
        assert!(
            wait_for("it", Duration::from_secs(5), || bail!("broken")
                as Result<Option<()>>)
            .is_err()
        );
    }
}
