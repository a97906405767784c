//! The programs and libraries under test, built by cargo.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
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
    /// Files that are the same as long as this program runs, by their names: paths of descriptors. Another
    /// cargo that builds in the same directory may put files of other features there at any time, and nodes
    /// of one trial would get different programs.
    kept: BTreeMap<String, PathBuf>,
}

/// Directory with built programs and libraries, for machines without cargo.
const DIR_ENV: &str = "FIRN_BUILT_DIR";

const SHIM: &str = "containerd-shim-firn-v2";

/// What a release has, by file names.
pub const PROGRAMS: [&str; 7] = [
    SHIM,
    "firn",
    "firn-gpu",
    "firn-hook",
    "firn-runc",
    "libfirn_criu.so",
    CUDA_LIBRARY,
];

/// What stands between programs and libcuda: a workspace of its own.
const CUDA_LIBRARY: &str = "libfirn_cuda.so";

/// What else nodes of tests have.
const OF_TESTS: [&str; 11] = [
    "cuda-step",
    "device-free",
    "gpu-counter",
    "gpu-sample",
    "libcuda.so",
    "libnvidia_ml.so",
    "memory-hog",
    "objects",
    "simgpu",
    "stall-fs",
    "unix-talk",
];

/// Packages of all these but the shim.
const PACKAGES: [&str; 9] = [
    "firn",
    "firn-criu-plugin",
    "firn-hook",
    "firn-runc",
    "firn-worker",
    "firn-workloads",
    "simgpu-cuda",
    "simgpu-model",
    "simgpu-nvml",
];

/// The static target of the shim; without it the shim is built for the host.
const MUSL: &str = "x86_64-unknown-linux-musl";

impl Built {
    /// What tests run, built once per test program.
    pub fn for_tests() -> Result<&'static Self> {
        static BUILT: OnceLock<Result<Built, String>> = OnceLock::new();
        let build = || {
            let built = Self::find(Profile::Dev, Voice::Quiet)?;
            built.keep(PROGRAMS.iter().chain(&OF_TESTS))
        };
        let build = || build().map_err(|error| format!("{error:#}"));
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
                kept: BTreeMap::new(),
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
        let shim = match profile {
            // As all of it is built and tested: another choice of packages has other features of their
            // dependencies, and cargo then builds those once more.
            Profile::Dev => {
                cargo(voice, &["--workspace"])?;
                target.clone()
            }
            Profile::Release => {
                let packages = PACKAGES.iter().flat_map(|package| ["--package", package]);
                cargo(
                    voice,
                    &["--release"].into_iter().chain(packages).collect::<Vec<_>>(),
                )?;
                let shim = ["--release", "--package", "firn-shim"];
                if has_musl()? {
                    cargo(voice, &[&shim[..], &["--target", MUSL]].concat())?;
                    target.join(MUSL)
                } else {
                    cargo(voice, &shim)?;
                    target.clone()
                }
            }
        };
        let dir = target.join(name);
        put_cuda_library(voice, &target, &dir)?;
        Ok(Self {
            dir,
            shim: shim.join(name).join(SHIM),
            kept: BTreeMap::new(),
        })
    }

    /// Keeps files with these names as they are, until this program ends.
    fn keep<'n>(mut self, names: impl IntoIterator<Item = &'n &'n str>) -> Result<Self> {
        for name in names {
            let path = if *name == SHIM {
                self.shim.clone()
            } else {
                self.program(name)
            };
            let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
            let kept = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
            self.kept.insert((*name).to_owned(), kept.into());
            // Open to the end of the program.
            std::mem::forget(file);
        }
        if let Some(shim) = self.kept.get(SHIM) {
            self.shim.clone_from(shim);
        }
        Ok(self)
    }

    /// The shim.
    pub fn shim(&self) -> &Path {
        &self.shim
    }

    /// Any other program of the workspace, or a library of the simulated driver.
    pub fn program(&self, name: &str) -> PathBuf {
        self.kept
            .get(name)
            .cloned()
            .unwrap_or_else(|| self.dir.join(name))
    }
}

/// Builds libfirn_cuda.so, as a release has it, below the target directory. Returns the file.
pub fn build_cuda_library(target: &Path) -> Result<PathBuf> {
    cuda_library(Voice::Cargo, target)
}

fn cuda_library(voice: Voice, target: &Path) -> Result<PathBuf> {
    let target = target.join("interposer");
    let dir = target.to_str().context("the target directory is no text")?;
    let arguments = ["--release", "--locked", "--target-dir", dir];
    cargo_of("interposer/library/Cargo.toml", voice, &arguments)?;
    Ok(target.join("release").join(CUDA_LIBRARY))
}

/// Builds it and puts it next to the programs. Other programs may have it open there.
fn put_cuda_library(voice: Voice, target: &Path, dir: &Path) -> Result<()> {
    let built = cuda_library(voice, target)?;
    let copy = tempfile::NamedTempFile::new_in(dir).context("make a file next to the programs")?;
    fs::copy(&built, copy.path()).with_context(|| format!("copy {}", built.display()))?;
    copy.persist(dir.join(CUDA_LIBRARY)).context("name the copy")?;
    Ok(())
}

/// Runs `cargo build` with these arguments.
fn cargo(voice: Voice, arguments: &[&str]) -> Result<()> {
    cargo_of("Cargo.toml", voice, arguments)
}

/// The same in the workspace of this file. Releases are compiled by rustc, whatever has compiled the tests.
fn cargo_of(manifest: &str, voice: Voice, arguments: &[&str]) -> Result<()> {
    let mut command = Command::new(env!("CARGO"));
    if arguments.contains(&"--release") {
        command.env_remove("RUSTC_WORKSPACE_WRAPPER");
    }
    command
        .args(["build", "--manifest-path"])
        .arg(workspace().join(manifest))
        .args(arguments);
    if voice == Voice::Quiet {
        command.arg("--quiet");
    }
    let status = command.status().context("run cargo")?;
    ensure!(status.success(), "cargo build {} failed", arguments.join(" "));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_built_again_meanwhile_changes_no_node() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in [SHIM, "simgpu"] {
            std::fs::write(at(name), "first").unwrap();
        }
        let built = Built {
            dir: dir.path().to_owned(),
            shim: at(SHIM),
            kept: BTreeMap::new(),
        };
        let built = built.keep(&[SHIM, "simgpu"]).unwrap();
        // As cargo puts a file into its place.
        for name in [SHIM, "simgpu", "other"] {
            std::fs::write(at("new"), "second").unwrap();
            std::fs::rename(at("new"), at(name)).unwrap();
        }
        let of = |path: &Path| std::fs::read_to_string(path).unwrap();
        assert_eq!(of(built.shim()), "first");
        assert_eq!(of(&built.program("simgpu")), "first");
        assert_eq!(of(&built.program("other")), "second");
    }
}
