//! The mounts that a restore needs.
//!
//! CRIU rebuilds the mount tree of the dump. The image does not contain bind mounts: each must exist again at
//! the same destination, from any source of the target. Otherwise the restore fails late and with an unclear
//! message. For each bind mount firn uses the first of these that exists:
//!
//! 1. the mount of the target's own spec at this destination;
//! 2. a library of this node's driver: if the spec's source is a library of the driver that is elsewhere on
//!    this node; or if the spec lacks the destination, and the destination is the library's place on this
//!    node, or the spec has that library at another destination;
//! 3. an empty file, for what a driver's container toolkit mounts and no process needs to continue: sockets
//!    of the driver's daemons, firmware, and tools that no process had in use;
//! 4. none: the restore is refused.
//!
//! Bind mounts that the checkpoint did not have are removed from the spec: CRIU does not make them. Those of
//! a checkpoint without devices stay, because the target's driver may have other files than the source's:
//! firn-hook mounts them when CRIU is done ([`late`]). For such a checkpoint an empty file also stands for
//! any file of NVIDIA's driver that no process had in use.
//!
//! The manifest is untrusted: its list is only compared. firn mounts sources of the target's spec, files that
//! carry this node's driver version in their name and are where the loader looks, and its own empty file. It
//! adds a mount only at the places that are listed here.

use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};

use firn_host::Problem;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{Spec, SpecError, SpecMount};

/// A bind mount that the container had at the dump.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RequiredMount {
    /// Path in the container.
    pub destination: PathBuf,
    /// Last part of the source's path, which has the driver version for driver libraries. Shown to people,
    /// never opened.
    pub source_name: String,
    /// Whether a process had something of it open or mapped.
    pub in_use: bool,
}

/// Where the loader looks for the libraries of a driver.
pub const LIBRARY_DIRS: [&str; 7] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/opt/nvidia/lib64",
];

/// Sockets of the driver's daemons.
const SOCKETS: [&str; 4] = [
    "/run/nvidia-persistenced/socket",
    "/var/run/nvidia-persistenced/socket",
    "/run/nvidia-fabricmanager/socket",
    "/var/run/nvidia-fabricmanager/socket",
];

/// Firmware: `VERSION/gsp_*.bin` below these.
const FIRMWARE: [&str; 2] = ["/lib/firmware/nvidia", "/usr/lib/firmware/nvidia"];

/// Tools of the driver, in /usr/bin.
const TOOLS: [&str; 8] = [
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-modprobe",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
];

/// The mounts of a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Needs<'a> {
    pub mounts: &'a [RequiredMount],
    /// It holds nothing of any device: the files of drivers that the container needs are the target's.
    pub device_free: bool,
}

/// The driver of this node, as far as its files go.
#[derive(Clone, Copy, Debug)]
pub struct Driver<'a> {
    /// Full version, as the running driver reports it.
    pub version: &'a str,
    /// Where its libraries may be: [`LIBRARY_DIRS`], and the directories in the node's CDI files.
    pub dirs: &'a [&'a str],
}

/// The result of [`resolve`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResolvedMounts {
    /// Destinations that get a file of this node's driver, and the file.
    pub from_driver: Vec<(PathBuf, PathBuf)>,
    /// Destinations that get an empty file.
    pub empty: Vec<PathBuf>,
    /// Bind mounts of the spec that the checkpoint did not have: the restored container will not have them.
    pub extra: Vec<PathBuf>,
    /// The same for a checkpoint without devices: it will have them.
    pub late: Vec<PathBuf>,
    /// Other sources, by the place in the spec's list.
    sources: Vec<(usize, PathBuf)>,
    /// Places in the list, in order.
    dropped: Vec<usize>,
    /// Destinations and sources.
    added: Vec<(PathBuf, PathBuf)>,
}

impl ResolvedMounts {
    /// Edits the mounts of the spec that was resolved.
    pub fn apply(&mut self, spec: &mut Spec) -> Result<(), SpecError> {
        if self.sources.is_empty() && self.dropped.is_empty() && self.added.is_empty() {
            return Ok(());
        }
        let list = spec.list_mut("mounts")?;
        for (at, source) in self.sources.drain(..) {
            list[at]["source"] = json!(source);
        }
        for at in self.dropped.drain(..).rev() {
            list.remove(at);
        }
        for (destination, source) in self.added.drain(..) {
            let options = ["ro", "nosuid", "nodev", "rbind", "rprivate"];
            list.push(
                json!({"destination": destination, "type": "bind", "source": source, "options": options}),
            );
        }
        Ok(())
    }

    /// The file that stands for a source that is not there, if any may.
    fn stand_in(
        &mut self,
        wanted: &RequiredMount,
        library: Option<PathBuf>,
        device_free: bool,
        empty: &Path,
    ) -> Option<PathBuf> {
        let destination = wanted.destination.clone();
        if let Some(file) = library {
            self.from_driver.push((destination, file.clone()));
            return Some(file);
        }
        let is_unused = device_free && !wanted.in_use && is_nvidias(&destination);
        let can_be_empty = is_unused || can_be_empty(&destination, wanted.in_use);
        can_be_empty.then(|| {
            self.empty.push(destination);
            empty.to_owned()
        })
    }
}

