//! `cargo xtask suite-bundle`: one archive with which the suites of tests/integration run on another machine.
//!
//! For machines with another cgroup set-up or kernel that cannot install packages. The archive has the root
//! of one Debian suite, the test programs, the programs that they install on a node, and `xtask` for
//! benchmarks and faults. Its `run.sh` needs root, util-linux and a glibc not older than this machine's.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use firn_lab::{Built, Profile};
use firn_node::{Store, Suite};
use serde_json::Value;

use super::{check, check_size, copy_into, install_missing, list, mib, output};
use crate::tools::cargo;
use crate::workspace;

/// Parts of a root that tests do not need.
const LEFT_OUT: [&str; 26] = [
    "./usr/share/doc/*",
    "./usr/share/man/*",
    "./usr/share/info/*",
    "./usr/share/locale/*",
    "./usr/share/zoneinfo/*",
    "./usr/lib/x86_64-linux-gnu/gconv/*",
    "./usr/share/bash-completion/*",
    "./usr/lib/containerd/*",
    "./usr/lib/cni/*",
    "./usr/bin/containerd-stress",
    "./usr/sbin/fs-idmap",
    "./usr/sbin/pidfd-kill",
    "./usr/sbin/recvtty",
    "./usr/sbin/remap-rootfs",
    "./usr/sbin/sd-helper",
    "./usr/sbin/seccompagent",
    "./usr/lib/x86_64-linux-gnu/security/*",
    "./usr/lib/udev/*",
    "./var/lib/dpkg/info/*",
    "./usr/lib/systemd/systemd-networkd",
    "./usr/lib/x86_64-linux-gnu/systemd/libsystemd-core-*",
    "./usr/lib/x86_64-linux-gnu/libapt-pkg.so*",
    "./usr/lib/x86_64-linux-gnu/libcrun.a",
    "./usr/bin/sqv",
    "./var/cache/*",
    "./var/lib/apt/lists/*",
];

const PROGRAMS: [&str; 16] = [
    "firn-gpu",
    "firn-hook",
    "firn-runc",
    "libfirn_criu.so",
    "libfirn_cuda.so",
    "firn",
    "simgpu",
    "cuda-step",
    "gpu-counter",
    "gpu-sample",
    "stall-fs",
    "device-free",
    "memory-hog",
    "memory-pool",
    "objects",
    "unix-talk",
];

/// The simulated driver.
const LIBRARIES: [&str; 2] = ["libcuda.so", "libnvidia_ml.so"];

const RUN: &str = include_str!("run-suites.sh");

/// Pack the suites of tests/integration for another machine.
#[derive(Debug, clap::Args)]
pub struct Cmd {
    /// trixie or forky
    suite: Suite,
    /// Archive to write. Default: `suites-SUITE.tar.xz` in the workspace's target directory.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Pack release builds of what is tested, for benchmarks.
    #[arg(long)]
    release: bool,
}

/// Builds, collects and packs.
pub fn run(cmd: Cmd) -> anyhow::Result<()> {
    install_missing(&[("xz", "xz-utils"), ("strip", "binutils")])?;
    let root = Store::open()?.root(cmd.suite, &[])?;
    let target = workspace()?.join("target");
    let out = cmd
        .out
        .unwrap_or_else(|| target.join(format!("suites-{}.tar.xz", cmd.suite)));
    fs::create_dir_all(&target).context("make the target directory")?;
    let stage = tempfile::tempdir_in(&target)?;
    let bin = stage.path().join("bin");
    for dir in [&bin, &stage.path().join("node/roots")] {
        fs::create_dir_all(dir)?;
    }
    programs(&bin, cmd.release)?;
    suites(&bin)?;
    let script = stage.path().join("run.sh");
    fs::write(&script, RUN)?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    list(stage.path())?;

    // Appended with its owners, modes and links.
    let tar = out.with_extension("");
    check(
        Command::new("tar")
            .arg("-cf")
            .arg(&tar)
            .arg("-C")
            .arg(stage.path())
            .arg("."),
    )?;
    let name = root.file_name().context("a root has a name")?;
    let name = name.to_string_lossy();
    let mut append = Command::new("tar");
    append.arg("-rf").arg(&tar).arg("-C").arg(&root);
    append.args(LEFT_OUT.map(|path| format!("--exclude={path}")));
    append.arg(format!("--transform=flags=rh;s,^\\.,./node/roots/{name},"));
    check(append.arg("."))?;
    // The programs hold much of the same code: the window is larger than the largest.
    let window = "--lzma2=preset=5,dict=256MiB";
    check(Command::new("xz").args(["-T1", window, "--force"]).arg(&tar))?;
    let packed = fs::metadata(&out)?.len();
    println!("{}: {}", out.display(), mib(packed));
    check_size(packed)
}

/// The programs that the lab installs on a node, and this program for benchmarks and faults.
fn programs(bin: &Path, release: bool) -> anyhow::Result<()> {
    let profile = if release { Profile::Release } else { Profile::Dev };
    let built = Built::build(profile)?;
    copy_stripped(built.shim(), bin)?;
    for name in PROGRAMS {
        copy_stripped(&built.program(name), bin)?;
    }
    for name in LIBRARIES {
        copy_stripped(&built.program(name), bin)?;
    }
    // cargo may just have put another build of it where it was.
    let own = bin.join("xtask");
    fs::copy("/proc/self/exe", &own).context("copy this program")?;
    check(Command::new("strip").arg("--strip-unneeded").arg(&own))
}

/// Where the program of the suites begins. A test of this crate has the same name.
const SUITES: &str = "tests/integration/tests/main.rs";

/// The program of the suites.
fn suites(bin: &Path) -> anyhow::Result<()> {
    let mut cargo = cargo();
    cargo.args(["test", "--no-run", "--locked", "--workspace", "--test", "suites"]);
    cargo.args(["--message-format", "json-render-diagnostics"]);
    let messages = output(cargo.current_dir(workspace()?))?;
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line).context("read cargo's messages")?;
        let begins = message["target"]["src_path"].as_str().unwrap_or_default();
        if let Some(program) = message["executable"].as_str()
            && begins.ends_with(SUITES)
        {
            let copy = copy_stripped(Path::new(program), bin)?;
            return fs::rename(copy, bin.join("suites")).context("name the program");
        }
    }
    bail!("cargo has built no suites")
}

fn copy_stripped(from: &Path, dir: &Path) -> anyhow::Result<PathBuf> {
    let copy = copy_into(from, dir)?;
    check(Command::new("strip").arg("--strip-unneeded").arg(&copy))?;
    Ok(copy)
}
