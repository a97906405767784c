//! The CDI files of a node.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::{CdiError, CdiFile, Device, DeviceName, FileError};

/// The CDI files of a node, and which of them describes which device.
#[derive(Debug, Default)]
pub struct Registry {
    dirs: Vec<PathBuf>,
    files: Vec<CdiFile>,
    broken: Vec<(PathBuf, FileError)>,
    devices: BTreeMap<DeviceName, DeviceFiles>,
}

/// The files that describe a device.
#[derive(Debug)]
struct DeviceFiles {
    /// Position of the directory: a later one takes precedence.
    priority: usize,
    /// Positions of the file and of the device in it: more than one is a conflict.
    at: Vec<(usize, usize)>,
}

impl Registry {
    /// Reads all files of these directories. A broken file does not affect the others; a missing directory is
    /// empty.
    pub fn read<P: AsRef<Path>>(dirs: &[P]) -> Self {
        let mut registry = Self {
            dirs: dirs.iter().map(|dir| dir.as_ref().to_owned()).collect(),
            ..Self::default()
        };
        for (priority, dir) in dirs.iter().enumerate() {
            for path in files_of(dir.as_ref()) {
                match CdiFile::read(&path) {
                    Ok(file) => registry.add(priority, file),
                    Err(error) => registry.broken.push((path, error)),
                }
            }
        }
        registry
    }

    /// A registry of these files alone.
    pub fn of(files: impl IntoIterator<Item = CdiFile>) -> Self {
        let mut registry = Self::default();
        files.into_iter().for_each(|file| registry.add(0, file));
        registry
    }

    fn add(&mut self, priority: usize, file: CdiFile) {
        let nowhere = || DeviceFiles {
            priority,
            at: Vec::new(),
        };
        for (place, device) in file.devices.iter().enumerate() {
            // Parsing has checked the names.
            let Ok(name) = DeviceName::new(&file.kind, &device.name) else {
                continue;
            };
            let found = self.devices.entry(name).or_insert_with(nowhere);
            // Directories come in the order of their priority.
            if found.priority < priority {
                *found = nowhere();
            }
            found.at.push((self.files.len(), place));
        }
        self.files.push(file);
    }

    /// Files that cannot be used, and why.
    pub fn broken(&self) -> &[(PathBuf, FileError)] {
        &self.broken
    }

    /// Files that are used, by directory and name.
    pub fn files(&self) -> &[CdiFile] {
        &self.files
    }

    /// Directories of the host from which these files mount libraries.
    pub fn library_dirs(&self) -> Vec<PathBuf> {
        let edits = self.files.iter().flat_map(|file| {
            let devices = file.devices.iter().map(|device| &device.edits);
            std::iter::once(&file.edits).chain(devices)
        });
        let sources = edits
            .flat_map(|edits| &edits.mounts)
            .map(|mount| Path::new(&mount.host_path));
        let libraries = sources.filter(|source| {
            let name = source.file_name().and_then(|name| name.to_str());
            source.is_absolute() && name.is_some_and(|name| name.starts_with("lib") && name.contains(".so"))
        });
        let dirs: BTreeSet<PathBuf> = libraries.filter_map(Path::parent).map(Path::to_owned).collect();
        dirs.into_iter().collect()
    }

    /// Names of all devices, and the file that describes each; several where they are in conflict.
    pub fn devices(&self) -> impl Iterator<Item = (&DeviceName, Vec<&Path>)> {
        self.devices.iter().map(|(name, found)| {
            let paths = found.at.iter().map(|(file, _)| self.files[*file].path.as_path());
            (name, paths.collect())
        })
    }

    /// Whether any file describes devices of this kind.
    pub fn has_kind(&self, kind: &str) -> bool {
        self.files.iter().any(|file| file.kind == kind)
    }

    /// A device and the file that describes it.
    pub fn device(&self, name: &DeviceName) -> Result<(&CdiFile, &Device), CdiError> {
        let Some(found) = self.devices.get(name) else {
            let line = |(path, error): &(PathBuf, FileError)| format!("{}: {error}", path.display());
            let broken = self.broken.iter().map(line).collect();
            return Err(if self.has_kind(name.kind()) {
                CdiError::Unknown {
                    name: name.to_string(),
                    known: self.devices.keys().map(ToString::to_string).collect(),
                    broken,
                }
            } else {
                CdiError::NoSpec {
                    kind: name.kind().to_owned(),
                    dirs: self.dirs.clone(),
                    broken,
                }
            });
        };
        match found.at[..] {
            [(file, place)] => Ok((&self.files[file], &self.files[file].devices[place])),
            _ => Err(CdiError::Ambiguous {
                name: name.to_string(),
                paths: found
                    .at
                    .iter()
                    .map(|(file, _)| self.files[*file].path.clone())
                    .collect(),
            }),
        }
    }
}

/// The CDI files of a directory, by name.
fn files_of(dir: &Path) -> Vec<PathBuf> {
    let is_cdi = |path: &PathBuf| path.extension().is_some_and(|end| end == "json" || end == "yaml");
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| is_cdi(path) && !path.is_dir())
        .collect();
    files.sort();
    files
}

#[cfg(test)]
mod tests {
    use firn_host::Problem;
    use std::fs;

    use serde_json::json;
    use tempfile::TempDir;

    use super::*;