/// A mount that a restore needs and cannot have.
#[derive(Debug, thiserror::Error, Problem)]
pub enum MountError {
    /// The checkpoint had a bind mount that the spec does not give.
    #[error(
        "the checkpoint needs a mount at {} (source {source_name:?}), which the spec does not have",
        destination.display()
    )]
    #[problem(
        "FIRN-MOUNT-NOT-IN-SPEC",
        "give the restored container the same mounts as the source had; libraries of the driver may be at \
         other places, but have to be of the same version"
    )]
    NotInSpec {
        destination: PathBuf,
        source_name: String,
    },
    /// The source of a bind mount of the spec is not there.
    #[error("source {} of the mount at {} does not exist on this node", source_path.display(),
             destination.display())]
    #[problem(
        SOURCE_MISSING,
        "make the path, or install the same driver and CDI spec as on the source (file names of the driver \
         carry its version)"
    )]
    SourceMissing {
        source_path: PathBuf,
        destination: PathBuf,
    },
    /// The spec's mounts cannot be read.
    #[error("cannot read the mounts of the spec")]
    Spec(#[from] SpecError),
}

/// Code of [`MountError::SourceMissing`].
pub const SOURCE_MISSING: &str = "FIRN-MOUNT-SOURCE-MISSING";

/// The bind mounts of a container, which its restore will need.
pub fn required(spec: &Spec) -> Result<Vec<RequiredMount>, MountError> {
    let binds = spec.mounts()?.into_iter().filter(|mount| mount.is_bind());
    let required = |mount: SpecMount| RequiredMount {
        source_name: (mount.source.file_name().unwrap_or_default())
            .to_string_lossy()
            .into_owned(),
        destination: mount.destination,
        in_use: true,
    };
    Ok(binds.map(required).collect())
}

/// Looks for the source of every bind mount of a spec that nothing is edited in. A relative source starts at
/// the bundle.
pub fn expect_sources(spec: &Spec, bundle: &Path) -> Result<(), MountError> {
    let mut binds = spec.mounts()?.into_iter().filter(SpecMount::is_bind);
    // What the caller may not look at may be there.
    let is_here = |mount: &SpecMount| bundle.join(&mount.source).try_exists().unwrap_or(true);
    match binds.find(|mount| !is_here(mount)) {
        None => Ok(()),
        Some(mount) => Err(MountError::SourceMissing {
            source_path: mount.source,
            destination: mount.destination,
        }),
    }
}

/// Finds the edits after which every mount of the spec has a source, and every mount that the checkpoint
/// needs is in the spec. A relative source starts at the bundle. `empty` is firn's empty file in the bundle;
/// the caller makes it before anything is mounted.
///
/// Reads the sources: on a file system that hangs this does not return.
pub fn resolve(
    spec: &Spec,
    bundle: &Path,
    needs: Needs<'_>,
    driver: Driver<'_>,
    empty: &Path,
) -> Result<ResolvedMounts, MountError> {
    let mounts = spec.mounts()?;
    let mut resolved = ResolvedMounts::default();
    // Paths are compared by components: a trailing or doubled slash makes no difference.
    let wanted_at = |destination: &Path| {
        needs
            .mounts
            .iter()
            .find(|wanted| wanted.destination == destination)
    };
    for (at, mount) in mounts.iter().enumerate().filter(|(_, mount)| mount.is_bind()) {
        let Some(wanted) = wanted_at(&mount.destination) else {
            if needs.device_free && bundle.join(&mount.source).exists() {
                resolved.late.push(mount.destination.clone());
                continue;
            }
            resolved.extra.push(mount.destination.clone());
            resolved.dropped.push(at);
            continue;
        };
        let source = bundle.join(&mount.source);
        // runc follows a link. CRIU does not, and fails.
        if source.is_symlink()
            && let Ok(file) = source.canonicalize()
        {
            resolved.sources.push((at, file));
            continue;
        }
        if source.exists() {
            continue;
        }
        let name = mount.source.file_name().unwrap_or_default();
        let library = driver.libraries(name).next().map(|(_, file)| file);
        let Some(file) = resolved.stand_in(wanted, library, needs.device_free, empty) else {
            return Err(MountError::SourceMissing {
                source_path: mount.source.clone(),
                destination: mount.destination.clone(),
            });
        };
        resolved.sources.push((at, file));
    }
    add_missing(&mut resolved, &mounts, bundle, needs, driver, empty)?;
    Ok(resolved)
}

