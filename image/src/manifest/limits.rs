//! Values that a manifest may hold. Checked when it is written and when it is read.

use std::collections::HashSet;
use std::hash::Hash;
use std::path::{Component, Path};

use firn_gpu::{Backend, GpuUuid, Link};
use firn_oci::job_hook::{JobHook, MAX_VALUE};

use super::{CheckpointedProcess, ImageFile, InheritedGpus, Manifest, Origin, RequiredMount, SourceGpu};

/// Longest id of a checkpoint.
const MAX_ID: usize = 64;
const MAX_GPUS: usize = 64;
const MAX_PROCESSES: usize = 4096;
/// Descriptors of GPUs that a process has inherited.
const MAX_OPEN: usize = 65_536;
const MAX_MOUNTS: usize = 4096;
const MAX_IMAGES: usize = 32_768;
const MAX_CPU_FEATURES: usize = 1024;
/// Longest text that is a name or a version.
pub(super) const MAX_TEXT: usize = 256;
/// Longest path (PATH_MAX of Linux).
const MAX_PATH: usize = 4096;

impl Manifest {
    /// The first field whose value no dump writes.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        let versions = &self.versions;
        let driver = self.driver.as_ref().map_or("", |driver| &driver.driver);
        let node = |gpu: &SourceGpu| gpu.node.as_ref().is_none_or(|node| absolute(&node.path));
        let gpu = |gpu: &SourceGpu| text(&gpu.name) && text(&gpu.pci_address) && node(gpu);
        let process = |process: &CheckpointedProcess| process.pid > 0 && process.restore_tid > 0;
        let inherited = |process: &InheritedGpus| {
            process.pid > 0 && process.open.len() <= MAX_OPEN && process.open.iter().all(|fd| *fd >= 0)
        };
        let mount = |mount: &RequiredMount| absolute(&mount.destination) && text(&mount.source_name);
        let image = |file: &ImageFile| file_name(&file.name) && has_one_checksum(file);
        let mut versions = [&versions.firn, &versions.criu, &versions.runc, &versions.kernel].into_iter();
        let checks = [
            ("checkpoint", is_id(&self.checkpoint)),
            ("origin", self.origin.as_ref().is_none_or(Origin::is_good)),
            (
                "hooks",
                self.hooks
                    .iter()
                    .all(|(annotation, value)| is_hook(annotation, value)),
            ),
            ("backend", self.has_good_backend()),
            ("driver", text(driver)),
            ("gpus", all(&self.gpus, MAX_GPUS, gpu)),
            ("gpus", distinct(self.gpus.iter().map(|gpu| &gpu.uuid))),
            ("released_gpus", self.has_good_release(gpu)),
            ("topology", self.has_good_topology()),
            ("processes", all(&self.processes, MAX_PROCESSES, process)),
            (
                "processes",
                distinct(self.processes.iter().map(|process| process.pid)),
            ),
            ("processes", self.processes.is_empty() || !self.gpus.is_empty()),
            (
                "inherited_gpus",
                all(&self.inherited_gpus, MAX_PROCESSES, inherited),
            ),
            ("bulk", self.bulk.as_ref().is_none_or(|bulk| is_id(&bulk.store))),
            ("mounts", all(&self.mounts, MAX_MOUNTS, mount)),
            ("cpu", self.has_good_cpu()),
            ("versions", versions.all(|version| text(version))),
            ("images", all(&self.images, MAX_IMAGES, image)),
            ("images", distinct(self.images.iter().map(|file| &file.name))),
        ];
        match checks.into_iter().find(|(_, good)| !good) {
            None => Ok(()),
            Some((field, _)) => Err(field),
        }
    }

    /// CRIU's plugin is used for images without manifest only.
    fn has_good_backend(&self) -> bool {
        match self.backend {
            Backend::None => self.driver.is_none() && self.gpus.is_empty(),
            Backend::Nvidia => self.driver.is_some(),
            Backend::CriuPlugin => false,
        }
    }

    /// Names as the kernel writes them.
    fn has_good_cpu(&self) -> bool {
        let is_letter = |c: u8| c.is_ascii_alphanumeric() || c == b'_';
        let is_name = |name: &str| (1..=MAX_ID).contains(&name.len()) && name.bytes().all(is_letter);
        self.cpu.names().len() <= MAX_CPU_FEATURES && self.cpu.names().all(is_name)
    }

    /// An image that holds nothing of any device names no other GPUs.
    fn has_good_release(&self, is_good: impl Fn(&SourceGpu) -> bool) -> bool {
        let released = self.released_gpus.as_ref();
        released.is_none_or(|gpus| all(gpus, MAX_GPUS, is_good) && self.backend == Backend::None)
    }

    /// One link for two different GPUs of the checkpoint, and no more.
    fn has_good_topology(&self) -> bool {
        let uuids: HashSet<&GpuUuid> = self.gpus.iter().map(|gpu| &gpu.uuid).collect();
        let links = &self.topology.links;
        let good =
            |link: &Link| link.gpus[0] < link.gpus[1] && link.gpus.iter().all(|gpu| uuids.contains(gpu));
        links.iter().all(good)
            && distinct(links.iter().map(|link| &link.gpus))
            && self.topology.numa.keys().all(|gpu| uuids.contains(gpu))
    }
}

/// One checksum, of 64 hexadecimal digits.
fn has_one_checksum(file: &ImageFile) -> bool {
    let is_checksum = |sum: &String| sum.len() == 64 && sum.bytes().all(|c| c.is_ascii_hexdigit());
    file.checksums().count() == 1 && file.checksums().all(is_checksum)
}

/// At most so many, and each of them good.
pub(super) fn all<T>(items: &[T], most: usize, is_good: impl Fn(&T) -> bool) -> bool {
    items.len() <= most && items.iter().all(is_good)
}

pub(super) fn distinct<T: Eq + Hash>(mut items: impl Iterator<Item = T>) -> bool {
    let mut seen = HashSet::new();
    items.all(|item| seen.insert(item))
}

fn is_hook(annotation: &str, value: &str) -> bool {
    let mut annotations = JobHook::ALL.iter().map(|hook| hook.annotation());
    annotations.any(|known| known == annotation) && value.len() <= MAX_VALUE
}

/// Whether it is an id: the job gets it in variables. Images of older versions have none.
fn is_id(id: &str) -> bool {
    id.len() <= MAX_ID
        && id
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// Short and free of control characters: it is shown on terminals and in logs.
pub(super) fn text(text: &str) -> bool {
    text.len() <= MAX_TEXT && !text.contains(char::is_control)
}

fn absolute(path: &Path) -> bool {
    let plain = path
        .components()
        .all(|c| matches!(c, Component::RootDir | Component::Normal(_)));
    let shown = path
        .to_str()
        .is_some_and(|t| t.len() <= MAX_PATH && !t.contains(char::is_control));
    path.is_absolute() && plain && shown
}

/// A name directly in the image directory.
fn file_name(name: &str) -> bool {
    text(name) && !name.is_empty() && !name.contains('/') && name != "." && name != ".."
}
