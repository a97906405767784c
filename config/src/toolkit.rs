//! The configuration of NVIDIA's container runtime, a wrapper around runc that turns what asks for GPUs into
//! edits of the spec: firn does that in its stead, and by the rules that the operator has given it.
//!
//! firn reads the keys that decide what counts as a request and which devices are meant. Where one has a
//! value that firn does not follow, firn logs it and leaves the container to the wrapper. No file, or no key:
//! the wrapper's defaults.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::ConfigError;
use crate::load::read;
use crate::programs::{find_runtime, in_path};
use crate::section::{UnknownKeys, sections};

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

/// Kind of devices that are named without one.
const DEFAULT_KIND: &str = "nvidia.com/gpu";

/// Where the wrapper looks for CDI files.
const SPEC_DIRS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// Where the wrapper looks for runtimes that are not in PATH.
const RUNTIME_DIRS: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What NVIDIA's container runtime takes for a request of GPUs, and which runtime it calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Toolkit {
    /// Whether the variable `NVIDIA_VISIBLE_DEVICES` gives GPUs to containers that are not privileged.
    pub visible_devices: bool,
    /// Whether mounts below /var/run/nvidia-container-devices do.
    pub volume_mounts: bool,
    /// Variables that take the place of `NVIDIA_VISIBLE_DEVICES` where one of them is set.
    pub variables: Vec<String>,
    /// Beginnings of the keys of annotations that name CDI devices.
    pub annotations: Vec<String>,
    /// Whether annotations count only if all devices that they name have a kind.
    pub only_full_names: bool,
    /// The key whose value firn does not follow: the container is to be the wrapper's.
    pub not_followed: Option<&'static str>,
    /// The OCI runtimes that it looks for, in this order.
    pub runtimes: Vec<String>,
}

