//! Where firn's own helper programs are.

use firn_host::Problem;

use crate::names::{CRIU_PLUGIN, CUDA_LIBRARY};
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// A helper program that is not there.
#[derive(Debug, thiserror::Error, Problem)]
pub enum ProgramError {
    /// The configuration names a file that is no program.
    #[error("{} is not an executable file", .0.display())]
    #[problem(
        "FIRN-PROGRAM-MISSING",
        "correct the path in the configuration file, or leave it out"
    )]
    Configured(PathBuf),
    /// No such program in the caller's directory, nor in PATH.
    #[error("no program {name} in {} nor in PATH", dir.display())]
    #[problem(
        "FIRN-PROGRAM-MISSING",
        "install firn's programs into one directory, or set the path in the configuration file"
    )]
    NotFound { name: String, dir: PathBuf },
}

/// The absolute path of a helper: `configured` if given, else from the running program's directory, else from
/// PATH.
pub fn find_program(name: &str, configured: Option<&Path>) -> Result<PathBuf, ProgramError> {
    let own_dir = std::env::current_exe()
        .ok()
        .and_then(|exe| Some(exe.parent()?.to_owned()));
    search(name, configured, own_dir.as_deref(), &search_path())
}

/// Where programs are if the caller has set no PATH, as podman does.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The directories in which programs are, of this process and of those that it starts.
pub fn search_path() -> OsString {
    std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into())
}

/// What to do where [`find_criu_plugin`] finds none.
pub const INSTALL_CRIU_PLUGIN: &str = "install firn's libfirn_criu.so into the shim's directory";

/// firn's plugin for CRIU, if it is installed: in the operator's directory of plugins, else as the helper
/// programs, else where packages have it, in `../lib/firn` of the running program's directory.
pub fn find_criu_plugin(libs_dir: Option<&Path>) -> Option<PathBuf> {
    let theirs = libs_dir
        .map(|dir| dir.join(CRIU_PLUGIN))
        .filter(|plugin| plugin.is_file());
    theirs.or_else(|| find_library(CRIU_PLUGIN))
}

/// What to do where [`find_cuda_library`] finds none.
pub const INSTALL_CUDA_LIBRARY: &str = "install firn's libfirn_cuda.so into the shim's directory";

/// firn's library between programs and NVIDIA's driver, if it is installed: the `configured` file, or else
/// where [`find_criu_plugin`] looks.
pub fn find_cuda_library(configured: Option<&Path>) -> Option<PathBuf> {
    match configured {
        Some(library) => library.is_file().then(|| library.to_owned()),
        None => find_library(CUDA_LIBRARY),
    }
}

fn find_library(name: &str) -> Option<PathBuf> {
    find_program(name, None).ok().or_else(|| packaged(name))
}

fn packaged(name: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    let library = own.parent()?.parent()?.join("lib/firn").join(name);
    library.is_file().then_some(library)
}

fn search(
    name: &str,
    configured: Option<&Path>,
    own_dir: Option<&Path>,
    path: &OsStr,
) -> Result<PathBuf, ProgramError> {
    if let Some(configured) = configured {
        return if is_program(configured) {
            Ok(configured.to_owned())
        } else {
            Err(ProgramError::Configured(configured.to_owned()))
        };
    }
    own_dir
        .map(|dir| dir.join(name))
        .filter(|program| is_program(program))
        .or_else(|| in_path(name, path))
        .ok_or_else(|| ProgramError::NotFound {
            name: name.to_owned(),
            dir: own_dir.unwrap_or(Path::new("?")).to_owned(),
        })
}

/// The OCI runtime of this name or path.
pub fn find_runtime(runtime: &str) -> Option<PathBuf> {
    let path = search_path();
    if runtime.contains('/') {
        Some(PathBuf::from(runtime)).filter(|program| is_program(program))
    } else {
        in_path(runtime, &path)
    }
}

/// The first program of this name in the absolute directories of a PATH.
pub fn in_path(name: &str, path: &OsStr) -> Option<PathBuf> {
    std::env::split_paths(path)
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(name))
        .find(|program| is_program(program))
}

/// Whether the path is a file that can be run.
fn is_program(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(dir: &Path, mode: u32) -> PathBuf {
        let path = dir.join("tool");
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn the_configured_path_wins_and_must_be_a_program() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (wanted, _) = (program(a.path(), 0o755), program(b.path(), 0o755));
        assert_eq!(
            search("tool", Some(&wanted), Some(b.path()), OsStr::new("")).unwrap(),
            wanted
        );
        let error = search(
            "tool",
            Some(Path::new("/nonexistent/tool")),
            Some(b.path()),
            OsStr::new(""),
        );
        assert!(matches!(error, Err(ProgramError::Configured(_))));
    }

    #[test]
    fn the_callers_directory_comes_before_the_path() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (own, in_path) = (program(a.path(), 0o755), program(b.path(), 0o755));
        assert_eq!(
            search("tool", None, Some(a.path()), b.path().as_os_str()).unwrap(),
            own
        );
        std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(
            search("tool", None, Some(a.path()), b.path().as_os_str()).unwrap(),
            in_path
        );
    }

    #[test]
    fn a_relative_path_entry_is_not_searched() {
        let error = search("Cargo.toml", None, None, OsStr::new(".")).unwrap_err();
        assert_eq!(error.code(), "FIRN-PROGRAM-MISSING");
    }
}
