//! Whoever makes a call that has to leave nothing behind when it is given up.

use std::future::Future;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tonic::Status;
use tonic::metadata::MetadataMap;

use super::error::CriError;

pub struct Caller {
    deadline: Instant,
    /// Closed when nobody waits for the answer any more.
    waits: watch::Receiver<()>,
}

impl Caller {
    /// Does the work for a caller, who has to set a deadline. The work continues to its own end if the caller
    /// leaves and drops the future that this returns.
    pub async fn serve<T, W>(metadata: &MetadataMap, work: impl FnOnce(Self) -> W) -> Result<T, Status>
    where
        T: Send + 'static,
        W: Future<Output = Result<T, CriError>> + Send + 'static,
    {
        let deadline = metadata
            .get("grpc-timeout")
            .and_then(|text| timeout(text.to_str().ok()?));
        let deadline = Instant::now() + deadline.ok_or(CriError::NoDeadline)?;
        let (_present, waits) = watch::channel(());
        let done = tokio::spawn(work(Self { deadline, waits })).await;
        let done = done.map_err(|failed| Status::internal(format!("FIRN-INTERNAL: {failed}")))?;
        done.map_err(Status::from)
    }

    /// Waits until its deadline has passed or it has left.
    pub async fn left(&mut self) {
        tokio::select! {
            () = sleep_until(self.deadline) => {}
            // Nothing is ever sent.
            _closed = self.waits.changed() => {}
        }
    }

    pub fn expect_waiting(&self) -> Result<(), CriError> {
        if Instant::now() < self.deadline && self.waits.has_changed().is_ok() {
            Ok(())
        } else {
            Err(CriError::Left)
        }
    }
}

/// `grpc-timeout`: at most eight digits and a unit.
fn timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let count: u64 = digits.parse().ok().filter(|_| digits.len() <= 8)?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_are_those_of_grpc() {
        assert_eq!(timeout("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(timeout("119999990u"), None);
        assert_eq!(timeout("59999m"), Some(Duration::from_millis(59_999)));
        for wrong in ["", "S", "1", "1x", "-1S", "ä"] {
            assert_eq!(timeout(wrong), None, "{wrong}");
        }
    }
}