    fn write(dir: &Path, name: &str, kind: &str, devices: &[&str]) {
        let devices: Vec<_> = devices
            .iter()
            .map(|device| json!({"name": device, "containerEdits": {"env": [format!("FROM={name}")]}}))
            .collect();
        let text = json!({"cdiVersion": "0.6.0", "kind": kind, "devices": devices});
        fs::write(dir.join(name), text.to_string()).unwrap();
    }

    fn dirs() -> (TempDir, [PathBuf; 2]) {
        let root = tempfile::tempdir().unwrap();
        let dirs = ["etc", "run"].map(|name| root.path().join(name));
        dirs.iter().for_each(|dir| fs::create_dir(dir).unwrap());
        (root, dirs)
    }

    fn from(registry: &Registry, name: &str) -> Result<String, CdiError> {
        let (_, device) = registry.device(&name.parse().unwrap())?;
        Ok(device.edits.env[0].clone())
    }

    #[test]
    fn directories_of_libraries_are_those_of_the_host() {
        let (_root, dirs) = dirs();
        let mount = |host: &str, inside: &str| json!({"hostPath": host, "containerPath": inside});
        let text = json!({
            "cdiVersion": "0.6.0",
            "kind": "v/gpu",
            "devices": [{"name": "0", "containerEdits": {"mounts":
             [mount("/driver/lib64/libb.so.1", "/lib/libb.so.1")]}}],
            "containerEdits": {"mounts": [
                mount("/driver/lib/liba.so.580", "/usr/lib64/liba.so.580"),
                mount("/driver/lib/libc.so.580", "/usr/lib64/libc.so.580"),
                mount("/driver/bin/smi", "/usr/bin/smi"),
            ]},
        });
        fs::write(dirs[0].join("a.json"), text.to_string()).unwrap();
        let found = Registry::read(&dirs).library_dirs();
        assert_eq!(found, [Path::new("/driver/lib"), Path::new("/driver/lib64")]);
    }

    #[test]
    fn the_later_directory_takes_precedence() {
        let (_root, dirs) = dirs();
        write(&dirs[0], "a.json", "v/gpu", &["0", "1"]);
        write(&dirs[1], "b.yaml", "v/gpu", &["0"]);
        let registry = Registry::read(&dirs);
        assert_eq!(from(&registry, "v/gpu=0").unwrap(), "FROM=b.yaml");
        assert_eq!(from(&registry, "v/gpu=1").unwrap(), "FROM=a.json");
        let listed: Vec<_> = registry
            .devices()
            .map(|(name, files)| (name.to_string(), files.len()))
            .collect();
        assert_eq!(listed, [("v/gpu=0".to_owned(), 1), ("v/gpu=1".to_owned(), 1)]);
    }

    #[test]
    fn a_name_in_two_files_is_an_error_when_it_is_requested() {
        let (_root, dirs) = dirs();
        write(&dirs[0], "a.json", "v/gpu", &["0", "1"]);
        write(&dirs[0], "b.json", "v/gpu", &["0"]);
        let registry = Registry::read(&dirs);
        let error = from(&registry, "v/gpu=0").unwrap_err();
        assert_eq!(error.code(), "FIRN-CDI-DEVICE");
        let message = error.to_string();
        assert!(
            message.contains("a.json") && message.contains("b.json"),
            "{message}"
        );
        assert!(from(&registry, "v/gpu=1").is_ok());
        // A file of a more important directory resolves the conflict.
        write(&dirs[1], "c.json", "v/gpu", &["0"]);
        assert_eq!(from(&Registry::read(&dirs), "v/gpu=0").unwrap(), "FROM=c.json");
    }

    #[test]
    fn a_broken_file_does_not_stop_the_others_and_is_named() {
        let (_root, dirs) = dirs();
        fs::write(dirs[0].join("broken.yaml"), "cdiVersion: [").unwrap();
        fs::write(dirs[0].join("large.json"), vec![b' '; 5 << 20]).unwrap();
        fs::write(dirs[0].join("notes.txt"), "no CDI file").unwrap();
        fs::create_dir(dirs[0].join("dir.json")).unwrap();
        nix::unistd::mkfifo(&dirs[0].join("fifo.json"), nix::sys::stat::Mode::S_IRUSR).unwrap();
        write(&dirs[0], "good.json", "v/gpu", &["0"]);
        let registry = Registry::read(&dirs);
        assert_eq!(from(&registry, "v/gpu=0").unwrap(), "FROM=good.json");
        let names: Vec<_> = registry
            .broken()
            .iter()
            .map(|(path, _)| path.file_name().unwrap().to_str().unwrap())
            .collect();
        assert_eq!(names, ["broken.yaml", "fifo.json", "large.json"]);
        let message = from(&registry, "v/gpu=7").unwrap_err().to_string();
        assert!(
            message.contains("there are v/gpu=0; not used: ")
                && message.contains("broken.yaml: it is not valid"),
            "{message}"
        );
    }

    #[test]
    fn without_a_file_of_the_kind_the_hint_names_the_command() {
        let (_root, dirs) = dirs();
        let error = from(&Registry::read(&dirs), "nvidia.com/gpu=0").unwrap_err();
        assert_eq!(error.code(), "FIRN-NO-CDI-SPEC");
        assert!(error.hint().contains("firn cdi generate"));
        assert!(error.to_string().contains("describes nvidia.com/gpu"), "{error}");
        let none = Registry::read(&["/nonexistent/cdi"]);
        assert!(none.files().is_empty() && none.broken().is_empty());
    }
}
