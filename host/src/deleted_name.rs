//! Files that a process has open or mapped by a name that was deleted, while another name leads to them.
//!
//! glibc makes such files: it opens and maps a named semaphore by a temporary name, links it to its own name,
//! and deletes the temporary one. For the time of a dump CRIU gives such a file a name of its own, so that
//! the image can refer to it: the hard link `link_remap.N` in the directory of the deleted name, or in the
//! nearest directory above it that still exists.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, ResolveFlag};
use nix::sys::stat::fstatat;
use nix::unistd::{UnlinkatFlags, unlinkat};

use crate::ordered::set_of;
use crate::{FileId, open_below, procfs};

/// How CRIU's names begin. A decimal number follows.
const CRIU_LINK: &[u8] = b"link_remap.";

/// A file of a process with a deleted name and another one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeletedName {
    pub pid: i32,
    /// The deleted name, in the process's mount namespace.
    pub path: PathBuf,
    /// Number of the mount by which the process has opened it.
    pub mount: u32,
    file: FileId,
}

/// Names that CRIU has made for a file, or would seem to have made.
#[derive(Debug)]
pub struct CriuLinks {
    /// Their directory, in the process's mount namespace.
    pub dir: PathBuf,
    pub names: Vec<OsString>,
    opened: File,
}

impl DeletedName {
    /// Those of a process; none if it has ended.
    pub fn of_process(pid: i32) -> BTreeSet<Self> {
        let files = procfs::deleted(pid);
        set_of(files.filter_map(|(entry, path)| Self::at(pid, &entry, path)))
    }

    /// The file behind `entry` of /proc/PID/fd or map_files, which has this deleted name; none if no other
    /// name leads to it.
    fn at(pid: i32, entry: &Path, path: PathBuf) -> Option<Self> {
        // A handle opens no device and reads nothing.
        let handle = OpenOptions::new()
            .read(true)
            .custom_flags(OFlag::O_PATH.bits())
            .open(entry)
            .ok()?;
        let meta = handle.metadata().ok()?;
        let me = i32::try_from(std::process::id()).ok()?;
        let mount = procfs::mount_of(me, handle.as_raw_fd())?;
        if meta.nlink() == 0 {
            return None;
        }
        // It may have that name in full.
        let in_full = [path.as_os_str().as_bytes(), b" (deleted)"].concat();
        let in_full = Path::new(OsStr::from_bytes(&in_full))
            .strip_prefix("/")
            .ok()?
            .to_owned();
        let there = fs::symlink_metadata(Path::new(&format!("/proc/{pid}/root")).join(in_full));
        if there.is_ok_and(|there| FileId::of(&there) == FileId::of(&meta)) {
            return None;
        }
        Some(Self {
            pid,
            path,
            mount,
            file: FileId::of(&meta),
        })
    }

    /// The links that CRIU has made of the file.
    ///
    /// # Errors
    /// If the directory cannot be looked at, or a symbolic link has taken its place.
    pub fn criu_links(&self) -> io::Result<CriuLinks> {
        let root = File::open(format!("/proc/{}/root", self.pid))?;
        let mut dirs = self.path.ancestors().skip(1);
        let (dir, opened) = loop {
            let dir = dirs.next().ok_or(io::ErrorKind::NotFound)?;
            let resolve = ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_SYMLINKS;
            match open_below(&root, dir, OFlag::O_RDONLY | OFlag::O_DIRECTORY, resolve) {
                Err(Errno::ENOENT) => {}
                opened => break (dir, File::from(opened?)),
            }
        };
        let mut names = Vec::new();
        for entry in fs::read_dir(format!("/proc/self/fd/{}", opened.as_raw_fd()))? {
            let name = entry?.file_name();
            if is_criu_link(&name) && self.is_at(&opened, &name) {
                names.push(name);
            }
        }
        Ok(CriuLinks {
            dir: dir.to_owned(),
            names,
            opened,
        })
    }

    fn is_at(&self, dir: &File, name: &OsString) -> bool {
        let found = fstatat(dir, name.as_os_str(), AtFlags::AT_SYMLINK_NOFOLLOW);
        found.is_ok_and(|found| FileId::new(found.st_dev, found.st_ino) == self.file)
    }
}

impl CriuLinks {
    pub fn remove(&self) -> io::Result<()> {
        let remove = |name: &OsString| unlinkat(&self.opened, name.as_os_str(), UnlinkatFlags::NoRemoveDir);
        Ok(self.names.iter().try_for_each(remove)?)
    }
}

/// Whether it is a name that CRIU would give.
pub fn is_criu_link(name: &OsStr) -> bool {
    let number = name.as_bytes().strip_prefix(CRIU_LINK);
    number.is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn me() -> i32 {
        i32::try_from(std::process::id()).unwrap()
    }

    fn of_mine_below(dir: &Path) -> Vec<DeletedName> {
        let all = DeletedName::of_process(me()).into_iter();
        all.filter(|file| file.path.starts_with(dir)).collect()
    }

    #[test]
    fn a_file_with_a_deleted_name_is_found_if_another_one_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let (first, second, both) = (at("first"), at("second"), at("both"));
        let open = |path: &Path| File::create(path).unwrap();
        let _open = [open(&first), open(&first), open(&both), open(&at("only"))];
        fs::hard_link(&first, &second).unwrap();
        fs::hard_link(&both, at("both too")).unwrap();
        assert_eq!(of_mine_below(dir.path()), []);
        fs::remove_file(&first).unwrap();
        fs::remove_file(at("only")).unwrap();
        let found = of_mine_below(dir.path());
        let paths: Vec<_> = found.iter().map(|file| file.path.as_path()).collect();
        assert_eq!(paths, [first], "two descriptors of one file");
        assert_eq!(
            Some(found[0].mount),
            procfs::mount_of(me(), open(&second).as_raw_fd())
        );
        assert_eq!(DeletedName::of_process(i32::MAX), BTreeSet::new());
    }

    #[test]
    fn only_links_of_the_file_with_criu_s_names_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        // CRIU uses the directory above one that has gone.
        fs::create_dir(at("gone")).unwrap();
        let deleted = at("gone/deleted");
        let _open = File::create(&deleted).unwrap();
        for link in [
            "link_remap.7",
            "link_remap.12",
            "link_remap.",
            "link_remap.7a",
            "other",
        ] {
            fs::hard_link(&deleted, at(link)).unwrap();
        }
        fs::write(at("link_remap.8"), "another file").unwrap();
        symlink(at("other"), at("link_remap.9")).unwrap();
        fs::remove_file(&deleted).unwrap();
        fs::remove_dir(at("gone")).unwrap();
        let found = of_mine_below(dir.path());
        let links = found[0].criu_links().unwrap();
        assert_eq!(links.dir, dir.path());
        let names: BTreeSet<_> = links.names.iter().filter_map(|name| name.to_str()).collect();
        assert_eq!(names, BTreeSet::from(["link_remap.12", "link_remap.7"]));
        links.remove().unwrap();
        assert_eq!(found[0].criu_links().unwrap().names, [""; 0]);
        let left = fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(left, 5);
    }

    #[test]
    fn a_symbolic_link_in_the_place_of_the_directory_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("own")).unwrap();
        let _open = File::create(at("own/deleted")).unwrap();
        fs::hard_link(at("own/deleted"), at("link_remap.1")).unwrap();
        fs::remove_file(at("own/deleted")).unwrap();
        fs::remove_dir(at("own")).unwrap();
        symlink(dir.path(), at("own")).unwrap();
        assert!(of_mine_below(dir.path())[0].criu_links().is_err());
    }
}
