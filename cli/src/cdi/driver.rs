//! The files of an NVIDIA driver that a container needs: its libraries, the links that lead to them, and
//! `nvidia-smi`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use firn_cdi::ldcache;
use firn_host::Problem;
use firn_oci::mounts::LIBRARY_DIRS;

/// Where `nvidia-smi` may be.
const TOOLS: [&str; 2] = ["usr/bin/nvidia-smi", "usr/local/nvidia/bin/nvidia-smi"];

/// Libraries that programs open by a name that the host may lack.
const SONAMES: [&str; 2] = ["libcuda", "libnvidia-ml"];

/// Largest loader's cache that is read.
const MAX_CACHE: u64 = 16 << 20;

/// The files of a driver.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct DriverFiles {
    /// File of the host, path in the container.
    pub files: BTreeMap<String, PathBuf>,
    /// Text of each symbolic link, by its path in the container.
    pub links: BTreeMap<String, String>,
    /// Paths in the container for the loader's cache.
    pub libraries: BTreeSet<String>,
}

/// The files of the driver were not found.
#[derive(Debug, thiserror::Error, Problem)]
#[error("no libcuda.so.{version} in {}", searched(root, dirs))]
#[problem(
    "FIRN-DRIVER-MISSING",
    "name the directory below which the driver is installed: --driver-root"
)]
pub struct NoDriver {
    version: String,
    root: PathBuf,
    dirs: Vec<PathBuf>,
}

fn searched(root: &Path, dirs: &[PathBuf]) -> String {
    let dirs = dirs.iter().map(|dir| root.join(dir).display().to_string());
    dirs.collect::<Vec<_>>().join(", ")
}

impl DriverFiles {
    /// Finds the files of this version below a root.
    pub fn find(root: &Path, version: &str) -> Result<Self, NoDriver> {
        let dirs = directories(root);
        let Some((home, seen)) = dirs.iter().find_map(|dir| home(root, dir, version)) else {
            return Err(NoDriver {
                version: version.to_owned(),
                root: root.to_owned(),
                dirs,
            });
        };
        let mut found = Self::default();
        found.add_libraries(root, &home, version);
        if seen != home {
            found.add_links(root, &seen);
        }
        let sonames = found.links.keys().filter(|link| !link.ends_with(".so")).cloned();
        found.libraries.extend(sonames);
        let mut tools = TOOLS.iter().map(|tool| root.join(tool));
        let tool = tools.find(|tool| tool.is_file());
        found
            .files
            .extend(tool.map(|tool| ("/usr/bin/nvidia-smi".to_owned(), tool)));
        Ok(found)
    }

    /// The libraries of a directory, and the links to them there.
    fn add_libraries(&mut self, root: &Path, dir: &Path, version: &str) {
        let host = root.join(dir);
        let names = names_of(&host);
        let full = format!(".so.{version}");
        for name in names.iter().filter(|name| name.ends_with(&full)) {
            let file = host.join(name);
            // The container gets the file, not a link to another directory.
            self.files
                .insert(inside(dir, name), file.canonicalize().unwrap_or(file));
            self.libraries.insert(inside(dir, name));
        }
        self.add_links(root, dir);
        for stem in SONAMES {
            let file = format!("{stem}{full}");
            if !names.contains(&file) {
                continue;
            }
            let (soname, plain) = (format!("{stem}.so.1"), format!("{stem}.so"));
            self.links.entry(inside(dir, &soname)).or_insert(file);
            self.links.entry(inside(dir, &plain)).or_insert(soname);
        }
    }

    /// The links in a directory that lead to the driver's files.
    fn add_links(&mut self, root: &Path, dir: &Path) {
        let host = root.join(dir);
        for name in names_of(&host) {
            let link = inside(dir, &name);
            let Ok(text) = std::fs::read_link(host.join(&name)) else {
                continue;
            };
            if self.files.contains_key(&link) {
                continue;
            }
            let file = host.join(&name).canonicalize().ok();
            let known = file.and_then(|file| self.files.iter().find(|(_, host)| **host == file));
            let Some((path, _)) = known else {
                continue;
            };
            // The container has the targets of links in the same directory, and no other directories.
            let is_in_dir = text.components().count() == 1;
            let text = text.to_str().filter(|_| is_in_dir).unwrap_or(path).to_owned();
            self.links.entry(link).or_insert(text);
        }
    }
}

