//! What code works for, on whatever thread it runs: one value that a call of a client has with it.

use std::any::Any;
use std::sync::Arc;

type Subject = Arc<dyn Any + Send + Sync>;

tokio::task_local! {
    static SUBJECT: Subject;
}

/// Runs `work` as a call that has this value.
pub fn within<T>(subject: Subject, work: impl Future<Output = T>) -> impl Future<Output = T> {
    SUBJECT.scope(subject, work)
}

/// Runs blocking work on another thread as part of the call that has started it.
pub fn inherit<T>(work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let subject = SUBJECT.try_with(Arc::clone);
    move || match subject {
        Ok(subject) => SUBJECT.sync_scope(subject, work),
        Err(_) => work(),
    }
}

/// The value of this call; none outside of calls, and of those that have a value of another type.
pub fn subject<T: Any + Send + Sync>() -> Option<Arc<T>> {
    SUBJECT
        .try_with(|subject| subject.clone().downcast().ok())
        .ok()
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn blocking_work_has_the_value_of_its_call() {
        let seen = within(Arc::new(7_u8), crate::blocking::blocking(subject::<u8>)).await;
        assert_eq!(seen.as_deref(), Some(&7));
        assert_eq!(within(Arc::new(7_u8), async { subject::<u16>() }).await, None);
        assert_eq!(crate::blocking::blocking(subject::<u8>).await, None);
    }
}
