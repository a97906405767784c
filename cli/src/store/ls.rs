//! `firn store ls`.

use anyhow::Result;
use serde_json::json;

use super::args::LsArgs;
use super::short;
use super::usage::{Contents, Image};
use crate::output::{self, line};
use crate::text;

/// True: all checkpoints are complete.
pub fn run(args: &LsArgs) -> Result<bool> {
    let store = super::named(&args.common)?.open()?;
    let contents = Contents::read(&*store)?;
    match args.common.json {
        true => {
            let images: Vec<_> = contents.images.iter().map(as_json).collect();
            output::json(&json!({"store": store.place(), "id": store.id(), "images": images}))?;
        }
        false => print(&contents.images),
    }
    Ok(contents.images.iter().all(Image::is_complete))
}

fn as_json(image: &Image) -> serde_json::Value {
    let index = image.index.as_ref();
    json!({
        "id": image.id,
        "checkpoint": index.map(|index| &index.checkpoint),
        "container": index.map(|index| &index.container),
        "host": index.map(|index| &index.host),
        "image": index.map(|index| &index.image),
        "made": index.map(|index| index.made),
        "time": index.and_then(|index| text::utc(index.made)),
        "parent": index.and_then(|index| index.parent),
        "memory": image.memory, "own": image.own, "shared": image.shared, "zero": image.zero,
        "missing": image.missing, "pinned": image.pinned,
        "state": state(image), "failure": image.failure,
    })
}

fn state(image: &Image) -> &'static str {
    match (&image.failure, image.missing) {
        (Some(_), _) => "damaged",
        (None, 0) => "complete",
        (None, _) => "incomplete",
    }
}

fn print(images: &[Image]) {
    const HEAD: [&str; 9] = [
        "ID",
        "CONTAINER",
        "HOST",
        "MADE",
        "PARENT",
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

fn row(image: &Image) -> [String; 9] {
    let of = |get: fn(&firn_image::store::Index) -> String| image.index.as_ref().map_or("-".to_owned(), get);
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
        of(|index| index.parent.as_ref().map_or("-".to_owned(), short)),
        text::bytes(image.own),
        text::bytes(image.shared),
        text::bytes(image.zero),
        format!("{}{missing}{pinned}", state(image)),
    ]
}
