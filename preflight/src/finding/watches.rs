//! Watches of files by inotify and fanotify.
//!
//! CRIU writes down the path of a watched file. It opens the file by the handle that the kernel shows, or
//! else looks for the inode in a few directories (`criu/irmap.c`). overlayfs, on which containers have their
//! root, opens no handle: so firn looks for the name of each watched file of such a root, and lets CRIU look
//! there.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use firn_host::mountinfo::{self, MountEntry};
use firn_host::{FileId, bounded, open_below, proc_maps};
use firn_oci::criu_config;
use nix::fcntl::{OFlag, ResolveFlag};
use nix::sys::stat::makedev;
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};

use super::objects::Object;
use super::{Unreadable, open_files};
use crate::Refusal;

/// Where CRIU looks by itself, with all that is below.
const CRIUS: [&str; 7] = [
    "/etc",
    "/var/spool",
    "/var/log",
    "/usr/share/dbus-1/system-services",
    "/var/lib/polkit-1/localauthority",
    "/usr/share/polkit-1/actions",
    "/lib/udev",
];

/// Most names that are looked at, most bytes of directories that wait to be, and most watches.
const MOST: usize = 500_000;
const MOST_BYTES: usize = 64 << 20;
const MOST_WATCHES: usize = 100_000;

/// Most bytes of paths that CRIU's configuration gets, and of one of them.
const MOST_PATHS: usize = 32 << 10;
const LONGEST: usize = 4000;

/// `CAP_SYS_ADMIN` in a set of capabilities.
const SYS_ADMIN: u64 = 1 << 21;

/// The watches of a container.
#[derive(Debug, Default)]
struct Watches {
    /// The files of its root file system, each with a process and descriptor that watch it.
    files: BTreeMap<FileId, (i32, i32)>,
    /// Groups of fanotify.
    groups: Vec<(i32, i32)>,
}

