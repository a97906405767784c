//! The CRIU configuration file of a GPU container.
//!
//! runc hands CRIU one such file per container, whose lines override what runc asks for. It is the only way to reach
//! what GPU containers need: a plugin directory without CRIU's CUDA plugin (firn drives the driver itself), and, at a
//! restore, firn-hook as a script that sets /dev right before CRIU opens files, and tasks that stay stopped until their GPU
//! state is back. At restores of all containers it keeps CRIU from applying what the image says of cgroups.
//!
//! A user's own file keeps its effect: its lines come first, firn's follow, and of two values CRIU takes the last, but for
//! scripts, all of which it runs. One default comes before them: CRIU carries deleted files that are still open up to 1 MiB, and
//! NCCL's and PyTorch's in /dev/shm are larger. runc reads the file that the annotation `org.criu.config` names, else
//! /etc/criu/runc.conf; an empty annotation means no
//! file; a file that does not exist is ignored. So does firn. The file is read anew for every operation.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use firn_config::names;
use firn_host::{Problem, Remedy, remedy};

use crate::Spec;
use firn_host::{atomic_file, open_regular};

/// Largest user's file that is read.
const MAX_BYTES: u64 = 64 << 10;

/// Deleted files in the image: as large as they are.
const ANY_GHOST: &str = "ghost-limit 1024G";

/// What CRIU is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Write an image.
    Dump,
    /// Make processes from an image.
    Restore,
}

/// A CRIU configuration that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum CriuError {
    /// The user's file is there and cannot be read.
    #[error("cannot read CRIU configuration {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The user's file is no configuration: too large, or not text.
    #[error("{} is not a CRIU configuration: larger than {MAX_BYTES} bytes or not text", path.display())]
    NotText { path: PathBuf },
    /// CRIU's configuration files cannot express this path.
    #[error("path {} cannot be written into a CRIU configuration", path.display())]
    Path { path: PathBuf },
    /// firn's file or directory cannot be made.
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

impl Problem for CriuError {
    fn remedy(&self) -> Remedy<'_> {
        match self {
            Self::Read { .. } | Self::NotText { .. } => remedy(
                "FIRN-CRIU-CONFIG",
                "correct the file that the annotation org.criu.config names, or /etc/criu/runc.conf",
            ),
            Self::Path { .. } => remedy(
                "FIRN-CRIU-CONFIG",
                "use a path without blanks, quotes, backslashes, # and control characters",
            ),
            Self::Write { .. } => remedy(
                "FIRN-CRIU-CONFIG",
                "check that the bundle's file system is writable and not full",
            ),
        }
    }
}

/// The CRIU configuration of one container. Made from the spec before [`crate::edit::set_criu_config`] edits it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CriuConfig {
    bundle: PathBuf,
    users_file: Option<PathBuf>,
    driver: Driver,
    /// firn-hook, for a restore.
    script: Option<PathBuf>,
    /// How restores treat the image's cgroups.
    cgroups: Cgroups,
    /// Restored tasks run at once, whoever gives them their GPU state.
    runs: bool,
}

/// What of an image's cgroups a restore uses. No directory, no owner and no value of a file is ever made from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cgroups {
    /// Nothing: tasks stay in the cgroup of CRIU, which is the container's, as the runtime has put it there.
    Ignored,
    /// The root of the cgroup namespace, which CRIU makes only where it puts tasks into cgroups: those of the image have to be
    /// there.
    Existing,
}

impl Cgroups {
    fn of(spec: &Spec) -> Self {
        match spec.has_namespace("cgroup") {
            true => Self::Existing,
            false => Self::Ignored,
        }
    }

    /// As CRIU names it.
    fn mode(self) -> &'static str {
        match self {
            Self::Ignored => "ignore",
            Self::Existing => "none",
        }
    }
}

/// Who gives processes their GPU state.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Driver {
    /// firn, to tasks that stay stopped until then. With the operator's plugin directory; none means the empty one in the
    /// bundle.
    Firn { libs_dir: Option<PathBuf> },
    /// CRIU, by a plugin from where it looks for them.
    Criu,
}

