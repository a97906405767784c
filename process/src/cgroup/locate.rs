//! Locates cgroups: by a process that is in one, or by the path in a spec when there is no process.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use firn_host::cgroup_mounts::{Hierarchies, UNIFIED};

use super::{Cgroup, CgroupError};
use firn_host::mountinfo::mounted;

/// Slice of units that name none.
const DEFAULT_SLICE: &str = "system.slice";

/// The mounted cgroup hierarchies, which do not change while containers run.
pub(super) fn host() -> Result<&'static Hierarchies, CgroupError> {
    static HOST: OnceLock<Hierarchies> = OnceLock::new();
    if let Some(host) = HOST.get() {
        return Ok(host);
    }
    let mounts = mounted().map_err(|source| CgroupError::Mounts { source })?;
    let host = Hierarchies::from_mounts(&mounts, Path::new(UNIFIED)).ok_or(CgroupError::NoHierarchy)?;
    Ok(HOST.get_or_init(|| host))
}

/// The cgroup of a process.
pub(super) fn of_pid(host: &Hierarchies, pid: i32) -> Result<Cgroup, CgroupError> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup"));
    let text = text.map_err(|source| CgroupError::Process { pid, source })?;
    Ok(Cgroup {
        version: host.version,
        places: host.of_process(&text),
    })
}

/// The cgroup that a spec's `cgroupsPath` names, whether it exists or not.
///
/// The runtime resolves a relative path below the cgroup of its caller, which is this process.
pub(super) fn by_spec(
    host: &Hierarchies,
    cgroups_path: &str,
    id: &str,
    systemd: bool,
) -> Result<Cgroup, CgroupError> {
    let path = match (cgroups_path, systemd) {
        ("", true) => unit_path(DEFAULT_SLICE, "runc", id),
        ("", false) => PathBuf::from(id),
        (path, true) => {
            let Some((slice, prefix, name)) = unit(path) else {
                return Err(CgroupError::SystemdPath {
                    path: path.to_owned(),
                });
            };
            unit_path(if slice.is_empty() { DEFAULT_SLICE } else { slice }, prefix, name)
        }
        (path, false) => PathBuf::from(path),
    };
    let is_relative = path.is_relative();
    let own = is_relative.then(|| of_pid(host, own_pid())).transpose()?;
    let mut places = host.of_path(&path);
    for (name, place) in &mut places {
        if let Some(own) = own.as_ref().and_then(|own| own.places.get(name)) {
            place.path = own.path.join(&place.path);
        }
    }
    Ok(Cgroup {
        version: host.version,
        places,
    })
}

/// Slice, prefix and name of a path in the form that the systemd driver takes.
fn unit(path: &str) -> Option<(&str, &str, &str)> {
    let mut parts = path.splitn(3, ':');
    Some((parts.next()?, parts.next()?, parts.next()?))
}

/// Whether only the systemd driver can make sense of a `cgroupsPath`: `slice:prefix:name`.
pub(super) fn is_of_systemd(path: &str) -> bool {
    unit(path).is_some_and(|(slice, _, name)| {
        (slice.is_empty() || slice.ends_with(".slice"))
            && !name.is_empty()
            && !name.contains(':')
            && !path.contains('/')
    })
}

/// This process's pid, as cgroup files number it.
pub(super) fn own_pid() -> i32 {
    nix::unistd::getpid().as_raw()
}

/// `a-b.slice` lies in `a.slice`. A unit that is a slice itself has no scope.
fn unit_path(slice: &str, prefix: &str, name: &str) -> PathBuf {
    let mut path = PathBuf::from("/");
    let mut push_slice = |slice: &str| {
        let stem = slice.strip_suffix(".slice").unwrap_or(slice);
        let ends = stem.match_indices('-').map(|(at, _)| at).chain([stem.len()]);
        // `-.slice` is the root.
        for end in ends.filter(|_| stem != "-") {
            path.push(format!("{}.slice", &stem[..end]));
        }
    };
    push_slice(slice);
    match name.strip_suffix(".slice") {
        Some(_) => path.push(name),
        None if prefix.is_empty() => path.push(format!("{name}.scope")),
        None => path.push(format!("{prefix}-{name}.scope")),
    }
    path
}

