//! Where this node had its stores mounted, and the directories whose checkpoints protect memory.
//!
//! A file system that is not mounted leaves an empty directory, which would become another store on the disk
//! below, or would show no checkpoint.

use std::path::{Path, PathBuf, absolute};

use firn_host::bounded::read_at_most;
use firn_host::mountinfo::{MountEntry, is_mount_point, mounted};
use firn_host::{UnlessAbsent, atomic_file};
use serde::{Deserialize, Serialize};

use super::error::io;
use super::{Digest, Packing, Store, StoreError};

/// Digits of the name of a record.
const NAME: usize = 16;
/// Largest one that is read.
const LIMIT: u64 = 16 << 10;

/// The store that was used last at a path, or a directory with checkpoints.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    store: PathBuf,
    /// Empty for a directory with checkpoints.
    id: String,
    /// Where its file system was mounted.
    mount_point: PathBuf,
}

impl Store {
    /// As [`Store::create`], for a store that this node uses again, and that is recorded in the directory
    /// `records`.
    ///
    /// # Errors
    /// Where there would be a new store because the file system of the last one is not mounted.
    pub fn create_again(root: &Path, records: &Path, packing: &Packing) -> Result<Self, StoreError> {
        let mounts = mounted().map_err(io("read", "/proc/self/mountinfo"))?;
        Self::create_among(root, records, packing, &mounts)
    }

    /// Opens the store that [`Store::create_again`] would use. None: that would make one. Changes nothing.
    ///
    /// # Errors
    /// As those of that function.
    pub fn find_again(root: &Path, records: &Path, packing: &Packing) -> Result<Option<Self>, StoreError> {
        let mounts = mounted().map_err(io("read", "/proc/self/mountinfo"))?;
        last_of(root, records, packing, &mounts)?;
        match Self::open(root, packing) {
            Err(StoreError::Absent { .. }) => Ok(None),
            opened => opened.map(Some),
        }
    }

    pub(super) fn create_among(
        root: &Path,
        records: &Path,
        packing: &Packing,
        mounts: &[MountEntry],
    ) -> Result<Self, StoreError> {
        let root = &absolute(root).map_err(io("resolve", root))?;
        let name = name(root);
        let last = last_of(root, records, packing, mounts)?;
        let store = Self::create(root, packing)?;
        let now = Record {
            store: root.to_owned(),
            id: store.id().to_owned(),
            mount_point: mount_point(root, mounts)?,
        };
        // What lies on the root's file system cannot lack it. Without a record, the store is as good.
        if last.as_ref() != Some(&now) && (last.is_some() || now.mount_point != Path::new("/")) {
            let _ = write(records, &name, &now);
        }
        Ok(store)
    }
}

/// The record of the store that was used last at this path, unless its file system is not mounted.
fn last_of(
    root: &Path,
    records: &Path,
    packing: &Packing,
    mounts: &[MountEntry],
) -> Result<Option<Record>, StoreError> {
    let root = &absolute(root).map_err(io("resolve", root))?;
    let record = records.join(name(root));
    let last = read(&record).filter(|last| last.store == *root);
    // Also where another store was made on the disk below before.
    let is_another = |last: &Record| match Store::open(root, packing) {
        Err(StoreError::Absent { .. }) => true,
        opened => opened.is_ok_and(|store| store.id() != last.id),
    };
    match last {
        Some(last) if !is_mount_point(mounts, &last.mount_point) && is_another(&last) => {
            Err(StoreError::NotMounted {
                path: root.to_owned(),
                id: last.id,
                mount_point: last.mount_point,
                record,
            })
        }
        last => Ok(last),
    }
}

/// Refuses a directory with checkpoints whose file system is not mounted now, and was when it was looked for
/// last. `records` is the directory that remembers where.
///
/// # Errors
/// That, or the mounts or the record cannot be read, or not be written.
pub fn expect_mounted(root: &Path, records: &Path) -> Result<(), StoreError> {
    let mounts = mounted().map_err(io("read", "/proc/self/mountinfo"))?;
    expect_among(root, records, &mounts)
}

