//! The files of an NVIDIA driver that a container needs: its libraries, the links that lead to them, and `nvidia-smi`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use firn_cdi::ldcache;

/// Where distributions and the driver's own installer put libraries.
const DIRECTORIES: [&str; 7] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/nvidia/lib64",
    "usr/local/nvidia/lib",
    "opt/nvidia/lib64",
];

/// Where `nvidia-smi` may be.
const TOOLS: [&str; 2] = ["usr/bin/nvidia-smi", "usr/local/nvidia/bin/nvidia-smi"];

/// Libraries that programs ask for by a name that may be missing on the host.
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
    /// Paths in the container that the loader has to know.
    pub libraries: BTreeSet<String>,
}

/// A driver whose files are not found.
#[derive(Debug, thiserror::Error)]
#[error("no libcuda.so.{version} in {}", searched(root, dirs))]
pub struct NoDriver {
    version: String,
    root: PathBuf,
    dirs: Vec<PathBuf>,
}

impl NoDriver {
    /// The code shown to users.
    pub fn code(&self) -> &'static str {
        "FIRN-DRIVER-MISSING"
    }

    /// What the operator can do.
    pub fn hint(&self) -> &'static str {
        "name the directory below which the driver is installed: --driver-root"
    }
}

fn searched(root: &Path, dirs: &[PathBuf]) -> String {
    let dirs = dirs.iter().map(|dir| root.join(dir).display().to_string());
    dirs.collect::<Vec<_>>().join(", ")
}

impl DriverFiles {
    /// Finds the files of this version below a root.
    pub fn find(root: &Path, version: &str) -> Result<Self, NoDriver> {
        let dirs = directories(root);
        let has_driver = |dir: &&PathBuf| root.join(dir).join(format!("libcuda.so.{version}")).exists();
        let Some(dir) = dirs.iter().find(has_driver) else {
            return Err(NoDriver {
                version: version.to_owned(),
                root: root.to_owned(),
                dirs,
            });
        };
        let mut found = Self::default();
        found.add_libraries(root, dir, version);
        for tool in TOOLS {
            if root.join(tool).is_file() {
                found
                    .files
                    .insert("/usr/bin/nvidia-smi".to_owned(), root.join(tool));
                break;
            }
        }
        Ok(found)
    }

    fn add_libraries(&mut self, root: &Path, dir: &Path, version: &str) {
        let host = root.join(dir);
        let inside = |name: &str| format!("/{}/{name}", dir.display());
        let names = names_of(&host);
        let full = format!(".so.{version}");
        let is_file = |name: &str| name.ends_with(&full);
        for name in names.iter().filter(|name| is_file(name)) {
            let file = host.join(name);
            // What a container is shown is the file, not a link that leads elsewhere.
            self.files
                .insert(inside(name), file.canonicalize().unwrap_or(file));
            self.libraries.insert(inside(name));
        }
        for name in names.iter().filter(|name| !is_file(name)) {
            // The name in this directory that a link says, if the file behind it is one of the driver's.
            let text = std::fs::read_link(host.join(name)).ok();
            let next = text
                .as_deref()
                .and_then(Path::file_name)
                .and_then(|name| name.to_str());
            let file = host.join(name).canonicalize().ok();
            let of_driver = file.is_some_and(|file| self.files.values().any(|known| *known == file));
            if let Some(next) = next.filter(|_| of_driver) {
                self.links.insert(inside(name), next.to_owned());
            }
        }
        for stem in SONAMES {
            let file = format!("{stem}{full}");
            if !names.contains(&file) {
                continue;
            }
            let (soname, plain) = (format!("{stem}.so.1"), format!("{stem}.so"));
            self.links.entry(inside(&soname)).or_insert(file);
            self.links.entry(inside(&plain)).or_insert(soname);
        }
        let sonames = self.links.keys().filter(|link| !link.ends_with(".so")).cloned();
        self.libraries.extend(sonames);
    }
}

/// Directories below the root that may hold the driver, those that the loader knows first.
fn directories(root: &Path) -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> = Vec::new();
    let mut add = |dir: &Path| {
        if !dirs.iter().any(|known| known == dir) {
            dirs.push(dir.to_owned());
        }
    };
    for library in loader_cache(root) {
        if library.name == "libcuda.so.1" && library.is_native() {
            let dir = Path::new(&library.path).parent();
            dir.and_then(|dir| dir.strip_prefix("/").ok()).map(&mut add);
        }
    }
    DIRECTORIES.iter().for_each(|dir| add(Path::new(dir)));
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
    let Ok(entries) = std::fs::read_dir(dir) else {
        return BTreeSet::new();
    };
    entries
        .flatten()
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

    #[test]
    fn a_driver_that_is_not_there_is_told_with_where_it_was_looked_for() {
        let root = root("usr/lib64", &["libcuda.so.570.1"], &[]);
        let error = DriverFiles::find(root.path(), VERSION).unwrap_err();
        assert_eq!(error.code(), "FIRN-DRIVER-MISSING");
        let said = error.to_string();
        assert!(
            said.contains("libcuda.so.580.95.05") && said.contains("usr/lib64"),
            "{said}"
        );
    }
}
