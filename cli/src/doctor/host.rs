//! Checks of the kernel's interfaces and of files on the host.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use firn_cdi::{KIND, Registry};
use firn_config::{Config, HugePages};
use firn_transaction::huge_pages::Switch;

use super::Check;

pub fn checks(config: &Config) -> Vec<Check> {
    vec![
        cgroups(Path::new("/sys/fs/cgroup")),
        huge_pages(config.checkpoint.huge_pages, &Switch::of_host()),
        cdi(&config.create.cdi_dirs),
    ]
}

/// What containerd can do, and this program needs to see the same. Breaks off for who is not root, and does
/// not see what the other checks look at.
pub fn root(status: &Path) -> ControlFlow<Check, Check> {
    const NAME: &str = "root";
    /// Capabilities by their numbers.
    const NEEDED: [(u32, &str); 3] = [
        (12, "CAP_NET_ADMIN"),
        (19, "CAP_SYS_PTRACE"),
        (21, "CAP_SYS_ADMIN"),
    ];
    let status = std::fs::read_to_string(status).unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()
    };
    if field("Uid:") != Some("0") {
        let found = "this is not root, and nothing else was checked";
        return ControlFlow::Break(Check::fail(NAME, found, "`sudo firn doctor`"));
    }
    let held = field("CapEff:").and_then(|mask| u64::from_str_radix(mask, 16).ok());
    let lacks = |number: u32| held.unwrap_or_default() & (1 << number) == 0;
    let missing: Vec<&str> = NEEDED
        .iter()
        .filter(|(number, _)| lacks(*number))
        .map(|(_, name)| *name)
        .collect();
    ControlFlow::Continue(if missing.is_empty() {
        Check::ok(NAME, "root with all capabilities that CRIU needs")
    } else {
        Check::fail(
            NAME,
            format!("root without {}", missing.join(", ")),
            "run it, and containerd, on the node itself and in no container that drops capabilities; \
             `capsh --print` shows them",
        )
    })
}

/// Puts back the host's setting first, if a shim that was killed has left another.
fn huge_pages(configured: HugePages, switch: &Switch) -> Check {
    const NAME: &str = "huge pages";
    let path = switch.path().display();
    match (switch.recover(), configured) {
        (Err(error), _) => Check::warn(
            NAME,
            format!("cannot see whether a shim that was killed has changed {path}: {error}"),
            "run it as root, with /sys and /run writable",
        ),
        (Ok(Some(former)), _) => Check::ok(
            NAME,
            format!("{path} is {former} again: a shim was killed while it was changed"),
        ),
        (Ok(None), HugePages::Off) => Check::ok(NAME, "off"),
        (Ok(None), HugePages::WhileCopying) => match switch.setting() {
            Ok(setting) => Check::ok(NAME, format!("while-copying, now {setting}")),
            Err(error) => Check::warn(
                NAME,
                format!("while-copying, and {path} cannot be read: {error}"),
                "use a kernel with transparent huge pages, or remove huge-pages under [checkpoint]",
            ),
        },
    }
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
            "`mount -t cgroup2 none /sys/fs/cgroup`, or boot with systemd",
        ),
    }
}

/// A CDI file for NVIDIA's GPUs lets containerd write device nodes and library mounts into the container's
/// own spec.
fn cdi(dirs: &[PathBuf]) -> Check {
    const NAME: &str = "cdi";
    let registry = Registry::read(dirs);
    let mut wrong: Vec<String> = (registry.broken().iter())
        .map(|(path, error)| format!("{} is not used: {}", path.display(), error))
        .collect();
    let conflicts = registry.devices().filter(|(_, files)| files.len() > 1);
    wrong.extend(conflicts.map(|(name, files)| {
        let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
        format!("{name} is in conflict: {}", files.join(", "))
    }));
    let ours = registry.files().iter().filter(|file| file.kind == KIND);
    let files: Vec<String> = ours.map(|file| file.path.display().to_string()).collect();
    if files.is_empty() {
        let shown: Vec<String> = dirs.iter().map(|dir| dir.display().to_string()).collect();
        wrong.insert(0, format!("no CDI file for {KIND} in {}", shown.join(" or ")));
        return Check::warn(
            NAME,
            wrong.join("; "),
            "`firn cdi generate --output /etc/cdi/nvidia.yaml`; GPUs that a hook mounts cannot be \
             checkpointed",
        );
    }
    let found = files.join(", ");
    if wrong.is_empty() {
        return Check::ok(NAME, found);
    }
    wrong.insert(0, found);
    let remedy = "fix or remove these files; `firn cdi list` shows the devices of this node";
    Check::warn(NAME, wrong.join("; "), remedy)
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    #[test]
    fn root_without_capabilities_fails() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let of = |uid: u32, mask: &str| {
            std::fs::write(file.path(), format!("Uid:\t{uid}\t0\nCapEff:\t{mask}\n")).unwrap();
            root(file.path())
        };
        let whole = of(0, "000001ffffffffff").continue_value().unwrap();
        assert_eq!(whole.status, Status::Ok);
        let part = of(0, "00000000a80425fb").continue_value().unwrap();
        assert!(
            part.found
                .ends_with("CAP_NET_ADMIN, CAP_SYS_PTRACE, CAP_SYS_ADMIN")
        );
        let user = of(1000, "000001ffffffffff").break_value().unwrap();
        assert_eq!(user.remedy.unwrap(), "`sudo firn doctor`");
    }

    #[test]
    fn both_cgroup_versions_and_none_are_distinguished() {
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
    fn cdi_files_are_read_as_a_container_would_get_them() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = ["/nonexistent".into(), dir.path().to_owned()];
        let write = |name: &str, kind: &str| {
            let edits = serde_json::json!({"env": ["A=1"]});
            let devices = [serde_json::json!({"name": "0", "containerEdits": edits})];
            let text = serde_json::json!({"cdiVersion": "0.6.0", "kind": kind, "devices": devices});
            std::fs::write(dir.path().join(name), text.to_string()).unwrap();
        };
        let none = cdi(&dirs);
        assert_eq!(none.status, Status::Warn);
        assert!(none.remedy.unwrap().contains("firn cdi generate"));
        write("other.json", "vendor.com/net");
        assert_eq!(cdi(&dirs).status, Status::Warn);
        // It names the kind, and is no CDI file.
        std::fs::write(dir.path().join("broken.yaml"), "kind: nvidia.com/gpu").unwrap();
        let broken = cdi(&dirs);
        assert_eq!(broken.status, Status::Warn);
        assert!(
            broken.found.contains("no CDI file") && broken.found.contains("broken.yaml is not used: "),
            "{broken:?}"
        );
        std::fs::remove_file(dir.path().join("broken.yaml")).unwrap();
        write("a.json", "nvidia.com/gpu");
        assert_eq!(cdi(&dirs).status, Status::Ok);
        write("b.json", "nvidia.com/gpu");
        let twice = cdi(&dirs);
        assert_eq!(twice.status, Status::Warn);
        assert!(
            twice.found.contains("nvidia.com/gpu=0 is in conflict: ") && twice.found.contains("b.json"),
            "{twice:?}"
        );
    }
}
