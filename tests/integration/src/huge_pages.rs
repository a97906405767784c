//! Pages in this machine's pool of huge pages.

use std::fs;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};

use crate::Skip;

const POOL: &str = "/proc/sys/vm/nr_hugepages";
const BEYOND: &str = "/proc/sys/vm/nr_overcommit_hugepages";

/// Where a node has its view of the pool of 2 MiB pages.
pub const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";

/// The pool has one size at a time.
static CHANGE: Mutex<()> = Mutex::new(());

/// Pages that the pool has more, until this is dropped.
#[derive(Debug)]
pub struct HugePages(u64);

impl HugePages {
    /// Adds so many.
    ///
    /// # Errors
    /// The pool cannot be read; [`Skip`] if the machine has no memory in such large pieces, or lets nobody
    /// change the pool.
    pub fn add(count: u64) -> Result<Self> {
        let _alone = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
        if number(BEYOND)? > 0 {
            return Err(Skip::new("the pool of huge pages may grow by itself").into());
        }
        let before = number(POOL)?;
        let _written = fs::write(POOL, (before + count).to_string());
        let after = number(POOL)?;
        if after < before + count {
            let _written = fs::write(POOL, before.to_string());
            return Err(Skip::new(format!("{after} huge pages of {}", before + count)).into());
        }
        Ok(Self(count))
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _alone = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(size) = number(POOL) {
            let _written = fs::write(POOL, size.saturating_sub(self.0).to_string());
        }
    }
}

fn number(file: &str) -> Result<u64> {
    let text = fs::read_to_string(file).with_context(|| format!("read {file}"))?;
    text.trim()
        .parse()
        .with_context(|| format!("{file} has {text:?}"))
}
