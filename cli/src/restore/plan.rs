//! What a restore would do, for its dry run: whether it would be accepted, and with which GPUs. Decided as
//! the shim does at Create.
//!
//! Of another node only the GPUs are known, and not its mounts and CDI files. Names of GPUs are then resolved
//! as by a CDI file that names each GPU by index and UUID.

use std::path::Path;

use firn_cdi::{CdiFile, DeviceNode, Registry};
use firn_config::Config;
use firn_gpu::{Gpu, GpuUuid, Inventory, SourceGpu};
use firn_host::{CpuFeatures, ProblemReport};
use firn_image::criu::{self, HugePages, Pids};
use firn_image::manifest::Manifest;
use firn_oci::{GpuRequest, Rules, Spec, mounts};
use firn_remap::plan::{GpuMap, Warning};
use firn_remap::{Basis, GpuAssignment, Grant};
use serde::Serialize;
use serde_json::json;

use super::error::RestoreError;
use super::gpus::NodeGpus;
use crate::cdi;
use crate::output::line;
use crate::view::View;

const UNSEEN_MOUNTS: &str =
    "mounts and their files, libraries, hooks, AppArmor and the CPU: they are looked at on the node itself";
const UNSEEN_CDI: &str =
    "CDI files of that node: what the spec requests is taken as its GPUs by index, UUID or all";

/// A restore that would be accepted.
pub struct Plan {
    gpus: PlannedGpus,
    /// What could not be checked.
    unseen: Vec<&'static str>,
}

/// The GPUs that the container would get.
enum PlannedGpus {
    /// The checkpoint holds no GPU state.
    None,
    /// The checkpoint holds nothing of any device.
    DeviceFree(Grant),
    Mapped {
        source: Vec<SourceGpu>,
        /// Version of the driver.
        driver: String,
        assignment: GpuAssignment,
    },
}

/// What a dry run found; nothing of a restore that was made.
#[derive(Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Decision<'a> {
    /// Whether it would be restored; absent without --dry-run, as all fields of the decision.
    accepted: Option<bool>,
    /// UUIDs of the GPUs for a checkpoint that holds nothing of any device; absent for another checkpoint.
    device_free: Option<Vec<&'a GpuUuid>>,
    /// A pair for every GPU of the checkpoint; absent if it has no GPU state, or if the restore would be
    /// refused.
    map: Option<&'a GpuMap>,
    /// By what the container is granted its GPUs, for people; absent if there is neither `map` nor
    /// `device_free`.
    basis: Option<String>,
    /// What a restore with this map does not keep; absent as the map.
    warnings: Option<&'a [Warning]>,
    /// What could not be checked, for people; absent if the restore would be refused.
    unseen: Option<&'a [&'static str]>,
    /// Why it would be refused; absent if it would be accepted.
    failure: Option<&'a ProblemReport>,
}

impl<'a> Decision<'a> {
    pub fn refused(failure: &'a ProblemReport) -> Self {
        Self {
            accepted: Some(false),
            failure: Some(failure),
            ..Self::default()
        }
    }

    pub fn accepted(plan: &'a Plan) -> Self {
        let decision = Self {
            accepted: Some(true),
            unseen: Some(&plan.unseen),
            ..Self::default()
        };
        match &plan.gpus {
            PlannedGpus::None => decision,
            PlannedGpus::DeviceFree(grant) => Self {
                device_free: Some(grant.gpus.iter().map(|gpu| &gpu.uuid).collect()),
                basis: Some(basis(grant)),
                ..decision
            },
            PlannedGpus::Mapped { assignment, .. } => Self {
                map: Some(&assignment.map),
                basis: Some(basis(&assignment.grant)),
                warnings: Some(&assignment.warnings),
                ..decision
            },
        }
    }
}

