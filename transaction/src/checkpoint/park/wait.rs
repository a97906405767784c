//! The wait of a resume or move for GPUs that another container has.
//!
//! It takes minutes, so that it is done without the container's operation lock: meanwhile a parked container
//! can be checkpointed or resumed in another way, and one that is to move runs on. Whoever waits takes the
//! lock again afterwards and looks at everything again. Two that wait for the same GPUs both look; the first
//! gets them, the other waits on.

use std::time::Duration;

use firn_config::{Config, Keys};
use firn_process::blocking::blocking;
use tokio::time::{Instant, sleep};

use super::ParkError;
use crate::checkpoint::error::EffectError;
use crate::container::{Container, InitState};
use crate::journal::Operation;
use crate::lease::Lease;

/// How often is looked whether GPUs have become free.
const LOOK: Duration = Duration::from_millis(200);

/// A container waits for GPUs.
pub struct Wait {
    until: Instant,
    /// The pause that it is to be resumed from; none if it runs and is to move.
    pause: Option<String>,
}

impl Wait {
    /// Begins the wait. The caller still holds the operation lock.
    pub fn begin(container: &Container) -> Result<Self, ParkError> {
        let limit = Config::load(Keys::PAUSE)?.deadlines.gpu_wait;
        Ok(Self {
            until: Instant::now() + limit,
            pause: pause_of(container),
        })
    }

    /// Waits until `holder` has given its GPUs free, or something has become of the container. Returns
    /// whether that was in time.
    pub async fn for_holder(&self, container: &Container, holder: &Lease) -> bool {
        log::info!(
            "{} waits for the GPUs of container {}",
            container.id,
            holder.container
        );
        loop {
            sleep(LOOK).await;
            let lease = holder.clone();
            if !self.is_same(container) || !blocking(move || lease.is_in_force()).await {
                return true;
            }
            if Instant::now() >= self.until {
                return false;
            }
        }
    }

    /// Whether the container still is as it was when the wait began. An error if it has ended.
    pub fn check(&self, container: &Container) -> Result<bool, ParkError> {
        match container.state() {
            InitState::Stopped | InitState::Deleted => Err(ParkError::Ended {
                operation: match self.pause {
                    Some(_) => Operation::Resume,
                    None => Operation::Move,
                },
                container: container.id.clone(),
                cause: EffectError::Killed,
            }),
            _ => Ok(self.is_same(container)),
        }
    }

    fn is_same(&self, container: &Container) -> bool {
        let has_ended = matches!(container.state(), InitState::Stopped | InitState::Deleted);
        !has_ended && pause_of(container) == self.pause
    }
}

/// The id of the pause that a container is parked by.
fn pause_of(container: &Container) -> Option<String> {
    container.parked().map(|parked| parked.id)
}
