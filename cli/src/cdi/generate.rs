//! `firn cdi generate`: writes a CDI file for a node that has only NVIDIA's driver.
//!
//! The file has no numbers of device nodes, because they change when the node starts again. Readers of the
//! file look them up.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use firn_cdi::{CdiFile, DeviceNode, Edits, Hook, KIND, Mount, Registry};
use firn_config::{Config, Keys, find_program, names};
use firn_gpu::{Gpu, Inventory};

use super::devices;
use super::driver::DriverFiles;
use crate::args::{CdiFormat, CdiGenerateArgs};
use crate::output::{self, line, note};
use crate::program;
use firn_host::{Problem, ProblemReport};

/// The oldest version of CDI with all fields that are used here.
const VERSION: &str = "0.5.0";

/// A CDI file that prevents writing another.
#[derive(Debug, thiserror::Error, Problem)]
enum InTheWay {
    /// It has the path of the new file.
    #[error("{} was not written by firn", .0.display())]
    #[problem("FIRN-CDI-EXISTS", "write to another file, or replace this one with --force")]
    Foreign(PathBuf),
    /// It has another path: every device would be described twice.
    #[error("{} describes {KIND} already", .0.display())]
    #[problem(
        "FIRN-CDI-EXISTS",
        "use that one, or remove it, or write to another directory with --force"
    )]
    Another(PathBuf),
}

/// Writes or prints the file.
pub fn run(args: &CdiGenerateArgs) -> Result<bool> {
    let config = Config::load(Keys::CDI).map_err(ProblemReport::from)?;
    let hook = find_program(names::HOOK_PROGRAM, config.hook.path.as_deref()).map_err(ProblemReport::from)?;
    let output = args.output.as_deref().filter(|path| *path != Path::new("-"));
    if let Some(output) = output.filter(|_| !args.force) {
        match check(output, &config.create.cdi_dirs) {
            Err(other) if args.yield_to_others => {
                line!("nothing was written: {other}");
                return Ok(true);
            }
            checked => checked.map_err(ProblemReport::from)?,
        }
    }
    let inventory = program::inventory(&config).context("cannot read the GPUs of this node")?;
    let files =
        DriverFiles::find(&args.driver_root, &inventory.driver_version).map_err(ProblemReport::from)?;
    let document = document(&inventory, &files, &hook)?;
    let format = args
        .format
        .unwrap_or_else(|| match output.and_then(Path::extension) {
            Some(extension) if extension == "json" => CdiFormat::Json,
            _ => CdiFormat::Yaml,
        });
    let text = text(&document, format, &inventory.driver_version)?;
    for gpu in inventory.gpus.iter().filter(|gpu| gpu.mig) {
        note!("{}", left_out(gpu));
    }
    match output {
        None => output::raw(&text),
        Some(path) => {
            write(path, &text)?;
            let count = document.devices.len();
            line!(
                "{}: {count} names of {} GPUs",
                path.display(),
                inventory.gpus.len()
            );
        }
    }
    Ok(true)
}

/// Refuses to overwrite or to duplicate another tool's file.
fn check(output: &Path, dirs: &[PathBuf]) -> Result<(), InTheWay> {
    if output.exists() && !CdiFile::read(output).is_ok_and(|file| is_ours(&file)) {
        return Err(InTheWay::Foreign(output.to_owned()));
    }
    let place = |path: &Path| {
        let dir = path.parent().and_then(|dir| dir.canonicalize().ok());
        dir.zip(path.file_name().map(ToOwned::to_owned))
    };
    let registry = Registry::read(dirs);
    let mut others = registry
        .files()
        .iter()
        .filter(|file| file.kind == KIND && place(&file.path) != place(output));
    match others.next() {
        Some(other) => Err(InTheWay::Another(other.path.clone())),
        None => Ok(()),
    }
}

/// Whether firn has written a CDI file: its hooks run firn-hook.
pub fn is_ours(file: &CdiFile) -> bool {
    let hooks = &file.edits.hooks;
    let of_firn = |hook: &Hook| Path::new(&hook.path).file_name() == Some(names::HOOK_PROGRAM.as_ref());
    !hooks.is_empty() && hooks.iter().all(of_firn)
}