fn expect_among(root: &Path, records: &Path, mounts: &[MountEntry]) -> Result<(), StoreError> {
    let root = &absolute(root).map_err(io("resolve", root))?;
    // Not that of a store at the same path.
    let name = format!("checkpoints-{}", name(root));
    let path = records.join(&name);
    let file = std::fs::File::open(&path).if_present();
    let bytes = file.and_then(|file| file.map(|file| read_at_most(file, LIMIT)).transpose());
    let last = match bytes.map_err(io("read", &path))? {
        None => None,
        Some(bytes) => {
            let record = bytes.and_then(|bytes| serde_json::from_slice::<Record>(&bytes).ok());
            Some(record.ok_or_else(|| StoreError::Record { path: path.clone() })?)
        }
    };
    if let Some(last) = &last
        && !is_mount_point(mounts, &last.mount_point)
    {
        return Err(StoreError::RootNotMounted {
            path: root.to_owned(),
            mount_point: last.mount_point.clone(),
            record: path,
        });
    }
    let now = Record {
        store: root.to_owned(),
        id: String::new(),
        mount_point: mount_point(root, mounts)?,
    };
    // What lies on the root's file system cannot lack it.
    if last.as_ref() != Some(&now) && (last.is_some() || now.mount_point != Path::new("/")) {
        write(records, &name, &now).map_err(io("write", path))?;
    }
    Ok(())
}

fn name(root: &Path) -> String {
    let mut name = Digest::of(root.as_os_str().as_encoded_bytes()).to_string();
    name.truncate(NAME);
    name + ".json"
}

fn read(record: &Path) -> Option<Record> {
    let bytes = read_at_most(std::fs::File::open(record).ok()?, LIMIT).ok()??;
    serde_json::from_slice(&bytes).ok()
}

fn write(records: &Path, name: &str, record: &Record) -> std::io::Result<()> {
    std::fs::create_dir_all(records)?;
    atomic_file::write(records, name, &serde_json::to_vec(record)?, 0o600)
}

/// Where the file system of a directory is mounted. None: that cannot be found out, or is no text.
pub fn mount_of(dir: &Path) -> Option<PathBuf> {
    let mount = mount_point(dir, &mounted().ok()?).ok()?;
    mount.to_str().is_some().then_some(mount)
}

