//! Why firn is not installed or removed.

use std::io;
use std::path::PathBuf;

use firn_host::Problem;

/// Why firn is not installed or removed. What had been done is rolled back.
#[derive(Debug, thiserror::Error, Problem)]
pub enum InstallError {
    #[error("{} has no {name}", dir.display())]
    #[problem(
        "FIRN-INSTALL",
        "name the directory that has all of firn's programs by --from"
    )]
    Missing { dir: PathBuf, name: &'static str },
    #[error("cannot {what} {}", path.display())]
    #[problem(
        "FIRN-INSTALL",
        "run it again as root, on a disk with room: what is there stays usable"
    )]
    Io {
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("containers or pods run under firn: {names}")]
    #[problem(
        "FIRN-INSTALL-IN-USE",
        "delete them, or let `firn uninstall --wait` wait for their end; nothing was changed"
    )]
    InUse { names: String },
    #[error("{} is no configuration of containerd", path.display())]
    #[problem(
        "FIRN-INSTALL-CONFIG",
        "nothing was changed; `containerd config dump` shows what is wrong"
    )]
    Syntax { path: PathBuf, source: toml::de::Error },
    #[error("{} has version {version}", path.display())]
    #[problem(
        "FIRN-INSTALL-CONFIG",
        "nothing was changed; `containerd config migrate` prints it in a newer version"
    )]
    Version { path: PathBuf, version: i64 },
    #[error("{} has a runtime handler firn for {other}", path.display())]
    #[problem(
        "FIRN-INSTALL-CONFIG",
        "nothing was changed; remove that handler, or install with the prefix that it names"
    )]
    Other { path: PathBuf, other: String },
    #[error("with the handler firn containerd would not have the rest of {} as it is: {why}", path.display())]
    #[problem(
        "FIRN-INSTALL-CONFIG",
        "nothing was changed; add the table that firn has in config/containerd by hand"
    )]
    Differs { path: PathBuf, why: String },
    #[error("containerd does not serve Kubernetes: {} disables its plugin for CRI", path.display())]
    #[problem(
        "FIRN-INSTALL-CONFIG",
        "nothing was changed; without Kubernetes install without --containerd, else remove the plugin from \
         disabled_plugins"
    )]
    NoCri { path: PathBuf },
    #[error("`containerd config dump` fails: {message}")]
    #[problem(
        "FIRN-INSTALL-CONFIG",
        "nothing was changed; install containerd into the PATH and correct its configuration"
    )]
    Dump { message: String },
    #[error("containerd was not restarted: {message}")]
    #[problem(
        "FIRN-INSTALL-RESTART",
        "all else is done; restart containerd by hand, pods run on meanwhile"
    )]
    Restart { message: String },
}

impl InstallError {
    /// For `map_err`: what could not be done with which file.
    pub fn io(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { what, path, source }
    }
}
