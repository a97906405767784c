//! Repeats in a restored container's files what createContainer hooks make when a container is created.
//!
//! runc runs no createContainer hook at a restore. If the source's writable files are not copied to the
//! target, the links of the driver's libraries and the loader's cache are missing. This module makes them
//! from the arguments of the spec's hooks. It does not run the hooks, because they expect a container that is
//! being created. NVIDIA's hook lets ldconfig find the names of libraries; this module reads them from the
//! libraries.
//!
//! Nothing is made below a mount, whose content comes from CRIU or the host. A link that would lead nowhere
//! is not made either: the hooks may be of a node that has the libraries at other places than the source.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::Result;
use firn_host::lexical;
use firn_oci::{Spec, SpecMount};
use oci_spec::runtime::Hook;

use crate::libraries::{by_own_names, create_symlinks, provide_mounted, update_ldcache};
use crate::rootfs::Rootfs;
use crate::state;

/// What a hook makes.
#[derive(Debug, PartialEq, Eq)]
enum HookOutput {
    /// Links, `TEXT::PATH`.
    Links(Vec<String>),
    /// Entries of the loader's cache for these files.
    Libraries(Vec<String>),
    /// The same for all libraries in these directories, with the links that lead to them.
    Folders(Vec<String>),
}

/// Makes what the createContainer hooks of the bundle's spec make.
pub fn run(bundle: &Path) -> Result<()> {
    let spec = Spec::load(bundle)?;
    let mounts = spec.mounts()?;
    let (mut links, mut libraries, mut any) = (Vec::new(), Vec::new(), false);
    for made in spec.create_hooks().filter_map(|hook| made_by(&hook)) {
        any = true;
        match made {
            HookOutput::Links(more) => links.extend(more),
            HookOutput::Libraries(more) => libraries.extend(more),
            HookOutput::Folders(folders) => {
                let (more, named) = named(&mounts, &folders);
                links.extend(more);
                libraries.extend(named);
            }
        }
    }
    if !any {
        return Ok(());
    }
    let mut container = Container {
        rootfs: Rootfs::open(&state::root(bundle, &spec)?)?,
        mounts: &mounts,
        links: BTreeSet::new(),
    };
    let linked = container.link(links)?;
    if container.cache(libraries)? && linked {
        Ok(())
    } else {
        // The libraries are at the source's places, and the hooks name this node's.
        provide_mounted(&container.rootfs, &mounts)
    }
}

/// The container that is to be restored, of which only the root file system is there.
struct Container<'s> {
    rootfs: Rootfs,
    mounts: &'s [SpecMount],
    /// Links that lead to something.
    links: BTreeSet<PathBuf>,
}

impl Container<'_> {
    /// Makes those links, given as `TEXT::PATH`, that will lead to something and are not below a mount.
    /// Returns false if links are left out because they would lead nowhere.
    fn link(&mut self, links: Vec<String>) -> Result<bool> {
        let (mut useful, mut rest) = (Vec::new(), links);
        rest.retain(|link| !self.is_mounted(Path::new(path_of(link))));
        // A link may lead to one that comes later.
        loop {
            let (found, left): (Vec<_>, Vec<_>) = rest.into_iter().partition(|link| {
                let (text, path) = link.split_once("::").unwrap_or_default();
                let dir = Path::new(path).parent().unwrap_or(Path::new("/"));
                self.will_have(&lexical(&dir.join(text)))
            });
            rest = left;
            if found.is_empty() {
                break;
            }
            self.links
                .extend(found.iter().map(|link| PathBuf::from(path_of(link))));
            useful.extend(found);
        }
        create_symlinks(&self.rootfs, &useful)?;
        Ok(rest.is_empty())
    }

    /// Adds those libraries to the loader's cache that will exist. Returns false if some will not.
    fn cache(&self, libraries: Vec<String>) -> Result<bool> {
        let (useful, rest): (Vec<_>, Vec<_>) = libraries
            .into_iter()
            .partition(|path| self.will_have(Path::new(path)));
        update_ldcache(&self.rootfs, &useful)?;
        Ok(rest.is_empty())
    }

    /// Whether something will exist at this path.
    fn will_have(&self, path: &Path) -> bool {
        self.is_mounted(path) || self.links.contains(path) || self.rootfs.has(path)
    }

    /// Whether the path is a mount, or below one.
    fn is_mounted(&self, path: &Path) -> bool {
        let mut points = self.mounts.iter().map(|mount| &mount.destination);
        points.any(|point| point != Path::new("/") && path.starts_with(point))
    }
}

fn path_of(link: &str) -> &str {
    link.split_once("::").map_or("", |(_, path)| path)
}

fn made_by(hook: &Hook) -> Option<HookOutput> {
    let words: Vec<&str> = hook.args().iter().flatten().map(String::as_str).collect();
    let program = hook.path().file_name()?.to_str()?;
    let words = match (program, words.get(1)) {
        ("firn-hook" | "nvidia-cdi-hook", _) => words.get(1..)?,
        ("nvidia-ctk", Some(&"hook")) => words.get(2..)?,
        _ => return None,
    };
    let (verb, options) = words.split_first()?;
    match (*verb, program) {
        ("create-symlinks", _) => Some(HookOutput::Links(values(options, "--link"))),
        ("update-ldcache", "firn-hook") => Some(HookOutput::Libraries(values(options, "--library"))),
        ("update-ldcache", _) => Some(HookOutput::Folders(values(options, "--folder"))),
        _ => None,
    }
}