/// Path in the container.
fn inside(dir: &Path, name: &str) -> String {
    format!("/{}/{name}", dir.display())
}

/// The directory of the driver's libraries, if it is this one or a link in this one leads there; and this
/// one.
fn home(root: &Path, dir: &Path, version: &str) -> Option<(PathBuf, PathBuf)> {
    let name = format!("libcuda.so.{version}");
    if root.join(dir).join(&name).exists() {
        return Some((dir.to_owned(), dir.to_owned()));
    }
    let file = root.join(dir).join("libcuda.so.1").canonicalize().ok()?;
    let below = file.strip_prefix(root.canonicalize().ok()?).ok()?;
    let home = below
        .parent()
        .filter(|_| file.file_name() == Some(name.as_ref()))?;
    Some((home.to_owned(), dir.to_owned()))
}

/// Directories below the root that may hold the driver, those that the loader knows first.
fn directories(root: &Path) -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> = Vec::new();
    let known = loader_cache(root);
    let cuda = known
        .iter()
        .filter(|library| library.name == "libcuda.so.1" && library.is_native());
    let of_loader = cuda.filter_map(|library| Path::new(&library.path).parent());
    let all = of_loader.chain(LIBRARY_DIRS.map(Path::new));
    for dir in all.filter_map(|dir| dir.strip_prefix("/").ok()) {
        if !dirs.iter().any(|known| known == dir) {
            dirs.push(dir.to_owned());
        }
    }
    dirs
}

fn loader_cache(root: &Path) -> Vec<ldcache::Library> {
    let path = root.join("etc/ld.so.cache");
    let small = path
        .metadata()
        .is_ok_and(|file| file.is_file() && file.len() <= MAX_CACHE);
    let bytes = small.then(|| std::fs::read(path).ok()).flatten();
    bytes.and_then(|bytes| ldcache::parse(&bytes)).unwrap_or_default()
}

