//! `memory-hog`: holds private anonymous memory and, for each SIGUSR1, adds a line to a file about whether
//! all of it is as it was: `ready 123` once it is filled, then `OK 123`, or `BAD 124 is not 123`.
//!
//! It sleeps in between, and keeps no file open.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use firn_workloads::huge;
use nix::sys::signal::{SigSet, Signal};

/// Mappings that the memory consists of.
const REGIONS: usize = 4;
/// Words in a MiB.
const MIB: usize = (1 << 20) / size_of::<u64>();

#[derive(Parser)]
#[command(name = "memory-hog", version)]
struct Options {
    /// Size of the memory
    #[arg(long)]
    mib: usize,
    #[arg(long)]
    fill: Fill,
    /// Ask for huge pages
    #[arg(long)]
    huge: bool,
    /// The file to write to
    out: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Fill {
    /// Numbers that cannot be compressed
    Random,
    /// Every other MiB written with zeros, the rest random
    HalfZero,
    /// Written with zeros
    Zero,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let mut asked = SigSet::empty();
    asked.add(Signal::SIGUSR1);
    asked.thread_block()?;
    let regions = on_each(0..REGIONS, |number| region(&options, number))?;
    let right = checksum(&regions)?;
    add(&options.out, &format!("ready {right}"))?;
    loop {
        asked.wait()?;
        let sum = checksum(&regions)?;
        let verdict = if sum == right {
            format!("OK {sum}")
        } else {
            format!("BAD {sum} is not {right}")
        };
        add(&options.out, &verdict)?;
    }
}

/// Does this for each item on a thread of its own.
fn on_each<I: Send, T: Send>(
    items: impl IntoIterator<Item = I>,
    work: impl Fn(I) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let work = &work;
    thread::scope(|scope| {
        let threads: Vec<_> = items
            .into_iter()
            .map(|item| scope.spawn(move || work(item)))
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join().ok());
        joined
            .map(|done| done.context("a thread has panicked")?)
            .collect()
    })
}

/// One mapping, written from its begin to its end.
fn region(options: &Options, number: usize) -> Result<Vec<u64>> {
    let words = options.mib * MIB / REGIONS;
    let mut region: Vec<u64> = if options.huge {
        huge::with_capacity(words)?
    } else {
        Vec::with_capacity(words)
    };
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ (number as u64 + 1);
    let fill = options.fill;
    region.extend((0..words).map(|at| {
        let is_zero = fill == Fill::Zero || fill == Fill::HalfZero && (at / MIB) % 2 == 1;
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        if is_zero { 0 } else { state }
    }));
    Ok(region)
}

/// A sum in which every word counts by its place.
fn checksum(regions: &[Vec<u64>]) -> Result<u64> {
    let sums = on_each(regions, |region| {
        let weighed = region
            .iter()
            .zip(1_u64..)
            .map(|(word, place)| word.wrapping_add(1).wrapping_mul(2 * place + 1));
        Ok(weighed.fold(0, u64::wrapping_add))
    })?;
    Ok(sums.iter().fold(0, |sum: u64, next| sum.rotate_left(1) ^ next))
}

fn add(out: &Path, line: &str) -> io::Result<()> {
    writeln!(File::options().create(true).append(true).open(out)?, "{line}")
}
