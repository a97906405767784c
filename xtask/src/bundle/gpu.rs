//! `cargo xtask gpu-bundle`: one archive with everything that the runs on a GPU machine need.
//!
//! The machine has a driver, a kernel and Python, but no packages: containerd, runc, CRIU and iptables are
//! those of Debian forky with their own loader and libraries, so that the machine's glibc does not matter.
//! Their paths are fixed to [`INSTALL_DIR`]: the kernel takes a program's interpreter by absolute path
//! (`$ORIGIN` does not exist there), and runc runs itself again from a sealed copy in memory, from where no
//! relative path leads to the libraries.
//!
//! firn's own programs use the machine's loader, because `firn-gpu` must open the machine's driver libraries;
//! the shim is static where the musl target is installed. `tests/gpu/run.py` unpacks the archive and runs the
//! cases.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use firn_lab::build_cuda_library;

use super::{check, check_size, copy_into, debs, elf, install_missing, list, mib, output, write_out};
use crate::tools::{cargo, in_path};
use crate::workspace;

/// Where the archive has to be unpacked; `tests/gpu/host.py` has the same path.
const INSTALL_DIR: &str = "/opt/firn-gpu";

/// Debian packages whose files are taken; apt adds what they depend on.
const PACKAGES: [&str; 7] = [
    "containerd",
    "runc",
    "criu",
    "iptables",
    "busybox-static",
    "podman",
    "conmon",
];

/// Programs taken from the packages.
const TOOLS: [&str; 9] = [
    "usr/bin/conmon",
    "usr/bin/containerd",
    "usr/bin/containerd-shim-runc-v2",
    "usr/bin/ctr",
    "usr/bin/podman",
    "usr/sbin/criu",
    "usr/sbin/runc",
    "usr/sbin/xtables-legacy-multi",
    "usr/sbin/xtables-nft-multi",
];

/// Names under which CRIU calls iptables.
const IPTABLES: [&str; 6] = [
    "iptables",
    "iptables-restore",
    "iptables-save",
    "ip6tables",
    "ip6tables-restore",
    "ip6tables-save",
];

/// The match extension that CRIU's network lock uses.
const XTABLES_PLUGINS: [&str; 1] = ["libxt_mark.so"];

/// Where Debian keeps libraries.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// Libraries that NVIDIA's driver libraries need in the container, in addition to those of the workload.
const DRIVER_NEEDS: [&str; 6] = [
    "libm.so.6",
    "libdl.so.2",
    "librt.so.1",
    "libpthread.so.0",
    "libgcc_s.so.1",
    "libc.so.6",
];

/// Suites, and the clients that they build.
const CLIENTS: [(&str, &str); 2] = [("nerdctl", "nerdctl"), ("cri", "cri-client")];

/// What the cases run in containers.
const WORKLOADS: [&str; 2] = ["gpu-counter", "gpu-sample"];

/// Packs the archive for GPU machines.
#[derive(Debug, clap::Args)]
pub struct Cmd {
    /// Archive (`.tar.xz`) or directory to write. Default: `gpu-bundle.tar.xz` in the workspace's target
    /// directory.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Pack the tools and the scripts without firn's programs: enough for the stock shim and CPU containers.
    #[arg(long)]
    tools_only: bool,
}

/// Builds, collects and packs.
pub fn run(cmd: Cmd) -> anyhow::Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "gpu-bundle needs root\nhint: apt installs patchelf and xz when they are missing"
    );
    install_missing(&[("patchelf", "patchelf"), ("xz", "xz-utils"), ("dpkg-deb", "dpkg")])?;
    let workspace = workspace()?;
    let target = workspace.join("target");
    let out = cmd.out.unwrap_or_else(|| target.join("gpu-bundle.tar.xz"));

    let work = target.join("gpu-bundle");
    fs::create_dir_all(&work)?;
    let stage = tempfile::tempdir_in(&work)?;
    let packages = debs::fetch(&work.join("apt"), &PACKAGES)?;
    let forky = tempfile::tempdir_in(&work)?;
    for package in &packages {
        package.unpack(forky.path())?;
    }

    tools(forky.path(), stage.path())?;
    if !cmd.tools_only {
        programs(&workspace, stage.path())?;
        clients(&target, stage.path())?;
    }
    rootfs(&forky.path().join("usr/bin/busybox"), stage.path())?;
    scripts(&workspace, stage.path())?;

    for package in packages
        .iter()
        .filter(|package| PACKAGES.contains(&package.name.as_str()))
    {
        println!("  {} {}", package.name, package.version);
    }
    list(stage.path())?;
    let packed = write_out(stage.path(), &out)?;
    println!("{}: {}", out.display(), mib(packed));
    check_size(packed)
}

/// firn's programs and the test image, as `tests/gpu/run.py --bundle` takes them, for a machine that has the
/// tools.
pub(crate) fn stage_without_tools(stage: &Path) -> anyhow::Result<()> {
    install_missing(&[("patchelf", "patchelf"), ("busybox", "busybox-static")])?;
    fs::create_dir_all(stage.join("bin"))?;
    programs(&workspace()?, stage)?;
    rootfs(&in_path("busybox").context("no busybox in PATH")?, stage)
}

/// The tools of forky with their loader, libraries and plugins, bound to the install directory.
fn tools(forky: &Path, stage: &Path) -> anyhow::Result<()> {
    let (bin, lib) = (stage.join("bin"), stage.join("lib"));
    fs::create_dir_all(lib.join("xtables"))?;
    fs::create_dir_all(&bin)?;
    let library_dir = forky.join(LIBRARIES);
    for tool in TOOLS {
        let copy = copy_into(&forky.join(tool), &bin)?;
        elf::copy_needed(&copy, std::slice::from_ref(&library_dir), &lib)?;
        elf::rebind(&copy, Path::new(INSTALL_DIR).join("lib").as_path())?;
    }
    for plugin in XTABLES_PLUGINS {
        copy_into(&library_dir.join("xtables").join(plugin), &lib.join("xtables"))?;
    }
    for name in IPTABLES {
        symlink("xtables-nft-multi", bin.join(name))?;
    }
    Ok(())
}

