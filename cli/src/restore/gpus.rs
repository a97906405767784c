//! Which GPUs a new container gets: chosen for this restore, or as the node and the spec have it.

use std::path::Path;

use anyhow::Context;
use firn_config::{Config, Keys, RemapPolicy, Restore, names};
use firn_gpu::{Gpu, Inventory};
use firn_host::ProblemReport;
use firn_image::manifest::Manifest;
use firn_oci::Spec;
use firn_remap::{AssignmentError, GpuAssignment, Grant};
use firn_transaction::lease::{Lease, name_holders};

use super::error::RestoreError;
use super::room::expect_restorer;
use crate::args::restore::RestoreArgs;
use crate::program;

/// The word that leaves the choice of GPUs to firn.
const AUTO: &str = "auto";

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
            let there = args.inventory.as_deref();
            return Ok(Self::DryRun(NodeGpus::read(
                there,
                &args.containerd.socket.address,
            )?));
        }
        let read = || NodeGpus::read(None, &args.containerd.socket.address);
        let gpus = args.gpus.is_some().then(read).transpose()?;
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
    /// Why containerd's shims here restore nothing; not known of another node.
    pub failure: Option<ProblemReport>,
    inventory: Result<Inventory, String>,
}

impl NodeGpus {
    /// Of this node, whose containerd listens on `socket`, or of another one whose inventory is in a file.
    pub fn read(there: Option<&Path>, socket: &Path) -> Result<Self, RestoreError> {
        let config = Config::load(Keys::RESTORE)?;
        let inventory = match there {
            Some(file) => program::read_inventory(file),
            None => program::inventory(&config).context("cannot read the GPUs of this node"),
        };
        Ok(Self {
            config,
            is_there: there.is_some(),
            failure: match there {
                Some(_) => None,
                None => expect_restorer(socket).err(),
            },
            inventory: inventory.map_err(|error| format!("{error:#}")),
        })
    }

    /// Names of the GPUs to choose among, those of the configuration or all: first those that no container
    /// has, then all of them.
    fn choices(&self) -> Result<[Vec<String>; 2], RestoreError> {
        let (inventory, pool) = (self.inventory()?, &self.config.restore.gpus);
        let gpus = match &**pool {
            [] => inventory.gpus.clone(),
            pool => {
                Grant::named(inventory, pool, "gpus in the configuration")
                    .map_err(AssignmentError::from)?
                    .gpus
            }
        };
        let taken = if self.is_there {
            Vec::new()
        } else {
            Lease::taken_by_others(0).unwrap_or_default()
        };
        let is_free = |gpu: &&Gpu| gpu.node.as_ref().is_none_or(|node| !taken.contains(&node.id()));
        let names = |gpus: Vec<&Gpu>| gpus.iter().map(|gpu| gpu.uuid.to_string()).collect();
        Ok([
            names(gpus.iter().filter(is_free).collect()),
            names(gpus.iter().collect()),
        ])
    }

    /// Adds which containers of this node have a GPU without room.
    pub fn with_holders(&self, error: AssignmentError, spec: &Spec) -> AssignmentError {
        if self.is_there {
            error
        } else {
            name_holders(error, spec)
        }
    }

    pub fn inventory(&self) -> Result<&Inventory, RestoreError> {
        let read = self.inventory.as_ref();
        read.map_err(|error| RestoreError::Node(error.clone()))
    }
}

/// Writes what the command line chooses into the spec's annotations, where the shim reads it.
pub fn choose(
    args: &RestoreArgs,
    node: Option<&NodeGpus>,
    spec: &mut Spec,
    manifest: Option<&Manifest>,
) -> Result<(), RestoreError> {
    if let Some(word) = &args.cpu {
        let annotations = spec
            .object_mut("annotations")
            .map_err(|error| RestoreError::Plan(error.into()))?;
        annotations.insert(names::ANNOTATION_CPU.to_owned(), word.clone().into());
    }
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
    let mut restore = node.config.restore.clone();
    restore.gpu_map = Vec::new();
    let choices = if gpus == AUTO {
        restore.policy = RemapPolicy::Subset;
        annotations.remove(names::ANNOTATION_REMAP_POLICY);
        node.choices()?.to_vec()
    } else {
        let names = gpus.split(',').map(|name| name.trim().to_owned());
        let names: Vec<String> = names.filter(|name| !name.is_empty()).collect();
        let (named, had) = (names.len(), manifest.gpus.len());
        if named != had {
            return Err(RestoreError::GpuCount { named, had });
        }
        vec![names]
    };
    let assignment = first_of(choices, |gpus| {
        let restore = Restore {
            gpus,
            ..restore.clone()
        };
        GpuAssignment::make(spec, manifest, node.inventory()?, &restore)
            .map_err(|error| node.with_holders(error, spec).into())
    })?;
    let pairs = assignment.map.pairs().iter();
    let pairs = pairs.map(|pair| format!("{}={}", pair.old, pair.new));
    Ok(pairs.collect::<Vec<_>>().join(","))
}

/// The first choice that can be, or why the last one cannot.
fn first_of(
    choices: Vec<Vec<String>>,
    decide: impl Fn(Vec<String>) -> Result<GpuAssignment, RestoreError>,
) -> Result<GpuAssignment, RestoreError> {
    let mut last = Err(RestoreError::NoGpuState);
    // An empty list is no pool.
    for choice in choices.into_iter().filter(|choice| !choice.is_empty()) {
        last = decide(choice);
        if last.is_ok() {
            break;
        }
    }
    last
}
