//! What hooks make in a container's own files when it is created, made in those of one that is restored.
//!
//! runc runs no createContainer hook at a restore. Where the files that the source had written are not brought along, the links
//! of the driver's libraries and the loader's cache are missing then. This makes them by what the spec's hooks are told to make: it
//! runs none of them, as they expect a container that is being created. NVIDIA's hook leaves names of libraries to ldconfig; here
//! they are read from the libraries.
//!
//! Nothing is made below a mount: CRIU brings that, or the host.

use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use crate::libraries::{by_own_names, create_symlinks, mounts, update_ldcache};
use crate::rootfs::Rootfs;
use crate::state;

/// What one hook makes.
#[derive(Debug, PartialEq, Eq)]
enum Made {
    /// Links, `TEXT::PATH`.
    Links(Vec<String>),
    /// Entries of the loader's cache for these files.
    Libraries(Vec<String>),
    /// The same for all libraries in these directories, with the links that lead to them.
    Folders(Vec<String>),
}

/// Makes what the hooks of the bundle's spec make.
pub fn run(bundle: &Path) -> Result<()> {
    let spec = state::spec(bundle)?;
    let hooks = spec.pointer("/hooks/createContainer").and_then(Value::as_array);
    let made: Vec<Made> = hooks.into_iter().flatten().filter_map(made_by).collect();
    if made.is_empty() {
        return Ok(());
    }
    let rootfs = Rootfs::open(&state::root(bundle, &spec)?)?;
    let below_a_mount = |link: &String| {
        let path = link.split_once("::").map_or("", |(_, path)| path);
        mounts(&spec).any(|(at, _)| at != Path::new("/") && Path::new(path).starts_with(at))
    };
    for made in made {
        match made {
            Made::Links(links) => {
                let links: Vec<String> = links.into_iter().filter(|link| !below_a_mount(link)).collect();
                create_symlinks(&rootfs, &links)?;
            }
            Made::Libraries(libraries) => update_ldcache(&rootfs, &libraries)?,
            Made::Folders(folders) => {
                let (links, libraries) = named(&spec, &folders);
                let links: Vec<String> = links.into_iter().filter(|link| !below_a_mount(link)).collect();
                create_symlinks(&rootfs, &links)?;
                update_ldcache(&rootfs, &libraries)?;
            }
        }
    }
    Ok(())
}

fn made_by(hook: &Value) -> Option<Made> {
    let words: Vec<&str> = hook["args"]
        .as_array()?
        .iter()
        .filter_map(Value::as_str)
        .collect();
    let program = Path::new(hook["path"].as_str()?).file_name()?.to_str()?;
    let words = match (program, words.get(1)) {
        ("firn-hook" | "nvidia-cdi-hook", _) => words.get(1..)?,
        ("nvidia-ctk", Some(&"hook")) => words.get(2..)?,
        _ => return None,
    };
    let (verb, options) = words.split_first()?;
    match (*verb, program) {
        ("create-symlinks", _) => Some(Made::Links(values(options, "--link"))),
        ("update-ldcache", "firn-hook") => Some(Made::Libraries(values(options, "--library"))),
        ("update-ldcache", _) => Some(Made::Folders(values(options, "--folder"))),
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

/// The libraries that are mounted into these directories: links from their own names, and their paths by these.
fn named(spec: &Value, folders: &[String]) -> (Vec<String>, Vec<String>) {
    let is_here = |at: &Path| {
        let folder = at.parent().and_then(Path::to_str);
        folder.is_some_and(|folder| folders.iter().any(|one| one == folder))
    };
    let here = mounts(spec).filter(|(at, _)| is_here(at));
    by_own_names(here)
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
        let links = || Some(Made::Links(strings(&["a::/l/a", "b::/l/b"])));
        let folders = || Some(Made::Folders(strings(&["/l"])));
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
                Some(Made::Libraries(strings(&["/l/a"]))),
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
            assert_eq!(
                made_by(&json!({"path": path, "args": args})),
                expected,
                "{args:?}"
            );
        }
        for hook in [json!(3), json!({}), json!({"path": 3, "args": [3]})] {
            assert_eq!(made_by(&hook), None);
        }
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
        let hook = |words: &str| json!({"path": "/usr/bin/nvidia-cdi-hook", "args": words.split(' ').collect::<Vec<_>>()});
        let spec = json!({
            "root": {"path": "rootfs"},
            "mounts": [
                {"destination": "/dev", "source": "tmpfs", "type": "tmpfs"},
                {"destination": "/usr/lib64/libc.so.580.95.05", "source": libc, "options": ["rbind"]},
                {"destination": "/usr/bin/nvidia-smi", "source": "/bin/sh", "options": ["rbind"]},
            ],
            "hooks": {"createContainer": [
                hook("nvidia-cdi-hook create-symlinks --link ../card1::/dev/dri/by-path/card --link libc.so.6::/usr/lib64/libc.so"),
                hook("nvidia-cdi-hook update-ldcache --folder /usr/lib64"),
            ]},
        });
        std::fs::write(bundle.path().join("config.json"), spec.to_string()).unwrap();
        for _ in 0..2 {
            run(bundle.path()).unwrap();
            let link = |path: &str| std::fs::read_link(at(path)).unwrap();
            assert_eq!(link("usr/lib64/libc.so"), Path::new("libc.so.6"));
            assert_eq!(link("usr/lib64/libc.so.6"), Path::new("libc.so.580.95.05"));
            assert!(!at("dev").exists(), "what is below a mount is not ours");
            let cache = firn_cdi::ldcache::parse(&std::fs::read(at("etc/ld.so.cache")).unwrap()).unwrap();
            assert_eq!(cache.len(), 1);
            assert_eq!(
                (cache[0].name.as_str(), cache[0].path.as_str()),
                ("libc.so.6", "/usr/lib64/libc.so.6")
            );
        }
    }
}
