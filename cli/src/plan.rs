//! `firn plan`: which GPUs a restore would use.
//!
//! Of another node only the inventory is known, and not its mounts and CDI files. Names of GPUs are then
//! resolved as by a CDI file that names each GPU by index and UUID.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use firn_cdi::{CdiFile, DeviceNode, Registry};
use firn_config::{Config, Keys};
use firn_gpu::{Backend, CudaState, Gpu, GpuUuid, Inventory, SourceGpu};
use firn_host::Problem;
use firn_image::manifest::{CheckpointedProcess, DriverVersion, DumpFlags, Manifest, Versions};
use firn_oci::{GpuRequest, Rules, Spec, job_hook, mounts};
use firn_remap::plan::{GpuMap, Warning};
use firn_remap::{Basis, GpuAssignment, Grant};
use serde::Serialize;
use serde_json::json;

use crate::args::PlanArgs;
use crate::output::{self, Tone, line, printed, toned};
use crate::view::{Subject, View};
use crate::{cdi, program};
use firn_host::ProblemReport;

/// A restore that would be accepted.
#[derive(Default)]
struct Accepted {
    /// `None` if the checkpoint holds no GPU state.
    gpus: Option<(Manifest, GpuAssignment, Inventory)>,
    /// What a container gets whose checkpoint holds nothing of any device.
    device_free: Option<Grant>,
    /// What could not be checked.
    unseen: Vec<&'static str>,
}

const UNSEEN_MOUNTS: &str = "mounts and libraries: they are looked for on the node itself";
const UNSEEN_CDI: &str =
    "CDI files of that node: what the spec requests is taken as its GPUs by index, UUID or all";

/// A directory of a checkpoint has CRIU's files alone.
#[derive(Debug, thiserror::Error, Problem)]
#[error("{what} does not have the spec of its container")]
#[problem(
    "FIRN-NO-SPEC",
    "name the config.json of the container to be restored: `firn plan DIR --spec FILE`. An image or a tar \
     file of `firn checkpoint` has it"
)]
struct NoSpec {
    what: String,
}

/// What is to be planned: the spec of a container, and its checkpoint.
struct PlanSubject {
    spec: Spec,
    manifest: Option<Manifest>,
    /// What relative paths of the spec begin at.
    bundle: PathBuf,
    /// The small files of an archive, for as long as this lives.
    _view: Option<View>,
}

/// Whether a restore would be accepted, and with which GPUs.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Decision<'a> {
    /// Whether it would be accepted.
    accepted: bool,
    /// UUIDs of the GPUs for a checkpoint that holds nothing of any device; absent for another checkpoint.
    device_free: Option<Vec<&'a GpuUuid>>,
    /// A pair for every GPU of the checkpoint; absent if it has no GPU state, or if the restore would be
    /// refused.
    map: Option<&'a GpuMap>,
    /// By what the container is granted its GPUs, for people; absent as the map.
    basis: Option<String>,
    /// What a restore with this map does not keep; absent as the map.
    warnings: Option<&'a [Warning]>,
    /// What could not be checked, for people; absent if the restore would be refused.
    unseen: Option<&'a [&'static str]>,
    /// Why it would be refused; absent if it would be accepted.
    failure: Option<&'a ProblemReport>,
}

