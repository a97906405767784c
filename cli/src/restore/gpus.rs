//! Which GPUs a new container gets: chosen for this restore, or as the node and the spec have it.

use std::path::Path;

use anyhow::Context;
use firn_config::{Config, Keys, names};
use firn_gpu::Inventory;
use firn_image::manifest::Manifest;
use firn_oci::Spec;
use firn_remap::GpuAssignment;

use super::error::RestoreError;
use crate::args::restore::RestoreArgs;
use crate::program;

/// What is to be done.
pub enum Mode {
    /// Show whether the restore would be accepted.
    DryRun(NodeGpus),
    /// Restore. None: nothing is to be decided about GPUs.
    Restore(Option<NodeGpus>),
}

impl Mode {
    /// What the command line wants. Runs firn-gpu: not to be called by a future.
    pub fn read(args: &RestoreArgs) -> Result<Self, RestoreError> {
        if args.dry_run {
            return Ok(Self::DryRun(NodeGpus::read(args.inventory.as_deref())?));
        }
        let gpus = args.gpus.is_some().then(|| NodeGpus::read(None)).transpose()?;
        Ok(Self::Restore(gpus))
    }

    /// Those to choose among.
    pub fn gpus(&self) -> Option<&NodeGpus> {
        match self {
            Self::DryRun(gpus) => Some(gpus),
            Self::Restore(gpus) => gpus.as_ref(),
        }
    }
}

/// What has to be known of a node to decide.
pub struct NodeGpus {
    /// That of this node.
    pub config: Config,
    /// Whether it is another node, of which only the GPUs are known.
    pub is_there: bool,
    inventory: Result<Inventory, String>,
}

impl NodeGpus {
    /// Of this node, or of another one whose inventory is in a file.
    fn read(there: Option<&Path>) -> Result<Self, RestoreError> {
        let config = Config::load(Keys::RESTORE)?;
        let inventory = match there {
            Some(file) => program::read_inventory(file),
            None => program::inventory(&config).context("cannot read the GPUs of this node"),
        };
        Ok(Self {
            config,
            is_there: there.is_some(),
            inventory: inventory.map_err(|error| format!("{error:#}")),
        })
    }

    pub fn inventory(&self) -> Result<&Inventory, RestoreError> {
        let read = self.inventory.as_ref();
        read.map_err(|error| RestoreError::Node(error.clone()))
    }
}

/// Writes the choice into the spec's annotations, where the shim reads it.
pub fn choose(
    args: &RestoreArgs,
    node: Option<&NodeGpus>,
    spec: &mut Spec,
    manifest: Option<&Manifest>,
) -> Result<(), RestoreError> {
    let map = match (&args.gpus, node, &args.gpu_map) {
        (Some(gpus), Some(node), _) => among(gpus, node, spec, gpu_state(manifest)?)?,
        (_, _, Some(map)) => {
            gpu_state(manifest)?;
            map.clone()
        }
        _ => return Ok(()),
    };
    let annotations = spec
        .object_mut("annotations")
        .map_err(|error| RestoreError::Plan(error.into()))?;
    annotations.remove(names::ANNOTATION_REMAP_POLICY);
    annotations.insert(names::ANNOTATION_GPU_MAP.to_owned(), map.into());
    Ok(())
}

fn gpu_state(manifest: Option<&Manifest>) -> Result<&Manifest, RestoreError> {
    manifest
        .filter(|manifest| manifest.has_gpu_state())
        .ok_or(RestoreError::NoGpuState)
}

/// The map onto these GPUs, by the policy of the spec or of the node.
fn among(gpus: &str, node: &NodeGpus, spec: &mut Spec, manifest: &Manifest) -> Result<String, RestoreError> {
    let annotations = spec
        .object_mut("annotations")
        .map_err(|error| RestoreError::Plan(error.into()))?;
    annotations.remove(names::ANNOTATION_GPU_MAP);
    let names = gpus.split(',').map(|name| name.trim().to_owned());
    let names: Vec<String> = names.filter(|name| !name.is_empty()).collect();
    let (named, had) = (names.len(), manifest.gpus.len());
    if named != had {
        return Err(RestoreError::GpuCount { named, had });
    }
    let mut restore = node.config.restore.clone();
    restore.gpus = names;
    restore.gpu_map = Vec::new();
    let assignment = GpuAssignment::make(spec, manifest, node.inventory()?, &restore)?;
    let pairs = assignment.map.pairs().iter();
    let pairs = pairs.map(|pair| format!("{}={}", pair.old, pair.new));
    Ok(pairs.collect::<Vec<_>>().join(","))
}
