//! The options that a client sends with a task, and the two files in the bundle that keep them for `delete`.
//!
//! `options.json` and `runtime` have the form that containerd-shim-runc-v2 uses, and are parsed leniently, so
//! that either shim can clean up after the other.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use firn_config::Toolkit;
use firn_host::UnlessAbsent;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The OCI runtime when the options name none.
pub(crate) const DEFAULT_RUNTIME: &str = "runc";
/// State directory of the OCI runtime when the options name none; the namespace is appended.
pub(crate) const DEFAULT_ROOT: &str = "/run/containerd/runc";
/// Options of the task, in the bundle.
const OPTIONS_FILE: &str = "options.json";
/// Name of the OCI runtime binary, in the bundle.
const RUNTIME_FILE: &str = "runtime";
/// Size limit of firn's files in a bundle.
pub const MAX_FILE: u64 = 1 << 20;

/// Options of a task: `containerd.runc.v1.Options`, in any of the encodings that clients use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RuncOptions {
    /// Use MS_MOVE instead of pivot_root.
    pub no_pivot_root: bool,
    /// Do not make a session keyring.
    pub no_new_keyring: bool,
    /// Cgroup for the shim itself.
    pub shim_cgroup: String,
    /// Owner of the stdio pipes.
    pub io_uid: u32,
    /// Group of the stdio pipes.
    pub io_gid: u32,
    /// OCI runtime binary; see [`RuncOptions::runtime`].
    pub binary_name: String,
    /// State directory of the OCI runtime; see [`RuncOptions::root`].
    pub root: String,
    /// CRIU binary; sent by containerd 1.x only.
    pub criu_path: String,
    /// Let systemd create the cgroups.
    pub systemd_cgroup: bool,
    /// Where a checkpoint's image goes when the request names no path.
    pub criu_image_path: String,
    /// CRIU's work directory.
    pub criu_work_path: String,
    /// Address of a task API that is served elsewhere.
    pub task_api_address: String,
    /// Version of that task API.
    pub task_api_version: u32,
}

/// A file of the bundle could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Reading failed, for another reason than a missing file.
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    /// Writing failed.
    #[error("cannot write {path}")]
    Write { path: PathBuf, source: io::Error },
    /// It is not JSON of the expected form.
    #[error("{path} is damaged")]
    Parse {
        path: PathBuf,
        source: serde_json::Error,
    },
}

impl RuncOptions {
    /// The OCI runtime binary to call.
    pub fn runtime(&self) -> &str {
        if self.binary_name.is_empty() {
            DEFAULT_RUNTIME
        } else {
            &self.binary_name
        }
    }

    /// The OCI runtime if it is NVIDIA's wrapper of runc.
    pub fn wrapper(&self) -> Option<&Path> {
        Toolkit::is_wrapper(&self.binary_name).then(|| Path::new(&self.binary_name))
    }

    /// The OCI runtime's `--root` for a namespace.
    pub fn root(&self, namespace: &str) -> PathBuf {
        let root = if self.root.is_empty() {
            DEFAULT_ROOT
        } else {
            &self.root
        };
        Path::new(root).join(namespace)
    }

    /// What is written to `options.json`: without defaults, as Go's `omitempty`.
    pub fn json(&self) -> Value {
        let mut json = serde_json::json!(self);
        if let Value::Object(options) = &mut json {
            let empty = [Value::from(""), false.into(), 0.into()];
            options.retain(|_, value| !empty.contains(value));
        }
        json
    }

    /// Writes `options.json` and `runtime` into the bundle.
    pub fn save(&self, bundle: &Path) -> Result<(), FileError> {
        write_private(bundle.join(OPTIONS_FILE), self.json().to_string().as_bytes())?;
        write_private(bundle.join(RUNTIME_FILE), self.binary_name.as_bytes())
    }

    /// Reads the files that [`RuncOptions::save`] or Go's shim wrote to the bundle; defaults where there are
    /// none.
    pub fn load(bundle: &Path) -> Result<Self, FileError> {
        let path = bundle.join(OPTIONS_FILE);
        let mut options = match read_small(&path)? {
            Some(json) if !json.is_empty() => {
                serde_json::from_slice(&json).map_err(|source| FileError::Parse { path, source })?
            }
            _ => Self::default(),
        };
        // Go's shim reads `runtime` and not the options; an older bundle may have only the former.
        if let Some(runtime) = read_small(&bundle.join(RUNTIME_FILE))? {
            let runtime = String::from_utf8_lossy(&runtime);
            if !runtime.trim().is_empty() {
                options.binary_name = runtime.trim().to_owned();
            }
        }
        Ok(options)
    }
}

fn write_private(path: PathBuf, content: &[u8]) -> Result<(), FileError> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&path);
    let written = file.and_then(|mut file| file.write_all(content));
    written.map_err(|source| FileError::Write { path, source })
}

fn read_small(path: &Path) -> Result<Option<Vec<u8>>, FileError> {
    let mut content = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_FILE).read_to_end(&mut content));
    let read = read.if_present().map_err(|source| FileError::Read {
        path: path.to_owned(),
        source,
    })?;
    Ok(read.map(|_| content))
}