/// How CRIU comes to watched files.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Lookup<'a> {
    /// firn configures it. What an earlier look has found is looked at first.
    ByFirn(&'a [PathBuf]),
    /// In its own places and those that the user names.
    ByCriu(&'a [PathBuf]),
}

/// Paths of the watched files of the container with this first process, in it, and why a watch refuses a
/// checkpoint. Calls `announce` before it looks at files.
pub(crate) fn inspect(
    proc_root: &Path,
    init: i32,
    dumped: &[i32],
    lookup: Lookup<'_>,
    announce: impl Fn(),
) -> Result<(Vec<PathBuf>, Vec<Refusal>), Unreadable> {
    let process = proc_root.join(init.to_string());
    let mounts = mountinfo::read(&process.join("mountinfo")).unwrap_or_default();
    let watches = Watches::of_processes(proc_root, dumped, root_device(&mounts))?;
    let refusal = |object: Object, (pid, fd): (i32, i32)| Refusal::Object {
        pid,
        comm: proc_maps::comm(proc_root, pid),
        object,
        at: format!("descriptor {fd}"),
    };
    let may_restore = watches.groups.is_empty() || has_sys_admin(proc_root, init);
    let groups = watches.groups.iter().filter(|_| !may_restore).take(1);
    let mut refusals: Vec<Refusal> = groups.map(|at| refusal(Object::Fanotify, *at)).collect();
    if watches.files.is_empty() {
        return Ok((Vec::new(), refusals));
    }
    announce();
    let (known, named) = match lookup {
        Lookup::ByFirn(known) => (known, None),
        Lookup::ByCriu(named) => (&[][..], Some(named)),
    };
    let wanted = watches.files.keys().copied().collect();
    let found = paths(&process.join("root"), wanted, known);
    let places = Places {
        mounts: &mounts,
        named,
    };
    let scanned = places.scanned(found.values());
    let is_lost = |file: &FileId| {
        found
            .get(file)
            .is_none_or(|path| !places.leads_to(&scanned, path))
    };
    let lost = watches.files.iter().find(|(file, _)| is_lost(file));
    refusals.extend(lost.map(|(_, at)| refusal(Object::Watch, *at)));
    Ok((scanned, refusals))
}

/// The device of an overlayfs that is the root.
fn root_device(mounts: &[MountEntry]) -> Option<u64> {
    let root = mounts.iter().rfind(|mount| mount.mount_point == Path::new("/"))?;
    let (major, minor) = root.device.split_once(':')?;
    let device = makedev(major.parse().ok()?, minor.parse().ok()?);
    (root.fs_type == "overlay").then_some(device)
}

/// Whether the container's processes may have CAP_SYS_ADMIN: without it firn restores no group of fanotify.
fn has_sys_admin(proc_root: &Path, init: i32) -> bool {
    let status = bounded::read(&proc_root.join(format!("{init}/status"))).unwrap_or_default();
    let status = String::from_utf8_lossy(&status);
    let set = status.lines().find_map(|line| line.strip_prefix("CapBnd:"));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_some_and(|set| set & SYS_ADMIN != 0)
}

impl Watches {
    fn of_processes(proc_root: &Path, dumped: &[i32], device: Option<u64>) -> Result<Self, Unreadable> {
        let mut found = Self::default();
        for &pid in dumped {
            for (fd, to) in open_files(proc_root, pid)?.into_iter().flatten() {
                let is_fanotify = to == Path::new("anon_inode:[fanotify]");
                if is_fanotify {
                    found.groups.push((pid, fd));
                } else if to != Path::new("anon_inode:inotify") {
                    continue;
                }
                let what = "fdinfo";
                let info = proc_root.join(format!("{pid}/{what}/{fd}"));
                let info = proc_maps::unless_gone(bounded::read(&info));
                let info = info
                    .map_err(|source| Unreadable { pid, what, source })?
                    .unwrap_or_default();
                let files = info.split(|byte| *byte == b'\n').filter_map(watched);
                for file in files.filter(|file| device.is_some_and(|device| file.is_on(device))) {
                    if found.files.len() == MOST_WATCHES {
                        let source = io::ErrorKind::FileTooLarge.into();
                        return Err(Unreadable { pid, what, source });
                    }
                    found.files.entry(file).or_insert((pid, fd));
                }
            }
        }
        Ok(found)
    }
}

/// The file of a line such as `inotify wd:1 ino:9e7e sdev:800013 mask:800afce ...`.
fn watched(line: &[u8]) -> Option<FileId> {
    let line = std::str::from_utf8(line).ok()?;
    let (kind, rest) = line.split_once(' ')?;
    let number = |name: &str| {
        let value = rest.split(' ').find_map(|word| word.strip_prefix(name))?;
        u64::from_str_radix(value, 16).ok()
    };
    let (inode, device) = (number("ino:")?, number("sdev:")?);
    // The kernel's own form of a device: twenty bits of the minor number.
    let file = FileId::of_numbers(device >> 20, device & 0xf_ffff, inode);
    ["inotify", "fanotify"].contains(&kind).then_some(file)
}

/// What a path leads to, without a question to a file server: the file, and whether it is a directory.
fn file_at(path: &Path) -> Option<(FileId, bool)> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    let found = statx(CWD, path, flags, StatxFlags::TYPE | StatxFlags::INO).ok()?;
    let (major, minor) = (found.stx_dev_major.into(), found.stx_dev_minor.into());
    let is_dir = FileType::from_raw_mode(found.stx_mode.into()) == FileType::Directory;
    Some((FileId::of_numbers(major, minor, found.stx_ino), is_dir))
}

/// A search below the root of a container, which may rename files meanwhile. No link and no mount is
/// followed.
struct Search {
    root: File,
    wanted: BTreeSet<FileId>,
    found: BTreeMap<FileId, PathBuf>,
    /// How many names may still be looked at.
    names: usize,
}

impl Search {
    /// The path of a directory by a descriptor, which is kept open.
    fn open(&self, dir: &Path) -> Option<(File, PathBuf)> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW;
        let resolve =
            ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV;
        let opened = File::from(open_below(&self.root, dir, flags, resolve).ok()?);
        let at = PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd()));
        Some((opened, at))
    }

    /// Notes the file if it is wanted. Returns whether it is a directory.
    fn note(&mut self, at: &Path, path: &Path) -> bool {
        let Some((file, is_dir)) = file_at(at) else {
            return false;
        };
        if self.wanted.remove(&file) {
            self.found.insert(file, path.to_owned());
        }
        is_dir
    }

    fn note_path(&mut self, path: &Path) {
        if let (Some(dir), Some(name)) = (path.parent(), path.file_name())
            && let Some((_opened, at)) = self.open(dir)
        {
            self.note(&at.join(name), path);
        }
    }

    fn walk(&mut self, start: &Path) {
        let (mut dirs, mut bytes) = (VecDeque::from([start.to_owned()]), MOST_BYTES);
        while let Some(dir) = dirs.pop_front() {
            bytes += dir.as_os_str().len();
            let Some((_opened, at)) = self.open(&dir) else {
                continue;
            };
            for entry in fs::read_dir(&at).into_iter().flatten().flatten() {
                if self.names == 0 || self.wanted.is_empty() {
                    return;
                }
                self.names -= 1;
                let path = dir.join(entry.file_name());
                let length = path.as_os_str().len();
                if self.note(&at.join(entry.file_name()), &path) && bytes > length {
                    bytes -= length;
                    dirs.push_back(path);
                }
            }
        }
    }
}