impl CriuConfig {
    /// For the container of this bundle. `libs_dir` is the configuration's `[criu] libs-dir`.
    pub fn new(spec: &Spec, bundle: &Path, libs_dir: Option<&Path>) -> Self {
        let libs_dir = libs_dir.map(Path::to_owned);
        Self::driven(spec, bundle, Driver::Firn { libs_dir })
    }

    /// For a container whose GPU state is CRIU's own affair.
    pub fn of_criu(spec: &Spec, bundle: &Path) -> Self {
        Self::driven(spec, bundle, Driver::Criu)
    }

    /// With firn-hook as a script of restores.
    pub fn with_script(self, hook: &Path) -> Self {
        Self {
            script: Some(hook.to_owned()),
            ..self
        }
    }

    /// For an image without GPU state: there is nothing to wait for.
    pub fn without_state(self) -> Self {
        Self { runs: true, ..self }
    }

    fn driven(spec: &Spec, bundle: &Path, driver: Driver) -> Self {
        let users_file = match spec.annotation(names::ANNOTATION_CRIU_CONFIG) {
            Some("") => None,
            Some(path) => Some(path.into()),
            None => Some(names::RUNC_CRIU_CONFIG.into()),
        };
        Self {
            bundle: bundle.to_owned(),
            users_file,
            driver,
            script: None,
            cgroups: Cgroups::of(spec),
            runs: false,
        }
    }

    /// Where the file is.
    pub fn path(&self) -> PathBuf {
        self.bundle.join(names::BUNDLE_CRIU_CONFIG)
    }

    /// Writes the file for the operation that comes next. Where firn has nothing to add to dumps, runc is led to the user's
    /// own file: nothing of firn's comes before a dump then that would read it anew.
    pub fn write(&self, operation: Operation) -> Result<(), CriuError> {
        if let (Operation::Dump, Driver::Criu, Some(users_file)) = (operation, &self.driver, &self.users_file)
        {
            return make_link(users_file, &self.path());
        }
        let content = self.content(operation)?;
        if self.driver == (Driver::Firn { libs_dir: None }) {
            make_directory(&self.bundle.join(names::BUNDLE_CRIU_LIBS))?;
        }
        if let Some(hook) = &self.script {
            // CRIU gives a script no argument: by the link firn-hook learns the bundle.
            make_link(hook, &self.bundle.join(names::BUNDLE_CRIU_SCRIPT))?;
        }
        atomic_file::write(&self.bundle, names::BUNDLE_CRIU_CONFIG, content.as_bytes(), 0o600).map_err(
            |source| CriuError::Write {
                path: self.path(),
                source,
            },
        )
    }

    fn content(&self, operation: Operation) -> Result<String, CriuError> {
        let mut content = match (operation, &self.driver) {
            (Operation::Dump, Driver::Firn { .. }) => format!("{ANY_GHOST}\n"),
            _ => String::new(),
        };
        content.push_str(&self.users_lines()?);
        if !content.is_empty() && !content.ends_with('\n') {
            content.push('\n');
        }
        if let Driver::Firn { libs_dir } = &self.driver {
            let default = self.bundle.join(names::BUNDLE_CRIU_LIBS);
            let libs_dir = checked(libs_dir.as_deref().unwrap_or(&default))?;
            content.push_str(&format!("libdir {libs_dir}\n"));
        }
        if operation == Operation::Restore {
            if self.script.is_some() {
                let link = self.bundle.join(names::BUNDLE_CRIU_SCRIPT);
                content.push_str(&format!("action-script {}\n", checked(&link)?));
            }
            // Without a blank, after which CRIU would take the value for another option's.
            content.push_str(&format!("manage-cgroups={}\n", self.cgroups.mode()));
            if self.driver != Driver::Criu && !self.runs {
                content.push_str("leave-stopped\n");
            }
        }
        Ok(content)
    }

