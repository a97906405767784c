//! Rules about mounts that are not in the spec, and about standard streams in files of the host: CRIU cannot
//! dump either.
//!
//! Only what CRIU is known to refuse is refused here. If CRIU fails for another reason, the checkpoint is
//! rolled back.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use firn_host::mountinfo::{self, MountEntry};
use firn_host::ordered::set_of;
use firn_host::procfs;
use firn_oci::{Spec, SpecError};

use crate::Refusal;

/// File systems that CRIU cannot mount again by itself.
const UNKNOWN_TO_CRIU: [&str; 9] = [
    "ext2", "ext3", "ext4", "xfs", "nfs", "nfs4", "squashfs", "ceph", "9p",
];

/// Mount points that the spec or runc makes: CRIU can dump them, or refuses them itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    /// Single mount points.
    points: BTreeSet<PathBuf>,
    /// Last names of bind mounts. All mounts at or below such a name count as known: a recursive bind has
    /// mounts that the spec does not list, and a path of the spec may have symbolic links.
    names: BTreeSet<OsString>,
}

/// Files in /dev that runc makes for every container.
const DEVICES: [&str; 7] = ["console", "full", "null", "random", "tty", "urandom", "zero"];

impl Known {
    pub(crate) fn of(spec: &Spec) -> Result<Self, SpecError> {
        let mut known = Self {
            points: DEVICES.iter().map(|name| Path::new("/dev").join(name)).collect(),
            names: BTreeSet::new(),
        };
        for mount in spec.mounts()? {
            if mount.is_bind() || mount.kind.starts_with("cgroup") {
                known
                    .names
                    .extend(mount.destination.file_name().map(OsStr::to_owned));
            }
            known.points.insert(mount.point());
        }
        let devices = spec.devices()?.into_iter().map(|device| device.node.path);
        known.points.extend(devices);
        known.points.extend(spec.masked_paths());
        known.points.extend(spec.read_only_paths());
        Ok(known)
    }

    fn has(&self, point: &Path) -> bool {
        self.points.contains(point) || point.iter().any(|name| self.names.contains(name))
    }
}

/// Refuses a mount that is not in the spec and that CRIU cannot dump. `init` is the first process of the
/// container.
pub(crate) fn by_mounts(init: i32, known: &Known) -> Result<(), Refusal> {
    let Some(entries) = mounts_of(init)? else {
        return Ok(());
    };
    match undumpable(&entries, known) {
        None => Ok(()),
        Some(entry) => Err(Refusal::ExternalMount {
            point: entry.mount_point.clone(),
            fs_type: entry.fs_type.clone(),
            root: entry.root.clone(),
        }),
    }
}

/// `None` if the process has ended or its mounts cannot be read: a later step reports that with a better
/// message.
fn mounts_of(pid: i32) -> Result<Option<Vec<MountEntry>>, Refusal> {
    match mountinfo::of_process(pid) {
        Ok(mounts) => Ok(Some(mounts)),
        Err(error) if error.kind() == ErrorKind::FileTooLarge => Err(Refusal::TooManyMounts { pid }),
        Err(_) => Ok(None),
    }
}

/// The first mount that CRIU can neither mount itself nor find by the spec: its file system is of a kind that
/// CRIU cannot mount, or it shows a part of a file system of which the container has no other mount.
fn undumpable<'a>(entries: &'a [MountEntry], known: &Known) -> Option<&'a MountEntry> {
    let is_whole = |entry: &MountEntry| entry.root == Path::new("/");
    let is_known = |entry: &MountEntry| entry.mount_point == Path::new("/") || known.has(&entry.mount_point);
    let sources = entries.iter().filter(|entry| is_whole(entry) || is_known(entry));
    let sources = set_of(sources.map(|entry| entry.device.as_str()));
    let has_source = |part: &MountEntry| sources.contains(part.device.as_str());
    entries.iter().find(|entry| {
        let fails = if is_whole(entry) {
            UNKNOWN_TO_CRIU.contains(&entry.fs_type.as_str())
        } else {
            entry.fs_type != "nsfs" && !has_source(entry)
        };
        fails && !is_known(entry)
    })
}