printed! { Decision<'_>: "plan" }

impl<'a> Decision<'a> {
    fn of(result: &'a Result<Accepted, ProblemReport>) -> Self {
        let accepted = result.as_ref().ok();
        let gpus = accepted.and_then(|accepted| accepted.gpus.as_ref());
        let decision = gpus.map(|(_, decision, _)| decision);
        Self {
            accepted: result.is_ok(),
            device_free: accepted.and_then(granted),
            map: decision.map(|decision| &decision.map),
            basis: decision.map(|decision| basis(&decision.grant)),
            warnings: decision.map(|decision| &*decision.warnings),
            unseen: accepted.map(|accepted| &*accepted.unseen),
            failure: result.as_ref().err(),
        }
    }
}

/// Returns whether the restore would be accepted.
pub fn run(args: &PlanArgs) -> Result<bool> {
    let config = Config::load(Keys::RESTORE).map_err(ProblemReport::from)?;
    let result = decide(args, &config)?;
    if args.json {
        output::json(&Decision::of(&result))?;
    } else {
        match &result {
            Ok(accepted) => {
                let place = if args.inventory.is_some() { "there" } else { "here" };
                line!("verdict can be restored {place}, as far as can be seen");
                print(accepted, args.verbose);
            }
            Err(failure) => toned(Some((Tone::Bad, &failure.code)), &format!("verdict {failure}")),
        }
    }
    Ok(result.is_ok())
}

/// What the shim would decide at Create. The outer error: the decision could not be made.
fn decide(args: &PlanArgs, config: &Config) -> Result<Result<Accepted, ProblemReport>> {
    let there = args
        .inventory
        .as_deref()
        .map(program::read_inventory)
        .transpose()?;
    let PlanSubject {
        spec,
        manifest,
        bundle,
        _view,
    } = match subject(args, config)? {
        Ok(planned) => planned,
        Err(failure) => return Ok(Err(failure)),
    };
    let (spec, by_names) = match created(spec, config, there.as_ref()) {
        Ok(created) => created,
        Err(failure) => return Ok(Err(failure)),
    };
    let is_there = there.is_some();
    if let Some(manifest) = manifest.as_ref().filter(|manifest| manifest.is_device_free()) {
        return Ok(without_devices(&spec, &bundle, manifest, there, config));
    }
    let Some(manifest) = manifest.filter(Manifest::has_gpu_state) else {
        return Ok(Ok(Accepted::default()));
    };
    let inventory = match there {
        Some(inventory) => inventory,
        None => program::inventory(config).context("cannot read the GPUs of this node")?,
    };
    let decision = GpuAssignment::make(&spec, &manifest, &inventory, &config.restore)
        .map_err(ProblemReport::from)
        .and_then(|decision| {
            if is_there {
                return Ok(decision);
            }
            find_mounts(&spec, &bundle, &manifest, &inventory, config).map(|()| decision)
        });
    Ok(decision.map(|decision| Accepted {
        gpus: Some((manifest, decision, inventory)),
        unseen: [(is_there, UNSEEN_MOUNTS), (is_there && by_names, UNSEEN_CDI)]
            .into_iter()
            .filter_map(|(is_so, what)| is_so.then_some(what))
            .collect(),
        device_free: None,
    }))
}

/// The grant of a container whose checkpoint holds nothing of any device.
fn without_devices(
    spec: &Spec,
    bundle: &Path,
    manifest: &Manifest,
    there: Option<Inventory>,
    config: &Config,
) -> Result<Accepted, ProblemReport> {
    let is_there = there.is_some();
    let asks = there.is_none() && spec.requests_gpu();
    // A node without the driver has no GPU of NVIDIA's to grant.
    let here = asks.then(|| program::inventory(config).ok()).flatten();
    let inventory = there.or(here).unwrap_or_default();
    let grant = Grant::of_device_free(spec, &inventory, &config.restore)?;
    if !is_there {
        find_mounts(spec, bundle, manifest, &inventory, config)?;
    }
    Ok(Accepted {
        device_free: Some(grant),
        unseen: is_there.then_some(UNSEEN_MOUNTS).into_iter().collect(),
        ..Accepted::default()
    })
}

/// Looks for every mount that the restore needs.
pub fn find_mounts(
    spec: &Spec,
    bundle: &Path,
    manifest: &Manifest,
    inventory: &Inventory,
    config: &Config,
) -> Result<(), ProblemReport> {
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
    mounts::resolve(spec, bundle, needs, driver, &empty)?;
    Ok(())
}

/// The outer error: what the subject is could not be found out.
fn subject(args: &PlanArgs, config: &Config) -> Result<Result<PlanSubject, ProblemReport>> {
    let given = args.spec.as_deref().map(Spec::load_file).transpose();
    let given = match given.map_err(ProblemReport::from) {
        Ok(given) => given,
        Err(failure) => return Ok(Err(failure)),
    };
    let of_file = args.spec.as_deref().and_then(Path::parent).map(Path::to_owned);
    match Subject::of(&args.subject) {
        Subject::Container(bundle) => {
            let planned = container(&bundle, config)?;
            Ok(planned.map(|planned| PlanSubject {
                spec: given.unwrap_or(planned.spec),
                ..planned
            }))
        }
        Subject::Checkpoint(place) => {
            let view = View::open(&place, &args.subject)?;
            Ok(checkpoint(view, given, of_file))
        }
    }
}

fn checkpoint(
    view: View,
    given: Option<Spec>,
    of_file: Option<PathBuf>,
) -> Result<PlanSubject, ProblemReport> {
    let spec = given.or_else(|| view.spec.clone());
    let spec = spec.ok_or_else(|| NoSpec {
        what: view.what.clone(),
    })?;
    let manifest = Manifest::read_for(&spec, &view.dir)?;
    if let (Some(_), (_, Some(failure))) = (&manifest, view.look()) {
        return Err(failure);
    }
    Ok(PlanSubject {
        spec,
        manifest,
        bundle: of_file.unwrap_or_else(|| view.dir.clone()),
        _view: Some(view),
    })
}

/// A running container, with the manifest that a checkpoint of it would have, as far as a plan needs it.
fn container(bundle: &Path, config: &Config) -> Result<Result<PlanSubject, ProblemReport>> {
    let spec = match Spec::load(bundle) {
        Ok(spec) => spec,
        Err(error) => return Ok(Err(error.into())),
    };
    let manifest = if spec.requests_gpu() {
        let here = program::inventory(config).context("cannot read the GPUs of this node")?;
        match manifest_of(&spec, &here) {
            Ok(manifest) => Some(manifest),
            Err(failure) => return Ok(Err(failure)),
        }
    } else {
        None
    };
    Ok(Ok(PlanSubject {
        spec,
        manifest,
        bundle: bundle.to_owned(),
        _view: None,
    }))
}

fn manifest_of(spec: &Spec, here: &Inventory) -> Result<Manifest, ProblemReport> {
    let node = firn_preflight::check_node(here, Some(spec)).accepted()?;
    let gpus: Vec<_> = node.gpus.iter().map(SourceGpu::from).collect();
    let uuids: Vec<GpuUuid> = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    let manifest = Manifest {
        checkpoint: String::new(),
        origin: None,
        hooks: std::collections::BTreeMap::new(),
        backend: Backend::Nvidia,
        dump: DumpFlags::default(),
        driver: Some(DriverVersion {
            driver: here.driver_version.clone(),
            cuda: here.cuda_version,
        }),
        topology: here.topology.of(&uuids),
        gpus,
        // One is enough for the image to have GPU state.
        processes: vec![CheckpointedProcess {
            pid: 1,
            restore_tid: 1,
            state: CudaState::Running,
        }],
        inherited_gpus: Vec::new(),
        released_gpus: None,
        bulk: None,
        mounts: mounts::required(spec)?,
        versions: Versions::default(),
        images: Vec::new(),
    };
    Ok(if job_hook::releases_devices(spec) {
        manifest.without_devices()
    } else {
        manifest
    })
}

/// The spec as the shim would convert it at Create, and whether there was anything to convert.
pub fn created(
    spec: Spec,
    config: &Config,
    there: Option<&Inventory>,
) -> Result<(Spec, bool), ProblemReport> {
    let rules = Rules::of(&spec, None)?;
    let by_names = match GpuRequest::of(&spec, &rules) {
        GpuRequest::Named(request) => request.source.is_enabled(&config.create),
        _ => false,
    };
    let converted = match there {
        None => firn_cdi::convert(spec, config, &rules, true),
        Some(inventory) => firn_cdi::convert_by(spec, config, &rules, true, || registry_of(inventory)),
    };
    Ok((converted?.spec, by_names))
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

/// The UUIDs of the GPUs for a device-free checkpoint; none for any other.
fn granted(accepted: &Accepted) -> Option<Vec<&GpuUuid>> {
    let grant = accepted.device_free.as_ref()?;
    Some(grant.gpus.iter().map(|gpu| &gpu.uuid).collect())
}

fn print(accepted: &Accepted, is_verbose: bool) {
    if let Some(grant) = &accepted.device_free {
        line!("the checkpoint is device-free: the container gets what its spec grants here");
        line!("grant   {}", basis(grant));
        for gpu in &grant.gpus {
            line!(
                "gpu     {} {} (minor {}, {})",
                gpu.uuid,
                gpu.name,
                gpu.minor,
                gpu.pci_address
            );
        }
        for what in &accepted.unseen {
            line!("unseen  {what}");
        }
        return;
    }
    let Some((manifest, decision, inventory)) = &accepted.gpus else {
        line!("the checkpoint holds no GPU state: it would be restored as runc alone would");
        return;
    };
    if is_verbose {
        line!("driver  {} on both sides", inventory.driver_version);
        line!("grant   {}", basis(&decision.grant));
    }
    for pair in decision.map.pairs() {
        let old = manifest.gpus.iter().find(|gpu| gpu.uuid == pair.old);
        let new = inventory.gpus.iter().find(|gpu| gpu.uuid == pair.new);
        let name = old.map_or("", |gpu| &gpu.name);
        let minor = new.filter(|_| is_verbose).map_or_else(String::new, |gpu| {
            format!(" (minor {}, {})", gpu.minor, gpu.pci_address)
        });
        line!("gpu     {} {name} -> {}{minor}", pair.old, pair.new);
    }
    for warning in &decision.warnings {
        line!("warning {warning}");
    }
    for what in &accepted.unseen {
        line!("unseen  {what}");
    }
}

fn basis(grant: &Grant) -> String {
    match grant.basis {
        Basis::Nodes => "by the device nodes of the spec".to_owned(),
        Basis::Everything => "every GPU: the spec's device rules open them all".to_owned(),
        Basis::Config => "by [restore] gpus in the configuration".to_owned(),
        Basis::Map(origin) => format!("by the {origin}"),
    }
}
