//! Options of runc's shims, which firn's shim has too.

use std::collections::HashMap;

use prost::Message;

/// The type of [`Options`].
pub const OPTIONS: &str = "containerd.runc.v1.Options";
/// The type of [`CreateOptions`].
pub const CREATE_OPTIONS: &str = "containerd.linux.runc.CreateOptions";
/// The type of [`CheckpointOptions`].
pub const CHECKPOINT_OPTIONS: &str = "containerd.runc.v1.CheckpointOptions";
/// The type of [`RuntimeOptions`].
pub const RUNTIME_OPTIONS: &str = "runtimeoptions.v1.Options";

/// `containerd.runc.v1.Options`: of a task. Numbers of 15,000 and above are firn's own.
#[derive(Clone, PartialEq, Message)]
pub struct Options {
    #[prost(bool, tag = "1")]
    pub no_pivot_root: bool,
    #[prost(bool, tag = "2")]
    pub no_new_keyring: bool,
    #[prost(string, tag = "3")]
    pub shim_cgroup: String,
    #[prost(uint32, tag = "4")]
    pub io_uid: u32,
    #[prost(uint32, tag = "5")]
    pub io_gid: u32,
    #[prost(string, tag = "6")]
    pub binary_name: String,
    #[prost(string, tag = "7")]
    pub root: String,
    /// Of containerd 1.x; later versions reserve the number.
    #[prost(string, tag = "8")]
    pub criu_path: String,
    #[prost(bool, tag = "9")]
    pub systemd_cgroup: bool,
    #[prost(string, tag = "10")]
    pub criu_image_path: String,
    #[prost(string, tag = "11")]
    pub criu_work_path: String,
    #[prost(string, tag = "12")]
    pub task_api_address: String,
    #[prost(uint32, tag = "13")]
    pub task_api_version: u32,
    /// The image directory that `firn restore` names: containerd 1.7 hands on `criu_image_path` for the stock
    /// shim alone, and would start the container afresh.
    #[prost(string, tag = "15001")]
    pub restore_dir: String,
}

/// `containerd.linux.runc.CreateOptions`: what clients of containerd 1.x send for `--no-pivot` and user
/// namespaces to every runtime that is not called after runc. Its fields for dumps are not read.
#[derive(Clone, PartialEq, Message)]
pub struct CreateOptions {
    #[prost(bool, tag = "1")]
    pub no_pivot_root: bool,
    #[prost(bool, tag = "8")]
    pub no_new_keyring: bool,
    #[prost(string, tag = "9")]
    pub shim_cgroup: String,
    #[prost(uint32, tag = "10")]
    pub io_uid: u32,
    #[prost(uint32, tag = "11")]
    pub io_gid: u32,
    #[prost(string, tag = "12")]
    pub criu_work_path: String,
    #[prost(string, tag = "13")]
    pub criu_image_path: String,
}

/// `containerd.runc.v1.CheckpointOptions`. Numbers of 15,000 and above are firn's own.
#[derive(Clone, PartialEq, Message)]
pub struct CheckpointOptions {
    #[prost(bool, tag = "1")]
    pub exit: bool,
    #[prost(bool, tag = "2")]
    pub open_tcp: bool,
    #[prost(bool, tag = "3")]
    pub external_unix_sockets: bool,
    #[prost(bool, tag = "4")]
    pub terminal: bool,
    #[prost(bool, tag = "5")]
    pub file_locks: bool,
    #[prost(string, repeated, tag = "6")]
    pub empty_namespaces: Vec<String>,
    #[prost(string, tag = "7")]
    pub cgroups_mode: String,
    #[prost(string, tag = "8")]
    pub image_path: String,
    #[prost(string, tag = "9")]
    pub work_path: String,
    /// Newer than the published messages.
    #[prost(string, tag = "10")]
    pub parent_path: String,
    /// Where large memory goes, as in the annotation `firn.dev/bulk`; empty: as the container has it.
    /// containerd does not know the field and hands it on.
    #[prost(string, tag = "15002")]
    pub bulk: String,
    /// The client copies the container's files after the checkpoint, while the container stands still.
    #[prost(bool, tag = "15004")]
    pub files_follow: bool,
    /// Values that count for this checkpoint instead of the container's annotations.
    #[prost(map = "string, string", tag = "15003")]
    pub overrides: HashMap<String, String>,
}

/// `runtimeoptions.v1.Options`, which CRI sends for every runtime type but `io.containerd.runc.v2`.
#[derive(Clone, PartialEq, Message)]
pub struct RuntimeOptions {
    /// File with the options, in TOML.
    #[prost(string, tag = "2")]
    pub config_path: String,
    /// The options, in TOML, unless there is a file.
    #[prost(bytes = "vec", tag = "3")]
    pub config_body: Vec<u8>,
}
