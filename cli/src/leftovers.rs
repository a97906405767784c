//! Directories with images that nobody manages any more.
//!
//! containerd keeps an image in its directory for temporary files during a checkpoint, and one for every
//! restore, which it never removes. The shim keeps those that an error has named.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use firn_config::{Config, names};
use firn_host::bounded;

/// Variables that name the directory of containerd's temporary directories.
const VARIABLES: [&str; 2] = ["XDG_RUNTIME_DIR", "TMPDIR"];

/// Directories that containerd has left, or that firn has rescued from it: each may be an image.
pub fn directories(config: &Config) -> Vec<PathBuf> {
    below(&temporary(Path::new("/proc")), config.checkpoint.rescue_dir())
}

/// Those in these directories for temporary files, and in the one for rescued images.
pub fn below(temporary: &BTreeSet<PathBuf>, rescue: &Path) -> Vec<PathBuf> {
    let entries = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten();
    let begins = |name: &OsStr| {
        let begin = [names::CONTAINERD_CHECKPOINT, names::RESCUE_PREFIX];
        begin
            .iter()
            .any(|begin| name.as_bytes().starts_with(begin.as_bytes()))
    };
    let of_containerd = temporary.iter().flat_map(|dir| entries(dir));
    let of_containerd = of_containerd.filter(|entry| begins(&entry.file_name()));
    of_containerd
        .chain(entries(rescue))
        .map(|entry| entry.path())
        .collect()
}

/// Where containerd may have left images: in /tmp, and in directories that its environment or that of this
/// program names.
pub fn temporary(proc: &Path) -> BTreeSet<PathBuf> {
    let mut dirs = BTreeSet::from([PathBuf::from("/tmp")]);
    dirs.extend(VARIABLES.iter().filter_map(std::env::var_os).map(PathBuf::from));
    for process in fs::read_dir(proc).into_iter().flatten().flatten() {
        let process = process.path();
        let name = fs::read(process.join("comm")).unwrap_or_default();
        if name.trim_ascii_end() != b"containerd" {
            continue;
        }
        let environment = bounded::read(&process.join("environ")).unwrap_or_default();
        for entry in environment.split(|byte| *byte == 0) {
            let value = |name: &&str| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=");
            dirs.extend(
                VARIABLES
                    .iter()
                    .find_map(value)
                    .map(|path| PathBuf::from(OsStr::from_bytes(path))),
            );
        }
    }
    dirs.retain(|dir| dir.is_absolute());
    dirs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_of_containerd_names_directories() {
        let proc = tempfile::tempdir().unwrap();
        let process = |pid: &str, name: &str, environment: &[u8]| {
            let dir = proc.path().join(pid);
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("comm"), format!("{name}\n")).unwrap();
            fs::write(dir.join("environ"), environment).unwrap();
        };
        process(
            "7",
            "containerd",
            b"PATH=/bin\0TMPDIR=/srv/tmp\0XDG_RUNTIME_DIR=relative\0",
        );
        process("8", "bash", b"TMPDIR=/home/tmp\0");
        let dirs = temporary(proc.path());
        assert!(dirs.contains(Path::new("/tmp")) && dirs.contains(Path::new("/srv/tmp")));
        assert!(!dirs.contains(Path::new("/home/tmp")) && !dirs.contains(Path::new("relative")));
    }
}
