//! Checks of the programs that a checkpoint runs.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_config::{Config, INSTALL_CRIU_PLUGIN, find_criu_plugin, find_program, in_path, names};

use super::Check;
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
        own(names::WORKER_PROGRAM, config.worker.path.as_deref()),
        own(names::HOOK_PROGRAM, config.hook.path.as_deref()),
    ]
}

fn runc(path: &OsStr) -> Check {
    let remedy = "install runc 1.1 or later into the PATH of containerd";
    match versioned("runc", path) {
        Ok((_, version)) => Check::ok("runc", version),
        Err(found) => Check::fail("runc", found, remedy),
    }
}

fn criu(path: &OsStr) -> Check {
    match versioned("criu", path) {
        Err(found) => Check::fail("criu", found, "install CRIU into the PATH of containerd"),
        Ok((criu, version)) => match program::run(&criu, &["check"], LIMIT) {
            Ok(output) if output.success => Check::ok("criu", version),
            Ok(output) => Check::warn(
                "criu",
                format!("{version}; `criu check` fails: {}", last_line(&output.stderr)),
                "run `criu check` as root; the kernel may lack what CRIU needs",
            ),
            Err(_) => Check::warn(
                "criu",
                format!("{version}; `criu check` does not run"),
                "run `criu check` as root",
            ),
        },
    }
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
            "make it, or remove libs-dir",
        ),
        Some(dir) if dir.join(PLUGIN).exists() => Check::fail(
            NAME,
            format!("{} holds {PLUGIN}, which works against firn", dir.display()),
            "name a directory without it",
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
            "install iptables; without it CRIU cannot lock the network",
        ),
    }
}

/// One of firn's own programs, which has to be of this release.
fn own(name: &'static str, configured: Option<&Path>) -> Check {
    let ours = env!("CARGO_PKG_VERSION");
    let program = match find_program(name, configured) {
        Ok(program) => program,
        Err(error) => return Check::failed(name, &error),
    };
    let shown = program.display();
    match program::run(&program, &["--version"], LIMIT) {
        Ok(output) if output.success && output.stdout.split_whitespace().any(|word| word == ours) => {
            Check::ok(name, format!("{shown} {ours}"))
        }
        Ok(output) if output.success => Check::fail(
            name,
            format!("{shown} is {}, firn is {ours}", first_line(&output.stdout)),
            "install firn's programs from one release",
        ),
        Ok(output) => Check::fail(
            name,
            format!("{shown} fails: {}", last_line(&output.stderr)),
            "install firn's programs from one release",
        ),
        Err(error) => Check::fail(name, format!("{error:#}"), "install it again"),
    }
}

/// A program and what it prints as its version.
fn versioned(name: &str, path: &OsStr) -> Result<(PathBuf, String), String> {
    let program = in_path(name, path).ok_or_else(|| format!("no {name} in PATH"))?;
    match program::run(&program, &["--version"], LIMIT) {
        Ok(output) if output.success => {
            let version = first_line(&output.stdout).to_owned();
            Ok((program, version))
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
    fn a_plugin_directory_with_the_cuda_plugin_fails() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(criu_libs(None).status, Status::Ok);
        assert_eq!(criu_libs(Some(dir.path())).status, Status::Ok);
        std::fs::write(dir.path().join("cuda_plugin.so"), "").unwrap();
        assert_eq!(criu_libs(Some(dir.path())).status, Status::Fail);
        assert_eq!(criu_libs(Some(Path::new("/nonexistent"))).status, Status::Fail);
    }
}
