//! `cargo xtask gpu-bundle`: one archive with everything that the runs on a GPU machine need.
//!
//! The machine has a driver, a kernel and Python, but no packages: containerd, runc, CRIU and iptables come from Debian
//! forky with their own loader and libraries, so that the machine's glibc does not matter. They are bound to
//! [`INSTALL_DIR`]: the kernel takes a program's interpreter by absolute path (`$ORIGIN` does not exist there), and runc
//! runs itself again from a sealed copy in memory, from where no relative path leads to the libraries.
//!
//! firn's own programs use the machine's loader, because `firn-gpu` must open the machine's driver libraries; the shim
//! is static where the musl target can be had. `tests/gpu/run.py` unpacks the archive and runs the cases.

mod debs;
mod elf;
pub mod suites;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};

/// Where the archive has to be unpacked; the same path stands in `tests/gpu/run.py`.
const INSTALL_DIR: &str = "/opt/firn-gpu";

/// The working tree that travels to a GPU machine may hold 64 MiB in all.
const LIMIT: u64 = 60 << 20;

/// Debian packages whose files are taken; apt adds what they depend on.
const PACKAGES: [&str; 5] = ["containerd", "runc", "criu", "iptables", "busybox-static"];

/// Programs taken from the packages.
const TOOLS: [&str; 7] = [
    "usr/bin/containerd",
    "usr/bin/containerd-shim-runc-v2",
    "usr/bin/ctr",
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

/// Libraries that NVIDIA's driver libraries need of the container, beside what the workload itself needs.
const DRIVER_NEEDS: [&str; 6] = [
    "libm.so.6",
    "libdl.so.2",
    "librt.so.1",
    "libpthread.so.0",
    "libgcc_s.so.1",
    "libc.so.6",
];

/// What the cases run in containers.
const WORKLOADS: [&str; 2] = ["gpu-counter", "gpu-sample"];

/// Packs the archive for GPU machines.
#[derive(Debug, clap::Args)]
pub struct Cmd {
    /// Archive (`.tar.xz`) or directory to write. Default: `gpu-bundle.tar.xz` in the workspace's target directory.
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
    }
    rootfs(&forky.path().join("usr/bin/busybox"), stage.path())?;
    scripts(&workspace, stage.path())?;

    for package in packages
        .iter()
        .filter(|package| PACKAGES.contains(&package.name.as_str()))
    {
        println!("  {} {}", package.name, package.version);
    }
    let sizes = contents(stage.path())?;
    let packed = write_out(stage.path(), &out)?;
    println!("{}: {}", out.display(), mib(packed));
    check_size(packed, LIMIT, &sizes)
}

/// Refuses an archive of `packed` bytes that is too large to travel, naming the biggest of its files.
fn check_size(packed: u64, limit: u64, sizes: &BTreeMap<PathBuf, u64>) -> anyhow::Result<()> {
    if packed <= limit {
        return Ok(());
    }
    let (path, size) = sizes
        .iter()
        .max_by_key(|(_, size)| **size)
        .context("the bundle is empty")?;
    bail!(
        "the bundle has {}, more than the {} that travel; its biggest file is {} with {}",
        mib(packed),
        mib(limit),
        path.display(),
        mib(*size)
    );
}

/// firn's programs and the test image, as `tests/gpu/run.py --bundle` takes them, for a machine that has the tools.
pub(crate) fn stage_without_tools(stage: &Path) -> anyhow::Result<()> {
    install_missing(&[("patchelf", "patchelf"), ("busybox", "busybox-static")])?;
    fs::create_dir_all(stage.join("bin"))?;
    programs(&workspace()?, stage)?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let busybox = std::env::split_paths(&path)
        .map(|dir| dir.join("busybox"))
        .find(|file| file.is_file());
    rootfs(&busybox.context("no busybox in PATH")?, stage)
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
    let built = build(workspace, &["containerd-shim-firn-v2"], musl.then_some(MUSL))?;
    copy_into(&built.join("containerd-shim-firn-v2"), &bin)?;
    let others = ["firn-gpu", "firn-hook", "firn", WORKLOADS[0], WORKLOADS[1]];
    let built = build(workspace, &others, None)?;
    for name in others {
        copy_into(&built.join(name), &bin)?;
    }
    Ok(())
}

/// The root of the test image: busybox, this Debian's loader and libraries, and the workloads where they were built.
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

/// Prints each directory with its size and the files above 1 MiB; returns all files.
fn contents(stage: &Path) -> anyhow::Result<BTreeMap<PathBuf, u64>> {
    let mut files = BTreeMap::new();
    list(stage, stage, &mut files)?;
    let mut dirs: BTreeMap<&Path, (usize, u64)> = BTreeMap::new();
    for (path, size) in &files {
        let dir = dirs.entry(path.parent().unwrap_or(path)).or_default();
        *dir = (dir.0 + 1, dir.1 + size);
    }
    for (dir, (count, size)) in dirs {
        println!("  {:>10}  {}/  {count} files", mib(size), dir.display());
        for (path, size) in files
            .iter()
            .filter(|(path, size)| path.parent() == Some(dir) && **size >= 1 << 20)
        {
            println!("  {:>10}    {}", mib(*size), path.display());
        }
    }
    Ok(files)
}