impl Plan {
    /// For a container with this spec, and a checkpoint whose files are looked at.
    pub fn of_view(node: &NodeGpus, spec: Spec, view: &View, bundle: &Path) -> Result<Self, RestoreError> {
        let manifest = Manifest::read_for(&spec, &view.dir)?;
        if let (Some(_), (_, Some(failure))) = (&manifest, view.look()) {
            return Err(RestoreError::Plan(failure));
        }
        let (given, kept) = (
            spec.clone(),
            manifest.as_ref().map(|manifest| manifest.mounts.clone()),
        );
        let plan = Self::make(node, spec, manifest, bundle)?;
        // Kubernetes gives the copy mounts and a PID namespace of its own.
        if !node.is_there && given.author().owns_node() {
            let expected = criu::expect_volumes(&given, &view.dir, bundle, kept.as_deref())
                .and_then(|()| Pids::of_image(&given, &view.dir)?.expect(&given));
            expected.map_err(|error| RestoreError::Plan(error.into()))?;
        }
        if !node.is_there {
            let expected = HugePages::of_image(&view.dir).and_then(|pages| pages.expect());
            expected.map_err(|error| RestoreError::Plan(error.into()))?;
        }
        Ok(plan)
    }

    /// For a container with this spec, and a checkpoint that is whole. Relative paths of the spec begin at
    /// `bundle`.
    pub fn make(
        node: &NodeGpus,
        spec: Spec,
        manifest: Option<Manifest>,
        bundle: &Path,
    ) -> Result<Self, RestoreError> {
        if let Some(failure) = &node.failure {
            return Err(RestoreError::Plan(failure.clone()));
        }
        let config = &node.config;
        let there = node.is_there.then(|| node.inventory()).transpose()?;
        let (spec, by_names) = created(spec, config, there)?;
        let source_cpu = manifest.as_ref().map(|manifest| manifest.cpu.clone());
        let mounts = |manifest: &Manifest, inventory: &Inventory| match there {
            Some(_) => Ok(()),
            None => find_mounts(&spec, bundle, manifest, inventory, config),
        };
        let gpus = match manifest {
            Some(manifest) if manifest.is_device_free() => {
                let asks = node.is_there || spec.requests_gpu();
                // A node without the driver has no GPU of NVIDIA's to grant.
                let here = asks.then(|| node.inventory().ok()).flatten();
                let inventory = here.cloned().unwrap_or_default();
                let grant = Grant::of_device_free(&spec, &inventory, &config.restore);
                let grant = grant.map_err(|error| RestoreError::Plan(error.into()))?;
                mounts(&manifest, &inventory)?;
                PlannedGpus::DeviceFree(grant)
            }
            Some(manifest) if manifest.has_gpu_state() => {
                let inventory = node.inventory()?;
                let assignment = GpuAssignment::make(&spec, &manifest, inventory, &config.restore)
                    .map_err(|error| node.with_holders(error, &spec))?;
                mounts(&manifest, inventory)?;
                PlannedGpus::Mapped {
                    source: manifest.gpus,
                    driver: inventory.driver_version.clone(),
                    assignment,
                }
            }
            // No process used the GPUs that it has.
            Some(manifest) if !manifest.gpus.is_empty() => {
                mounts(&manifest, node.inventory()?)?;
                PlannedGpus::None
            }
            _ => {
                // Kubernetes replaces them.
                if !node.is_there && !spec.requests_gpu() && spec.author().owns_node() {
                    let sources = mounts::expect_sources(&spec, bundle);
                    sources.map_err(|error| RestoreError::Plan(error.into()))?;
                }
                PlannedGpus::None
            }
        };
        if !node.is_there {
            expect_of_node(&spec, source_cpu.as_ref())?;
        }
        let holds_gpus = !matches!(gpus, PlannedGpus::None);
        let unseen = [
            (node.is_there, UNSEEN_MOUNTS),
            (node.is_there && holds_gpus && by_names, UNSEEN_CDI),
        ];
        Ok(Self {
            gpus,
            unseen: unseen
                .into_iter()
                .filter_map(|(is_so, what)| is_so.then_some(what))
                .collect(),
        })
    }

    /// The GPUs that the container would get instead of its own; none if it has no GPU state.
    pub fn map(&self) -> Option<&GpuMap> {
        match &self.gpus {
            PlannedGpus::Mapped { assignment, .. } => Some(&assignment.map),
            PlannedGpus::None | PlannedGpus::DeviceFree(_) => None,
        }
    }

