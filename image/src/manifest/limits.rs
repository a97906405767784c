//! Values that a manifest may hold. Checked when it is written and when it is read.

use std::collections::HashSet;
use std::hash::Hash;
use std::path::{Component, Path};

use firn_gpu::{GpuUuid, Link};

use super::Manifest;

const MAX_GPUS: usize = 64;
const MAX_PROCESSES: usize = 4096;
const MAX_MOUNTS: usize = 4096;
const MAX_IMAGES: usize = 32_768;
/// Longest text that is a name or a version.
const MAX_TEXT: usize = 256;
/// Longest path (PATH_MAX of Linux).
const MAX_PATH: usize = 4096;

impl Manifest {
    /// The first field whose value no dump writes.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        let versions = &self.versions;
        let driver = self.driver.as_ref().map_or("", |driver| &driver.driver);
        let checks = [
            ("driver", text(driver)),
            (
                "gpus",
                self.gpus.len() <= MAX_GPUS && distinct(self.gpus.iter().map(|gpu| &gpu.uuid)),
            ),
            (
                "gpus",
                self.gpus
                    .iter()
                    .all(|gpu| text(&gpu.name) && text(&gpu.pci_address)),
            ),
            (
                "gpus",
                self.gpus
                    .iter()
                    .filter_map(|gpu| gpu.node.as_ref())
                    .all(|node| absolute(&node.path)),
            ),
            ("gpus", self.gpus.is_empty() || self.driver.is_some()),
            ("topology", self.has_good_topology()),
            (
                "processes",
                self.processes.len() <= MAX_PROCESSES && distinct(self.processes.iter().map(|p| p.pid)),
            ),
            (
                "processes",
                self.processes
                    .iter()
                    .all(|process| process.pid > 0 && process.restore_tid > 0),
            ),
            ("processes", self.processes.is_empty() || !self.gpus.is_empty()),
            ("mounts", self.mounts.len() <= MAX_MOUNTS),
            (
                "mounts",
                self.mounts
                    .iter()
                    .all(|m| absolute(&m.destination) && text(&m.source_name)),
            ),
            (
                "versions",
                [&versions.firn, &versions.criu, &versions.runc, &versions.kernel]
                    .into_iter()
                    .all(|v| text(v)),
            ),
            (
                "images",
                self.images.len() <= MAX_IMAGES && distinct(self.images.iter().map(|file| &file.name)),
            ),
            ("images", self.images.iter().all(|file| file_name(&file.name))),
        ];
        checks
            .into_iter()
            .find(|(_, good)| !good)
            .map_or(Ok(()), |(field, _)| Err(field))
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

fn distinct<T: Eq + Hash>(mut items: impl Iterator<Item = T>) -> bool {
    let mut seen = HashSet::new();
    items.all(|item| seen.insert(item))
}

/// Short and free of control characters: it is shown on terminals and in logs.
fn text(text: &str) -> bool {
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
