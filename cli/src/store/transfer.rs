//! `firn store push` and `pull`: copy the memory of checkpoints between stores.
//!
//! What is copied is compared with its name. Extents come before the index that names them, and get their
//! place as they come: a copy that was cut off continues where it was, and leaves no index without its
//! extents.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::Result;
use firn_store::{Digest, Packing, Store, Writer};
use serde::Serialize;

use super::args::{Common, PullArgs, PushArgs};
use super::bucket::Bucket;
use super::origin::{Fault, Origin, each};
use super::progress::Progress;
use super::usage::distinct;
use super::{KeyedStore, StoreLocation, cap, find, made, named, open, short, shown};
use crate::output::{self, line, printed};
use crate::text;

/// Extents after which those that were copied get their place in a directory: 1 GiB.
const BATCH: usize = 256;

/// A checkpoint that was copied.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Copied {
    /// Id of the checkpoint, in both stores.
    id: Digest,
    /// Bytes of extents that were copied.
    written: u64,
    /// Bytes of extents that were there already.
    reused: u64,
    /// How long it took, in seconds with up to three digits behind the point.
    seconds: f64,
}

/// The checkpoints that were copied.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct All<'a> {
    /// One for each.
    copied: &'a [Copied],
}

printed! { All<'_>: "store push", "store pull" }

/// True: all is there now.
pub fn push(args: &PushArgs) -> Result<bool> {
    let from = open(&args.common)?;
    let images = match &args.id {
        Some(id) => vec![find(&from, id)?],
        None => shown(from.images())?.into_iter().collect(),
    };
    let images = images.into_iter();
    let other = KeyedStore::other(&args.url, args.key.as_ref())?;
    let packing = Packing {
        compressed: args.compress,
        ..other.packing()?
    };
    let copied: Result<Vec<Copied>> = match other.place {
        StoreLocation::Dir(path) => {
            let to = shown(made(&path, &packing))?;
            images.map(|id| copy(&from, &to, None, id)).collect()
        }
        StoreLocation::Bucket(url) => {
            let to = shown(Bucket::create(&url, &packing))?;
            images.map(|id| shown(send(&from, &to, id))).collect()
        }
    };
    print(&args.common, &copied?)
}

/// True: it is there now.
pub fn pull(args: &PullArgs) -> Result<bool> {
    let from = KeyedStore::other(&args.url, args.key.as_ref())?.open()?;
    let image = find(&*from, &args.id)?;
    let own = named(&args.common)?;
    let packing = own.packing()?;
    let to = shown(made(&own.place.directory()?, &packing))?;
    let cap = cap(&args.common)?;
    print(&args.common, &[copy(&*from, &to, cap, image)?])
}

/// Copies into a bucket.
fn send(from: &Store, to: &Bucket, id: Digest) -> Result<Copied, Fault> {
    let begun = Instant::now();
    let (index, bytes) = from.verified_index(&id)?;
    let extents: Vec<(Digest, u64)> = distinct(&index).into_iter().collect();
    let total = extents.iter().map(|(_, length)| length).sum();
    let (progress, written) = (Progress::new("copied", total), AtomicU64::new(0));
    let send = |extent: &Digest, length, buffer: &mut [u8]| {
        if !to.has(extent, length)? {
            let buffer = part(buffer, length);
            from.read(extent, buffer)?;
            to.put_extent(extent, buffer)?;
            written.fetch_add(length, Ordering::Relaxed);
        }
        progress.add(length);
        Ok::<(), Fault>(())
    };
    each(to.threads(), &extents, send)?;
    to.put_index(&id, &bytes)?;
    Ok(Copied::new(id, written.into_inner(), total, begun))
}

/// Copies into a directory.
fn copy(from: &dyn Origin, to: &Store, cap: Option<u64>, id: Digest) -> Result<Copied> {
    let begun = Instant::now();
    let (index, bytes) = shown(from.index(&id))?;
    let extents: Vec<(Digest, u64)> = distinct(&index).into_iter().collect();
    let total = extents.iter().map(|(_, length)| length).sum();
    let progress = Progress::new("copied", total);
    let mut writer = shown(to.writer(cap))?;
    let copied = extents.chunks(BATCH).try_for_each(|batch| {
        let copied = copy_batch(from, &writer, batch, &progress);
        // Also what was copied before it failed.
        writer.publish().map_err(Fault::from).and(copied)
    });
    if let Err(error) = copied {
        writer.abort();
        return shown(Err(error));
    }
    let written = writer.written();
    shown(writer.finish_as(&bytes))?;
    Ok(Copied::new(id, written, total, begun))
}

fn copy_batch(
    from: &dyn Origin,
    writer: &Writer,
    batch: &[(Digest, u64)],
    progress: &Progress,
) -> Result<(), Fault> {
    each(from.threads(), batch, |extent, length, buffer| {
        if !writer.has(extent, length)? {
            let buffer = part(buffer, length);
            from.read(extent, buffer)?;
            writer.put(buffer)?;
        }
        progress.add(length);
        Ok(())
    })
}

/// As much of a buffer as an extent needs.
fn part(buffer: &mut [u8], length: u64) -> &mut [u8] {
    let length = usize::try_from(length).unwrap_or(buffer.len());
    &mut buffer[..length]
}

impl Copied {
    fn new(id: Digest, written: u64, total: u64, begun: Instant) -> Self {
        Self {
            id,
            written,
            reused: total - written,
            seconds: text::rounded(begun.elapsed().as_secs_f64()),
        }
    }
}

fn print(common: &Common, copied: &[Copied]) -> Result<bool> {
    if common.json {
        output::json(&All { copied })?;
        return Ok(true);
    }
    for copied in copied {
        let (written, reused) = (text::bytes(copied.written), text::bytes(copied.reused));
        let rate = text::rate(copied.written, copied.seconds);
        let seconds = copied.seconds;
        line!(
            "{} copied: {written} in {seconds:.1} s ({rate}), {reused} were there",
            short(&copied.id)
        );
    }
    Ok(true)
}
