//! Mounts that a restored container gets in addition to those of its checkpoint.
//!
//! CRIU makes the mounts of the checkpoint. A container that holds nothing of any device may come to a node
//! whose driver has other files, which the spec of the restored container mounts. They are mounted when CRIU
//! is done and no task runs. runc has made the places for them, in the container's root file system.
//!
//! A mount of this namespace can be carried into another one only while it is in none: it is copied by its
//! descriptor and put in place from within the container's namespace. A path leads nowhere outside of it.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use firn_host::mountinfo;
use firn_image::criu::ImageFault;
use firn_oci::{Spec, job_hook, mounts};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

/// A mount that is in no namespace, and its place.
type Loose = (OwnedFd, PathBuf);

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
    let has = |path: &Path| there.iter().any(|mount| mount.mount_point == path);
    let late = mounts::late(&spec, has)?;
    if late.is_empty() {
        return Ok(());
    }
    let mut loose: Vec<Loose> = Vec::new();
    for mount in late {
        let source = bundle.join(&mount.source);
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let tree = open_tree(CWD, &source, flags | OpenTreeFlags::AT_RECURSIVE);
        let tree = tree.map_err(|error| unreadable(&source.display().to_string(), &error))?;
        loose.push((tree, mount.destination));
    }
    let namespace = File::open(format!("/proc/{init}/ns/mnt"));
    let namespace = namespace.map_err(|error| unreadable("ns/mnt", &error))?;
    // In a thread of its own: what follows needs this namespace.
    let placed = std::thread::spawn(move || place(namespace, loose));
    match placed.join() {
        Ok(placed) => {
            placed.map_err(|(at, error)| unreadable(&format!("the mount {}", at.display()), &error))
        }
        Err(_) => Err(unreadable("the container's mounts", &"firn-hook has failed")),
    }
}

fn place(namespace: File, loose: Vec<Loose>) -> Result<(), (PathBuf, io::Error)> {
    let entered = unshare(CloneFlags::CLONE_FS).and_then(|()| setns(namespace, CloneFlags::CLONE_NEWNS));
    entered.map_err(|error| (PathBuf::from("/"), error.into()))?;
    for (tree, at) in loose {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
        match move_mount(&tree, "", CWD, &at, flags) {
            Ok(()) => {}
            // On a tmpfs, which is as it was at the checkpoint.
            Err(rustix::io::Errno::NOENT) => {
                report!("firn-hook: there is no place for the mount {}", at.display());
                continue;
            }
            Err(error) => return Err((at, error.into())),
        }
        let private = MsFlags::MS_PRIVATE | MsFlags::MS_REC;
        mount(None::<&str>, &at, None::<&str>, private, None::<&str>)
            .map_err(|error| (at.clone(), error.into()))?;
        report!("firn-hook: the mount {} is made", at.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    use serde_json::json;

    use super::*;

    /// A process with mounts of its own.
    struct Init(Child);

    impl Init {
        fn start() -> Self {
            let child = Command::new("unshare").args(["--mount", "sleep", "1000"]).spawn();
            let init = Self(child.unwrap());
            let (own, began) = (fs::read_link("/proc/self/ns/mnt").unwrap(), Instant::now());
            while fs::read_link(format!("/proc/{}/ns/mnt", init.pid())).is_ok_and(|of| of == own) {
                assert!(
                    began.elapsed() < Duration::from_secs(20),
                    "it has no mounts of its own"
                );
                std::thread::sleep(Duration::from_millis(1));
            }
            init
        }

        fn pid(&self) -> i32 {
            i32::try_from(self.0.id()).unwrap()
        }
    }

    impl Drop for Init {
        fn drop(&mut self) {
            let _killed = self.0.kill();
            let _ended = self.0.wait();
        }
    }

    #[test]
    fn what_the_spec_has_and_the_container_has_not_is_mounted_there_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for (name, text) in [("source", "of the driver"), ("place", "of the image")] {
            fs::write(path(name), text).unwrap();
        }
        let init = Init::start();
        let late = |annotations: serde_json::Value| {
            let bind =
                |at: &str| json!({"destination": path(at), "source": path("source"), "options": ["rbind"]});
            let proc = json!({"destination": "/proc", "type": "proc", "source": "proc"});
            let spec =
                json!({"annotations": annotations, "mounts": [proc, bind("absent/place"), bind("place")]});
            fs::write(path("config.json"), spec.to_string()).unwrap();
            complete(dir.path(), init.pid()).unwrap();
        };
        let inside = || fs::read_to_string(format!("/proc/{}/root{}", init.pid(), path("place").display()));
        late(json!({}));
        assert_eq!(inside().unwrap(), "of the image", "it is no such container");
        let released = json!({"firn.dev/gpu": "released-by-hook", "firn.dev/hook-prepare": "exec: /x"});
        for _ in 0..2 {
            late(released.clone());
            assert_eq!(inside().unwrap(), "of the driver");
            let mounts = mountinfo::of_process(init.pid()).unwrap();
            let made: Vec<_> = mounts
                .iter()
                .filter(|mount| mount.mount_point == path("place"))
                .collect();
            assert!(made.len() == 1 && !made[0].propagates, "{made:?}");
        }
        assert_eq!(fs::read_to_string(path("place")).unwrap(), "of the image");
    }
}