/// Names of libraries in a directory.
fn names_of(dir: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with("lib") && name.contains(".so"))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    const VERSION: &str = "580.95.05";

    fn root(dir: &str, files: &[&str], links: &[(&str, &str)]) -> TempDir {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join(dir);
        fs::create_dir_all(&dir).unwrap();
        files
            .iter()
            .for_each(|name| fs::write(dir.join(name), name).unwrap());
        links
            .iter()
            .for_each(|(text, name)| symlink(text, dir.join(name)).unwrap());
        root
    }

    fn text(map: &BTreeMap<String, String>) -> Vec<(&str, &str)> {
        map.iter()
            .map(|(path, text)| (path.as_str(), text.as_str()))
            .collect()
    }

    #[test]
    fn libraries_of_the_drivers_version_and_the_links_to_them_are_found() {
        let files = [
            "libcuda.so.580.95.05",
            "libnvidia-ml.so.580.95.05",
            "libnvidia-nvvm.so.580.95.05",
            // Of another driver, and of others.
            "libcuda.so.570.1",
            "libz.so.1",
        ];
        let links = [
            ("libcuda.so.580.95.05", "libcuda.so.1"),
            ("libnvidia-nvvm.so.580.95.05", "libnvidia-nvvm.so.4"),
            ("libz.so.1", "libz.so"),
        ];
        let root = root("usr/lib64", &files, &links);
        fs::create_dir_all(root.path().join("usr/bin")).unwrap();
        fs::write(root.path().join("usr/bin/nvidia-smi"), "").unwrap();
        let found = DriverFiles::find(root.path(), VERSION).unwrap();
        let inside: Vec<_> = found.files.keys().map(String::as_str).collect();
        assert_eq!(
            inside,
            [
                "/usr/bin/nvidia-smi",
                "/usr/lib64/libcuda.so.580.95.05",
                "/usr/lib64/libnvidia-ml.so.580.95.05",
                "/usr/lib64/libnvidia-nvvm.so.580.95.05",
            ]
        );
        assert_eq!(
            text(&found.links),
            [
                ("/usr/lib64/libcuda.so", "libcuda.so.1"),
                ("/usr/lib64/libcuda.so.1", "libcuda.so.580.95.05"),
                ("/usr/lib64/libnvidia-ml.so", "libnvidia-ml.so.1"),
                ("/usr/lib64/libnvidia-ml.so.1", "libnvidia-ml.so.580.95.05"),
                ("/usr/lib64/libnvidia-nvvm.so.4", "libnvidia-nvvm.so.580.95.05"),
            ]
        );
        assert!(found.libraries.contains("/usr/lib64/libnvidia-nvvm.so.4"));
        assert!(!found.libraries.contains("/usr/lib64/libcuda.so"));
    }

    #[test]
    fn a_library_that_is_itself_a_link_is_mounted_and_not_linked() {
        let root = root("opt/store", &["libcuda"], &[]);
        let dir = root.path().join("usr/lib64");
        fs::create_dir_all(&dir).unwrap();
        symlink("../../opt/store/libcuda", dir.join("libcuda.so.580.95.05")).unwrap();
        let found = DriverFiles::find(root.path(), VERSION).unwrap();
        let host = &found.files["/usr/lib64/libcuda.so.580.95.05"];
        assert!(host.ends_with("opt/store/libcuda"), "{host:?}");
        assert!(!found.links.contains_key("/usr/lib64/libcuda.so.580.95.05"));
    }

    #[test]
    fn the_loaders_cache_names_directories_that_nobody_knows() {
        let root = root("opt/strange", &["libcuda.so.580.95.05"], &[]);
        assert!(DriverFiles::find(root.path(), VERSION).is_err());
        fs::create_dir(root.path().join("etc")).unwrap();
        let cache = [ldcache::Library::new("libcuda.so.1", "/opt/strange/libcuda.so.1")];
        fs::write(
            root.path().join("etc/ld.so.cache"),
            ldcache::write(&cache).unwrap(),
        )
        .unwrap();
        let found = DriverFiles::find(root.path(), VERSION).unwrap();
        assert!(found.files.contains_key("/opt/strange/libcuda.so.580.95.05"));
    }

    /// Debian keeps several drivers and chooses by links through /etc/alternatives.
    #[test]
    fn a_driver_that_links_lead_to_is_found_with_all_of_its_names() {
        let current = "usr/lib/x86_64-linux-gnu/nvidia/current";
        let root = root(
            current,
            &["libcuda.so.580.95.05", "libnvidia-nvvm.so.580.95.05"],
            &[],
        );
        let (path, dir) = (root.path(), root.path().join("usr/lib/x86_64-linux-gnu"));
        fs::create_dir_all(path.join("etc/alternatives")).unwrap();
        for (name, file) in [
            ("libcuda.so.1", "libcuda"),
            ("libnvidia-nvvm.so.4", "libnvidia-nvvm"),
        ] {
            let chosen = path.join("etc/alternatives").join(name);
            symlink(path.join(current).join(format!("{file}.so.{VERSION}")), &chosen).unwrap();
            symlink(&chosen, dir.join(name)).unwrap();
        }
        let found = DriverFiles::find(path, VERSION).unwrap();
        let libcuda = format!("/{current}/libcuda.so.{VERSION}");
        assert!(found.files.contains_key(&libcuda));
        assert_eq!(found.links["/usr/lib/x86_64-linux-gnu/libcuda.so.1"], libcuda);
        let nvvm = "/usr/lib/x86_64-linux-gnu/libnvidia-nvvm.so.4";
        assert_eq!(
            found.links[nvvm],
            format!("/{current}/libnvidia-nvvm.so.{VERSION}")
        );
        assert!(found.libraries.contains(nvvm));
    }

    #[test]
    fn a_missing_driver_is_an_error_with_the_searched_directories() {
        let root = root("usr/lib64", &["libcuda.so.570.1"], &[]);
        let error = DriverFiles::find(root.path(), VERSION).unwrap_err();
        assert_eq!(error.code(), "FIRN-DRIVER-MISSING");
        let message = error.to_string();
        assert!(
            message.contains("libcuda.so.580.95.05") && message.contains("usr/lib64"),
            "{message}"
        );
    }
}
