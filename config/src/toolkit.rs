//! The configuration of NVIDIA's container runtime, a wrapper around runc that turns what asks for GPUs into edits of the
//! spec: firn does that in its stead, and by the rules that the operator has given it.
//!
//! Only what firn has to know is read; other keys are the wrapper's own matter. No file, or no key: the wrapper's defaults.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::ConfigError;
use crate::programs::is_program;

/// Names of the wrapper's program, one for each way to configure it.
const PROGRAMS: [&str; 4] = [
    "nvidia-container-runtime",
    "nvidia-container-runtime.cdi",
    "nvidia-container-runtime.legacy",
    "nvidia-container-runtime.experimental",
];

/// Variable that names the file.
const ENV_FILE: &str = "NVIDIA_CTK_CONFIG_FILE_PATH";
/// Variable that names the directory instead of `/etc`.
const ENV_DIR: &str = "XDG_CONFIG_HOME";
/// The file in it.
const FILE: &str = "nvidia-container-runtime/config.toml";

/// What NVIDIA's container runtime takes for a request of GPUs, and which runtime it calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolkit {
    /// Whether the variable `NVIDIA_VISIBLE_DEVICES` gives GPUs to containers that are not privileged.
    pub visible_devices: bool,
    /// Whether mounts below /var/run/nvidia-container-devices do.
    pub volume_mounts: bool,
    /// Beginnings of the keys of annotations that name CDI devices.
    pub annotations: Vec<String>,
    /// The OCI runtimes that it looks for, in this order.
    pub runtimes: Vec<String>,
}

/// As the file has it.
#[derive(Deserialize)]
#[serde(default)]
struct File {
    #[serde(rename = "accept-nvidia-visible-devices-envvar-when-unprivileged")]
    visible_devices: bool,
    #[serde(rename = "accept-nvidia-visible-devices-as-volume-mounts")]
    volume_mounts: bool,
    #[serde(rename = "nvidia-container-runtime")]
    runtime: Runtime,
}

impl Default for File {
    fn default() -> Self {
        Self {
            visible_devices: true,
            volume_mounts: false,
            runtime: Runtime::default(),
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Runtime {
    runtimes: Option<Vec<String>>,
    modes: Modes,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Modes {
    cdi: Cdi,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct Cdi {
    annotation_prefixes: Option<Vec<String>>,
}

impl Toolkit {
    /// Whether this OCI runtime is NVIDIA's wrapper.
    pub fn is_wrapper(runtime: &str) -> bool {
        let name = Path::new(runtime).file_name().and_then(OsStr::to_str);
        name.is_some_and(|name| PROGRAMS.contains(&name))
    }

    /// What this wrapper is configured to do.
    pub fn load(wrapper: &Path) -> Result<Self, ConfigError> {
        let given = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(file) = given(ENV_FILE) {
            return Self::load_from(Path::new(&file));
        }
        // NVIDIA's operator installs the wrapper with a configuration beside it, and lets a script name that.
        let beside = wrapper.parent().map(|dir| dir.join(".config").join(FILE));
        match (beside.filter(|file| file.exists()), given(ENV_DIR)) {
            (Some(file), _) => Self::load_from(&file),
            (None, Some(dir)) => Self::load_from(&Path::new(&dir).join(FILE)),
            (None, None) => Self::load_from(&Path::new("/etc").join(FILE)),
        }
    }

    fn load_from(path: &Path) -> Result<Self, ConfigError> {
        let text = match std::fs::read_to_string(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            read => read.map_err(|source| ConfigError::Read {
                path: path.to_owned(),
                source,
            })?,
        };
        let File {
            visible_devices,
            volume_mounts,
            runtime,
        } = toml::from_str(&text).map_err(|e| ConfigError::Invalid {
            path: path.to_owned(),
            source: Box::new(e),
        })?;
        let or = |given: Option<Vec<String>>, default: &[&str]| {
            given.unwrap_or_else(|| default.iter().map(ToString::to_string).collect())
        };
        Ok(Self {
            visible_devices,
            volume_mounts,
            annotations: or(runtime.modes.cdi.annotation_prefixes, &["cdi.k8s.io/"]),
            runtimes: or(runtime.runtimes, &["runc", "crun"]),
        })
    }

    /// The runtime that it calls: the first that there is.
    pub fn runtime(&self) -> Option<&str> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let dirs: Vec<PathBuf> = std::env::split_paths(&path).collect();
        let is_there = |name: &&String| match name.contains('/') {
            true => is_program(Path::new(name)),
            false => dirs.iter().any(|dir| is_program(&dir.join(name))),
        };
        self.runtimes.iter().find(is_there).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Toolkit, ConfigError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Toolkit::load_from(file.path())
    }

    #[test]
    fn what_the_file_does_not_say_is_as_the_wrapper_has_it() {
        let default = read("").unwrap();
        assert!(default.visible_devices && !default.volume_mounts);
        assert_eq!(default.annotations, ["cdi.k8s.io/"]);
        assert_eq!(default.runtimes, ["runc", "crun"]);
        assert_eq!(Toolkit::load_from(Path::new("/nonexistent")).unwrap(), default);
    }

    /// As the wrapper's package ships it, hardened.
    #[test]
    fn a_hardened_file_is_heeded() {
        let text = r#"
            accept-nvidia-visible-devices-as-volume-mounts = true
            accept-nvidia-visible-devices-envvar-when-unprivileged = false
            supported-driver-capabilities = "compute,utility"

            [nvidia-container-cli]
            load-kmods = true

            [nvidia-container-runtime]
            log-level = "info"
            mode = "auto"
            runtimes = ["docker-runc", "runc", "crun"]

            [nvidia-container-runtime.modes.cdi]
            annotation-prefixes = []
            default-kind = "nvidia.com/gpu"
        "#;
        let toolkit = read(text).unwrap();
        assert!(!toolkit.visible_devices && toolkit.volume_mounts);
        assert!(toolkit.annotations.is_empty());
        assert_eq!(toolkit.runtimes.len(), 3);
        assert_eq!(read("runtimes = [").unwrap_err().code(), "FIRN-CONFIG-INVALID");
    }

    #[test]
    fn the_wrapper_is_known_by_its_name() {
        for (runtime, expected) in [
            ("/usr/bin/nvidia-container-runtime", true),
            ("nvidia-container-runtime.cdi", true),
            ("/usr/local/nvidia/toolkit/nvidia-container-runtime.legacy", true),
            ("/usr/bin/nvidia-container-runtime-hook", false),
            ("/usr/sbin/runc", false),
            ("", false),
        ] {
            assert_eq!(Toolkit::is_wrapper(runtime), expected, "{runtime}");
        }
    }

    #[test]
    fn the_first_runtime_that_is_there_is_called() {
        let toolkit = |runtimes: &[&str]| Toolkit {
            runtimes: runtimes.iter().map(ToString::to_string).collect(),
            ..read("").unwrap()
        };
        assert_eq!(toolkit(&["no-such-runtime", "sh"]).runtime(), Some("sh"));
        assert_eq!(toolkit(&["/bin/sh", "sh"]).runtime(), Some("/bin/sh"));
        assert_eq!(toolkit(&["/etc/passwd"]).runtime(), None);
    }
}
