//! Mounts that a restored container gets in addition to those of its checkpoint.
//!
//! CRIU makes the mounts of the checkpoint. A container that holds nothing of any device may come to a node
//! whose driver has other files, which the spec of the restored container mounts. They are mounted when CRIU
//! is done and no task runs. runc has made the places for them, in the container's root file system.
//!
//! A mount of this namespace can be carried into another one only while it is in none. It gets its flags
//! before ([`restricted`]), so that it is never less restricted in the container than the spec has it. Its
//! place is looked up once, within the container's root: a path leads nowhere outside of it, and what lies
//! there afterwards does not matter.

mod restricted;

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use firn_host::{mountinfo, open_below};
use firn_image::criu::ImageFault;
use firn_oci::spec::SpecMount;
use firn_oci::{Spec, job_hook, mounts};
use nix::errno::Errno;
use nix::fcntl::{OFlag, ResolveFlag, readlinkat};
use nix::sched::{CloneFlags, setns, unshare};
use rustix::mount::{MoveMountFlags, move_mount};

/// A mount that is in no namespace, and its place.
type Loose = (OwnedFd, PathBuf);

/// What could not be mounted, and why.
type Failed = (PathBuf, io::Error);

/// Makes the bind mounts of the bundle's spec that the container with this first process does not have.
pub fn complete(bundle: &Path, init: i32) -> Result<(), ImageFault> {
    let spec = Spec::load(bundle)?;
    if !job_hook::releases_devices(&spec) {
        return Ok(());
    }
    let unreadable = |what: &str, source: &dyn std::fmt::Display| ImageFault::Unreadable {
        file: what.to_owned(),
        reason: source.to_string(),
    };
    let there = mountinfo::of_process(init).map_err(|error| unreadable("mountinfo", &error))?;
    let there: Vec<PathBuf> = there.into_iter().map(|mount| mount.mount_point).collect();
    // Those behind links are found out below.
    let late = mounts::late(&spec, |path| there.iter().any(|point| point == path))?;
    if late.is_empty() {
        return Ok(());
    }
    let namespace = File::open(format!("/proc/{init}/ns/mnt"));
    let namespace = namespace.map_err(|error| unreadable("ns/mnt", &error))?;
    // The container's /proc does not show this process.
    let names = File::open("/proc/self/fd").map_err(|error| unreadable("/proc/self/fd", &error))?;
    let bundle = bundle.to_owned();
    // Each in a thread of its own: this thread stays in this namespace.
    let made = in_thread(move || all_restricted(&bundle, late)).and_then(|loose| {
        let entered =
            move || unshare(CloneFlags::CLONE_FS).and_then(|()| setns(namespace, CloneFlags::CLONE_NEWNS));
        in_thread(move || {
            entered().map_err(|error| (PathBuf::from("/"), error.into()))?;
            place(loose, &there, &names)
        })
    });
    made.map_err(|(at, error)| unreadable(&format!("the mount {}", at.display()), &error))
}

fn in_thread<T: Send + 'static>(
    run: impl FnOnce() -> Result<T, Failed> + Send + 'static,
) -> Result<T, Failed> {
    let failed = |_| Err((PathBuf::from("/"), io::Error::other("firn-hook has failed")));
    std::thread::spawn(run).join().unwrap_or_else(failed)
}

fn all_restricted(bundle: &Path, late: Vec<SpecMount>) -> Result<Vec<Loose>, Failed> {
    restricted::enter().map_err(|error| (PathBuf::from("/"), error))?;
    let restrict = |mount: SpecMount| match restricted::tree(&bundle.join(&mount.source), &mount) {
        Ok(tree) => Ok((tree, mount.destination)),
        Err(error) => Err((mount.destination, error)),
    };
    late.into_iter().map(restrict).collect()
}

/// Puts the mounts in their places, in the order of the spec. This thread is in the container's namespace. At
/// the places in `there` something was mounted before. `names` is this process's directory /proc/self/fd.
fn place(loose: Vec<Loose>, there: &[PathBuf], names: &File) -> Result<(), Failed> {
    let root = File::open("/").map_err(|error| (PathBuf::from("/"), error))?;
    let within = ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS;
    for (tree, at) in loose {
        let found = match open_below(&root, &at, OFlag::O_PATH, within) {
            Ok(found) => found,
            // On a tmpfs, which is as it was at the checkpoint.
            Err(Errno::ENOENT) => {
                report!("firn-hook: there is no place for the mount {}", at.display());
                continue;
            }
            Err(error) => return Err((at, error.into())),
        };
        let found_at = readlinkat(names, &*found.as_raw_fd().to_string());
        let found_at = PathBuf::from(found_at.map_err(|error| (at.clone(), error.into()))?);
        if there.contains(&found_at) {
            continue;
        }
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(&tree, "", &found, "", flags).map_err(|error| (at.clone(), error.into()))?;
        report!(
            "firn-hook: the mount {} is made at {}",
            at.display(),
            found_at.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests;
