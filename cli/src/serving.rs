//! Which shim serves a container: its first process is a child of the shim.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_config::names;
use firn_host::procfs;

use crate::install::running::name_of;
use crate::program;

/// How long a shim may take to print its version.
const LIMIT: Duration = Duration::from_secs(10);

/// How the programs of containerd's shims begin.
const SHIMS: &str = "containerd-shim-";

pub const START_UNDER_FIRN: &str = "start it with firn: `ctr run --runtime io.containerd.firn.v2`, nerdctl \
                                    and docker `--runtime`, a RuntimeClass in Kubernetes (what runs stays \
                                    with its shim)";

/// The program of the shim that serves the container with this first process, if it is not firn's. None if
/// that cannot be seen.
pub fn other_shim(init: i32) -> Option<PathBuf> {
    let shim: i32 = procfs::stat_field(init, 1)?.parse().ok()?;
    // Root must not run a program of a container.
    if !procfs::is_of_host(shim) {
        return None;
    }
    let link = Path::new("/proc").join(shim.to_string()).join("exe");
    let program = fs::read_link(&link).ok()?;
    let name = name_of(&program)?;
    // The shim runs in the bundle of its first container, where it notes which runtime it calls.
    let runtime = fs::read_to_string(link.with_file_name("cwd").join("runtime")).unwrap_or_default();
    let calls_firn = name_of(Path::new(runtime.trim())) == Some(names::RUNC_PROGRAM);
    // A copy of firn's may have the name of another one.
    let is_other = name.starts_with(SHIMS) && name != names::SHIM_PROGRAM && !calls_firn && !is_firns(&link);
    is_other.then_some(program)
}

/// Whether a shim's program is firn's, whatever its name is.
fn is_firns(program: &Path) -> bool {
    let shown = program::run(program, &["-v"], LIMIT);
    shown.is_ok_and(|output| is_firns_version(&output.stdout))
}

/// Whether this is what firn's shim prints as its version.
pub fn is_firns_version(shown: &str) -> bool {
    shown.starts_with(names::SHIM_PROGRAM)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_whose_parent_is_no_shim_has_none() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        assert_eq!(other_shim(pid), None);
        assert_eq!(other_shim(i32::MAX), None);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
