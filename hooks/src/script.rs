//! firn-hook as a script that CRIU runs at a restore. CRIU gives it no argument: the link by which it is called lies in the
//! bundle.

use std::fs::File;
use std::path::Path;
use std::process::ExitCode;

use firn_config::names;
use firn_host::Problem;
use firn_image::criu::{self, ImageFault};
use firn_oci::Spec;
use firn_oci::criu_script;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns};

/// Does what there is to do at this moment, if anything.
pub fn run(action: &str) -> ExitCode {
    if ![criu_script::MOMENT, criu_script::MOUNTED].contains(&action) {
        return ExitCode::SUCCESS;
    }
    let called = std::env::args_os().next().unwrap_or_default();
    let bundle = Path::new(&called).parent().filter(|dir| dir.is_absolute());
    let init = std::env::var(names::ENV_CRIU_INIT).ok();
    let (Some(bundle), Some(init)) = (bundle, init.and_then(|pid| pid.parse().ok())) else {
        tell!("firn-hook: CRIU does not call its script as it should");
        return ExitCode::FAILURE;
    };
    if action == criu_script::MOUNTED {
        return match restrict(bundle, init) {
            Ok(()) => ExitCode::SUCCESS,
            Err(fault) => {
                tell!("firn-hook: {}", criu_script::leave(bundle, fault.report()));
                ExitCode::FAILURE
            }
        };
    }
    match criu_script::run(bundle, init) {
        Ok(repaired) => {
            tell!("firn-hook: device nodes: {repaired:?}");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            tell!("firn-hook: {}", problem);
            ExitCode::FAILURE
        }
    }
}

/// Gives bind mounts the flags that the spec asks for and that CRIU has lost. Last, as this process is in the container's mount namespace
/// afterwards. A path leads to the mount that lies above: all that can go wrong is that another one is restricted.
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
        tell!("firn-hook: the mount {} gets its flags again", point.display());
        mount(None::<&str>, &point, None::<&str>, flags, None::<&str>)
            .map_err(|source| fault(format!("the mount {}", point.display()), &source))?;
    }
    Ok(())
}