sections! {
    /// As the file has it, with the wrapper's own defaults.
    struct File {
        accept_nvidia_visible_devices_envvar_when_unprivileged: bool = true,
        accept_nvidia_visible_devices_as_volume_mounts: bool = false,
        swarm_resource: String = String::new(),
        nvidia_container_runtime: Runtime = Runtime::default(),
    }

    struct Runtime {
        runtimes: Vec<String> = ["runc", "crun"].map(String::from).to_vec(),
        mode: String = String::new(),
        modes: Modes = Modes::default(),
    }

    struct Modes {
        cdi: Cdi = Cdi::default(),
    }

    struct Cdi {
        annotation_prefixes: Vec<String> = vec!["cdi.k8s.io/".to_owned()],
        default_kind: String = DEFAULT_KIND.to_owned(),
        spec_dirs: Vec<String> = SPEC_DIRS.map(String::from).to_vec(),
    }
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
        // NVIDIA's operator installs the wrapper with a configuration in the same directory, and a script
        // names that.
        let own = wrapper.parent().map(|dir| dir.join(".config").join(FILE));
        let file = match (own.filter(|file| file.exists()), given(ENV_DIR)) {
            (Some(file), _) => file,
            (None, Some(dir)) => Path::new(&dir).join(FILE),
            (None, None) => Path::new("/etc").join(FILE),
        };
        let mode = wrapper.file_name().and_then(OsStr::to_str);
        let mode = mode.and_then(|name| name.strip_prefix(PROGRAMS[0])?.strip_prefix('.'));
        Self::load_from(&given(ENV_FILE).map_or(file, PathBuf::from), mode)
    }

    /// By this file, in the mode of the program's name.
    fn load_from(path: &Path, mode: Option<&str>) -> Result<Self, ConfigError> {
        let mut file = File::default();
        let mistakes = read(path, &mut file, UnknownKeys::Ignore)?.mistakes;
        if !mistakes.is_empty() {
            let path = path.to_owned();
            return Err(ConfigError::Invalid { path, mistakes });
        }
        let mode = mode.unwrap_or(&file.nvidia_container_runtime.mode).to_owned();
        Ok(Self::of(file, &mode))
    }

    fn of(file: File, mode: &str) -> Self {
        let Runtime {
            runtimes,
            modes: Modes { cdi },
            ..
        } = file.nvidia_container_runtime;
        // By annotations alone the wrapper knows devices of its mode cdi, to which auto comes by full names.
        let (is_cdi, is_auto) = (mode == "cdi", matches!(mode, "" | "auto"));
        let annotations = if is_cdi || is_auto {
            cdi.annotation_prefixes
        } else {
            Vec::new()
        };
        let other_kind = cdi.default_kind != DEFAULT_KIND;
        let other_dirs = cdi.spec_dirs != SPEC_DIRS;
        let not_followed = if !is_cdi && !is_auto && !matches!(mode, "legacy" | "jit-cdi") {
            Some("mode")
        } else if is_cdi && other_kind {
            Some("modes.cdi.default-kind")
        } else if (is_cdi || is_auto) && other_dirs {
            Some("modes.cdi.spec-dirs")
        } else {
            None
        };
        let variables = file.swarm_resource.split(',').map(str::trim);
        Self {
            visible_devices: file.accept_nvidia_visible_devices_envvar_when_unprivileged,
            volume_mounts: file.accept_nvidia_visible_devices_as_volume_mounts,
            variables: variables
                .filter(|name| !name.is_empty())
                .map(str::to_owned)
                .collect(),
            annotations,
            only_full_names: is_auto,
            not_followed,
            runtimes,
        }
    }

    /// The runtime that it calls: the first that there is.
    pub fn runtime(&self) -> Option<PathBuf> {
        let elsewhere = |name: &str| in_path(name, RUNTIME_DIRS.as_ref());
        let find = |name: &String| find_runtime(name).or_else(|| elsewhere(name));
        self.runtimes.iter().find_map(find)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_host::Problem;

    fn read(text: &str) -> Result<Toolkit, ConfigError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Toolkit::load_from(file.path(), None)
    }

    #[test]
    fn missing_keys_have_the_wrappers_defaults() {
        let default = read("").unwrap();
        assert!(default.visible_devices && !default.volume_mounts);
        assert_eq!(default.annotations, ["cdi.k8s.io/"]);
        assert_eq!(default.runtimes, ["runc", "crun"]);
        let none = Toolkit::load_from(Path::new("/nonexistent"), None);
        assert_eq!(none.unwrap(), default);
        assert!(default.only_full_names && default.not_followed.is_none());
    }

    /// As the wrapper's package ships it, hardened.
    #[test]
    fn a_hardened_file_is_followed() {
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
    fn what_firn_does_not_follow_is_named() {
        let runtime = "[nvidia-container-runtime]\nmode =";
        let cdi = "[nvidia-container-runtime.modes.cdi]\n";
        for (text, expected) in [
            (format!("{runtime} \"auto\""), None),
            (format!("{runtime} \"legacy\""), None),
            (format!("{runtime} \"csv\""), Some("mode")),
            (format!("{runtime} \"later\""), Some("mode")),
            (
                format!("{runtime} \"cdi\"\n{cdi}default-kind = \"management.nvidia.com/gpu\""),
                Some("modes.cdi.default-kind"),
            ),
            (
                format!("{cdi}spec-dirs = [\"/opt/cdi\"]"),
                Some("modes.cdi.spec-dirs"),
            ),
            (
                format!(
                    "{cdi}default-kind = \"nvidia.com/gpu\"\nspec-dirs = [\"/etc/cdi\", \"/var/run/cdi\"]"
                ),
                None,
            ),
        ] {
            assert_eq!(read(&text).unwrap().not_followed, expected, "{text}");
        }
        let of = |wrapper: &str| Toolkit::load(Path::new(wrapper)).unwrap();
        assert_eq!(
            of("/x/nvidia-container-runtime.experimental").not_followed,
            Some("mode")
        );
        assert!(of("/x/nvidia-container-runtime.legacy").annotations.is_empty());
        let swarm = read("swarm-resource = \"DOCKER_RESOURCE_GPU, OTHER\"").unwrap();
        assert_eq!(swarm.variables, ["DOCKER_RESOURCE_GPU", "OTHER"]);
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
        let found = toolkit(&["no-such-runtime", "sh"]).runtime().unwrap();
        assert!(found.is_absolute() && found.ends_with("sh"));
        assert_eq!(toolkit(&["/bin/sh", "sh"]).runtime(), Some("/bin/sh".into()));
        assert_eq!(toolkit(&["/etc/passwd"]).runtime(), None);
    }
}