fn document(inventory: &Inventory, files: &DriverFiles, hook: &Path) -> Result<CdiFile> {
    ensure!(
        !inventory.gpus.is_empty(),
        "this node has no NVIDIA GPU. hint: `firn doctor` shows what it has"
    );
    let nodes = inventory.gpus.iter().map(|gpu| Ok(vec![node(node_of(gpu)?)]));
    let nodes: Vec<_> = nodes.collect::<Result<_>>()?;
    let common = inventory
        .common_nodes
        .iter()
        .filter(|common| common.path.parent() == Some(Path::new("/dev")));
    Ok(CdiFile {
        version: VERSION.to_owned(),
        kind: KIND.to_owned(),
        devices: devices(&inventory.gpus, &nodes),
        edits: Edits {
            env: vec!["NVIDIA_VISIBLE_DEVICES=void".to_owned()],
            device_nodes: common.map(|common| node(&common.path)).collect(),
            mounts: files
                .files
                .iter()
                .map(|(inside, host)| mount(host, inside))
                .collect(),
            hooks: hooks(files, hook),
            ..Edits::default()
        },
        ..CdiFile::default()
    })
}

/// The note about a GPU in MIG mode.
fn left_out(gpu: &Gpu) -> String {
    format!(
        "GPU {} is in MIG mode: its instances are left out, and without them the GPU is of no use to a \
         container. hint: `nvidia-ctk cdi generate` describes instances; a container that has one cannot be \
         checkpointed (FIRN-GPU-MIG)",
        gpu.uuid
    )
}

fn node_of(gpu: &Gpu) -> Result<&Path> {
    let node = gpu.node.as_ref().with_context(|| {
        format!(
            "FIRN-GPU-NO-NODE: GPU {} has no device node on this host. \
             hint: `nvidia-modprobe -c 0` or `nvidia-smi` makes the nodes",
            gpu.uuid
        )
    })?;
    Ok(&node.path)
}

fn node(path: &Path) -> DeviceNode {
    DeviceNode {
        path: path.display().to_string(),
        permissions: Some("rwm".to_owned()),
        ..DeviceNode::default()
    }
}

fn mount(host: &Path, inside: &str) -> Mount {
    let options = ["ro", "nosuid", "nodev", "rbind", "rprivate"];
    Mount {
        host_path: host.display().to_string(),
        container_path: inside.to_owned(),
        options: options.map(str::to_owned).to_vec(),
        kind: None,
    }
}

fn hooks(files: &DriverFiles, program: &Path) -> Vec<Hook> {
    let hook = |verb: &str, option: &str, values: Vec<String>| {
        let pairs = values.into_iter().flat_map(|value| [option.to_owned(), value]);
        Hook {
            hook_name: "createContainer".to_owned(),
            path: program.display().to_string(),
            args: [names::HOOK_PROGRAM.to_owned(), verb.to_owned()]
                .into_iter()
                .chain(pairs)
                .collect(),
            ..Hook::default()
        }
    };
    let links = files.links.iter().map(|(link, text)| format!("{text}::{link}"));
    vec![
        hook("create-symlinks", "--link", links.collect()),
        hook(
            "update-ldcache",
            "--library",
            files.libraries.iter().cloned().collect(),
        ),
    ]
}

fn text(document: &CdiFile, format: CdiFormat, driver: &str) -> Result<String> {
    Ok(match format {
        CdiFormat::Json => serde_json::to_string_pretty(document)? + "\n",
        CdiFormat::Yaml => {
            let head = format!(
                "# GPUs of this node with driver {driver}, by `firn cdi generate`: \
                 to be made again when either changes.\n"
            );
            head + &serde_yaml_ng::to_string(document)?
        }
    })
}

fn write(path: &Path, text: &str) -> Result<()> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else {
        bail!("{} is no path of a file", path.display());
    };
    let dir = if dir.as_os_str().is_empty() {
        Path::new(".")
    } else {
        dir
    };
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(dir)
        .with_context(|| format!("cannot make {}", dir.display()))?;
    firn_host::atomic_file::write(dir, name, text.as_bytes(), 0o644)
        .with_context(|| format!("cannot write {}", path.display()))
}
