//! firn-hook as CRIU's action script at a dump or a restore.
//!
//! CRIU passes no argument. The link by which it calls firn-hook is in the bundle and so leads to it.

use std::fs::File;
use std::path::Path;

use crate::cap::limit_process;
use crate::{late, shm};
use anyhow::{Result, bail};
use firn_config::names;
use firn_host::{Problem, ProblemReport, UnlessAbsent};
use firn_image::criu::{self, ImageFault};
use firn_oci::Spec;
use firn_oci::criu_script;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns};

/// Runs the action for this moment, if there is one.
pub fn run(action: &str) -> Result<()> {
    if ![criu_script::MOMENT, criu_script::MOUNTED, criu_script::DUMPED].contains(&action) {
        return Ok(());
    }
    let called = std::env::args_os().next().unwrap_or_default();
    let bundle = Path::new(&called).parent().filter(|dir| dir.is_absolute());
    if let (criu_script::DUMPED, Some(bundle)) = (action, bundle) {
        return keep_shm(bundle);
    }
    let init = std::env::var(names::ENV_CRIU_INIT).ok();
    let (Some(bundle), Some(init)) = (bundle, init.and_then(|pid| pid.parse().ok())) else {
        bail!("CRIU called its script without a bundle or an init process");
    };
    if action == criu_script::MOUNTED {
        // Order matters: mounts that are made here get their flags after it.
        let done = late::complete(bundle, init).and_then(|()| restrict(bundle, init));
        return Ok(done.map_err(|fault| criu_script::leave(bundle, fault.report()))?);
    }
    let repaired = criu_script::run(bundle, init)?;
    report!("firn-hook: device nodes: {repaired:?}");
    Ok(())
}

/// Keeps the files of the pod's /dev/shm, if the shim has asked for it.
fn keep_shm(bundle: &Path) -> Result<()> {
    let Some(request) = File::open(bundle.join(names::BUNDLE_KEEP_SHM)).if_present()? else {
        return Ok(());
    };
    let kept = limit_process().and_then(|()| shm::keep(request));
    kept.map_err(|error| {
        let problem = ProblemReport {
            code: "FIRN-POD-SHM".into(),
            message: format!("{error:#}"),
            hint: String::new(),
        };
        criu_script::leave(bundle, problem).into()
    })
}

/// Sets the flags of bind mounts and of the root that the spec has and that CRIU has lost. This process is in
/// the container's mount namespace afterwards. A path leads to the topmost mount there: the worst result is
/// that another mount is restricted.
fn restrict(bundle: &Path, init: i32) -> Result<(), ImageFault> {
    let spec = Spec::load(bundle)?;
    let loosened = criu::loosened(&spec, init)?;
    if loosened.is_empty() {
        return Ok(());
    }
    let fault = |what: String, source: &dyn std::fmt::Display| ImageFault::Unreadable {
        file: what,
        reason: source.to_string(),
    };
    let namespace = format!("/proc/{init}/ns/mnt");
    let file = File::open(&namespace).map_err(|source| fault(namespace.clone(), &source))?;
    setns(file, CloneFlags::CLONE_NEWNS).map_err(|source| fault(namespace, &source))?;
    for (point, flags) in loosened {
        let flags = MsFlags::from_bits_truncate(flags.into()) | MsFlags::MS_BIND | MsFlags::MS_REMOUNT;
        report!("firn-hook: the mount {} gets its flags again", point.display());
        mount(None::<&str>, &point, None::<&str>, flags, None::<&str>)
            .map_err(|source| fault(format!("the mount {}", point.display()), &source))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As where CRIU makes links elsewhere and the pod's /dev/shm is empty.
    #[test]
    fn a_dump_for_which_nothing_was_asked_is_left_alone() {
        let bundle = tempfile::tempdir().unwrap();
        keep_shm(bundle.path()).unwrap();
        assert_eq!(std::fs::read_dir(bundle.path()).unwrap().count(), 0);
    }
}
