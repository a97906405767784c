//! Checks of the kernel's interfaces and of files on the host.

use std::path::Path;

use super::Check;

pub fn checks() -> Vec<Check> {
    vec![
        cgroups(Path::new("/sys/fs/cgroup")),
        cdi(&["/etc/cdi", "/var/run/cdi"]),
    ]
}

fn cgroups(root: &Path) -> Check {
    const NAME: &str = "cgroups";
    if root.join("cgroup.controllers").exists() {
        return Check::ok(NAME, "version 2");
    }
    let missing: Vec<&str> = ["freezer", "devices"]
        .into_iter()
        .filter(|controller| !root.join(controller).is_dir())
        .collect();
    match missing.as_slice() {
        [] => Check::ok(NAME, "version 1 with freezer and devices"),
        missing => Check::fail(
            NAME,
            format!(
                "no cgroup v2 at {} and no v1 controller {}",
                root.display(),
                missing.join(", ")
            ),
            "mount the cgroup file systems",
        ),
    }
}

/// A spec of NVIDIA's lets containerd write device nodes and library mounts into the container's own spec.
fn cdi(directories: &[&str]) -> Check {
    const NAME: &str = "cdi";
    let entries = directories
        .iter()
        .filter_map(|dir| std::fs::read_dir(dir).ok())
        .flatten()
        .flatten();
    let nvidia = |path: &std::path::PathBuf| {
        let is_spec = path.extension().is_some_and(|e| e == "yaml" || e == "json");
        is_spec && std::fs::read_to_string(path).is_ok_and(|text| text.contains("nvidia.com/gpu"))
    };
    match entries.map(|entry| entry.path()).find(nvidia) {
        Some(path) => Check::ok(NAME, path.display().to_string()),
        None => Check::warn(
            NAME,
            format!("no CDI spec for nvidia.com/gpu in {}", directories.join(" or ")),
            "`firn cdi generate --output /etc/cdi/nvidia.yaml`; GPUs that a hook mounts cannot be checkpointed",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    #[test]
    fn both_cgroup_versions_and_none_are_told_apart() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(cgroups(root.path()).status, Status::Fail);
        std::fs::create_dir(root.path().join("devices")).unwrap();
        assert!(cgroups(root.path()).found.ends_with("controller freezer"));
        std::fs::create_dir(root.path().join("freezer")).unwrap();
        assert!(cgroups(root.path()).found.starts_with("version 1"));
        std::fs::write(root.path().join("cgroup.controllers"), "").unwrap();
        assert_eq!(cgroups(root.path()).found, "version 2");
    }

    #[test]
    fn a_cdi_spec_counts_when_it_is_about_nvidia() {
        let dir = tempfile::tempdir().unwrap();
        let directories = ["/nonexistent", dir.path().to_str().unwrap()];
        assert_eq!(cdi(&directories).status, Status::Warn);
        std::fs::write(dir.path().join("other.yaml"), "kind: vendor.com/net").unwrap();
        assert_eq!(cdi(&directories).status, Status::Warn);
        std::fs::write(dir.path().join("nvidia.yaml"), "kind: nvidia.com/gpu").unwrap();
        assert_eq!(cdi(&directories).status, Status::Ok);
    }
}
