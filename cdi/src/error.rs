//! Errors of CDI files, and of devices that are requested from them.

use std::io;
use std::path::PathBuf;

use crate::names::BadName;
use crate::parse::VERSIONS;
use firn_host::Problem;

/// A CDI file that cannot be used. Other files are not affected.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file cannot be read.
    #[error("cannot read it: {0}")]
    Read(io::Error),
    /// The file is larger than any CDI file.
    #[error("it is larger than {limit} bytes")]
    TooLarge { limit: u64 },
    /// Its lists and objects are nested more deeply than those of any CDI file.
    #[error("it is nested too deeply")]
    TooDeep,
    /// Its aliases stand for more than any CDI file holds.
    #[error("its aliases stand for too much")]
    TooMuch,
    /// The file is not JSON, or its fields are not those of a CDI file.
    #[error("it is not valid: {0}")]
    Json(serde_json::Error),
    /// The file is not YAML, or its fields are not those of a CDI file.
    #[error("it is not valid: {0}")]
    Yaml(serde_yaml_ng::Error),
    /// Its version is unknown.
    #[error("cdiVersion {0:?} is not one of {known}", known = VERSIONS.join(", "))]
    Version(String),
    /// Its kind or a device has an invalid name.
    #[error("{0}")]
    Name(#[from] BadName),
    /// The file has no devices.
    #[error("it has no devices")]
    NoDevices,
    /// Two of its devices have the same name.
    #[error("it has two devices {0:?}")]
    Twice(String),
    /// An edit is invalid for every spec.
    #[error("{of}: {what}")]
    Edit { of: String, what: String },
}

/// Why devices cannot be added to a container.
#[derive(Debug, thiserror::Error, Problem)]
pub enum CdiError {
    /// No file describes such devices.
    #[error("no CDI file in {} describes {kind}{}", join(dirs), broken_files(broken))]
    #[problem(
        "FIRN-NO-CDI-SPEC",
        "`firn cdi generate --output /etc/cdi/nvidia.yaml` writes one; `[create] hooks = \"keep\"` in firn's \
         configuration runs a hook of NVIDIA's as it is"
    )]
    NoSpec {
        kind: String,
        dirs: Vec<PathBuf>,
        broken: Vec<String>,
    },
    /// There is no such device.
    #[error("no CDI device {name}: there are {}{}", list(known), broken_files(broken))]
    #[problem("FIRN-CDI-DEVICE", "`firn cdi list` shows the devices of this node")]
    Unknown {
        name: String,
        known: Vec<String>,
        broken: Vec<String>,
    },
    /// Several files of one directory describe the device.
    #[error("CDI device {name} is described by {}", join(paths))]
    #[problem("FIRN-CDI-DEVICE", "remove all of these files but one")]
    Ambiguous { name: String, paths: Vec<PathBuf> },
    /// A node of the device is not on the host, or differs from the file.
    #[error("CDI device {name} needs {}", path.display())]
    #[problem(
        "FIRN-CDI-DEVICE",
        "generate the node's CDI file again: its devices have changed"
    )]
    Node {
        name: String,
        path: PathBuf,
        source: io::Error,
    },
    /// A node has another type than in the file.
    #[error("CDI device {name} needs {} to be of type {wanted}, and it is of type {found}", path.display())]
    #[problem(
        "FIRN-CDI-DEVICE",
        "generate the node's CDI file again: its devices have changed"
    )]
    NodeType {
        name: String,
        path: PathBuf,
        wanted: String,
        found: &'static str,
    },
    /// The container's device nodes are its grant, and an edit would exceed it.
    #[error(
        "{edit} of CDI device {name} (in {}) is more than the container's device nodes grant", file.display()
    )]
    #[problem(
        "FIRN-CDI-GRANT",
        "name the granted GPUs alone, or `void`, in NVIDIA_VISIBLE_DEVICES; or let CDI give the devices, \
         without nodes"
    )]
    Beyond {
        name: String,
        file: PathBuf,
        edit: String,
    },
    /// The container's spec is malformed where the edit changes it.
    #[error("the container's spec has a malformed entry in {part}")]
    #[problem("FIRN-SPEC-INVALID", "create the container again with a valid spec")]
    Spec { part: &'static str },
}

fn join(paths: &[PathBuf]) -> String {
    let shown: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
    shown.join(" and ")
}

fn list(names: &[String]) -> String {
    const SHOWN: usize = 20;
    match names.len().checked_sub(SHOWN) {
        Some(more @ 1..) => format!("{} and {more} more", names[..SHOWN].join(", ")),
        _ if names.is_empty() => "none".to_owned(),
        _ => names.join(", "),
    }
}

fn broken_files(broken: &[String]) -> String {
    if broken.is_empty() {
        String::new()
    } else {
        format!("; not used: {}", broken.join("; "))
    }
}