#[cfg(test)]
mod tests {
    use firn_host::mountinfo::MountEntry;

    use super::*;

    fn entry(mount_point: &str, root: &str, fs_type: &str, options: &str) -> MountEntry {
        MountEntry {
            root: root.into(),
            mount_point: mount_point.into(),
            fs_type: fs_type.into(),
            super_options: options.into(),
            ..MountEntry::default()
        }
    }

    fn hierarchies(entries: &[MountEntry]) -> Hierarchies {
        Hierarchies::from_mounts(entries, Path::new(UNIFIED)).unwrap()
    }

    fn dirs(cgroup: &Cgroup) -> Vec<(&str, String)> {
        cgroup
            .places
            .iter()
            .map(|(name, place)| (name.as_str(), place.dir().display().to_string()))
            .collect()
    }

    #[test]
    fn only_cgroup2_at_the_top_makes_a_unified_host() {
        let unified = hierarchies(&[entry("/sys/fs/cgroup", "/", "cgroup2", "rw")]);
        assert_eq!(
            dirs(&by_spec(&unified, "/k8s.io/box", "box", false).unwrap()),
            [("", "/sys/fs/cgroup/k8s.io/box".into())]
        );
        let hybrid = hierarchies(&[
            entry("/sys/fs/cgroup", "/", "tmpfs", "rw"),
            entry("/sys/fs/cgroup/cpu,cpuacct", "/", "cgroup", "rw,cpu,cpuacct"),
            entry("/sys/fs/cgroup/unified", "/", "cgroup2", "rw"),
            entry("/elsewhere/cpu", "/", "cgroup", "rw,cpu,cpuacct"),
        ]);
        assert_eq!(
            dirs(&by_spec(&hybrid, "/../a/c/../b", "box", false).unwrap()),
            [
                ("", "/sys/fs/cgroup/unified/a/b".into()),
                ("cpu", "/sys/fs/cgroup/cpu,cpuacct/a/b".into()),
                ("cpuacct", "/sys/fs/cgroup/cpu,cpuacct/a/b".into()),
            ]
        );
        assert!(Hierarchies::from_mounts(&[], Path::new(UNIFIED)).is_none());
    }

    #[test]
    fn paths_of_the_systemd_driver_are_known_by_their_form() {
        for path in ["system.slice:nerdctl:box", ":cri:box", "a-b.slice::box"] {
            assert!(is_of_systemd(path), "{path}");
        }
        for path in [
            "",
            "/default/box",
            "box",
            "a:b",
            "host:8080:box",
            "/a.slice:b:c",
            "a.slice:b:",
        ] {
            assert!(!is_of_systemd(path), "{path}");
        }
    }

    #[test]
    fn systemd_paths_nest_slices() {
        let unified = hierarchies(&[entry("/sys/fs/cgroup", "/", "cgroup2", "rw")]);
        let dir = |path: &str| by_spec(&unified, path, "box", true).map(|cgroup| cgroup.primary_dir());
        assert_eq!(
            dir("kubepods-burstable-pod1.slice:cri-containerd:box").unwrap(),
            Path::new(
                "/sys/fs/cgroup/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/\
                 cri-containerd-box.scope"
            )
        );
        assert_eq!(
            dir(":x:box").unwrap(),
            Path::new("/sys/fs/cgroup/system.slice/x-box.scope")
        );
        assert_eq!(
            dir("-.slice::box").unwrap(),
            Path::new("/sys/fs/cgroup/box.scope")
        );
        assert_eq!(
            dir("").unwrap(),
            Path::new("/sys/fs/cgroup/system.slice/runc-box.scope")
        );
        assert!(matches!(dir("/plain/path"), Err(CgroupError::SystemdPath { .. })));
    }
}
