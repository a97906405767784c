//! `firn store ls`.

use std::path::Path;

use anyhow::Result;
use firn_host::ProblemReport;
use firn_store::Digest;
use serde::Serialize;

use super::args::LsArgs;
use super::short;
use super::usage::{Contents, Image};
use crate::output::{self, line, printed};
use crate::text;

/// The checkpoints in a store.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct StoreList<'a> {
    /// The store's directory or URL.
    store: String,
    /// Id of the store.
    id: &'a str,
    /// One for each, in the order of the ids.
    images: Vec<StoreRow<'a>>,
}

/// A checkpoint in a store.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct StoreRow<'a> {
    /// Its id in the store: the digest of its index.
    id: Digest,
    /// Random id of the checkpoint, as in its manifest; absent if the index is damaged or has none.
    checkpoint: Option<&'a str>,
    /// Id of the container; absent if the index is damaged.
    container: Option<&'a str>,
    /// Name of the node that it was made on; absent if the index is damaged.
    host: Option<&'a str>,
    /// The image directory that it was written for; absent if the index is damaged.
    image: Option<&'a Path>,
    /// When it was made, UTC; absent if the index is damaged.
    #[cfg_attr(test, schemars(extend("format" = "date-time")))]
    time: Option<String>,
    /// The same in seconds since 1970.
    made: Option<u64>,
    /// Bytes of memory.
    memory: u64,
    /// Bytes of extents that no other checkpoint in the store has.
    own: u64,
    /// Bytes of extents that others have as well.
    shared: u64,
    /// Bytes of zeros, for which nothing is stored.
    zero: u64,
    /// Number of extents that the store lacks.
    missing: usize,
    /// Whether it is kept until `firn store unpin`.
    pinned: bool,
    /// `complete`, `incomplete` (the store lacks extents) or `damaged` (its index cannot be used).
    state: &'static str,
    /// Why its index cannot be used; absent otherwise.
    failure: Option<&'a ProblemReport>,
}

printed! { StoreList<'_>: "store ls" }

/// True: all checkpoints are complete.
pub fn run(args: &LsArgs) -> Result<bool> {
    let store = super::named(&args.common)?.open()?;
    let contents = Contents::read(&*store)?;
    if args.common.json {
        output::json(&StoreList {
            store: store.place(),
            id: store.id(),
            images: contents.images.iter().map(StoreRow::of).collect(),
        })?;
    } else {
        print(&contents.images)
    }
    Ok(contents.images.iter().all(Image::is_complete))
}

impl<'a> StoreRow<'a> {
    fn of(image: &'a Image) -> Self {
        let index = image.index.as_ref();
        Self {
            id: image.id,
            checkpoint: index.and_then(|index| text::some(&index.checkpoint)),
            container: index.map(|index| &*index.container),
            host: index.map(|index| &*index.host),
            image: index.map(|index| &*index.image),
            time: index.and_then(|index| text::utc(index.made)),
            made: index.map(|index| index.made),
            memory: image.memory,
            own: image.own,
            shared: image.shared,
            zero: image.zero,
            missing: image.missing,
            pinned: image.pinned,
            state: state(image),
            failure: image.failure.as_ref(),
        }
    }
}

fn state(image: &Image) -> &'static str {
    match (&image.failure, image.missing) {
        (Some(_), _) => "damaged",
        (None, 0) => "complete",
        (None, _) => "incomplete",
    }
}

fn print(images: &[Image]) {
    const HEAD: [&str; 8] = [
        "ID",
        "CONTAINER",
        "HOST",
        "MADE",
        "OWN",
        "SHARED",
        "ZERO",
        "STATE",
    ];
    output::table(HEAD, images.iter().map(row));
    for image in images {
        if let Some(failure) = &image.failure {
            line!("{}: {failure}", short(&image.id));
        }
    }
}

fn row(image: &Image) -> [String; 8] {
    let of = |get: fn(&firn_store::Index) -> String| image.index.as_ref().map_or("-".to_owned(), get);
    let pinned = if image.pinned { ", pinned" } else { "" };
    let missing = match image.missing {
        0 => String::new(),
        count => format!(", lacks {}", text::count(count, "extent")),
    };
    [
        short(&image.id),
        of(|index| index.container.clone()),
        of(|index| index.host.clone()),
        of(|index| text::time(index.made)),
        text::bytes(image.own),
        text::bytes(image.shared),
        text::bytes(image.zero),
        format!("{}{missing}{pinned}", state(image)),
    ]
}