fn list(top: &Path, dir: &Path, files: &mut BTreeMap<PathBuf, u64>) -> anyhow::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let meta = path.symlink_metadata()?;
        if meta.is_dir() {
            list(top, &path, files)?;
        } else if meta.is_file() {
            files.insert(path.strip_prefix(top)?.to_owned(), meta.len());
        }
    }
    Ok(())
}

/// Writes the archive (the same bytes for the same files) or the directory; returns the size that travels.
fn write_out(stage: &Path, out: &Path) -> anyhow::Result<u64> {
    if let Some(parent) = out.parent() {
        fs::create_dir_all(parent)?;
    }
    if out.extension() == Some(OsStr::new("xz")) {
        let options = [
            "--sort=name",
            "--mtime=@0",
            "--owner=0",
            "--group=0",
            "--numeric-owner",
            "--mode=go-w",
        ];
        check(
            Command::new("tar")
                .args(options)
                .args(["--use-compress-program", "xz -6 -T2", "-cf"])
                .arg(out)
                .arg("-C")
                .arg(stage)
                .arg("."),
        )?;
        return Ok(fs::metadata(out)?.len());
    }
    if out.exists() {
        ensure!(
            out.join("bin/containerd").is_file() || fs::read_dir(out)?.next().is_none(),
            "{} exists and is no earlier bundle\nhint: name another directory",
            out.display()
        );
        fs::remove_dir_all(out)?;
    }
    check(Command::new("cp").args(["-a", "--"]).arg(stage).arg(out))?;
    fs::set_permissions(out, fs::Permissions::from_mode(0o755))?;
    let mut files = BTreeMap::new();
    list(out, out, &mut files)?;
    Ok(files.values().sum())
}

/// Builds the named programs and returns the directory that holds them.
fn build(workspace: &Path, bins: &[&str], target: Option<&str>) -> anyhow::Result<PathBuf> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .args(["build", "--release", "--locked"])
        .current_dir(workspace);
    for bin in bins {
        cargo.args(["--bin", bin]);
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

/// Installs by apt the packages of programs that are missing, after saying so.
fn install_missing(programs: &[(&str, &str)]) -> anyhow::Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let missing: Vec<&str> = programs
        .iter()
        .filter(|(program, _)| !std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
        .map(|(_, package)| *package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    println!("installing by apt: {}", missing.join(" "));
    check(Command::new("apt-get").arg("update").arg("-q"))?;
    check(
        Command::new("apt-get")
            .args(["install", "-y", "-q", "--no-install-recommends"])
            .args(missing),
    )
}

fn workspace() -> anyhow::Result<PathBuf> {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    Ok(xtask.parent().context("xtask lies in the workspace")?.to_owned())
}

fn copy_into(from: &Path, dir: &Path) -> anyhow::Result<PathBuf> {
    let to = dir.join(from.file_name().context("a file has a name")?);
    fs::copy(from, &to).with_context(|| format!("cannot copy {} to {}", from.display(), dir.display()))?;
    Ok(to)
}

/// Runs a command to its end, its output going where ours goes.
fn check(command: &mut Command) -> anyhow::Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let status = command
        .status()
        .with_context(|| format!("cannot run {program}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// Runs a command and returns what it printed.
fn output(command: &mut Command) -> anyhow::Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    String::from_utf8(output.stdout).with_context(|| format!("{program} printed no text"))
}

fn mib(bytes: u64) -> String {
    let tenths = bytes * 10 / (1 << 20);
    format!("{}.{} MiB", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_shown_in_mebibytes() {
        assert_eq!(mib(0), "0.0 MiB");
        assert_eq!(mib((1 << 20) + (1 << 19)), "1.5 MiB");
        assert_eq!(mib(LIMIT), "60.0 MiB");
    }

    #[test]
    fn what_is_too_large_names_its_biggest_file() {
        let sizes = BTreeMap::from([
            ("bin/a".into(), 5 << 20),
            ("bin/b".into(), 9 << 20),
            ("lib/c".into(), 1),
        ]);
        check_size(10 << 20, 10 << 20, &sizes).unwrap();
        let error = check_size((10 << 20) + 1, 10 << 20, &sizes)
            .unwrap_err()
            .to_string();
        assert!(error.contains("bin/b with 9.0 MiB"), "{error}");
    }

    #[test]
    fn the_scripts_unpack_where_the_tools_expect_it() {
        let script = fs::read_to_string(workspace().unwrap().join("tests/gpu/host.py")).unwrap();
        assert!(script.contains(&format!("INSTALL_DIR = \"{INSTALL_DIR}\"")));
    }

    #[test]
    fn archives_of_the_same_files_are_equal() {
        let dir = tempfile::tempdir().unwrap();
        let archive = |name: &str| {
            let stage = dir.path().join(name);
            fs::create_dir(&stage).unwrap();
            fs::write(stage.join("b"), "two").unwrap();
            fs::write(stage.join("a"), "one").unwrap();
            let out = dir.path().join(format!("{name}.tar.xz"));
            assert!(write_out(&stage, &out).unwrap() > 0);
            fs::read(out).unwrap()
        };
        assert_eq!(archive("first"), archive("second"));
    }

    #[test]
    fn a_directory_of_someone_else_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (stage, out) = (dir.path().join("stage"), dir.path().join("out"));
        fs::create_dir(&stage).unwrap();
        fs::create_dir(&out).unwrap();
        fs::write(out.join("letter"), "dear").unwrap();
        assert!(write_out(&stage, &out).is_err());
        assert_eq!(fs::read_to_string(out.join("letter")).unwrap(), "dear");
    }
}
