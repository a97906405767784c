//! Compares what is to be restored with the spec of the container that it becomes.
//!
//! The shim runs this in a process of its own: a file that cannot be read to its end, or that takes all
//! memory, then harms that process alone.

use std::path::Path;

use anyhow::{Context, Result};
use firn_host::UnlessAbsent;
use firn_image::criu;
use firn_image::criu::{Host, HugePages, Pids};
use firn_oci::Spec;
use serde_json::json;

use crate::rights;

/// Prints what in an image exceeds the bundle's spec, or null.
pub(crate) fn check(bundle: &Path, image: &Path) -> Result<()> {
    rights::keep_reading()?;
    let spec = Spec::load(bundle)?;
    let root = bundle.join(spec.root_path().context("the spec has no root file system")?);
    // What is not there has no links.
    let host = match Host::before(&root).if_present() {
        Ok(host) => host.unwrap_or_else(Host::this),
        Err(error) => return Err(error).with_context(|| format!("cannot open {}", root.display())),
    };
    let fits = criu::check(&spec, image, &host)
        .and_then(|()| criu::expect_volumes(&spec, image, bundle, None))
        .and_then(|()| HugePages::of_image(image)?.expect())
        .and_then(|()| Pids::of_image(&spec, image)?.expect(&spec));
    crate::answer(json!(fits.err()))
}

/// Prints what in restored processes, of which the first is the container's init, exceeds the bundle's spec,
/// or null.
pub(crate) fn check_tasks(bundle: &Path, pids: &[&str]) -> Result<()> {
    let spec = Spec::load(bundle)?;
    let pids: Vec<i32> = pids.iter().map(|pid| pid.parse()).collect::<Result<_, _>>()?;
    let init = *pids.first().context("no process")?;
    let host = Host::of(init).context("cannot open the root file system of the container")?;
    let fault = criu::check_made(&spec, init, &pids, &host).err();
    crate::answer(json!(fault))
}