/// Paths of these files in a container. Those of `known` are looked at first, and CRIU's own places next.
fn paths(root: &Path, wanted: BTreeSet<FileId>, known: &[PathBuf]) -> BTreeMap<FileId, PathBuf> {
    let Ok(root) = File::open(root) else {
        return BTreeMap::new();
    };
    let top = Path::new("/");
    let mut search = Search {
        root,
        wanted,
        found: BTreeMap::new(),
        names: MOST,
    };
    if let Some((_opened, at)) = search.open(top) {
        search.note(&at.join("."), top);
    }
    for path in known.iter().map(|path| &**path).chain(CRIUS.map(Path::new)) {
        search.note_path(path);
    }
    for start in CRIUS.map(Path::new).into_iter().chain([top]) {
        search.walk(start);
    }
    search.found
}

/// Where CRIU can look. It looks at all that is below a directory, also on other mounts, before it comes to
/// the next one.
struct Places<'a> {
    mounts: &'a [MountEntry],
    /// The user's, if firn does not configure CRIU.
    named: Option<&'a [PathBuf]>,
}

impl Places<'_> {
    /// Those of these files, in the order in which CRIU should look at them: the deepest are first, and one
    /// that has mounts below can only be the last.
    fn scanned<'p>(&self, found: impl Iterator<Item = &'p PathBuf>) -> Vec<PathBuf> {
        if let Some(named) = self.named {
            return found.filter(|path| is_seen(path, named)).cloned().collect();
        }
        let plain = found.filter(|path| *path != Path::new("/") && is_plain(path));
        let (mut with, mut without): (Vec<_>, Vec<_>) =
            plain.cloned().partition(|path| self.have_below(path));
        let bytes = |paths: &[PathBuf]| paths.iter().map(|path| path.as_os_str().len()).sum::<usize>();
        if bytes(&without) > MOST_PATHS {
            without = topmost(without);
        }
        without.sort_by_key(|path| Reverse(path.components().count()));
        with.truncate(1);
        without.append(&mut with);
        let mut left = MOST_PATHS;
        without.retain(|path| {
            let rest = left.checked_sub(path.as_os_str().len());
            left = rest.unwrap_or(left);
            rest.is_some()
        });
        without
    }

    /// Whether CRIU finds a file where it looks in these. Of the root it knows the directory alone.
    fn leads_to(&self, scanned: &[PathBuf], path: &Path) -> bool {
        let is_in = |place: &PathBuf| path == place || (path.starts_with(place) && !self.have_below(place));
        path == Path::new("/") || scanned.iter().any(is_in)
    }

    /// Whether there are mounts below a directory.
    fn have_below(&self, path: &Path) -> bool {
        let mut points = self.mounts.iter().map(|mount| &mount.mount_point);
        points.any(|point| point != path && point.starts_with(path))
    }
}

/// Whether CRIU finds it by itself, or in the places that the user names.
fn is_seen(path: &Path, named: &[PathBuf]) -> bool {
    let mut places = CRIUS.iter().map(Path::new).chain(named.iter().map(|dir| &**dir));
    path == Path::new("/") || places.any(|dir| path.starts_with(dir))
}

/// Those below no other.
fn topmost(mut paths: Vec<PathBuf>) -> Vec<PathBuf> {
    paths.sort();
    paths.dedup_by(|path, above| path.starts_with(above));
    paths
}

