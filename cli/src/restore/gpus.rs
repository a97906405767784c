//! Which GPUs a new container gets: chosen for this restore, or as the node and the spec have it.

use std::path::Path;

use firn_config::{Config, Keys, names};
use firn_gpu::Inventory;
use firn_image::manifest::Manifest;
use firn_oci::Spec;
use firn_remap::GpuAssignment;

use super::error::RestoreError;
use crate::args::restore::RestoreArgs;
use crate::{plan, program, stored};

/// Pairs of GPUs, old and new.
pub type Pairs = Vec<(String, String)>;

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
            return Ok(Self::DryRun(NodeGpus::read()?));
        }
        let gpus = args.gpus.is_some().then(NodeGpus::read).transpose()?;
        Ok(Self::Restore(gpus))
    }

    fn gpus(&self) -> Option<&NodeGpus> {
        match self {
            Self::DryRun(gpus) => Some(gpus),
            Self::Restore(gpus) => gpus.as_ref(),
        }
    }
}

/// What has to be known of this node to decide.
pub struct NodeGpus {
    config: Config,
    inventory: Result<Inventory, String>,
}

impl NodeGpus {
    fn read() -> Result<Self, RestoreError> {
        let config = Config::load(Keys::RESTORE)?;
        let inventory = program::inventory(&config).map_err(|error| format!("{error:#}"));
        Ok(Self { config, inventory })
    }

    fn inventory(&self) -> Result<&Inventory, RestoreError> {
        let read = self.inventory.as_ref();
        read.map_err(|error| RestoreError::Node(format!("cannot read the GPUs of this node: {error}")))
    }
}

/// Writes the choice into the spec's annotations, where the shim reads it.
pub fn choose(
    args: &RestoreArgs,
    mode: &Mode,
    spec: &mut Spec,
    manifest: Option<&Manifest>,
) -> Result<(), RestoreError> {
    let map = match (&args.gpus, mode.gpus(), &args.gpu_map) {
        (Some(gpus), Some(here), _) => among(gpus, here, spec, gpu_state(manifest)?)?,
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
fn among(gpus: &str, here: &NodeGpus, spec: &mut Spec, manifest: &Manifest) -> Result<String, RestoreError> {
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
    let mut restore = here.config.restore.clone();
    restore.gpus = names;
    restore.gpu_map = Vec::new();
    let assignment = GpuAssignment::make(spec, manifest, here.inventory()?, &restore)?;
    let pairs = pairs(&assignment)
        .into_iter()
        .map(|(old, new)| format!("{old}={new}"));
    Ok(pairs.collect::<Vec<_>>().join(","))
}

/// What the shim would decide for this spec, if the memory of the checkpoint is here.
pub fn plan(
    here: &NodeGpus,
    spec: &Spec,
    manifest: Option<&Manifest>,
    bundle: &Path,
) -> Result<Pairs, RestoreError> {
    if let Some(missing) = manifest.and_then(stored::missing) {
        return Err(RestoreError::Plan(missing));
    }
    let Some(manifest) = manifest.filter(|manifest| manifest.has_gpu_state()) else {
        return Ok(Pairs::new());
    };
    let (config, inventory) = (&here.config, here.inventory()?);
    let created = plan::created(spec.clone(), config, None);
    let (converted, _) = created.map_err(RestoreError::Plan)?;
    let assignment = GpuAssignment::make(&converted, manifest, inventory, &config.restore)?;
    plan::find_mounts(&converted, bundle, manifest, inventory, config).map_err(RestoreError::Plan)?;
    Ok(pairs(&assignment))
}

fn pairs(assignment: &GpuAssignment) -> Pairs {
    let pairs = assignment.map.pairs().iter();
    pairs
        .map(|pair| (pair.old.to_string(), pair.new.to_string()))
        .collect()
}
