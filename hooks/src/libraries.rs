//! Links and entries of the loader's cache for driver libraries that are mounted into a container.
//!
//! They are made in the container's own files, before its program starts. Safe to repeat.

use std::ffi::OsStr;
use std::path::Path;

use anyhow::{Context, Result};
use firn_cdi::ldcache::{self, Library};
use firn_oci::{Spec, SpecMount};

use crate::rootfs::{Rootfs, is_mounted};
use crate::{soname, state};

/// The loader's cache.
const CACHE: &str = "/etc/ld.so.cache";

/// Largest cache that is read. That of a desktop has some 200 KiB.
const MAX_BYTES: u64 = 16 << 20;

/// Libraries that every driver has.
const DRIVER: [&str; 2] = ["libcuda.so.", "libnvidia-ml.so."];

/// Makes links, each given as `TEXT::PATH`.
pub fn create_symlinks(rootfs: &Rootfs, links: &[String]) -> Result<()> {
    for given in links {
        let (text, link) = given
            .split_once("::")
            .with_context(|| format!("{given:?} is not TEXT::PATH"))?;
        let made = rootfs
            .symlink(Path::new(text), Path::new(link))
            .with_context(|| format!("cannot make the link {link}"));
        match made {
            Ok(true) => {}
            Ok(false) => report!("firn-hook: {link} of the image is no symbolic link and stays as it is"),
            Err(error) => below_mount(error)?,
        }
    }
    Ok(())
}

/// A place below a mount is not the container's own: it is reported and is no failure.
fn below_mount(error: anyhow::Error) -> Result<()> {
    if is_mounted(&error) {
        report!("firn-hook: what is mounted is not changed: {error:#}");
        Ok(())
    } else {
        Err(error)
    }
}

/// Adds libraries, given by their paths, to the loader's cache, before others of the same name. A cache of an
/// unknown format stays: that C library would not read firn's.
pub fn update_ldcache(rootfs: &Rootfs, libraries: &[String]) -> Result<()> {
    update(rootfs, libraries).or_else(below_mount)
}

fn update(rootfs: &Rootfs, libraries: &[String]) -> Result<()> {
    let path = Path::new(CACHE);
    let known = match rootfs.read(path, MAX_BYTES)? {
        None => Vec::new(),
        Some(bytes) => match ldcache::parse(&bytes) {
            Some(known) => known,
            None => {
                report!("firn-hook: {CACHE} of the image is of an unknown form and stays as it is");
                return Ok(());
            }
        },
    };
    let name = |path: &String| {
        let name = Path::new(path).file_name()?.to_str()?;
        Some(Library::new(name, path))
    };
    let ours: Vec<Library> = libraries.iter().filter_map(name).collect();
    let is_first = |library: &Library| known.iter().find(|known| known.name == library.name) == Some(library);
    if ours.iter().all(is_first) {
        return Ok(());
    }
    let others = known.iter().filter(|library| !ours.contains(library)).cloned();
    let all: Vec<Library> = ours.iter().cloned().chain(others).collect();
    let cache = ldcache::write(&all).context("the loader's cache would be too large")?;
    rootfs.write(path, &cache)
}

/// Makes links and cache entries in a container of podman's or CRI-O's, if its spec has NVIDIA GPUs.
pub fn provide(bundle: &Path, spec: &Spec) -> Result<()> {
    if !spec.requests_gpu() {
        return Ok(());
    }
    provide_mounted(&Rootfs::open(&state::root(bundle, spec)?)?, &spec.mounts()?)
}

/// Makes links and cache entries for the libraries of NVIDIA's driver that the spec mounts one by one.
pub fn provide_mounted(rootfs: &Rootfs, mounts: &[SpecMount]) -> Result<()> {
    let file = |source: &Path| {
        let file = source.canonicalize().ok()?;
        file.file_name()?.to_str().map(str::to_owned)
    };
    let mounted: Vec<_> = mounts
        .iter()
        .filter_map(|mount| Some((mount, file(&mount.source)?)))
        .collect();
    // The names of all of a driver's files end with its version.
    let version = |name: &str| {
        DRIVER
            .iter()
            .find_map(|library| name.strip_prefix(library).map(str::to_owned))
    };
    let Some(version) = mounted.iter().find_map(|(_, name)| version(name)) else {
        return Ok(());
    };
    let suffix = format!(".so.{version}");
    let ours = mounted.iter().filter(|(_, name)| name.ends_with(&suffix));
    let (links, libraries) = by_own_names(ours.map(|(mount, _)| *mount));
    create_symlinks(rootfs, &links)?;
    update_ldcache(rootfs, &libraries)
}