    fn users_lines(&self) -> Result<String, CriuError> {
        let Some(path) = &self.users_file else {
            return Ok(String::new());
        };
        let file = match open_regular(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
            Err(source) => {
                return Err(CriuError::Read {
                    path: path.clone(),
                    source,
                });
            }
        };
        let mut bytes = Vec::new();
        file.take(MAX_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(|source| CriuError::Read {
                path: path.clone(),
                source,
            })?;
        let text = String::from_utf8(bytes)
            .ok()
            .filter(|t| t.len() as u64 <= MAX_BYTES && !t.contains('\0'));
        text.ok_or_else(|| CriuError::NotText { path: path.clone() })
    }
}

/// A path as a value of CRIU's configuration files, which cut values at `#` and at blanks. Quotes would help against
/// blanks only, and CRIU's reading of them has its own surprises.
fn checked(path: &Path) -> Result<&str, CriuError> {
    let unfit = |c: char| matches!(c, '"' | '\\' | '#') || c.is_control() || c.is_whitespace();
    let text = path.to_str().filter(|text| !text.contains(unfit));
    text.ok_or_else(|| CriuError::Path {
        path: path.to_owned(),
    })
}

/// Where CRIU's packages put plugins.
pub const PLUGIN_DIRS: [&str; 6] = [
    "/usr/lib/criu",
    "/usr/local/lib/criu",
    "/usr/lib/x86_64-linux-gnu/criu",
    "/usr/lib64/criu",
    "/usr/local/lib64/criu",
    "/usr/libexec/criu",
];

const AMD_PLUGIN: &str = "amdgpu_plugin.so";

/// CRIU has no plugin for AMD's GPUs, or cannot be given it alone.
#[derive(Debug, thiserror::Error)]
pub enum AmdPluginError {
    /// It is nowhere.
    #[error("CRIU's plugin for AMD's GPUs is not there: {}", looked_at.display())]
    Missing { looked_at: PathBuf },
    /// The directory that holds nothing else cannot be made.
    #[error("cannot make {}", path.display())]
    Directory { path: PathBuf, source: io::Error },
}

impl Problem for AmdPluginError {
    fn remedy(&self) -> Remedy<'_> {
        match self {
            Self::Missing { .. } => remedy(
                "FIRN-AMD-PLUGIN",
                "install CRIU's amdgpu plugin, or name it by [criu] amdgpu-plugin in the configuration",
            ),
            Self::Directory { .. } => remedy(
                "FIRN-AMD-PLUGIN",
                "check that the bundle's file system is writable and not full",
            ),
        }
    }
}

/// CRIU's plugin for AMD's GPUs: the one that is configured, else the first in `dirs`.
pub fn amd_plugin(configured: Option<&Path>, dirs: &[&str]) -> Result<PathBuf, AmdPluginError> {
    let found = match configured {
        Some(plugin) => Some(plugin.to_owned()).filter(|plugin| plugin.is_file()),
        None => dirs
            .iter()
            .map(|dir| Path::new(dir).join(AMD_PLUGIN))
            .find(|plugin| plugin.is_file()),
    };
    found.ok_or_else(|| AmdPluginError::Missing {
        looked_at: configured.map_or_else(|| dirs.join(", ").into(), Path::to_owned),
    })
}

/// A plugin directory in the bundle with the plugin for AMD's GPUs and no other. Safe to repeat.
pub fn amd_plugins(
    bundle: &Path,
    configured: Option<&Path>,
    dirs: &[&str],
) -> Result<PathBuf, AmdPluginError> {
    let plugin = amd_plugin(configured, dirs)?;
    let dir = bundle.join(names::BUNDLE_AMD_LIBS);
    let made = || {
        match std::fs::remove_dir_all(&dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        std::fs::create_dir(&dir)?;
        std::os::unix::fs::symlink(plugin, dir.join(AMD_PLUGIN))
    };
    match made() {
        Ok(()) => Ok(dir),
        Err(source) => Err(AmdPluginError::Directory { path: dir, source }),
    }
}

fn make_directory(path: &Path) -> Result<(), CriuError> {
    match std::fs::create_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other.map_err(|source| CriuError::Write {
            path: path.to_owned(),
            source,
        }),
    }
}

