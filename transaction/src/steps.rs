//! The steps of a transaction, for those who show them elsewhere.

use std::fmt;
use std::sync::Arc;

use firn_image::memory::progress::Progress;

use crate::phase::Phase;

/// A step of a transaction.
pub enum Step<'a> {
    /// A phase is about to begin.
    Phase(Phase),
    /// How far a copy of memory is that takes long.
    Copied(&'a Progress),
}

type Follow = dyn Fn(&str, Step<'_>) + Send + Sync;

/// Gets the steps of a container's transactions, with the name of the operation. It never waits.
#[derive(Clone)]
pub struct Follower(Arc<Follow>);

impl Follower {
    pub fn new(follow: impl Fn(&str, Step<'_>) + Send + Sync + 'static) -> Self {
        Self(Arc::new(follow))
    }

    pub(crate) fn step(&self, operation: &str, step: Step<'_>) {
        (self.0)(operation, step);
    }
}

impl fmt::Debug for Follower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Follower")
    }
}
