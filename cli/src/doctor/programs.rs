//! Checks of the programs that a checkpoint runs.

use std::ffi::OsStr;
use std::path::Path;

use firn_config::{
    Config, Cuda, INSTALL_CRIU_PLUGIN, INSTALL_CUDA_LIBRARY, Interpose, find_criu_plugin, find_cuda_library,
    find_program, in_path, names,
};
use firn_preflight::CriuLimits;

use super::{Check, ONE_RELEASE};
use crate::program::{self, first_line, kernel, last_line, versioned};

pub fn checks(config: &Config) -> Vec<Check> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    vec![
        runc(&path),
        criu(&path, config.criu.repaired),
        criu_libs(config.criu.libs_dir.as_deref()),
        criu_plugin(config.criu.libs_dir.as_deref()),
        cuda_library(&config.cuda),
        iptables(&path),
        own(names::WORKER_PROGRAM, config.worker.path.as_deref(), "--version"),
        own(names::HOOK_PROGRAM, config.hook.path.as_deref(), "--version"),
        front(&path),
    ]
}

fn runc(path: &OsStr) -> Check {
    let remedy = "`apt install runc`: 1.1 or later, in the PATH of containerd";
    match versioned("runc", path) {
        Ok((_, version)) => Check::ok("runc", version),
        Err(found) => Check::fail("runc", found, remedy),
    }
}

fn criu(path: &OsStr, repaired: bool) -> Check {
    match versioned("criu", path) {
        Err(found) => Check::fail("criu", found, "`apt install criu`, in the PATH of containerd"),
        Ok((_, version))
            if let Some((cannot, remedy)) = unfit(CriuLimits::of(&version, &kernel(), repaired)) =>
        {
            Check::warn("criu", format!("{version}; {cannot}"), remedy)
        }
        Ok((criu, version)) => match program::run(&criu, &["check"], program::LIMIT) {
            Ok(output) if output.success => Check::ok("criu", version),
            Ok(output) => Check::warn(
                "criu",
                format!("{version}; `criu check` fails: {}", last_line(&output.stderr)),
                "`criu check --all` shows what the kernel lacks",
            ),
            Err(_) => Check::warn(
                "criu",
                format!("{version}; `criu check` does not run"),
                "run `criu check` as root",
            ),
        },
    }
}

/// What a CRIU cannot do, and the remedy.
fn unfit(limits: CriuLimits) -> Option<(String, String)> {
    const REPAIRED: &str = ". If its distribution has repaired it: `repaired = true` under [criu]";
    let CriuLimits {
        no_plugin,
        no_inet,
        no_dump,
    } = limits;
    let kernel = kernel();
    let cannot = [
        no_plugin.then(|| "it loads no plugin of firn (4.0 does)".to_owned()),
        no_inet.then(|| format!("it cannot dump sockets of TCP, UDP, raw IP or packets on Linux {kernel}")),
        no_dump.then(|| format!("it dumps nothing on Linux {kernel} (CRIU's issue 3002)")),
    ];
    let cannot: Vec<String> = cannot.into_iter().flatten().collect();
    if cannot.is_empty() {
        return None;
    }
    let newer = if no_dump {
        "install a CRIU after 4.2, or boot Linux 7.0"
    } else {
        "install CRIU 4.2 or later; `criu --version` shows it"
    };
    let repaired = if no_inet || no_dump { REPAIRED } else { "" };
    Some((cannot.join("; "), format!("{newer}{repaired}")))
}

/// firn's own plugin.
fn criu_plugin(libs_dir: Option<&Path>) -> Check {
    const NAME: &str = "criu plugin";
    match find_criu_plugin(libs_dir) {
        Some(plugin) => Check::ok(NAME, plugin.display().to_string()),
        None => Check::warn(
            NAME,
            "libfirn_criu.so is missing: no container with forked children of CUDA processes, or with Unix \
             sockets to the node, is checkpointed",
            INSTALL_CRIU_PLUGIN,
        ),
    }
}

