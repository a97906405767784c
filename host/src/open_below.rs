//! Paths that are resolved below a directory, whatever they hold.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag};

/// How often a path is resolved before `EAGAIN` is returned.
const TRIES: usize = 128;

/// Opens `path` below the directory `root` by `openat2`, close-on-exec. `resolve` has `RESOLVE_BENEATH` or
/// `RESOLVE_IN_ROOT`.
///
/// # Errors
/// Those of openat2(2). The kernel returns `EAGAIN` where it has followed a `..` while anything was renamed
/// or mounted anywhere on the host; that is tried again 128 times.
pub fn open_below(
    root: impl AsFd,
    path: &Path,
    flags: OFlag,
    resolve: ResolveFlag,
) -> Result<OwnedFd, Errno> {
    let how = OpenHow::new().flags(flags | OFlag::O_CLOEXEC).resolve(resolve);
    #[allow(clippy::disallowed_methods, reason = "the one place that tries again")]
    let open = || nix::fcntl::openat2(root.as_fd(), path, how);
    let mut tried = open();
    for _ in 1..TRIES {
        match tried {
            Err(Errno::EAGAIN) => tried = open(),
            result => return result,
        }
    }
    tried
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn renames_elsewhere_do_not_fail_a_path_with_parents() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["root/a", "other/1"] {
            fs::create_dir_all(dir.path().join(name)).unwrap();
        }
        let path = Path::new("a/..").join("a/../".repeat(200));
        let root = File::open(dir.path().join("root")).unwrap();
        let (ended, other) = (AtomicBool::new(false), dir.path().join("other"));
        std::thread::scope(|scope| {
            let rename = || {
                while !ended.load(Ordering::Relaxed) {
                    fs::rename(other.join("1"), other.join("2")).unwrap();
                    fs::rename(other.join("2"), other.join("1")).unwrap();
                    std::thread::sleep(Duration::from_micros(100));
                }
            };
            scope.spawn(rename);
            let opened = |_| open_below(&root, &path, OFlag::O_PATH, ResolveFlag::RESOLVE_IN_ROOT).err();
            let failed: Vec<_> = (0..2000).filter_map(opened).collect();
            ended.store(true, Ordering::Relaxed);
            assert_eq!(failed, []);
        });
    }
}
