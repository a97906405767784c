//! Where a path of a container leads within its root file system.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, ResolveFlag};

use crate::{lexical, open_below};

/// Most parts that a path may have. The kernel takes no longer ones.
const MOST: usize = 2048;

/// The path from `root` of what `path` leads to there, without links: their targets are in `root`, too. Parts
/// that do not exist stay as they are. `..` is resolved by name, as OCI runtimes do it.
///
/// # Errors
/// Those of openat2(2) and readlink(2); a path with more than 2048 parts.
pub fn in_root(root: impl AsFd, path: &Path) -> io::Result<PathBuf> {
    let path = lexical(path);
    let path = path.strip_prefix("/").unwrap_or(&path);
    if path.components().count() > MOST {
        return Err(io::ErrorKind::InvalidFilename.into());
    }
    let root = root.as_fd();
    let name = |of: &dyn AsRawFd| std::fs::read_link(format!("/proc/self/fd/{}", of.as_raw_fd()));
    let top = name(&root)?;
    let within = ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS;
    for there in path.ancestors().filter(|there| *there != Path::new("")) {
        match open_below(root, there, OFlag::O_PATH, within) {
            Ok(found) => {
                let found = name(&found)?;
                let below = found.strip_prefix(&top).map_err(io::Error::other)?;
                let missing = path.strip_prefix(there).map_err(io::Error::other)?;
                // Without a slash at the end.
                return Ok(Path::new("/").join(below).join(missing).components().collect());
            }
            Err(Errno::ENOENT | Errno::ENOTDIR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Path::new("/").join(path))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_lead_within_the_root_and_what_is_missing_stays() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir_all(root.join("run/secrets")).unwrap();
        fs::create_dir_all(root.join("var")).unwrap();
        for (target, link) in [
            ("/run", "var/run"),
            ("../../../../run", "up"),
            ("var/run/secrets", "twice"),
            ("/nowhere", "dangling"),
            ("loop", "loop"),
        ] {
            symlink(target, root.join(link)).unwrap();
        }
        fs::write(root.join("file"), "").unwrap();
        let opened = File::open(&root).unwrap();
        for (path, found) in [
            ("/var/run/secrets/token", "/run/secrets/token"),
            ("var/run//secrets/", "/run/secrets"),
            ("/up/secrets", "/run/secrets"),
            ("/twice/a/b", "/run/secrets/a/b"),
            ("/up/../var/run", "/run"),
            ("/../../var/run/x", "/run/x"),
            ("/absent/a", "/absent/a"),
            ("/dangling/a", "/dangling/a"),
            ("/file/a", "/file/a"),
            ("/", "/"),
            ("", "/"),
        ] {
            assert_eq!(
                in_root(&opened, Path::new(path)).unwrap(),
                Path::new(found),
                "{path}"
            );
        }
        assert_eq!(
            in_root(File::open("/").unwrap(), Path::new("/usr")).unwrap(),
            Path::new("/usr")
        );
        assert!(in_root(&opened, Path::new("/loop/a")).is_err());
        assert!(in_root(&opened, Path::new(&"a/".repeat(3000))).is_err());
    }
}