/// Refuses a process whose standard input, output or error is a regular file on a mount of the host that the
/// container does not have.
pub(crate) fn by_streams(init: i32, pids: &[i32]) -> Result<(), Refusal> {
    let (Some(own), Ok(hosts)) = (mounts_of(init)?, mountinfo::mounted()) else {
        return Ok(());
    };
    let ids = |entries: Vec<MountEntry>| set_of(entries.into_iter().map(|entry| entry.id));
    let (own, hosts) = (ids(own), ids(hosts));
    for &pid in pids {
        for fd in 0..=2 {
            let file = format!("/proc/{pid}/fd/{fd}");
            if !fs::metadata(&file).is_ok_and(|file| file.is_file()) {
                continue;
            }
            let outside =
                procfs::mount_of(pid, fd).is_some_and(|id| hosts.contains(&id) && !own.contains(&id));
            if outside {
                return Err(Refusal::ExternalStream {
                    pid,
                    comm: procfs::comm(pid),
                    fd,
                    path: fs::read_link(&file).unwrap_or_default(),
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn known() -> Known {
        let spec: Spec = json!({
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
                {"destination": "/dev/pts", "type": "devpts", "source": "devpts"},
                {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup"},
                {"destination": "/data/", "type": "bind", "source": "/srv", "options": ["rbind", "ro"]},
                {"destination": "/var/run/secrets", "source": "/run/secrets", "options": ["bind"]},
                {"destination": "/lib/libcuda.so.1", "source": "/lib/libcuda.so.1", "options": ["bind"]},
            ],
            "linux": {
                "devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}],
                "maskedPaths": ["/proc/kcore", "/sys/firmware"],
                "readonlyPaths": ["/proc/sys"],
            },
        })
        .into();
        Known::of(&spec).unwrap()
    }

    fn entry(device: &str, root: &str, point: &str, fs_type: &str) -> MountEntry {
        MountEntry {
            device: device.into(),
            root: root.into(),
            mount_point: point.into(),
            fs_type: fs_type.into(),
            ..MountEntry::default()
        }
    }

    /// The mounts that runc makes for the spec, on an ext4 host with cgroup v1.
    fn ordinary() -> Vec<MountEntry> {
        vec![
            entry("0:60", "/", "/", "overlay"),
            entry("0:61", "/", "/proc", "proc"),
            entry("0:62", "/", "/dev", "tmpfs"),
            entry("0:63", "/", "/dev/pts", "devpts"),
            entry("0:70", "/", "/sys/fs/cgroup", "tmpfs"),
            entry("0:30", "/box", "/sys/fs/cgroup/freezer", "cgroup"),
            entry("8:1", "/srv", "/data", "ext4"),
            entry("8:2", "/", "/data/disk", "xfs"),
            entry("8:3", "/a", "/data/part", "xfs"),
            entry("8:4", "/run/secrets", "/run/secrets", "ext4"),
            entry("0:6", "/tty", "/dev/tty", "devtmpfs"),
            entry("8:1", "/lib/libcuda.so.580", "/lib/libcuda.so.1", "ext4"),
            entry("0:5", "/null", "/proc/kcore", "devtmpfs"),
            entry("0:61", "/sys", "/proc/sys", "proc"),
            entry("0:71", "/", "/sys/firmware", "tmpfs"),
            entry("0:63", "/0", "/dev/console", "devpts"),
            entry("0:5", "/nvidia0", "/dev/nvidia0", "devtmpfs"),
        ]
    }

    fn found(more: &[MountEntry]) -> Option<PathBuf> {
        let entries = [ordinary(), more.to_vec()].concat();
        undumpable(&entries, &known()).map(|entry| entry.mount_point.clone())
    }

    #[test]
    fn mounts_of_the_spec_of_runc_and_of_the_container_pass() {
        assert_eq!(found(&[]), None);
        for own in [
            entry("0:80", "/", "/mnt", "tmpfs"),
            entry("0:60", "/var/lib", "/mnt", "overlay"),
            entry("0:62", "/shm", "/mnt", "tmpfs"),
            entry("0:4", "net:[4026531840]", "/run/netns/a", "nsfs"),
            entry("0:81", "/", "/mnt", "fuse.sshfs"),
            // The spec has a mount of the same file system: CRIU decides.
            entry("8:1", "/home", "/mnt", "ext4"),
        ] {
            assert_eq!(found(std::slice::from_ref(&own)), None, "{own:?}");
        }
    }

    #[test]
    fn mounts_from_outside_are_refused() {
        for external in [
            entry("8:9", "/", "/mnt", "ext4"),
            entry("0:90", "/", "/mnt", "nfs4"),
            entry(
                "8:9",
                "/usr/lib/libcuda.so.580",
                "/usr/lib/libcuda.so.580",
                "ext4",
            ),
            entry("0:91", "/nvidia", "/run/nvidia", "tmpfs"),
        ] {
            assert_eq!(found(std::slice::from_ref(&external)), Some(external.mount_point));
        }
        // Two parts of one external file system do not make each other known.
        let parts = [entry("8:9", "/a", "/a", "ext4"), entry("8:9", "/b", "/b", "ext4")];
        assert_eq!(found(&parts), Some("/a".into()));
    }

    #[test]
    fn streams_in_own_mounts_pass() {
        let me = i32::try_from(std::process::id()).unwrap();
        assert!(by_streams(me, &[me]).is_ok());
        assert!(by_streams(i32::MAX, &[me]).is_ok(), "init has ended");
        assert!(procfs::mount_of(me, 0).is_some());
    }
}
