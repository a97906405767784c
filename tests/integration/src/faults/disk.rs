//! File systems that fail: full, without a working device, read-only.

use anyhow::{Result, bail};

use super::case::{Disk, Fault, FaultAt, Flow};
use crate::GpuHost;

/// Where failing file systems of a checkpoint are mounted, each below a number.
pub(super) const MOUNTS: &str = "/srv/disk";
/// File systems of their own from the beginning, so that they can be filled: containerd's bundles and its
/// work directories.
const BUNDLES: &str = "/run/containerd/io.containerd.runtime.v2.task";
/// The store, where one is used.
pub(super) const STORE: &str = "/var/lib/firn-store";
const WORKS: &str = "/var/lib/containerd/io.containerd.runtime.v2.task";

/// Gives containerd's bundles and work directories file systems of their own.
pub(super) fn prepare(host: &GpuHost) -> Result<()> {
    let node = host.node();
    for path in [BUNDLES, WORKS] {
        node.run(&["mkdir", "-p", path])?;
        node.run(&["mount", "-t", "tmpfs", "-o", "size=8m,mode=0711", "tmpfs", path])?;
    }
    Ok(())
}

/// Makes a file system for the store.
pub(super) fn prepare_store(host: &GpuHost) -> Result<()> {
    let make = format!("mkdir -p {STORE}; mount -t tmpfs -o size=1g,mode=700 tmpfs {STORE}");
    host.node().run(&["sh", "-c", &make]).map(drop)
}

