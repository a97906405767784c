//! A dry run for a spec or for GPUs that are given: containerd is asked for nothing but the checkpoint, if it
//! has it.

use std::path::Path;

use anyhow::{Context, Result, bail};
use firn_gpu::protocol::GpuMemory;
use firn_host::Problem;
use firn_image::manifest::Manifest;
use firn_oci::Spec;

use super::error::RestoreError;
use super::facts::manifest_of;
use super::gpus::{self, NodeGpus};
use super::plan::Plan;
use super::{Restored, STDIN};
use crate::args::restore::RestoreArgs;
use crate::program;
use crate::view::args::SubjectArgs;
use crate::view::{Subject, View};

/// A directory of a checkpoint has CRIU's files alone.
#[derive(Debug, thiserror::Error, Problem)]
#[error("{what} does not have the spec of its container")]
#[problem(
    "FIRN-NO-SPEC",
    "name the config.json of the container to be restored: `firn restore DIR --dry-run --spec FILE`. An \
     image or a tar file of `firn checkpoint` has it"
)]
struct NoSpec {
    what: String,
}

/// Whether a restore would be accepted. The outer error: it could not be found out.
pub(super) fn plan(args: &RestoreArgs, node: &NodeGpus) -> Result<Result<Restored, RestoreError>> {
    if args.from == STDIN {
        bail!("--spec and --inventory do not go with a stream. hint: name a tar file");
    }
    let subject = SubjectArgs {
        subject: args.from.clone(),
        kind: args.kind,
        containerd: args.containerd.clone(),
        // containerd's socket is in its state directory.
        state: args
            .containerd
            .socket
            .address
            .parent()
            .map(Path::to_owned)
            .unwrap_or_default(),
    };
    let subject = Subject::of(&subject);
    let given = match args.spec.as_deref().map(Spec::load_file).transpose() {
        Ok(given) => given,
        Err(error) => return Ok(Err(RestoreError::Plan(error.into()))),
    };
    match subject {
        Subject::Container(bundle) => of_container(args, node, given, &bundle),
        Subject::Checkpoint(place) => {
            let view = View::open(&place, &args.containerd)?;
            Ok(of_checkpoint(args, node, given, &view))
        }
    }
}

fn of_checkpoint(
    args: &RestoreArgs,
    node: &NodeGpus,
    given: Option<Spec>,
    view: &View,
) -> Result<Restored, RestoreError> {
    let spec = given.or_else(|| view.spec.clone());
    let what = || view.what.clone();
    let mut spec = spec.ok_or_else(|| RestoreError::Plan(NoSpec { what: what() }.into()))?;
    let manifest = Manifest::read(&view.dir)?;
    gpus::choose(args, Some(node), &mut spec, manifest.as_ref())?;
    let bundle = args.spec.as_deref().and_then(Path::parent).unwrap_or(&view.dir);
    Ok(Restored::planned(Plan::of_view(node, spec, view, bundle)?))
}

/// For a checkpoint of a running container that would be made now.
fn of_container(
    args: &RestoreArgs,
    node: &NodeGpus,
    given: Option<Spec>,
    bundle: &Path,
) -> Result<Result<Restored, RestoreError>> {
    let own = match Spec::load(bundle) {
        Ok(own) => own,
        Err(error) => return Ok(Err(RestoreError::Plan(error.into()))),
    };
    let manifest = if own.requests_gpu() {
        // Its GPUs are of this node, wherever it would be restored.
        let read = node.is_there.then(|| program::inventory(&node.config));
        let read = read.transpose().context("cannot read the GPUs of this node")?;
        let here = match &read {
            Some(here) => here,
            None => node.inventory()?,
        };
        match manifest_of(&own, here, &GpuMemory::new()) {
            Ok(manifest) => Some(manifest),
            Err(failure) => return Ok(Err(RestoreError::Plan(failure))),
        }
    } else {
        None
    };
    let mut spec = given.unwrap_or(own);
    let chosen = gpus::choose(args, Some(node), &mut spec, manifest.as_ref());
    let planned = chosen.and_then(|()| Plan::make(node, spec, manifest, bundle));
    Ok(planned.map(Restored::planned))
}