/// Links to libraries from their SONAMEs, as `TEXT::PATH`, and the paths of these links or files.
pub fn by_own_names<'s>(mounted: impl Iterator<Item = &'s SpecMount>) -> (Vec<String>, Vec<String>) {
    let (mut links, mut libraries) = (Vec::new(), Vec::new());
    for mount in mounted {
        let at = &mount.destination;
        let (Some(dir), Some(file)) = (at.parent(), at.file_name().and_then(OsStr::to_str)) else {
            continue;
        };
        let Some(name) = soname::of(&mount.source) else {
            continue;
        };
        let path = dir.join(&name).display().to_string();
        if name != file {
            links.push(format!("{file}::{path}"));
        }
        libraries.push(path);
    }
    (links, libraries)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use firn_host::FileId;

    use super::*;

    fn cache(root: &Path) -> Vec<(String, String)> {
        let libraries = ldcache::parse(&fs::read(root.join("etc/ld.so.cache")).unwrap()).unwrap();
        let pair = |library: Library| (library.name, library.path);
        libraries.into_iter().map(pair).collect()
    }

    #[test]
    fn libraries_come_before_those_of_the_image() {
        let root = tempfile::tempdir().unwrap();
        let rootfs = Rootfs::open(root.path()).unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        let image = [
            Library::new("libcuda.so.1", "/compat/libcuda.so.1"),
            Library::new("libz.so.1", "/lib/libz.so.1"),
        ];
        fs::write(
            root.path().join("etc/ld.so.cache"),
            ldcache::write(&image).unwrap(),
        )
        .unwrap();
        let ours = ["/usr/lib/libcuda.so.1".to_owned()];
        update_ldcache(&rootfs, &ours).unwrap();
        let pair = |name: &str, path: &str| (name.to_owned(), path.to_owned());
        let expected = [
            pair("libz.so.1", "/lib/libz.so.1"),
            pair("libcuda.so.1", "/usr/lib/libcuda.so.1"),
            pair("libcuda.so.1", "/compat/libcuda.so.1"),
        ];
        assert_eq!(cache(root.path()), expected);

        let before = fs::metadata(root.path().join("etc/ld.so.cache")).unwrap();
        update_ldcache(&rootfs, &ours).unwrap();
        let after = fs::metadata(root.path().join("etc/ld.so.cache")).unwrap();
        assert_eq!(
            FileId::of(&before),
            FileId::of(&after),
            "nothing is written twice"
        );
    }

    #[test]
    fn an_image_without_cache_gets_one_and_a_strange_one_stays() {
        let root = tempfile::tempdir().unwrap();
        let rootfs = Rootfs::open(root.path()).unwrap();
        let ours = ["/usr/lib/libcuda.so.1".to_owned()];
        update_ldcache(&rootfs, &ours).unwrap();
        assert_eq!(cache(root.path()).len(), 1);
        fs::write(root.path().join("etc/ld.so.cache"), "strange").unwrap();
        update_ldcache(&rootfs, &ours).unwrap();
        assert_eq!(fs::read(root.path().join("etc/ld.so.cache")).unwrap(), b"strange");
    }

    #[test]
    fn links_are_given_with_their_text() {
        let root = tempfile::tempdir().unwrap();
        let rootfs = Rootfs::open(root.path()).unwrap();
        create_symlinks(&rootfs, &["libcuda.so.580::/lib/libcuda.so.1".to_owned()]).unwrap();
        assert_eq!(
            fs::read_link(root.path().join("lib/libcuda.so.1")).unwrap(),
            Path::new("libcuda.so.580")
        );
        assert!(create_symlinks(&rootfs, &["libcuda.so.580".to_owned()]).is_err());
    }

    #[test]
    fn mounted_libraries_of_a_driver_are_found_and_others_are_left() {
        let root = tempfile::tempdir().unwrap();
        let host = tempfile::tempdir().unwrap();
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let mut paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
        let libc = paths.find(|path| path.contains("/libc.so")).unwrap();
        for name in ["libcuda.so.580.1", "libnvidia-x.so.580.1", "libother.so.3"] {
            fs::copy(libc, host.path().join(name)).unwrap();
        }
        let mount =
            |name: &str, at: &str| serde_json::json!({"source": host.path().join(name), "destination": at});
        let mut spec = serde_json::json!({"mounts": [
            mount("libcuda.so.580.1", "/usr/lib64/libcuda.so.580.1"),
            mount("libother.so.3", "/other/libother.so.3"),
            mount("none", "/usr/lib64/none"),
        ]});
        provide(Path::new("/none"), &Spec::from(spec.clone())).unwrap();
        spec["root"] = serde_json::json!({"path": root.path()});
        provide(host.path(), &Spec::from(spec.clone())).unwrap();
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0, "no GPU, no trace");

        spec["linux"] =
            serde_json::json!({"devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]});
        for _ in 0..2 {
            provide(host.path(), &Spec::from(spec.clone())).unwrap();
            let link = root.path().join("usr/lib64/libc.so.6");
            assert_eq!(fs::read_link(link).unwrap(), Path::new("libcuda.so.580.1"));
            assert_eq!(
                cache(root.path()),
                [("libc.so.6".to_owned(), "/usr/lib64/libc.so.6".to_owned())]
            );
            assert!(!root.path().join("other").exists());
        }
    }
}