/// Safe to repeat.
fn make_link(to: &Path, path: &Path) -> Result<(), CriuError> {
    let made = match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => std::os::unix::fs::symlink(to, path),
    };
    made.map_err(|source| CriuError::Write {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn spec(criu_config: &str) -> Spec {
        Spec::from(json!({"annotations": {"org.criu.config": criu_config}}))
    }

    fn written(config: &CriuConfig, operation: Operation) -> Vec<String> {
        config.write(operation).unwrap();
        std::fs::read_to_string(config.path())
            .unwrap()
            .lines()
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn without_a_users_file_only_firns_lines_are_there() {
        let bundle = tempfile::tempdir().unwrap();
        for users_file in ["", "/nonexistent/criu.conf"] {
            let config = CriuConfig::new(&spec(users_file), bundle.path(), None);
            let libs_dir = bundle.path().join("firn-criu-libs");
            let libdir = format!("libdir {}", libs_dir.display());
            let dump = [ANY_GHOST.to_owned(), libdir.clone()];
            assert_eq!(written(&config, Operation::Dump), dump);
            assert_eq!(
                written(&config, Operation::Restore),
                [
                    libdir,
                    "manage-cgroups=ignore".to_owned(),
                    "leave-stopped".to_owned()
                ]
            );
            assert_eq!(
                written(&config, Operation::Dump),
                dump,
                "a dump must not leave tasks stopped"
            );
            assert_eq!(std::fs::read_dir(&libs_dir).unwrap().count(), 0);
        }
    }

    #[test]
    fn the_users_lines_come_first_and_are_read_anew() {
        let bundle = tempfile::tempdir().unwrap();
        let users = bundle.path().join("users.conf");
        std::fs::write(&users, "tcp-established\nlibdir /usr/lib/criu").unwrap();
        let config = CriuConfig::new(
            &spec(users.to_str().unwrap()),
            bundle.path(),
            Some(Path::new("/empty")),
        );
        let lines = written(&config, Operation::Restore);
        assert_eq!(
            lines,
            [
                "tcp-established",
                "libdir /usr/lib/criu",
                "libdir /empty",
                "manage-cgroups=ignore",
                "leave-stopped"
            ]
        );
        std::fs::write(&users, "ghost-limit 2M").unwrap();
        assert_eq!(
            written(&config, Operation::Dump),
            [ANY_GHOST, "ghost-limit 2M", "libdir /empty"]
        );
        assert!(!bundle.path().join("firn-criu-libs").exists());
    }

    #[test]
    fn the_script_is_for_restores_and_beside_the_users() {
        let bundle = tempfile::tempdir().unwrap();
        let users = bundle.path().join("users.conf");
        std::fs::write(&users, "action-script /users").unwrap();
        let link = bundle.path().join("firn-criu-script");
        let ours = format!("action-script {}", link.display());
        let spec = spec(users.to_str().unwrap());
        let plugins = CriuConfig::of_criu(&spec, bundle.path()).with_script(Path::new("/a hook"));
        for _ in 0..2 {
            let lines = written(&plugins, Operation::Restore);
            let ours = ["action-script /users", &ours, "manage-cgroups=ignore"];
            assert_eq!(lines, ours, "CRIU's own restore");
            assert_eq!(std::fs::read_link(&link).unwrap(), Path::new("/a hook"));
        }
        assert_eq!(written(&plugins, Operation::Dump), ["action-script /users"]);
        std::fs::write(&users, "ghost-limit 2M").unwrap();
        let dumps = std::fs::read_to_string(plugins.path()).unwrap();
        assert_eq!(dumps, "ghost-limit 2M", "as it is at the dump");
        assert_eq!(
            written(&plugins, Operation::Restore),
            ["ghost-limit 2M", &ours, "manage-cgroups=ignore"]
        );
        assert_eq!(std::fs::read_to_string(&users).unwrap(), "ghost-limit 2M");
        let own =
            CriuConfig::new(&spec, bundle.path(), Some(Path::new("/empty"))).with_script(Path::new("/hook"));
        let lines = written(&own, Operation::Restore);
        assert_eq!(
            lines[1..],
            ["libdir /empty", &ours, "manage-cgroups=ignore", "leave-stopped"]
        );
        assert_eq!(std::fs::read_link(&link).unwrap(), Path::new("/hook"));
    }

    #[test]
    fn only_a_cgroup_namespace_has_criu_look_at_the_images_cgroups() {
        let bundle = tempfile::tempdir().unwrap();
        for (namespace, mode) in [
            ("cgroup", "manage-cgroups=none"),
            ("pid", "manage-cgroups=ignore"),
        ] {
            let namespaces = json!([{ "type": namespace }]);
            let spec = Spec::from(
                json!({"linux": {"namespaces": namespaces}, "annotations": {"org.criu.config": ""}}),
            );
            let config = CriuConfig::of_criu(&spec, bundle.path());
            assert_eq!(written(&config, Operation::Restore), [mode]);
            let config = CriuConfig::new(&spec, bundle.path(), Some(Path::new("/empty"))).without_state();
            assert_eq!(written(&config, Operation::Restore), ["libdir /empty", mode]);
        }
    }

    #[test]
    fn without_annotation_runcs_own_file_counts() {
        let config = CriuConfig::new(&Spec::from(json!({})), Path::new("/b"), None);
        assert_eq!(
            config.users_file.as_deref(),
            Some(Path::new("/etc/criu/runc.conf"))
        );
    }

    #[test]
    fn a_users_file_that_is_no_text_is_refused() {
        let bundle = tempfile::tempdir().unwrap();
        let users = bundle.path().join("users.conf");
        for content in [&b"\xff\xfe"[..], b"a\0b", &[b'#'; 70_000]] {
            std::fs::write(&users, content).unwrap();
            let config = CriuConfig::new(&spec(users.to_str().unwrap()), bundle.path(), None);
            assert!(matches!(
                config.write(Operation::Dump),
                Err(CriuError::NotText { .. })
            ));
            assert!(!config.path().exists());
        }
        let config = CriuConfig::new(&spec(bundle.path().to_str().unwrap()), bundle.path(), None);
        assert!(matches!(
            config.write(Operation::Dump),
            Err(CriuError::Read { .. })
        ));
    }

    #[test]
    fn the_plugin_for_amd_is_given_alone() {
        let node = tempfile::tempdir().unwrap();
        let at = |name: &str| node.path().join(name);
        for name in [
            "criu/amdgpu_plugin.so",
            "criu/cuda_plugin.so",
            "own/amdgpu_plugin.so",
        ] {
            std::fs::create_dir_all(at(name).parent().unwrap()).unwrap();
            std::fs::write(at(name), "").unwrap();
        }
        let dirs = [at("none"), at("criu"), at("own")];
        let dirs: Vec<&str> = dirs.iter().map(|dir| dir.to_str().unwrap()).collect();
        let own = at("own/amdgpu_plugin.so");
        for (configured, expected) in [
            (None, at("criu/amdgpu_plugin.so")),
            (Some(own.as_path()), own.clone()),
        ] {
            let dir = amd_plugins(node.path(), configured, &dirs).unwrap();
            let entries: Vec<_> = std::fs::read_dir(&dir)
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .collect();
            assert_eq!(entries, [dir.join("amdgpu_plugin.so")]);
            assert_eq!(std::fs::read_link(&entries[0]).unwrap(), expected);
        }
        for configured in [None, Some(at("none/amdgpu_plugin.so"))] {
            let error = amd_plugins(node.path(), configured.as_deref(), &dirs[..1]).unwrap_err();
            assert_eq!(error.code(), "FIRN-AMD-PLUGIN");
            assert!(error.to_string().contains("none"), "{error}");
        }
    }

    #[test]
    fn paths_that_criu_would_misread_are_refused() {
        for bad in ["/a#b", "/a\"b", "/a\nleave-running", "/a\\b", "/a b"] {
            let config = CriuConfig::new(&spec(""), Path::new("/"), Some(Path::new(bad)));
            assert!(
                matches!(config.content(Operation::Dump), Err(CriuError::Path { .. })),
                "{bad}"
            );
        }
    }
}