    /// For people.
    pub fn print(&self) {
        match &self.gpus {
            PlannedGpus::None => {
                line!("the checkpoint holds no GPU state: it would be restored as runc alone would");
            }
            PlannedGpus::DeviceFree(grant) => {
                line!("the checkpoint is device-free: the container gets what its spec grants");
                line!("grant   {}", basis(grant));
                for gpu in &grant.gpus {
                    line!("gpu     {} {} {}", gpu.uuid, gpu.name, place(gpu));
                }
            }
            PlannedGpus::Mapped {
                source,
                driver,
                assignment,
            } => {
                line!("driver  {driver} on both sides");
                line!("grant   {}", basis(&assignment.grant));
                for pair in assignment.map.pairs() {
                    let old = source.iter().find(|gpu| gpu.uuid == pair.old);
                    let new = assignment.grant.gpus.iter().find(|gpu| gpu.uuid == pair.new);
                    let name = old.map_or("", |gpu| &gpu.name);
                    let place = new.map_or_else(String::new, place);
                    line!("gpu     {} {name} -> {} {place}", pair.old, pair.new);
                }
                for warning in &assignment.warnings {
                    line!("warning {warning}");
                }
            }
        }
        for what in &self.unseen {
            line!("unseen  {what}");
        }
    }
}

/// Where a GPU is on its node.
fn place(gpu: &Gpu) -> String {
    format!("(minor {}, {})", gpu.minor, gpu.pci_address)
}

fn basis(grant: &Grant) -> String {
    match grant.basis {
        Basis::Nodes => "by the device nodes of the spec".to_owned(),
        Basis::Everything => "every GPU: the spec's device rules open them all".to_owned(),
        Basis::Config => "by [restore] gpus in the configuration".to_owned(),
        Basis::Map(origin) => format!("by the {origin}"),
    }
}

/// Looks for every mount that the restore needs.
fn find_mounts(
    spec: &Spec,
    bundle: &Path,
    manifest: &Manifest,
    inventory: &Inventory,
    config: &Config,
) -> Result<(), RestoreError> {
    let by_cdi = Registry::read(&config.create.cdi_dirs).library_dirs();
    let by_cdi = by_cdi.iter().filter_map(|dir| dir.to_str());
    let dirs: Vec<&str> = mounts::LIBRARY_DIRS.into_iter().chain(by_cdi).collect();
    let driver = mounts::Driver {
        version: &inventory.driver_version,
        dirs: &dirs,
    };
    let needs = mounts::Needs {
        mounts: &manifest.mounts,
        device_free: manifest.is_device_free(),
    };
    let empty = bundle.join(firn_config::names::BUNDLE_EMPTY);
    let resolved = mounts::resolve(spec, bundle, needs, driver, &empty);
    resolved.map_err(|error| RestoreError::Plan(error.into()))?;
    Ok(())
}

/// Looks for what is neither a GPU nor room. `cpu`: of the source; none if firn has not made the image.
fn expect_of_node(spec: &Spec, cpu: Option<&CpuFeatures>) -> Result<(), RestoreError> {
    let fits = cpu.map_or(Ok(()), |cpu| firn_preflight::expect_cpu(cpu, spec));
    fits.and_then(|()| firn_preflight::expect_named(spec))
        .map_err(|error| RestoreError::Plan(error.into()))
}

/// The spec as the shim would convert it at Create, and whether there was anything to convert.
fn created(spec: Spec, config: &Config, there: Option<&Inventory>) -> Result<(Spec, bool), RestoreError> {
    let rules = Rules::of(&spec, None).map_err(|error| RestoreError::Plan(error.into()))?;
    let by_names = match GpuRequest::of(&spec, &rules) {
        GpuRequest::Named(request) => request.source.is_enabled(&config.create),
        _ => false,
    };
    let converted = match there {
        None => firn_cdi::convert(spec, config, &rules, true),
        Some(inventory) => firn_cdi::convert_by(spec, config, &rules, true, || registry_of(inventory)),
    };
    let converted = converted.map_err(|error| RestoreError::Plan(error.into()))?;
    Ok((converted.spec, by_names))
}

/// CDI devices of a node of which only the GPUs are known.
fn registry_of(inventory: &Inventory) -> Registry {
    let node = |node: &firn_gpu::DeviceNode| serde_json::from_value(json!(node)).ok();
    let nodes = |gpu: &Gpu| gpu.node.iter().filter_map(node).collect();
    let nodes: Vec<Vec<DeviceNode>> = inventory.gpus.iter().map(nodes).collect();
    Registry::of([CdiFile {
        kind: firn_cdi::KIND.to_owned(),
        devices: cdi::devices(&inventory.gpus, &nodes),
        ..CdiFile::default()
    }])
}
