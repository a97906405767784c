//! The directory that holds everything that nodes keep on the host: cached roots and the records of nodes.
//!
//! A run directory without a record is made and removed only under the lock, so it never belongs to anybody
//! who could still want it.

use std::env;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use crate::record::{Record, Status};
use crate::suite::Suite;
use crate::{debootstrap, host, sweep};

/// Overrides the directory.
const DIR_ENV: &str = "FIRN_NODE_DIR";

/// Where roots are cached and nodes recorded.
#[derive(Clone, Debug)]
pub struct Store {
    base: PathBuf,
}

impl Store {
    /// `$FIRN_NODE_DIR`, else `node/` in cargo's target directory.
    pub fn open() -> Result<Self> {
        let base = match (env::var_os(DIR_ENV), env::var_os("CARGO_TARGET_DIR")) {
            (Some(dir), _) => PathBuf::from(dir),
            (None, Some(target)) => Path::new(&target).join("node"),
            (None, None) => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/node"),
        };
        fs::create_dir_all(base.join("roots"))
            .and_then(|()| fs::create_dir_all(base.join("run")))
            .with_context(|| format!("make {}", base.display()))?;
        Ok(Self {
            base: base
                .canonicalize()
                .with_context(|| format!("resolve {}", base.display()))?,
        })
    }

    /// A short name for this store, which differs from that of any other.
    pub(crate) fn tag(&self) -> String {
        let digest = Sha256::digest(self.base.as_os_str().as_encoded_bytes());
        digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect()
    }

    /// The suite's root, with these packages in addition; made if it is not cached (about half a minute,
    /// needs the package mirror).
    pub fn root(&self, suite: Suite, more: &[&str]) -> Result<PathBuf> {
        host::require_root()?;
        debootstrap::root(&self.base.join("roots"), suite, more)
    }

    /// Where programs built with Go are kept.
    pub(crate) fn go(&self) -> Result<PathBuf> {
        let dir = self.base.join("go");
        fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        Ok(dir)
    }

    /// Where packages that are in no root are kept.
    pub(crate) fn packages(&self) -> Result<PathBuf> {
        let dir = self.base.join("packages");
        fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        Ok(dir)
    }

    /// Every recorded node, by name.
    pub fn nodes(&self) -> Result<Vec<Record>> {
        let mut found = Vec::new();
        for dir in self.run_dirs()? {
            found.extend(Record::read(&dir)?);
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// The node of this name.
    pub fn node(&self, name: &str) -> Result<Option<Record>> {
        check_name(name)?;
        Record::read(&self.run_dir(name))
    }

    /// Removes everything of crashed nodes; with `all`, every node that was left running too. Returns their
    /// names.
    pub fn clean(&self, all: bool) -> Result<Vec<String>> {
        host::require_root()?;
        let _lock = self.lock()?;
        let mut removed = Vec::new();
        for dir in self.run_dirs()? {
            match Record::read(&dir)? {
                Some(record) if record.status() == Status::Crashed || all && record.left => {
                    sweep::remove(&record)?;
                    removed.push(record.name);
                }
                Some(_) => {}
                None => sweep::remove_dir(&dir)?,
            }
        }
        Ok(removed)
    }

    /// Removes the cached roots. Refused while a node uses them.
    pub fn clean_roots(&self) -> Result<()> {
        let nodes: Vec<String> = self.nodes()?.into_iter().map(|record| record.name).collect();
        ensure!(
            nodes.is_empty(),
            "nodes use the roots: {}\nhint: stop them first",
            nodes.join(", ")
        );
        debootstrap::remove_roots(&self.base.join("roots"))
    }

    /// Makes the run directory of a new node and writes its record.
    pub(crate) fn reserve(&self, record: impl FnOnce(PathBuf) -> Record, name: &str) -> Result<Record> {
        check_name(name)?;
        let _lock = self.lock()?;
        let dir = self.run_dir(name);
        match fs::create_dir(&dir) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                bail!("a node called {name} exists\nhint: cargo xtask node stop {name}")
            }
            result => result.with_context(|| format!("make {}", dir.display()))?,
        }
        let record = record(dir);
        record.write()?;
        Ok(record)
    }

    fn run_dir(&self, name: &str) -> PathBuf {
        self.base.join("run").join(name)
    }

    fn run_dirs(&self) -> Result<Vec<PathBuf>> {
        let run = self.base.join("run");
        let entries = fs::read_dir(&run).with_context(|| format!("list {}", run.display()))?;
        Ok(entries
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.is_dir())
            .collect())
    }

    fn lock(&self) -> Result<File> {
        lock(&self.base.join("lock"))
    }
}

/// Takes the lock in this file until the result is dropped.
pub(crate) fn lock(path: &Path) -> Result<File> {
    let file = File::create(path).with_context(|| format!("make {}", path.display()))?;
    file.lock().with_context(|| format!("lock {}", path.display()))?;
    Ok(file)
}

/// Names become file names, cgroup names and hostnames.
fn check_name(name: &str) -> Result<()> {
    let good = !name.is_empty()
        && name.len() <= 48
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    ensure!(
        good,
        "not a node name: {name:?}\nhint: up to 48 letters, digits and dashes"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_their_directory() {
        for good in ["a", "forky-12-0", "N7"] {
            check_name(good).unwrap();
        }
        for bad in ["", "..", "a/b", "-a", "a b", "a.b", &"a".repeat(49)] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
    }
}
