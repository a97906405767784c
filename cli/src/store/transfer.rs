//! `firn store push` and `pull`: memory goes to another store, and comes from there.
//!
//! What is copied is compared with its name. Extents get their place batch by batch: a copy that was cut off
//! goes on where it was.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Result;
use firn_config::Config;
use firn_host::{Problem, ProblemReport};
use firn_image::store::{Digest, EXTENT, Store, StoreError, Writer};
use serde::Serialize;
use serde_json::json;

use super::args::{Common, PullArgs, PushArgs};
use super::progress::Progress;
use super::usage::distinct;
use super::{NameError, find, open, root, short, shown, threads};
use crate::output::{self, line};
use crate::text;

/// Extents after which those that were copied get their place: 1 GiB.
const BATCH: usize = 256;

/// A checkpoint that was copied.
#[derive(Serialize)]
struct Copied {
    id: Digest,
    /// Bytes of extents.
    written: u64,
    /// Those that were there already.
    reused: u64,
}

/// True: all is there now.
pub fn push(args: &PushArgs) -> Result<bool> {
    let from = open(&args.common)?;
    let images = match &args.id {
        Some(id) => vec![find(&from, id)?],
        None => shown(from.images())?.into_iter().collect(),
    };
    let to = shown(Store::create(&place(&args.url)?))?;
    let copied = images.into_iter().map(|image| copy(&from, &to, None, image));
    print(&args.common, &copied.collect::<Result<Vec<_>>>()?)
}

/// True: it is there now.
pub fn pull(args: &PullArgs) -> Result<bool> {
    let from = shown(Store::open(&place(&args.url)?))?;
    let image = find(&from, &args.id)?;
    let to = shown(Store::create(&root(&args.common)?))?;
    let cap = match &args.common.store {
        Some(_) => None,
        None => Config::load().map_err(ProblemReport::from)?.images.store_cap,
    };
    print(&args.common, &[copy(&from, &to, cap, image)?])
}

/// The directory of another store.
fn place(url: &str) -> Result<PathBuf> {
    let path = url.strip_prefix("file://").unwrap_or(url);
    match path.contains("://") {
        true => Err(NameError::Scheme { url: url.to_owned() }.report().into()),
        false => Ok(path.into()),
    }
}

fn copy(from: &Store, to: &Store, cap: Option<u64>, id: Digest) -> Result<Copied> {
    let (index, bytes) = (shown(from.index(&id))?, shown(from.index_bytes(&id))?);
    let extents: Vec<(Digest, u64)> = distinct(&index).into_iter().collect();
    let total = extents.iter().map(|(_, length)| length).sum();
    let progress = Progress::new("copied", total);
    let mut writer = shown(to.writer(cap))?;
    let copied = extents.chunks(BATCH).try_for_each(|batch| {
        let copied = copy_batch(from, &writer, batch, &progress);
        // Also what was copied before it failed.
        writer.publish().and(copied)
    });
    if let Err(error) = copied {
        writer.abort();
        return shown(Err(error));
    }
    let written = writer.written();
    shown(writer.finish_as(&bytes))?;
    Ok(Copied {
        id,
        written,
        reused: total - written,
    })
}

fn copy_batch(
    from: &Store,
    writer: &Writer,
    batch: &[(Digest, u64)],
    progress: &Progress,
) -> Result<(), StoreError> {
    let next = AtomicUsize::new(0);
    threads::all(|| {
        let mut buffer = vec![0; EXTENT];
        while let Some((extent, length)) = batch.get(next.fetch_add(1, Ordering::Relaxed)) {
            if !writer.has(extent, *length)? {
                let buffer = &mut buffer[..usize::try_from(*length).unwrap_or(EXTENT)];
                from.read(extent, buffer)?;
                writer.put(buffer)?;
            }
            progress.add(*length);
        }
        Ok(())
    })
}

fn print(common: &Common, copied: &[Copied]) -> Result<bool> {
    if common.json {
        output::json(&json!({"copied": copied}))?;
        return Ok(true);
    }
    for Copied { id, written, reused } in copied {
        let (written, reused) = (text::bytes(*written), text::bytes(*reused));
        line!("{} copied: {written}, {reused} were there", short(id));
    }
    Ok(true)
}
