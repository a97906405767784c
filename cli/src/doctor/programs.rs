//! Checks of the programs that a checkpoint runs.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_config::{Config, INSTALL_CRIU_PLUGIN, find_criu_plugin, find_program, in_path, names};

use super::{Check, ONE_RELEASE};
use crate::program;

const LIMIT: Duration = Duration::from_secs(10);

pub fn checks(config: &Config) -> Vec<Check> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    vec![
        runc(&path),
        criu(&path),
        criu_libs(config.criu.libs_dir.as_deref()),
        criu_plugin(config.criu.libs_dir.as_deref()),
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

fn criu(path: &OsStr) -> Check {
    match versioned("criu", path) {
        Err(found) => Check::fail("criu", found, "`apt install criu`, in the PATH of containerd"),
        Ok((_, version)) if let Some(limit) = unfit(&version, &kernel()) => Check::warn(
            "criu",
            format!("{version}; {limit}"),
            "install CRIU 4.2 or later; `criu --version` shows it",
        ),
        Ok((criu, version)) => match program::run(&criu, &["check"], LIMIT) {
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

/// The release of the running kernel.
fn kernel() -> String {
    let shown = nix::sys::utsname::uname();
    shown
        .map(|name| name.release().to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// What this CRIU cannot do on this kernel.
fn unfit(criu: &str, kernel: &str) -> Option<String> {
    let number = |text: &str| {
        let mut parts = text.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
        Some((parts.next()?.ok()?, parts.next()?.ok()?))
    };
    let version = number(criu.split_whitespace().last()?)?;
    if version < (4, 0) {
        return Some("firn's plugin needs 4.0 or later".to_owned());
    }
    let has_no_tcp = version < (4, 2) && number(kernel)? >= (6, 16);
    has_no_tcp.then(|| format!("it cannot dump TCP sockets on Linux {kernel}"))
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
    match program::run(&program, &[option], LIMIT) {
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

/// A program and its version.
fn versioned(name: &str, path: &OsStr) -> Result<(PathBuf, String), String> {
    let program = in_path(name, path).ok_or_else(|| format!("no {name} in PATH"))?;
    match program::run(&program, &["--version"], LIMIT) {
        Ok(output) if output.success => {
            // `runc version 1.3.6`, `Version: 4.2.1`
            let version = first_line(&output.stdout).split_whitespace().last();
            Ok((program, version.unwrap_or_default().to_owned()))
        }
        Ok(output) => Err(format!(
            "{} --version fails: {}",
            program.display(),
            last_line(&output.stderr)
        )),
        Err(error) => Err(format!("{error:#}")),
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default().trim()
}

fn last_line(text: &str) -> &str {
    text.trim().lines().last().unwrap_or("no message").trim()
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    #[test]
    fn versions_of_criu_that_do_not_fit_the_kernel_are_known() {
        assert_eq!(unfit("Version: 4.2.1", "6.18.44"), None);
        assert_eq!(unfit("Version: 4.1", "6.12.1+deb13"), None);
        assert!(unfit("Version: 4.1.1", "6.16-rc1").unwrap().contains("TCP"));
        assert!(unfit("Version: 3.19", "6.1.0").unwrap().contains("4.0"));
        assert_eq!(unfit("Version: git", "6.18"), None);
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
