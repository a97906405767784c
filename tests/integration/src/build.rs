//! The programs and libraries under test, built by cargo.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow, ensure};

/// With how much optimisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Fast to build: for tests and the demo.
    Dev,
    /// What ships: for benchmarks and bundles.
    Release,
}

/// Who speaks while it is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Voice {
    Cargo,
    Quiet,
}

/// Where the built files are.
#[derive(Clone, Debug)]
pub struct Built {
    dir: PathBuf,
    shim: PathBuf,
}

/// Directory with built programs and libraries, for machines without cargo.
const DIR_ENV: &str = "FIRN_BUILT_DIR";

const SHIM: &str = "containerd-shim-firn-v2";

/// What a release has, by file names.
pub const PROGRAMS: [&str; 6] = [
    SHIM,
    "firn",
    "firn-gpu",
    "firn-hook",
    "firn-runc",
    "libfirn_criu.so",
];

/// The static target of the shim; without it the shim is built for the host.
const MUSL: &str = "x86_64-unknown-linux-musl";

impl Built {
    /// What tests run, built once per test program.
    pub fn for_tests() -> Result<&'static Self> {
        static BUILT: OnceLock<Result<Built, String>> = OnceLock::new();
        let build = || Self::find(Profile::Dev, Voice::Quiet).map_err(|error| format!("{error:#}"));
        BUILT
            .get_or_init(build)
            .as_ref()
            .map_err(|error| anyhow!("{error}"))
    }

    /// Builds everything that a node needs; cargo shows its progress.
    pub fn build(profile: Profile) -> Result<Self> {
        Self::find(profile, Voice::Cargo)
    }

    /// In the directory that [`DIR_ENV`] names, else built.
    fn find(profile: Profile, voice: Voice) -> Result<Self> {
        match std::env::var_os(DIR_ENV) {
            Some(dir) => Ok(Self {
                shim: Path::new(&dir).join(SHIM),
                dir: dir.into(),
            }),
            None => Self::make(profile, voice),
        }
    }

    fn make(profile: Profile, voice: Voice) -> Result<Self> {
        let name = match profile {
            Profile::Dev => "debug",
            Profile::Release => "release",
        };
        let target = target_dir()?;
        let packages = [
            "firn-worker",
            "firn-hook",
            "firn-runc",
            "firn-criu-plugin",
            "firn",
            "firn-workloads",
            "simgpu-model",
            "simgpu-cuda",
            "simgpu-nvml",
        ];
        cargo(profile, voice, None, &packages)?;
        let shim = match profile == Profile::Release && has_musl()? {
            true => {
                cargo(profile, voice, Some(MUSL), &["firn-shim"])?;
                target.join(MUSL)
            }
            false => {
                cargo(profile, voice, None, &["firn-shim"])?;
                target.clone()
            }
        };
        Ok(Self {
            dir: target.join(name),
            shim: shim.join(name).join(SHIM),
        })
    }

    /// The shim.
    pub fn shim(&self) -> &Path {
        &self.shim
    }

    /// Any other program of the workspace.
    pub fn program(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Directory with the libraries of the simulated driver.
    pub fn libraries(&self) -> &Path {
        &self.dir
    }
}

fn cargo(profile: Profile, voice: Voice, target: Option<&str>, packages: &[&str]) -> Result<()> {
    let mut command = Command::new(env!("CARGO"));
    command
        .args(["build", "--manifest-path"])
        .arg(workspace().join("Cargo.toml"));
    if voice == Voice::Quiet {
        command.arg("--quiet");
    }
    if profile == Profile::Release {
        command.arg("--release");
    }
    if let Some(target) = target {
        command.args(["--target", target]);
    }
    for package in packages {
        command.args(["--package", package]);
    }
    let status = command.status().context("run cargo")?;
    ensure!(status.success(), "cargo build of {} failed", packages.join(", "));
    Ok(())
}

/// Whether the standard library for the static target is there.
fn has_musl() -> Result<bool> {
    let output = Command::new("rustc")
        .current_dir(workspace())
        .args(["--print", "target-libdir", "--target", MUSL])
        .output()
        .context("run rustc")?;
    let dir = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    Ok(dir.read_dir().is_ok_and(|mut entries| entries.next().is_some()))
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn target_dir() -> Result<PathBuf> {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => Ok(PathBuf::from(dir)),
        None => workspace()
            .join("target")
            .canonicalize()
            .context("find the target directory"),
    }
}
