//! Copies of mounts that are in no namespace, with the flags that a spec demands.
//!
//! Flags are set by paths of a mount namespace, so the copy passes through one that this thread alone sees.
//! There nothing propagates, and no other mount of the host is changed.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use firn_host::mountinfo::{self, MountEntry};
use firn_oci::spec::{RESTRICTIONS, SpecMount};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

/// Other flags, which are lost where they are not set again.
const OTHERS: [(&str, MsFlags); 3] = [
    ("noatime", MsFlags::MS_NOATIME),
    ("nodiratime", MsFlags::MS_NODIRATIME),
    ("relatime", MsFlags::MS_RELATIME),
];

/// Longest description of a descriptor that is read.
const MAX_INFO: u64 = 4096;

/// Moves this thread into a mount namespace of its own.
pub fn enter() -> io::Result<()> {
    unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS)?;
    let private = MsFlags::MS_PRIVATE | MsFlags::MS_REC;
    Ok(mount(None::<&str>, "/", None::<&str>, private, None::<&str>)?)
}

/// A copy of what is mounted at `source` and below it, in no namespace, as restricted as the spec has it.
/// This thread has called [`enter`].
pub fn tree(source: &Path, of_spec: &SpecMount) -> io::Result<OwnedFd> {
    let copy =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    let tree = open_tree(CWD, source, copy)?;
    let (top, below) = (of_spec.restrictions(), of_spec.restrictions_below());
    if top | below == 0 {
        return Ok(tree);
    }
    // Over its own source: of the same kind, and there.
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
    move_mount(&tree, "", CWD, source, flags)?;
    let id = id_of(&tree)?;
    let own = PathBuf::from(format!("/proc/self/fd/{}", tree.as_raw_fd()));
    for (entry, wanted) in members(id, top, below)? {
        let path = if entry.id == id { &own } else { &entry.mount_point };
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | others(&entry);
        let flags = flags | MsFlags::from_bits_truncate((wanted | has(&entry)).into());
        mount(None::<&str>, path, None::<&str>, flags, None::<&str>)?;
    }
    // Another mount may lie at the path of one below.
    if members(id, top, below)?
        .iter()
        .any(|(entry, wanted)| wanted & !has(entry) != 0)
    {
        return Err(io::Error::other("a mount below it does not get its flags"));
    }
    let restricted = open_tree(&tree, "", copy | OpenTreeFlags::AT_EMPTY_PATH)?;
    umount2(&own, MntFlags::MNT_DETACH)?;
    Ok(restricted)
}

/// The mount with this number and those below it, with the restrictions that each must have.
fn members(top_id: u32, top: u32, below: u32) -> io::Result<Vec<(MountEntry, u32)>> {
    let mut ids = vec![top_id];
    let mut members = Vec::new();
    let mut left = mountinfo::mounted()?;
    // A mount may be in the list before the one that it is in.
    while let Some(at) = left
        .iter()
        .position(|entry| entry.id == top_id || ids.contains(&entry.parent))
    {
        let entry = left.swap_remove(at);
        let wanted = if entry.id == top_id { top | below } else { below };
        ids.push(entry.id);
        members.push((entry, wanted));
    }
    if members.iter().any(|(entry, _)| entry.id == top_id) {
        Ok(members)
    } else {
        Err(io::Error::other("it is not mounted"))
    }
}

fn has(entry: &MountEntry) -> u32 {
    let set = RESTRICTIONS.iter().filter(|(word, ..)| has_word(entry, word));
    set.map(|(.., flag)| flag).sum()
}

fn others(entry: &MountEntry) -> MsFlags {
    let set = OTHERS.iter().filter(|(word, _)| has_word(entry, word));
    set.map(|(_, flag)| *flag).collect()
}

fn has_word(entry: &MountEntry, word: &str) -> bool {
    entry.options.split(',').any(|option| option == word)
}

/// The number of the mount that a descriptor is of.
fn id_of(descriptor: &OwnedFd) -> io::Result<u32> {
    let mut info = String::new();
    let file = File::open(format!("/proc/self/fdinfo/{}", descriptor.as_raw_fd()))?;
    file.take(MAX_INFO).read_to_string(&mut info)?;
    let id = info
        .lines()
        .find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    id.ok_or_else(|| io::Error::other("the kernel shows no number of the mount"))
}