/// firn's programs and the workloads, in release builds.
fn programs(workspace: &Path, stage: &Path) -> anyhow::Result<()> {
    const MUSL: &str = "x86_64-unknown-linux-musl";
    let bin = stage.join("bin");
    let musl = have_target(workspace, MUSL)?;
    if !musl {
        println!("no target {MUSL} for this toolchain: the shim is linked with glibc");
    }
    let built = build(workspace, &["firn-shim"], musl.then_some(MUSL))?;
    copy_into(&built.join("containerd-shim-firn-v2"), &bin)?;
    let packages = [
        "firn-worker",
        "firn-hook",
        "firn",
        "firn-runc",
        "firn-criu-plugin",
        "firn-workloads",
    ];
    let built = build(workspace, &packages, None)?;
    let programs = ["firn-gpu", "firn-hook", "firn", "firn-runc", "libfirn_criu.so"];
    for name in programs.into_iter().chain(WORKLOADS) {
        copy_into(&built.join(name), &bin)?;
    }
    copy_into(&build_cuda_library(&workspace.join("target"))?, &bin)?;
    Ok(())
}

/// The clients that suites have built: the cases `nerdctl` and `cri` need them.
fn clients(target: &Path, stage: &Path) -> anyhow::Result<()> {
    for (suite, program) in CLIENTS {
        let kept = fs::read_dir(target.join("node/go")).into_iter().flatten();
        let found = kept.flatten().map(|entry| entry.path()).find(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name == program || name.starts_with(&format!("{program}-v"))
        });
        match found {
            Some(path) => check(
                Command::new("strip")
                    .arg("-o")
                    .arg(stage.join("bin").join(program))
                    .arg(path),
            )?,
            None => println!("without {program}, which the suite {suite} builds"),
        }
    }
    Ok(())
}

/// The root of the test image: busybox, this Debian's loader and libraries, and the workloads where they were
/// built.
fn rootfs(busybox: &Path, stage: &Path) -> anyhow::Result<()> {
    let root = stage.join("rootfs");
    let (bin, lib) = (root.join("usr/bin"), root.join(LIBRARIES));
    for dir in [
        "usr/bin",
        "usr/sbin",
        "usr/lib64",
        LIBRARIES,
        "dev",
        "etc",
        "proc",
        "root",
        "run",
        "sys",
        "tmp",
        "var",
    ] {
        fs::create_dir_all(root.join(dir))?;
    }
    for link in ["bin", "sbin", "lib", "lib64"] {
        symlink(Path::new("usr").join(link), root.join(link))?;
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n")?;
    let busybox = copy_into(busybox, &bin)?;
    for applet in output(Command::new(&busybox).arg("--list"))?
        .lines()
        .filter(|applet| *applet != "busybox")
    {
        symlink("busybox", bin.join(applet))?;
    }

    let host = [
        Path::new("/").join(LIBRARIES),
        PathBuf::from("/lib/x86_64-linux-gnu"),
    ];
    for name in DRIVER_NEEDS {
        elf::copy_library(name, &host, &lib)?;
    }
    for workload in WORKLOADS {
        let program = stage.join("bin").join(workload);
        if program.exists() {
            elf::copy_needed(&copy_into(&program, &bin)?, &host, &lib)?;
        }
    }
    symlink(
        Path::new("../lib/x86_64-linux-gnu").join(elf::LOADER),
        root.join("usr/lib64").join(elf::LOADER),
    )?;
    Ok(())
}

fn scripts(workspace: &Path, stage: &Path) -> anyhow::Result<()> {
    let to = stage.join("tests/gpu");
    fs::create_dir_all(&to)?;
    for entry in fs::read_dir(workspace.join("tests/gpu"))? {
        let path = entry?.path();
        if path.is_file() {
            copy_into(&path, &to)?;
        }
    }
    Ok(())
}

/// Builds what these packages ship, without the features of tests, and returns the directory of the programs.
fn build(workspace: &Path, packages: &[&str], target: Option<&str>) -> anyhow::Result<PathBuf> {
    let mut cargo = cargo();
    cargo
        .args(["build", "--release", "--locked"])
        .current_dir(workspace);
    for package in packages {
        cargo.args(["--package", package]);
    }
    let mut dir = workspace.join("target");
    if let Some(target) = target {
        cargo.args(["--target", target]);
        dir.push(target);
    }
    check(&mut cargo)?;
    Ok(dir.join("release"))
}

/// Whether this toolchain builds for `target`; adds the target where rustup can.
fn have_target(workspace: &Path, target: &str) -> anyhow::Result<bool> {
    let installed = Command::new("rustup")
        .args(["target", "list", "--installed"])
        .current_dir(workspace)
        .output();
    if installed.is_ok_and(|list| {
        String::from_utf8_lossy(&list.stdout)
            .lines()
            .any(|line| line == target)
    }) {
        return Ok(true);
    }
    println!("adding the target {target} with rustup");
    let added = Command::new("rustup")
        .args(["target", "add", target])
        .current_dir(workspace)
        .status();
    Ok(added.is_ok_and(|status| status.success()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scripts_unpack_where_the_tools_expect_it() {
        let script = fs::read_to_string(workspace().unwrap().join("tests/gpu/host.py")).unwrap();
        assert!(script.contains(&format!("INSTALL_DIR = \"{INSTALL_DIR}\"")));
    }
}
