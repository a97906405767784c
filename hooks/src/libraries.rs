//! What a container needs beside the mounts of a driver's libraries: their links, and their places in the loader's cache.
//!
//! Made in the container's own files, before its program starts. Repeating it changes nothing.

use std::path::Path;

use anyhow::{Context, Result};
use firn_cdi::ldcache::{self, Library};

use crate::rootfs::Rootfs;

/// The loader's cache.
const CACHE: &str = "/etc/ld.so.cache";

/// Largest cache that is read. That of a desktop has some 200 KiB.
const MAX_BYTES: u64 = 16 << 20;

/// Makes links, each given as `TEXT::PATH`.
pub fn create_symlinks(rootfs: &Rootfs, links: &[String]) -> Result<()> {
    for given in links {
        let (text, link) = given
            .split_once("::")
            .with_context(|| format!("{given:?} is not TEXT::PATH"))?;
        let made = rootfs
            .symlink(Path::new(text), Path::new(link))
            .with_context(|| format!("cannot make the link {link}"))?;
        if !made {
            eprintln!("firn-hook: {link} of the image is no symbolic link and stays as it is");
        }
    }
    Ok(())
}

/// Lets the loader find libraries, each given by its path, before others of the same name. A cache of an unknown form
/// stays: the C library is none that would read ours.
pub fn update_ldcache(rootfs: &Rootfs, libraries: &[String]) -> Result<()> {
    let path = Path::new(CACHE);
    let known = match rootfs.read(path, MAX_BYTES)? {
        None => Vec::new(),
        Some(bytes) => match ldcache::parse(&bytes) {
            Some(known) => known,
            None => {
                eprintln!("firn-hook: {CACHE} of the image is of an unknown form and stays as it is");
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

#[cfg(test)]
mod tests {
    use std::fs;

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
        use std::os::unix::fs::MetadataExt;
        assert_eq!(before.ino(), after.ino(), "nothing is written twice");
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
}