/// The values of an option, given as `NAME VALUE` or `NAME=VALUE`, among others.
fn values(options: &[&str], name: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = options.iter();
    while let Some(option) = rest.next() {
        match option.split_once('=') {
            Some((key, value)) if key == name => found.push(value.to_owned()),
            None if *option == name => found.extend(rest.next().map(ToString::to_string)),
            _ => {}
        }
    }
    found
}

/// The libraries that are mounted into these directories: links from their SONAMEs, and the paths of these.
fn named(mounts: &[SpecMount], folders: &[String]) -> (Vec<String>, Vec<String>) {
    let is_here = |mount: &&SpecMount| {
        let folder = mount.destination.parent().and_then(Path::to_str);
        folder.is_some_and(|folder| folders.iter().any(|one| one == folder))
    };
    by_own_names(mounts.iter().filter(is_here))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn hooks_are_read_in_every_form_and_others_are_left() {
        let links = || Some(HookOutput::Links(strings(&["a::/l/a", "b::/l/b"])));
        let folders = || Some(HookOutput::Folders(strings(&["/l"])));
        for (path, args, expected) in [
            (
                "/usr/local/bin/firn-hook",
                "firn-hook create-symlinks --link a::/l/a --link b::/l/b",
                links(),
            ),
            (
                "/usr/bin/nvidia-cdi-hook",
                "nvidia-cdi-hook create-symlinks --link=a::/l/a --link b::/l/b",
                links(),
            ),
            (
                "/usr/bin/nvidia-ctk",
                "nvidia-ctk hook create-symlinks --link a::/l/a --link=b::/l/b",
                links(),
            ),
            (
                "/usr/bin/nvidia-ctk",
                "nvidia-ctk hook update-ldcache --ldconfig-path /sbin/ldconfig --folder /l",
                folders(),
            ),
            (
                "/usr/bin/firn-hook",
                "firn-hook update-ldcache --library /l/a",
                Some(HookOutput::Libraries(strings(&["/l/a"]))),
            ),
            (
                "/usr/bin/nvidia-cdi-hook",
                "nvidia-cdi-hook enable-cuda-compat --host-driver-version=580",
                None,
            ),
            ("/usr/bin/nvidia-ctk", "nvidia-ctk cdi generate", None),
            ("/usr/bin/other", "other create-symlinks --link a::/l/a", None),
            ("/usr/bin/firn-hook", "firn-hook", None),
        ] {
            let args: Vec<&str> = args.split(' ').collect();
            let hook = serde_json::from_value(json!({"path": path, "args": args})).unwrap();
            assert_eq!(made_by(&hook), expected, "{args:?}");
        }
        assert_eq!(made_by(&Hook::default()), None);
    }

    /// A bundle whose spec is as NVIDIA's tools write it, with the C library in the driver's place.
    #[test]
    fn what_the_hooks_would_have_made_is_there_and_repeating_it_changes_nothing() {
        let bundle = tempfile::tempdir().unwrap();
        let at = |path: &str| bundle.path().join("rootfs").join(path);
        std::fs::create_dir_all(at("etc")).unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mut paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
        let libc = paths.find(|path| path.contains("/libc.so")).unwrap();
        let hook = |words: &str| {
            let args: Vec<&str> = words.split(' ').collect();
            json!({"path": "/usr/bin/nvidia-cdi-hook", "args": args})
        };
        let spec = json!({
            "root": {"path": "rootfs"},
            "mounts": [
                {"destination": "/dev", "source": "tmpfs", "type": "tmpfs"},
                {"destination": "/usr/lib64/libc.so.580.95.05", "source": libc, "options": ["rbind"]},
                {"destination": "/usr/bin/nvidia-smi", "source": "/bin/sh", "options": ["rbind"]},
            ],
            "hooks": {"createContainer": [
                hook("nvidia-cdi-hook create-symlinks --link ../card1::/dev/dri/by-path/card --link \
                      libc.so.6::/usr/lib64/libc.so"),
                hook("nvidia-cdi-hook create-symlinks --link libc.so.570::/usr/lib64/libc.so.5 --link \
                      libc.so.5::/usr/lib64/libc5.so"),
                hook("nvidia-cdi-hook update-ldcache --folder /usr/lib64"),
                {"path": "/bin/firn-hook", "args":
                  ["firn-hook", "update-ldcache", "--library", "/usr/lib/libc.so.6"]},
            ]},
        });
        std::fs::write(bundle.path().join("config.json"), spec.to_string()).unwrap();
        for _ in 0..2 {
            run(bundle.path()).unwrap();
            let link = |path: &str| std::fs::read_link(at(path)).unwrap();
            assert_eq!(link("usr/lib64/libc.so"), Path::new("libc.so.6"));
            assert_eq!(link("usr/lib64/libc.so.6"), Path::new("libc.so.580.95.05"));
            assert!(!at("dev").exists(), "what is below a mount is not ours");
            let nowhere = ["usr/lib64/libc.so.5", "usr/lib64/libc5.so"];
            assert!(nowhere.iter().all(|path| !at(path).is_symlink()));
            let cache = firn_cdi::ldcache::parse(&std::fs::read(at("etc/ld.so.cache")).unwrap()).unwrap();
            assert_eq!(cache.len(), 1);
            assert_eq!(
                (cache[0].name.as_str(), cache[0].path.as_str()),
                ("libc.so.6", "/usr/lib64/libc.so.6")
            );
        }
    }
}