/// A file system that fails, or is about to.
pub(super) struct Failing<'h> {
    host: &'h GpuHost,
    mount: String,
    what: What,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    /// Mounted for the image.
    Image,
    /// The same, and filled later.
    Manifest,
    /// Mounted for CRIU's work directory.
    Work,
    /// The store gets full, or an empty directory is in its place.
    StoreFull,
    StoreGone,
    /// One that is there gets full, or read-only.
    Full(&'static str),
    ReadOnly(&'static str),
    /// The pages of an image that is being restored.
    Pages,
}

impl<'h> Failing<'h> {
    /// Makes it; what can only be done later is done by [`Failing::begin`].
    pub(super) fn new(host: &'h GpuHost, flow: Flow, at: FaultAt, number: usize) -> Result<Self> {
        let what = match (flow, at.fault) {
            (Flow::Checkpoint, Fault::NoSpaceForManifest) => What::Manifest,
            (
                Flow::Checkpoint,
                Fault::NoSpace(Disk::Image) | Fault::ReadOnly(Disk::Image) | Fault::Io(Disk::Image),
            ) => What::Image,
            (
                Flow::Checkpoint,
                Fault::NoSpace(Disk::Work) | Fault::ReadOnly(Disk::Work) | Fault::Io(Disk::Work),
            ) => What::Work,
            (_, Fault::NoSpace(Disk::Store)) => What::StoreFull,
            (_, Fault::StoreGone) => What::StoreGone,
            (_, Fault::NoSpace(Disk::Bundle)) => What::Full(BUNDLES),
            (_, Fault::ReadOnly(Disk::Bundle)) => What::ReadOnly(BUNDLES),
            (Flow::Restore, Fault::NoSpace(Disk::Work)) => What::Full(WORKS),
            (Flow::Restore, Fault::ReadOnly(Disk::Work)) => What::ReadOnly(WORKS),
            (Flow::Restore, Fault::Io(Disk::Image)) => What::Pages,
            _ => bail!("{at} has no failing file system"),
        };
        let mount = format!("{MOUNTS}{number}");
        let disk = Self { host, mount, what };
        let script = match (what, at.fault) {
            (What::Manifest, _) => "mount -t tmpfs -o size=64m tmpfs $MOUNT; mkdir $MOUNT/to",
            // Room in bytes and for a few files: full in the middle of the dump.
            (What::Image, Fault::NoSpace(_)) => {
                "mount -t tmpfs -o size=64m,nr_inodes=10 tmpfs $MOUNT; mkdir $MOUNT/to"
            }
            (_, Fault::NoSpace(_)) => {
                "mount -t tmpfs -o size=16k tmpfs $MOUNT; mkdir $MOUNT/to
                dd if=/dev/zero of=$MOUNT/fill bs=4k count=4 2>/dev/null"
            }
            // Everything can be written, and the manifest synced. Memory is larger than what the device has:
            // it fails when it is written back.
            (What::Image, Fault::Io(_)) => {
                "mkdir -p $MOUNT.back; mount -t tmpfs -o size=8m tmpfs $MOUNT.back
                free=$(losetup --find); free=${free%% *}
                [ -e $free ] || mknod $free b 7 ${free#/dev/loop} || true
                truncate -s 256M $MOUNT.back/img; loop=$(losetup --find --show $MOUNT.back/img)
                busybox mke2fs -i 1048576 $loop >/dev/null; mount -t ext2 $loop $MOUNT; mkdir $MOUNT/to
                sync -f $MOUNT
                dd if=/dev/zero of=$MOUNT.back/fill bs=4k 2>/dev/null || true
                truncate -s -512K $MOUNT.back/fill"
            }
            (_, Fault::Io(_)) => {
                "mkdir -p $MOUNT.back; mount -t tmpfs -o size=2m tmpfs $MOUNT.back
                free=$(losetup --find); free=${free%% *}
                [ -e $free ] || mknod $free b 7 ${free#/dev/loop} || true
                truncate -s 8M $MOUNT.back/img; loop=$(losetup --find --show $MOUNT.back/img)
                busybox mke2fs $loop >/dev/null; mount -o sync -t ext2 $loop $MOUNT; mkdir $MOUNT/to
                dd if=/dev/zero of=$MOUNT.back/fill bs=4k 2>/dev/null || true"
            }
            _ => {
                "mount -t tmpfs -o size=1m tmpfs $MOUNT; mkdir $MOUNT/to
                mount -o remount,ro $MOUNT"
            }
        };
        match what {
            What::Image | What::Manifest | What::Work => disk.shell(&format!("mkdir -p $MOUNT; {script}"))?,
            What::Full(_) | What::ReadOnly(_) if flow != Flow::Restore => disk.begin()?,
            What::Full(_) | What::ReadOnly(_) | What::Pages | What::StoreFull | What::StoreGone => {}
        }
        Ok(disk)
    }

    /// Where the image goes, if it goes onto this file system.
    pub(super) fn image(&self) -> Option<String> {
        matches!(self.what, What::Image | What::Manifest).then(|| format!("{}/to/image", self.mount))
    }

    /// Where CRIU works, if it is on this file system.
    pub(super) fn work(&self) -> Option<String> {
        (self.what == What::Work).then(|| format!("{}/to", self.mount))
    }

    /// Lets it fail from now on.
    pub(super) fn begin(&self) -> Result<()> {
        let fill = |path: &str| format!("dd if=/dev/zero of={path}/fill bs=4k 2>/dev/null || true");
        match self.what {
            What::Image | What::Work => Ok(()),
            What::Manifest => self.shell(&fill(&self.mount)),
            What::Full(path) => self.shell(&fill(path)),
            What::StoreFull => self.shell(&fill(STORE)),
            What::StoreGone => self.shell(&format!("mount -t tmpfs -o size=1m,mode=700 tmpfs {STORE}")),
            What::ReadOnly(path) => self.shell(&format!("mount -o remount,ro {path}")),
            // Memory at address 0 cannot be read: EIO.
            What::Pages => self.shell(
                "for pages in /tmp/ctrd-checkpoint*/pages-*.img; do mount --bind /proc/1/mem $pages; done",
            ),
        }
    }

    /// Leaves only what is on its disk.
    pub(super) fn forget_cache(&self) -> Result<()> {
        let device = format!("{}.back", self.mount);
        if self.what != What::Image || !self.host.node().path(device).exists() {
            return Ok(());
        }
        self.shell(
            "loop=$(losetup --noheadings --output NAME --associated $MOUNT.back/img)
            umount $MOUNT; mount -t ext2 $loop $MOUNT",
        )
    }

    /// Takes it away.
    pub(super) fn end(self) -> Result<()> {
        match self.what {
            What::Image | What::Manifest | What::Work => self.shell(
                "umount $MOUNT; rmdir $MOUNT
                [ -d $MOUNT.back ] || exit 0
                losetup --detach $(losetup --noheadings --output NAME --associated $MOUNT.back/img)
                umount $MOUNT.back; rmdir $MOUNT.back",
            ),
            What::Full(path) => self.shell(&format!("rm -f {path}/fill")),
            What::StoreFull => self.shell(&format!("rm -f {STORE}/fill")),
            What::StoreGone => self.shell(&format!("umount {STORE}")),
            What::ReadOnly(path) => self.shell(&format!("mount -o remount,rw {path}")),
            // The daemon could not remove it either.
            What::Pages => self.shell(
                "for pages in /tmp/ctrd-checkpoint*/pages-*.img; do
                    umount $pages || true
                done; rm -rf /tmp/ctrd-checkpoint*",
            ),
        }
    }

    fn shell(&self, script: &str) -> Result<()> {
        let script = format!("set -eu; MOUNT={}; {script}", self.mount);
        self.host.node().run(&["sh", "-c", &script]).map(drop)
    }
}
