//! The threads, with a driver in which one rank waits for another.

use std::sync::{Condvar, Mutex};

use super::*;
use firn_gpu::{CudaState, GpuPair};

/// Behind, and ahead by one collective.
const BEHIND: i32 = 7;
const AHEAD: i32 = 8;

#[derive(Default)]
struct Inner {
    locked: Vec<i32>,
    unlocks: Vec<i32>,
    /// Whether the rank behind has started what the other waits for.
    arrived: bool,
}

struct Waiting {
    inner: Mutex<Inner>,
    changed: Condvar,
    /// Whether the rank behind comes once it runs.
    comes: bool,
}

impl Waiting {
    fn new(comes: bool) -> Self {
        Self {
            inner: Mutex::default(),
            changed: Condvar::new(),
            comes,
        }
    }

    fn lock_both(&self, timeout_ms: u32) -> BTreeMap<i32, DriverError> {
        lock(&[BEHIND, AHEAD], timeout_ms, &|pid, call| call(self, pid))
    }
}

impl Checkpointer for Waiting {
    fn restore_tid(&self, pid: i32) -> Result<i32, DriverError> {
        Ok(pid)
    }

    fn state(&self, _pid: i32) -> Result<CudaState, DriverError> {
        Ok(CudaState::Running)
    }

    fn lock(&self, pid: i32, timeout_ms: u32) -> Result<(), DriverError> {
        let inner = self.inner.lock().unwrap();
        let limit = Duration::from_millis(timeout_ms.into());
        let is_pending = |inner: &mut Inner| pid == AHEAD && !inner.arrived;
        let (mut inner, waited) = self.changed.wait_timeout_while(inner, limit, is_pending).unwrap();
        if waited.timed_out() {
            return Err(DriverError {
                call: "cuCheckpointProcessLock".to_owned(),
                code: 600,
                name: "CUDA_ERROR_NOT_READY".to_owned(),
            });
        }
        assert!(!inner.locked.contains(&pid), "locked twice");
        inner.locked.push(pid);
        Ok(())
    }

    fn checkpoint(&self, _pid: i32) -> Result<(), DriverError> {
        Ok(())
    }

    fn restore(&self, _pid: i32, _pairs: &[GpuPair]) -> Result<(), DriverError> {
        Ok(())
    }

    fn unlock(&self, pid: i32) -> Result<(), DriverError> {
        let mut inner = self.inner.lock().unwrap();
        assert!(inner.locked.contains(&pid), "unlocked twice");
        inner.locked.retain(|locked| *locked != pid);
        inner.unlocks.push(pid);
        inner.arrived |= self.comes && inner.unlocks.len() > 2;
        self.changed.notify_all();
        Ok(())
    }
}

#[test]
fn the_rank_that_is_behind_runs_until_the_other_is_locked() {
    let driver = Waiting::new(true);
    assert_eq!(driver.lock_both(20_000), BTreeMap::new());
    let inner = driver.inner.lock().unwrap();
    assert_eq!(inner.locked.len(), 2);
    assert!(
        inner.unlocks.iter().all(|pid| *pid == BEHIND),
        "{:?}",
        inner.unlocks
    );
}

#[test]
fn a_rank_that_never_comes_is_given_up_at_the_limit_and_none_stays_locked() {
    let driver = Waiting::new(false);
    let refused = driver.lock_both(300);
    assert_eq!(refused.keys().collect::<Vec<_>>(), [&AHEAD]);
    let inner = driver.inner.lock().unwrap();
    assert_eq!(inner.locked, [0; 0]);
}