/// Whether CRIU's configuration can have it, and CRIU can open it.
fn is_plain(path: &Path) -> bool {
    criu_config::value(path).is_some_and(|path| path.len() < LONGEST)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn watched_files_are_read_as_the_kernel_shows_them() {
        let inotify = b"inotify wd:3 ino:9e7e sdev:800013 mask:800afce ignored_mask:0 fhandle-bytes:8";
        assert_eq!(watched(inotify), Some(FileId::new(makedev(8, 0x13), 0x9e7e)));
        let fanotify = b"fanotify ino:4f969 sdev:34 mflags:0 mask:3b ignored_mask:40000000";
        assert_eq!(watched(fanotify), Some(FileId::new(makedev(0, 0x34), 0x4f969)));
        for other in [
            "fanotify flags:10 event-flags:0",
            "fanotify mnt_id:12 mflags:0 mask:3b",
            "pos:\t0",
            "",
        ] {
            assert_eq!(watched(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn files_are_found_by_what_they_are() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("a/b")).unwrap();
        fs::create_dir_all(at("etc/deep")).unwrap();
        fs::write(at("a/b/file"), "").unwrap();
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("file"), "").unwrap();
        symlink(outside.path(), at("link")).unwrap();
        let id = |path: &Path| file_at(path).unwrap().0;
        let names = ["a/b/file", "a", "link", "etc", "etc/deep", "."];
        let wanted = names.map(|name| id(&at(name)));
        let found = paths(
            root.path(),
            wanted.into(),
            &["/a/b/file".into(), "/none".into(), "/".into()],
        );
        let expected = ["/a/b/file", "/a", "/link", "/etc", "/etc/deep", "/"].map(PathBuf::from);
        assert_eq!(found, wanted.into_iter().zip(expected).collect());
        let file = id(&outside.path().join("file"));
        assert_eq!(
            paths(root.path(), [file].into(), &["/link/file".into()]),
            BTreeMap::new()
        );
    }

    fn mounts(points: &[&str]) -> Vec<MountEntry> {
        let mount = |point: &&str| MountEntry {
            mount_point: point.into(),
            ..MountEntry::default()
        };
        points.iter().map(mount).collect()
    }

    fn paths_of(paths: &[&str]) -> Vec<PathBuf> {
        paths.iter().map(PathBuf::from).collect()
    }

    #[test]
    fn directories_with_mounts_are_looked_at_last() {
        let found = paths_of(&["/a", "/work", "/a/b/c", "/", "/with blank", "/a#b", "/other"]);
        for (points, expected) in [
            (
                &["/", "/workload", "/other"][..],
                &["/a/b/c", "/a", "/work", "/other"][..],
            ),
            (&["/", "/a/data"], &["/a/b/c", "/work", "/other", "/a"]),
            // CRIU would read a volume for each of the files that it does not find there.
            (&["/a/data", "/work/data"], &["/a/b/c", "/other", "/a"]),
        ] {
            let mounts = mounts(points);
            let places = Places {
                mounts: &mounts,
                named: None,
            };
            let scanned = places.scanned(found.iter());
            assert_eq!(scanned, paths_of(expected));
            assert!(places.leads_to(&scanned, Path::new("/")));
            assert!(!places.leads_to(&scanned, Path::new("/with blank")));
            // By the directory above it, where that has no volumes.
            let has_volumes = points.contains(&"/a/data");
            assert_eq!(
                places.leads_to(&scanned, Path::new("/a/with blank")),
                !has_volumes
            );
        }
    }

    #[test]
    fn the_configuration_of_criu_stays_short() {
        let places = Places {
            mounts: &[],
            named: None,
        };
        let long = (100..300).map(|n| PathBuf::from(format!("/{}", format!("{n}").repeat(100))));
        let scanned = places.scanned(long.collect::<Vec<_>>().iter());
        let bytes: usize = scanned.iter().map(|path| path.as_os_str().len()).sum();
        assert!(bytes <= MOST_PATHS && bytes > MOST_PATHS - 400, "{bytes}");
        // Who watches all of a tree watches its top.
        let mut tree: Vec<_> = (0..10_000).map(|n| PathBuf::from(format!("/app/{n}"))).collect();
        tree.extend(paths_of(&["/app", "/apps"]));
        let scanned = places.scanned(tree.iter());
        assert_eq!(scanned, paths_of(&["/app", "/apps"]));
        assert!(tree.iter().all(|path| places.leads_to(&scanned, path)));
    }

    #[test]
    fn criu_looks_in_few_places_by_itself() {
        let named = ["/app".into()];
        for (path, expected) in [
            ("/etc/x", true),
            ("/", true),
            ("/app/x", true),
            ("/etcetera", false),
            ("/apps", false),
            ("/var", false),
        ] {
            assert_eq!(is_seen(Path::new(path), &named), expected, "{path}");
        }
    }

    #[test]
    fn a_group_of_fanotify_needs_the_capability_that_its_restore_needs() {
        let root = tempfile::tempdir().unwrap();
        let process = root.path().join("7");
        for dir in ["fd", "fdinfo"] {
            fs::create_dir_all(process.join(dir)).unwrap();
        }
        symlink("anon_inode:[fanotify]", process.join("fd/3")).unwrap();
        fs::write(
            process.join("fdinfo/3"),
            "fanotify ino:4f969 sdev:34 mflags:0 mask:3b\n",
        )
        .unwrap();
        for (set, refuses) in [("00000000a80425fb", true), ("000001ffffffffff", false)] {
            fs::write(process.join("status"), format!("CapBnd:\t{set}\n")).unwrap();
            let (_, refusals) = inspect(root.path(), 7, &[7], Lookup::ByFirn(&[]), || ()).unwrap();
            assert_eq!(refusals.len(), usize::from(refuses), "{refusals:?}");
        }
    }
}
