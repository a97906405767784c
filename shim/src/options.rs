//! Options as they come over the wire: protobuf `Any` values of three types, one of which carries TOML.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use firn_containerd::Message;
use firn_containerd::runc::{
    self, CHECKPOINT_OPTIONS, CREATE_OPTIONS, CheckpointOptions, CreateOptions, OPTIONS, RUNTIME_OPTIONS,
    RuntimeOptions,
};
use firn_oci::Spec;
use protobuf::well_known_types::any::Any;

use firn_process::cgroup::Cgroup;
use firn_transaction::options::{MAX_FILE, RuncOptions};

/// Options that cannot be understood.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Their type is none that this shim knows.
    #[error("unsupported options type {0:?}")]
    UnknownType(String),
    /// The bytes are no message of that type.
    #[error("malformed {type_name}")]
    Malformed {
        /// The message type.
        type_name: &'static str,
        /// Cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The file that `config_path` names cannot be read.
    #[error("cannot read the runtime options in {path}")]
    ConfigFile {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The runtime options are no TOML.
    #[error("the runtime options are not TOML")]
    Toml(#[source] toml::de::Error),
    /// A known option has a value of another type.
    #[error("runtime option {key} is {found}, expected {expected}")]
    OptionType {
        /// The key as it was written.
        key: String,
        /// TOML type found.
        found: &'static str,
        /// Type that the option has.
        expected: &'static str,
    },
}

pub(crate) fn malformed<E>(type_name: &'static str) -> impl Fn(E) -> DecodeError
where
    E: std::error::Error + Send + Sync + 'static,
{
    move |source| DecodeError::Malformed {
        type_name,
        source: Box::new(source),
    }
}

/// Last segment of a type URL: Go writes the bare message name, other encoders put a host before it.
fn type_name(any: &Any) -> &str {
    any.type_url.rsplit('/').next().unwrap_or_default()
}

/// Whether [`runc_options`] knows the type.
pub(crate) fn is_sent_as(any: &Any) -> bool {
    matches!(type_name(any), OPTIONS | CREATE_OPTIONS | RUNTIME_OPTIONS)
}

fn sent(any: Option<&Any>) -> Option<&Any> {
    any.filter(|any| !any.type_url.is_empty() || !any.value.is_empty())
}

/// Options for the container of this spec: as [`runc_options`]. nerdctl sends none for other names than the
/// stock shim's, or some that have no word on cgroups, but writes the cgroup's path for its own setting:
/// `slice:prefix:name` is systemd's.
pub(crate) fn options_of_task(any: Option<&Any>, bundle: &Path) -> Result<RuncOptions, DecodeError> {
    let mut options = runc_options(any)?;
    if sent(any).is_none_or(|any| type_name(any) == CREATE_OPTIONS) {
        // What is wrong with the spec is reported by those who need more of it.
        let spec = Spec::load(bundle).ok();
        let path = spec.as_ref().and_then(Spec::cgroups_path);
        options.systemd_cgroup = path.is_some_and(Cgroup::is_for_systemd);
    }
    Ok(options)
}

/// The options of a task as containerd sends them; none sent means defaults.
pub(crate) fn runc_options(any: Option<&Any>) -> Result<RuncOptions, DecodeError> {
    let Some(any) = sent(any) else {
        return Ok(RuncOptions::default());
    };
    match type_name(any) {
        OPTIONS => {
            let sent = runc::Options::decode(&*any.value).map_err(malformed(OPTIONS))?;
            Ok(from_runc(sent))
        }
        CREATE_OPTIONS => {
            let sent = CreateOptions::decode(&*any.value).map_err(malformed(CREATE_OPTIONS))?;
            Ok(from_create(sent))
        }
        RUNTIME_OPTIONS => from_runtime_options(&any.value),
        other => Err(DecodeError::UnknownType(other.to_owned())),
    }
}

/// The image directory that `firn restore` names; containerd does not know the field.
pub(crate) fn restore_dir(any: Option<&Any>) -> Result<Option<PathBuf>, DecodeError> {
    let Some(any) = any.filter(|any| type_name(any) == OPTIONS) else {
        return Ok(None);
    };
    let sent = runc::Options::decode(&*any.value).map_err(malformed(OPTIONS))?;
    Ok(Some(sent.restore_dir)
        .filter(|dir| !dir.is_empty())
        .map(PathBuf::from))
}

fn from_toml(text: &str) -> Result<RuncOptions, DecodeError> {
    let mut options = RuncOptions::default();
    let table: toml::Table = text.parse().map_err(DecodeError::Toml)?;
    for (key, value) in &table {
        // As Go's decoder does, regardless of case: BinaryName, binaryName, binary_name.
        let name = key.replace('_', "").to_ascii_lowercase();
        match name.as_str() {
            "nopivotroot" => options.no_pivot_root = boolean(key, value)?,
            "nonewkeyring" => options.no_new_keyring = boolean(key, value)?,
            "shimcgroup" => options.shim_cgroup = string(key, value)?,
            "iouid" => options.io_uid = number(key, value)?,
            "iogid" => options.io_gid = number(key, value)?,
            "binaryname" => options.binary_name = string(key, value)?,
            "root" => options.root = string(key, value)?,
            "criupath" => options.criu_path = string(key, value)?,
            "systemdcgroup" => options.systemd_cgroup = boolean(key, value)?,
            "criuimagepath" => options.criu_image_path = string(key, value)?,
            "criuworkpath" => options.criu_work_path = string(key, value)?,
            "taskapiaddress" => options.task_api_address = string(key, value)?,
            "taskapiversion" => options.task_api_version = number(key, value)?,
            // Not every key of the table is meant for the shim (TypeUrl, ConfigPath).
            _ => {}
        }
    }
    Ok(options)
}

fn from_runc(sent: runc::Options) -> RuncOptions {
    RuncOptions {
        criu_path: sent.criu_path,
        no_pivot_root: sent.no_pivot_root,
        no_new_keyring: sent.no_new_keyring,
        shim_cgroup: sent.shim_cgroup,
        io_uid: sent.io_uid,
        io_gid: sent.io_gid,
        binary_name: sent.binary_name,
        root: sent.root,
        systemd_cgroup: sent.systemd_cgroup,
        criu_image_path: sent.criu_image_path,
        criu_work_path: sent.criu_work_path,
        task_api_address: sent.task_api_address,
        task_api_version: sent.task_api_version,
    }
}

fn from_create(sent: CreateOptions) -> RuncOptions {
    RuncOptions {
        no_pivot_root: sent.no_pivot_root,
        no_new_keyring: sent.no_new_keyring,
        shim_cgroup: sent.shim_cgroup,
        io_uid: sent.io_uid,
        io_gid: sent.io_gid,
        criu_image_path: sent.criu_image_path,
        criu_work_path: sent.criu_work_path,
        ..RuncOptions::default()
    }
}

fn wrong_type(key: &str, value: &toml::Value, expected: &'static str) -> DecodeError {
    DecodeError::OptionType {
        key: key.to_owned(),
        found: value.type_str(),
        expected,
    }
}

fn boolean(key: &str, value: &toml::Value) -> Result<bool, DecodeError> {
    value.as_bool().ok_or_else(|| wrong_type(key, value, "boolean"))
}

fn string(key: &str, value: &toml::Value) -> Result<String, DecodeError> {
    value
        .as_str()
        .map(str::to_owned)
        .ok_or_else(|| wrong_type(key, value, "string"))
}

fn number(key: &str, value: &toml::Value) -> Result<u32, DecodeError> {
    let number = value.as_integer().and_then(|number| u32::try_from(number).ok());
    number.ok_or_else(|| wrong_type(key, value, "a number from 0 to 4294967295"))
}

/// The table in the file that the options name, or else the one sent along.
fn from_runtime_options(bytes: &[u8]) -> Result<RuncOptions, DecodeError> {
    let sent = RuntimeOptions::decode(bytes).map_err(malformed(RUNTIME_OPTIONS))?;
    let path = sent.config_path;
    if path.is_empty() {
        return from_toml(&String::from_utf8_lossy(&sent.config_body));
    }
    let mut text = String::new();
    match File::open(&path).and_then(|file| file.take(MAX_FILE).read_to_string(&mut text)) {
        Ok(_) => from_toml(&text),
        Err(source) => Err(DecodeError::ConfigFile {
            path: path.into(),
            source,
        }),
    }
}

/// The options of a checkpoint; none sent means defaults.
pub(crate) fn checkpoint_options(any: Option<&Any>) -> Result<CheckpointOptions, DecodeError> {
    let Some(any) = sent(any) else {
        return Ok(CheckpointOptions::default());
    };
    match type_name(any) {
        CHECKPOINT_OPTIONS => CheckpointOptions::decode(&*any.value).map_err(malformed(CHECKPOINT_OPTIONS)),
        other => Err(DecodeError::UnknownType(other.to_owned())),
    }
}

#[cfg(test)]
mod tests;