/// Adds the mounts that the checkpoint needs and that the spec does not have.
fn add_missing(
    resolved: &mut ResolvedMounts,
    mounts: &[SpecMount],
    bundle: &Path,
    needs: Needs<'_>,
    driver: Driver<'_>,
    empty: &Path,
) -> Result<(), MountError> {
    let given = |wanted: &&RequiredMount| mounts.iter().any(|mount| mount.destination == wanted.destination);
    for wanted in needs.mounts.iter().filter(|wanted| !given(wanted)) {
        let destination = wanted.destination.clone();
        let library = driver.library_at(&destination);
        let library = library.or_else(|| driver.mounted_elsewhere(mounts, bundle, &destination));
        let Some(file) = resolved.stand_in(wanted, library, needs.device_free, empty) else {
            return Err(MountError::NotInSpec {
                destination,
                source_name: wanted.source_name.clone(),
            });
        };
        resolved.added.push((destination, file));
    }
    Ok(())
}

impl Driver<'_> {
    /// Libraries of this driver with this name: the directory, and the file with the driver's full version to
    /// which the name leads.
    fn libraries(&self, name: &OsStr) -> impl Iterator<Item = (PathBuf, PathBuf)> {
        let dirs = if is_library(name) { self.dirs } else { &[] };
        dirs.iter().filter_map(move |dir| {
            let file = self.own(&Path::new(dir).join(name))?;
            Some((PathBuf::from(dir), file))
        })
    }

    /// The file to which a path leads, if it belongs to this driver.
    fn own(&self, path: &Path) -> Option<PathBuf> {
        let file = path.canonicalize().ok()?;
        let version = file.file_name()?.to_str()?.strip_suffix(self.version)?;
        let is_own = !self.version.is_empty() && version.ends_with(".so.") && file.is_file();
        is_own.then_some(file)
    }

    /// The library of this driver that the spec has under this name at another destination. The container
    /// gets no file that its spec does not give it.
    fn mounted_elsewhere(&self, mounts: &[SpecMount], bundle: &Path, path: &Path) -> Option<PathBuf> {
        let name = path.file_name().filter(|name| is_library(name))?;
        let is_plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
        if !path.components().all(is_plain) {
            return None;
        }
        let has_name = |mount: &&SpecMount| mount.is_bind() && mount.destination.file_name() == Some(name);
        let mut same = mounts.iter().filter(has_name);
        same.find_map(|mount| self.own(&bundle.join(&mount.source)))
    }

    /// The library of this driver that is at this path on this node.
    fn library_at(&self, path: &Path) -> Option<PathBuf> {
        let (parent, name) = (path.parent()?, path.file_name()?);
        // Most distributions have merged /lib into /usr/lib.
        let merged = |dir: &Path| Some(Path::new("/").join(dir.strip_prefix("/usr").ok()?));
        let is_here = |dir: &Path| dir == parent || merged(dir).is_some_and(|dir| dir == parent);
        let mut libraries = self.libraries(name);
        libraries.find_map(|(dir, file)| is_here(&dir).then_some(file))
    }
}

fn is_library(name: &OsStr) -> bool {
    let text = name.to_str().unwrap_or_default();
    text.starts_with("lib") && text.contains(".so")
}

/// Bind mounts of the spec of a container without devices that it does not have yet: `has` returns whether
/// something is mounted at a path. In the order of the spec.
pub fn late(spec: &Spec, has: impl Fn(&Path) -> bool) -> Result<Vec<SpecMount>, SpecError> {
    let mounts = spec.mounts()?.into_iter();
    let is_late = |mount: &SpecMount| mount.is_bind() && !has(&mount.destination);
    Ok(mounts.filter(is_late).collect())
}

/// Whether a path is that of a file of NVIDIA's driver, by its name.
fn is_nvidias(destination: &Path) -> bool {
    let name = destination
        .file_name()
        .and_then(OsStr::to_str)
        .unwrap_or_default();
    // A directory may have the name alone.
    let is_named = name.contains("nvidia") && name != "nvidia";
    is_named || NVIDIAS.iter().any(|own| name.starts_with(own))
}

/// How the names of other files of NVIDIA's driver begin.
const NVIDIAS: [&str; 6] = [
    "libcuda.so",
    "libcudadebugger.so",
    "libnvcuvid.so",
    "libnvoptix.so",
    "libnvsdm.so",
    "nvoptix.bin",
];

/// Whether the processes can continue without the file at this place.
fn can_be_empty(destination: &Path, in_use: bool) -> bool {
    let below = |dir: &str| destination.strip_prefix(dir).ok();
    let is_firmware = |rest: &Path| {
        let parts: Vec<_> = rest.iter().filter_map(OsStr::to_str).collect();
        let is_gsp = |file: &str| file.starts_with("gsp") && file.ends_with(".bin");
        matches!(parts[..], [version, file] if version != ".." && is_gsp(file))
    };
    let is_tool = |rest: &Path| TOOLS.iter().any(|tool| rest == Path::new(tool));
    is_daemon_socket(destination)
        || FIRMWARE.iter().filter_map(|dir| below(dir)).any(is_firmware)
        || (!in_use && below("/usr/bin").is_some_and(is_tool))
}

/// Whether this is the socket of one of the driver's daemons.
pub fn is_daemon_socket(destination: &Path) -> bool {
    SOCKETS.iter().any(|socket| destination == Path::new(socket))
}

#[cfg(test)]
mod tests;