/// Where the file system is mounted that `path` lies in, or will when it is made.
fn mount_point(path: &Path, mounts: &[MountEntry]) -> Result<PathBuf, StoreError> {
    let mut above = path.ancestors();
    let there = above.find_map(|path| path.canonicalize().if_present().transpose());
    let there = there.transpose().map_err(io("resolve", path))?;
    let there = there.unwrap_or_else(|| PathBuf::from("/"));
    let mounts = mounts.iter().map(|mount| &mount.mount_point);
    let over = mounts.filter(|mount| there.starts_with(mount));
    let nearest = over.max_by_key(|mount| mount.components().count());
    Ok(nearest.map_or_else(|| PathBuf::from("/"), PathBuf::clone))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use firn_host::Problem;

    use super::*;

    fn mounts(points: &[&Path]) -> Vec<MountEntry> {
        let entry = |point: &&Path| MountEntry {
            mount_point: point.to_path_buf(),
            ..MountEntry::default()
        };
        points.iter().map(entry).collect()
    }

    #[test]
    fn a_store_whose_file_system_is_not_mounted_is_not_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let (disk, records) = (dir.join("disk"), dir.join("records"));
        fs::create_dir(&disk).unwrap();
        let root = disk.join("firn/store");
        let with = mounts(&[Path::new("/"), &disk]);
        let without = mounts(&[Path::new("/")]);
        let first = Store::create_among(&root, &records, &Packing::default(), &with).unwrap();
        // What lies elsewhere is a store, too, if it is one.
        Store::create_among(&root, &records, &Packing::default(), &without).unwrap();
        Store::create_among(&root, &records, &Packing::default(), &with).unwrap();

        // The mount point is empty, then the operator has made the directory.
        fs::remove_dir_all(disk.join("firn")).unwrap();
        for step in 0..2 {
            let error = Store::create_among(&root, &records, &Packing::default(), &without).unwrap_err();
            assert_eq!(error.code(), "FIRN-STORE-UNUSABLE");
            let shown = error.to_string();
            let parts = [first.id(), disk.to_str().unwrap(), records.to_str().unwrap()];
            assert!(parts.iter().all(|part| shown.contains(part)), "{shown}");
            assert_eq!(fs::exists(&root).unwrap(), step > 0);
            fs::create_dir_all(&root).unwrap();
        }
        // Another file system there, as a tmpfs after the node has started again.
        let second = Store::create_among(&root, &records, &Packing::default(), &with).unwrap();
        assert_ne!(first.id(), second.id());

        // Another store was made on the disk below, by a firn that did not look.
        fs::remove_dir_all(disk.join("firn")).unwrap();
        Store::create(&root, &Packing::default()).unwrap();
        let error = Store::create_among(&root, &records, &Packing::default(), &without).unwrap_err();
        assert!(error.to_string().contains(second.id()), "{error}");
        fs::remove_dir_all(disk.join("firn")).unwrap();
        fs::create_dir_all(&root).unwrap();
        // The disk is mounted, and the store's directory has become a file system of its own.
        let own = mounts(&[Path::new("/"), &disk, &root]);
        let third = Store::create_among(&root, &records, &Packing::default(), &own).unwrap();
        assert_ne!(third.id(), second.id());

        // The operator has given it up.
        fs::remove_dir_all(disk.join("firn")).unwrap();
        fs::remove_dir_all(&records).unwrap();
        Store::create_among(&root, &records, &Packing::default(), &without).unwrap();
        assert!(!records.exists(), "one on the root's file system is recorded");
    }

    #[test]
    fn a_directory_with_checkpoints_has_to_be_mounted_once_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let (disk, records) = (dir.join("disk"), dir.join("records"));
        let root = disk.join("warm");
        let with = mounts(&[Path::new("/"), &disk]);
        let without = mounts(&[Path::new("/")]);
        // On the root's file system: nothing is recorded.
        expect_among(&root, &records, &without).unwrap();
        assert!(!records.exists());
        // Only its mount point is there yet.
        fs::create_dir(&disk).unwrap();
        expect_among(&root, &records, &with).unwrap();
        // A store at the same path has a record of its own.
        Store::create_among(&root, &records, &Packing::default(), &with).unwrap();
        for _ in 0..2 {
            let error = expect_among(&root, &records, &without).unwrap_err();
            assert_eq!(error.code(), "FIRN-STORE-UNUSABLE");
            let shown = error.to_string();
            for part in [root.as_path(), &disk, &records] {
                assert!(shown.contains(part.to_str().unwrap()), "{shown}");
            }
            expect_among(&root, &records, &with).unwrap();
        }
        // It has become a file system of its own, and is remembered as such.
        let own = mounts(&[Path::new("/"), &disk, &root]);
        expect_among(&root, &records, &own).unwrap();
        expect_among(&root, &records, &with).unwrap_err();
        // A record that cannot be understood protects as well.
        let record = records.join(format!("checkpoints-{}", name(&root)));
        fs::write(&record, "{").unwrap();
        let error = expect_among(&root, &records, &own).unwrap_err();
        assert!(error.to_string().contains(record.to_str().unwrap()), "{error}");
        fs::write(&record, vec![b' '; 20_000]).unwrap();
        expect_among(&root, &records, &own).unwrap_err();
        fs::remove_file(&record).unwrap();
        fs::create_dir(&record).unwrap();
        expect_among(&root, &records, &own).unwrap_err();
        // What cannot be remembered is an error.
        fs::remove_dir(&record).unwrap();
        expect_among(&root, &records.join(name(&root)), &own).unwrap_err();
        expect_among(&root, &records, &without).unwrap();
    }

    /// By the mounts of this machine.
    #[test]
    fn what_is_mounted_is_found_out() {
        let dir = tempfile::tempdir().unwrap();
        let (root, records) = (dir.path().join("store"), dir.path().join("records"));
        let find = |root: &Path| Store::find_again(root, &records, &Packing::default());
        assert!(find(&root).unwrap().is_none());
        let made = Store::create_again(&root, &records, &Packing::default()).unwrap();
        assert_eq!(find(&root).unwrap().unwrap().id(), made.id());
        let mount = mount_of(&root).unwrap();
        assert!(root.canonicalize().unwrap().starts_with(&mount), "{mount:?}");

        expect_mounted(&root, &records).unwrap();
        // Of a file system that is not there now.
        let last = Record {
            store: root.clone(),
            id: made.id().to_owned(),
            mount_point: dir.path().join("none"),
        };
        write(&records, &format!("checkpoints-{}", name(&root)), &last).unwrap();
        expect_mounted(&root, &records).unwrap_err();
        let other = dir.path().join("other");
        expect_mounted(&other, &records).unwrap();
        write(
            &records,
            &name(&other),
            &Record {
                store: other.clone(),
                ..last
            },
        )
        .unwrap();
        assert!(find(&other).is_err() && find(&root).is_ok());
    }

    #[test]
    fn a_node_without_records_has_stores() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        let root = dir.path().join("store");
        let with = mounts(&[dir.path()]);
        for _ in 0..2 {
            Store::create_among(
                &root,
                &dir.path().join("file/records"),
                &Packing::default(),
                &with,
            )
            .unwrap();
        }
        let records = dir.path().join("records");
        fs::create_dir(&records).unwrap();
        fs::write(records.join(name(&root)), "{}").unwrap();
        Store::create_among(&root, &records, &Packing::default(), &with).unwrap();
        assert_eq!(read(&records.join(name(&root))).unwrap().mount_point, dir.path());
    }
}
