//! `memory-pool`: holds the free memory of a virtual machine that would give it back to its host, where it
//! takes long to get it again, and frees it bit by bit as it is needed.
//!
//! For each line on standard input it takes all that is free and prints `full`. It ends with its input.

#![forbid(unsafe_code)]

use std::fs;
use std::io::{BufRead, stdin};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use firn_workloads::huge;

/// MiB that are taken and freed at a time.
const CHUNK: u64 = 64;
/// Below so much free memory in MiB some is freed. Little is left, because what is left goes to the host.
const LEAST: u64 = 256;
/// What is left when all is taken.
const LEFT: u64 = 512;
/// Time between two looks.
const PACE: Duration = Duration::from_millis(4);

type Pool = Arc<Mutex<Vec<Vec<u8>>>>;

fn main() -> Result<()> {
    // The first to go if memory is short all the same.
    fs::write("/proc/self/oom_score_adj", "1000").context("write oom_score_adj")?;
    let pool = Pool::default();
    let freed = pool.clone();
    thread::spawn(move || free(&freed));
    for line in stdin().lock().lines() {
        line?;
        fill(&pool)?;
        println!("full");
    }
    Ok(())
}

fn fill(pool: &Pool) -> Result<()> {
    let fill = || -> Result<()> {
        while free_mib()? > LEFT + 2 * CHUNK {
            let bytes = usize::try_from(CHUNK << 20)?;
            let mut chunk = huge::with_capacity(bytes)?;
            chunk.resize(bytes, 1_u8);
            // Shims look whether the node has memory left.
            huge::offer(&mut chunk)?;
            pool.lock().unwrap_or_else(PoisonError::into_inner).push(chunk);
        }
        Ok(())
    };
    thread::scope(|scope| {
        let other = scope.spawn(fill);
        fill()?;
        other.join().ok().context("a thread has panicked")?
    })
}

/// Frees memory whenever little is free.
fn free(pool: &Pool) -> Result<()> {
    loop {
        while free_mib()? < LEAST {
            let chunk = pool.lock().unwrap_or_else(PoisonError::into_inner).pop();
            if chunk.is_none() {
                break;
            }
        }
        thread::sleep(PACE);
    }
}

fn free_mib() -> Result<u64> {
    let info = fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
    let kib = info.lines().find_map(|line| {
        let kib = line.strip_prefix("MemFree:")?.trim().strip_suffix(" kB")?;
        kib.parse::<u64>().ok()
    });
    Ok(kib.context("no MemFree in /proc/meminfo")? >> 10)
}
