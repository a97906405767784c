//! Rules about memory and disk space: the driver copies GPU memory into the memory of the processes, and CRIU
//! writes all of it into the image.
//!
//! When a cgroup reaches its limit, the kernel kills the workload in the middle of the checkpoint. The
//! figures are read once. A checkpoint that passes can still fail, and is then rolled back.

use std::path::{Path, PathBuf};

use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use nix::sys::statvfs::statvfs;

use firn_host::procfs;

use super::MemoryLimit;
use crate::Refusal;

/// Bytes that CRIU writes into its work directory at least: its log.
const LOG_BYTES: u64 = 256 << 10;

/// Bytes that a checkpoint of a container needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Needs {
    /// GPU memory of all its processes.
    gpu: u64,
    /// Anonymous memory of all its processes.
    anonymous: u64,
    /// Files that only these processes have: deleted files and shared memory.
    unlinked: u64,
}

impl Needs {
    pub(crate) fn of(pids: &[i32], gpu: u64) -> Self {
        let anonymous = pids.iter().map(|&pid| procfs::anonymous(pid));
        Self {
            gpu,
            anonymous: anonymous.fold(0, u64::saturating_add),
            unlinked: procfs::unlinked(pids),
        }
    }

    /// Least size of the image.
    fn image(self) -> u64 {
        let memory = self.gpu.saturating_add(self.anonymous);
        memory.saturating_add(self.unlinked)
    }
}

/// Least size of the image of these processes, which have `gpu_memory` bytes of GPU memory.
pub fn image_bytes(dumped: &[i32], gpu_memory: u64) -> u64 {
    Needs::of(dumped, gpu_memory).image()
}

/// A file system that the checkpoint writes to.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Space {
    dir: PathBuf,
    free: u64,
    /// Whether files there take memory of the host.
    in_memory: bool,
}

impl Space {
    /// The file system that `path` is on or will be made on; `None` if it does not report its size.
    fn of(path: &Path) -> Option<Self> {
        let dir = path.ancestors().find(|dir| dir.exists())?;
        let numbers = statvfs(dir).ok()?;
        // Some network file systems report zeros.
        if numbers.blocks() == 0 {
            return None;
        }
        Some(Self {
            dir: dir.to_owned(),
            free: numbers.blocks_free().saturating_mul(numbers.fragment_size()),
            in_memory: statfs(dir).is_ok_and(|of| of.filesystem_type() == TMPFS_MAGIC),
        })
    }
}

/// Refuses a checkpoint for which memory or disk space is too small. `image` is the image directory, `work`
/// that of CRIU's log.
pub(crate) fn by_capacity(
    needs: Needs,
    limit: Option<MemoryLimit>,
    image: &Path,
    work: &Path,
) -> Vec<Refusal> {
    let image = Space::of(image);
    let in_memory = image.as_ref().is_some_and(|space| space.in_memory);
    let mut refusals = Vec::from_iter(by_memory_and_image(needs, available(), limit, in_memory));
    for (space, needed) in [(image, needs.image()), (Space::of(work), LOG_BYTES)] {
        refusals.extend(space.and_then(|space| by_space(space, needed)));
    }
    refusals
}

/// Refuses to copy GPU memory into host memory that is too small for it.
pub(crate) fn by_memory(needs: Needs, limit: Option<MemoryLimit>) -> Option<Refusal> {
    by_memory_and_image(needs, available(), limit, false)
}

/// Available memory of the host.
fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = value.split_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}

fn by_memory_and_image(
    needs: Needs,
    available: Option<u64>,
    limit: Option<MemoryLimit>,
    image_in_memory: bool,
) -> Option<Refusal> {
    if let Some(MemoryLimit { dir, left }) = limit
        && left < needs.gpu
    {
        return Some(Refusal::CgroupMemory {
            needed: needs.gpu,
            dir,
            left,
        });
    }
    // Pages of a tmpfs are charged to CRIU, which is not in the container's cgroup.
    let image = if image_in_memory { needs.image() } else { 0 };
    let left = available.filter(|left| *left < needs.gpu.saturating_add(image))?;
    Some(Refusal::HostMemory {
        needed: needs.gpu,
        image,
        left,
    })
}

fn by_space(space: Space, needed: u64) -> Option<Refusal> {
    let Space { dir, free, .. } = space;
    (needed > free).then_some(Refusal::Space { dir, needed, free })
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_host::Problem;

    const GIB: u64 = 1 << 30;

    const NEEDS: Needs = Needs {
        gpu: 8 * GIB,
        anonymous: GIB / 2,
        unlinked: GIB / 2,
    };

    fn limit(left: u64) -> Option<MemoryLimit> {
        let dir = "/sys/fs/cgroup/box".into();
        Some(MemoryLimit { dir, left })
    }

    #[test]
    fn gpu_memory_must_fit_into_host_and_cgroup() {
        for (host, cgroup, fits) in [
            (8 * GIB, 8 * GIB, true),
            (8 * GIB - 1, u64::MAX, false),
            (u64::MAX, 8 * GIB - 1, false),
            (0, 0, false),
        ] {
            let found = by_memory_and_image(NEEDS, Some(host), limit(cgroup), false);
            assert_eq!(found.is_none(), fits, "{host} {cgroup}: {found:?}");
        }
        assert!(
            by_memory_and_image(NEEDS, None, None, false).is_none(),
            "figures are unknown"
        );
        assert!(matches!(
            by_memory_and_image(NEEDS, Some(GIB), limit(GIB), false),
            Some(Refusal::CgroupMemory { left: GIB, .. })
        ));
    }

    #[test]
    fn an_image_on_tmpfs_takes_memory_of_the_host_and_not_of_the_cgroup() {
        assert!(by_memory_and_image(NEEDS, Some(17 * GIB), limit(8 * GIB), true).is_none());
        assert!(matches!(
            by_memory_and_image(NEEDS, Some(17 * GIB - 1), limit(8 * GIB), true),
            Some(Refusal::HostMemory { needed, image, .. }) if (needed, image) == (8 * GIB, 9 * GIB)
        ));
    }

    #[test]
    fn an_image_has_anonymous_and_gpu_memory_and_files_without_a_path() {
        let space = |free| Space {
            dir: "/images".into(),
            free,
            in_memory: false,
        };
        assert!(by_space(space(9 * GIB), NEEDS.image()).is_none());
        assert!(matches!(
            by_space(space(9 * GIB - 1), NEEDS.image()),
            Some(Refusal::Space { .. })
        ));
    }

    #[test]
    fn space_is_that_of_the_directory_or_its_nearest_ancestor() {
        let dir = tempfile::tempdir().unwrap();
        let later = Space::of(&dir.path().join("a/b/c")).unwrap();
        assert_eq!(later.dir, dir.path());
        assert!(later.free > 0);
        assert!(Space::of(Path::new("/dev/shm")).is_none_or(|space| space.in_memory));
        assert!(available().is_some_and(|bytes| bytes > 0));
        let nothing = Needs {
            gpu: 0,
            anonymous: 0,
            unlinked: 0,
        };
        assert!(by_capacity(nothing, None, dir.path(), dir.path()).is_empty());
        let everything = Needs {
            gpu: u64::MAX,
            anonymous: 0,
            unlinked: 0,
        };
        let refusals = by_capacity(everything, None, dir.path(), dir.path());
        let codes: Vec<_> = refusals.iter().map(Problem::code).collect();
        assert_eq!(codes, ["FIRN-HOST-MEMORY", "FIRN-IMAGE-SPACE"]);
    }
}
