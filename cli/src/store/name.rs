//! `firn store name`: a copy of an image directory in the store, for pods that name it.
//!
//! The copy is made under another name, and renamed when it is complete and synced.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use firn_config::names;
use firn_host::{Absent, Problem, ProblemReport, open_regular};
use firn_image::form::{self, CheckpointDir};
use firn_image::manifest::{Manifest, UntrustedDir, is_of_image};
use firn_transaction::restore::is_name;
use serde::Serialize;

use super::args::NameArgs;
use super::{made, named, shown};
use crate::image;
use crate::output::{self, line, printed};

/// A checkpoint that has a name in the store.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct NamedCheckpoint<'a> {
    /// Its directory in the store.
    dir: &'a Path,
}

printed! { NamedCheckpoint<'_>: "store name" }

/// A checkpoint that gets no name.
#[derive(Debug, thiserror::Error, Problem)]
enum NamingError {
    #[error("{name:?} is not NAMESPACE/NAME")]
    #[problem(
        "FIRN-STORE-NAME",
        "both are letters, digits, hyphens, underscores and dots, and do not begin with a dot"
    )]
    Name { name: String },
    #[error("the store has {} already", path.display())]
    #[problem("FIRN-STORE-NAME", "take another name, or remove that directory")]
    Taken { path: PathBuf },
    #[error("the store compresses or encrypts, and a checkpoint with a name would be as it is")]
    #[problem("FIRN-STORE-NAME", "put it into the directory of from-dir under [restore]")]
    Packed,
    #[error("checkpoint {} has no firn.json", dir.display())]
    #[problem("FIRN-MANIFEST-MISSING", "name the image directory of a finished checkpoint")]
    NoImage { dir: PathBuf },
}

/// True: it is there.
pub fn run(args: &NameArgs) -> Result<bool> {
    let CheckpointDir {
        image: dir, layer, ..
    } = shown(image::parts(&args.dir))?;
    let manifest = shown(Manifest::read(&dir))?.ok_or_else(|| NamingError::NoImage { dir: dir.clone() });
    let manifest = manifest.map_err(ProblemReport::from)?;
    shown(manifest.verify_images(&dir))?;
    let store = named(&args.common)?;
    let packing = store.packing()?;
    let store = shown(made(&store.place.directory()?, &packing))?;
    if !store.form().is_plain() {
        return Err(ProblemReport::from(NamingError::Packed).into());
    }
    if let Some(memory) = &manifest.bulk {
        shown(store.expect(&shown(store.index(&memory.index))?))?;
    }
    let parts = args
        .name
        .split_once('/')
        .filter(|(of, name)| is_name(of) && is_name(name));
    let (namespace, name) = parts.ok_or_else(|| {
        ProblemReport::from(NamingError::Name {
            name: args.name.clone(),
        })
    })?;
    let within = store.root().join(names::STORE_NAMED).join(namespace);
    private(true)
        .create(&within)
        .with_context(|| format!("cannot make {}", within.display()))?;
    let path = within.join(name);
    if path.symlink_metadata().is_ok() {
        return Err(ProblemReport::from(NamingError::Taken { path }).into());
    }
    // No name begins with a dot.
    let new = within.join(format!(".{name}.new"));
    let copied = copy(&dir, layer.as_deref(), &new).and_then(|()| fs::rename(&new, &path));
    if copied.is_err() {
        // The first failure is the one to report.
        let _left = fs::remove_dir_all(&new);
    }
    copied
        .and_then(|()| sync(&within))
        .with_context(|| format!("cannot write {}", path.display()))?;
    if args.common.json {
        output::json(&NamedCheckpoint { dir: &path })?
    } else {
        line!("{}: pods of {namespace} may name store:{name}", path.display())
    }
    Ok(true)
}

/// Makes directories that root alone enters.
fn private(recursive: bool) -> DirBuilder {
    let mut builder = DirBuilder::new();
    builder.recursive(recursive).mode(0o700);
    builder
}

fn copy(image: &Path, layer: Option<&Path>, to: &Path) -> io::Result<()> {
    // Of a copy that was cut off.
    match fs::remove_dir_all(to) {
        Err(error) if !error.is_absent() => return Err(error),
        _ => private(false).create(to)?,
    }
    let target = to.join(form::IMAGE);
    private(false).create(&target)?;
    let from = UntrustedDir::open(image)?;
    for entry in fs::read_dir(image)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if is_of_image(&name) || name == names::SIGNATURE {
            write(&mut from.file(&name)?, &target.join(&name))?;
        }
    }
    if let Some(layer) = layer {
        write(&mut open_regular(layer)?, &to.join(form::LAYER))?;
    }
    sync(&target)?;
    sync(to)
}

fn write(from: &mut File, to: &Path) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(to)?;
    io::copy(from, &mut file)?;
    file.sync_all()
}

fn sync(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}