/// firn's library between programs and NVIDIA's driver.
fn cuda_library(config: &Cuda) -> Check {
    const NAME: &str = "cuda library";
    match (find_cuda_library(config.library.as_deref()), config.interpose) {
        (Some(library), _) => Check::ok(NAME, library.display().to_string()),
        (None, Interpose::Never) => Check::ok(NAME, "not installed; no container would get it"),
        (None, Interpose::Annotated) => Check::warn(
            NAME,
            "libfirn_cuda.so is missing: no container with firn.dev/cuda=interpose is created",
            INSTALL_CUDA_LIBRARY,
        ),
        (None, Interpose::Always) => Check::fail(
            NAME,
            "libfirn_cuda.so is missing: no container with NVIDIA's GPUs is created",
            INSTALL_CUDA_LIBRARY,
        ),
    }
}

/// The plugin directory that the configuration names.
fn criu_libs(dir: Option<&Path>) -> Check {
    const NAME: &str = "criu libs";
    const PLUGIN: &str = "cuda_plugin.so";
    match dir {
        None => Check::ok(NAME, "an empty directory per container"),
        Some(dir) if !dir.is_dir() => Check::fail(
            NAME,
            format!("{} is no directory", dir.display()),
            "make it, or remove libs-dir under [criu]; then `firn config check`",
        ),
        Some(dir) if dir.join(PLUGIN).exists() => Check::fail(
            NAME,
            format!("{} holds {PLUGIN}, which works against firn", dir.display()),
            "`rm` it there, or name another directory by libs-dir under [criu]",
        ),
        Some(dir) => Check::ok(NAME, dir.display().to_string()),
    }
}

fn iptables(path: &OsStr) -> Check {
    const PROGRAM: &str = "iptables-restore";
    match in_path(PROGRAM, path) {
        Some(found) => Check::ok("iptables", found.display().to_string()),
        None => Check::warn(
            "iptables",
            format!("no {PROGRAM} in PATH"),
            "`apt install iptables`; without it CRIU cannot lock the network",
        ),
    }
}

/// firn's front end of runc, which only podman needs.
fn front(path: &OsStr) -> Check {
    const NAME: &str = names::RUNC_PROGRAM;
    match (find_program(NAME, None), in_path("podman", path)) {
        (Ok(_), _) => own(NAME, None, names::RUNC_VERSION_OPTION),
        (Err(error), Some(_)) => Check::failed(NAME, &error),
        (Err(_), None) => Check::ok(NAME, "not installed; podman would need it"),
    }
}

/// One of firn's own programs, which has to be of this release.
fn own(name: &'static str, configured: Option<&Path>, option: &str) -> Check {
    let ours = env!("CARGO_PKG_VERSION");
    let program = match find_program(name, configured) {
        Ok(program) => program,
        Err(error) => return Check::failed(name, &error),
    };
    let shown = program.display();
    match program::run(&program, &[option], program::LIMIT) {
        Ok(output) if output.success && output.stdout.split_whitespace().any(|word| word == ours) => {
            Check::ok(name, format!("{shown} {ours}"))
        }
        Ok(output) if output.success => Check::fail(
            name,
            format!("{shown} is {}, firn is {ours}", first_line(&output.stdout)),
            ONE_RELEASE,
        ),
        Ok(output) => Check::fail(
            name,
            format!("{shown} fails: {}", last_line(&output.stderr)),
            ONE_RELEASE,
        ),
        Err(error) => Check::fail(name, format!("{error:#}"), ONE_RELEASE),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    #[test]
    fn a_missing_library_matters_as_far_as_containers_are_to_have_it() {
        let dir = tempfile::tempdir().unwrap();
        let library = dir.path().join(names::CUDA_LIBRARY);
        let status = |interpose: Interpose| {
            let config = Cuda {
                interpose,
                library: Some(library.clone()),
            };
            cuda_library(&config).status
        };
        assert_eq!(status(Interpose::Never), Status::Ok);
        assert_eq!(status(Interpose::Annotated), Status::Warn);
        assert_eq!(status(Interpose::Always), Status::Fail);
        std::fs::write(&library, "").unwrap();
        assert_eq!(status(Interpose::Always), Status::Ok);
    }

    #[test]
    fn a_plugin_directory_with_the_cuda_plugin_fails() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(criu_libs(None).status, Status::Ok);
        assert_eq!(criu_libs(Some(dir.path())).status, Status::Ok);
        std::fs::write(dir.path().join("cuda_plugin.so"), "").unwrap();
        assert_eq!(criu_libs(Some(dir.path())).status, Status::Fail);
        assert_eq!(criu_libs(Some(Path::new("/nonexistent"))).status, Status::Fail);
    }
}
