//! The cgroup of a container that is to be restored: whether it is the container's own, and free.

use std::path::Path;

use firn_config::names;
use firn_oci::Spec;
use firn_process::OrWarn;
use firn_process::cgroup::{Cgroup, CgroupError};

use crate::options::RuncOptions;

/// What podman and CRI-O put before the id in the name of a container's cgroup.
const PREFIXES: [&str; 3] = ["", "libpod-", "crio-"];

/// Whether the cgroup that the spec names is named after the container.
pub(super) fn is_own(id: &str, spec: &Spec) -> bool {
    let name = spec
        .cgroups_path()
        .and_then(|path| path.rsplit(['/', ':']).next());
    let is_its = |name: &str| {
        PREFIXES
            .iter()
            .any(|prefix| name.strip_prefix(prefix) == Some(id))
    };
    name.is_some_and(is_its)
}

/// Whether the cgroup that the spec names has processes before the container has any. If so, a file in the
/// bundle marks it for the action `delete`, which follows a failed Create.
pub fn in_use(id: &str, options: &RuncOptions, spec: &Spec, bundle: &Path) -> Result<bool, CgroupError> {
    let Some(path) = spec.cgroups_path() else {
        return Ok(false);
    };
    let pids = Cgroup::by_spec(path, id, options.systemd_cgroup)?.pids()?;
    let mark = bundle.join(names::BUNDLE_OTHERS_CGROUP);
    let marked = match (pids.is_empty(), mark.exists()) {
        (false, _) => std::fs::write(&mark, ""),
        (true, true) => std::fs::remove_file(&mark),
        (true, false) => Ok(()),
    };
    marked.or_warn(format_args!("cannot write or remove {}", mark.display()));
    Ok(!pids.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_is_a_containers_own_by_its_name() {
        for (path, is) in [
            ("/default/job", true),
            ("system.slice:cri-containerd:job", true),
            ("/libpod_parent/libpod-job", true),
            ("/pod/crio-job", true),
            ("/default/other-job", false),
            ("/job/other", false),
            ("/libpod-job/other", false),
        ] {
            let spec = Spec::from(serde_json::json!({"linux": {"cgroupsPath": path}}));
            assert_eq!(is_own("job", &spec), is, "{path}");
        }
    }
}
