//! firn's programs: copied into a directory, and removed from it.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use firn_config::names;
use firn_host::UnlessAbsent;

use super::error::InstallError;
use super::{Change, ChangedFile};

/// In the order in which they are replaced: the shim runs the ones before it, and `firn` is the last.
pub const PROGRAMS: [&str; 7] = [
    names::CRIU_PLUGIN,
    names::CUDA_LIBRARY,
    names::WORKER_PROGRAM,
    names::HOOK_PROGRAM,
    names::RUNC_PROGRAM,
    names::SHIM_PROGRAM,
    "firn",
];

/// The programs of a release, open: they can be read after a change of the root directory.
pub struct Release(Vec<(&'static str, File)>);

impl Release {
    pub fn open(dir: &Path) -> Result<Self, InstallError> {
        let open = |name: &'static str| {
            let path = dir.join(name);
            match io::Result::if_present(File::open(&path)) {
                Ok(Some(file)) => Ok((name, file)),
                Ok(None) => Err(InstallError::Missing {
                    dir: dir.to_owned(),
                    name,
                }),
                Err(source) => Err(InstallError::io("open", path)(source)),
            }
        };
        Ok(Self(PROGRAMS.into_iter().map(open).collect::<Result<_, _>>()?))
    }

    /// Copies what differs into the directory. All copies are written before the first is renamed, so a full
    /// disk leaves the installed release as it is.
    pub fn install(mut self, bin: &Path, dry_run: bool) -> Result<Vec<ChangedFile>, InstallError> {
        let (mut done, mut copies) = (Vec::new(), Copies::default());
        if !dry_run {
            fs::create_dir_all(bin).map_err(InstallError::io("make", bin))?;
        }
        for (name, file) in &mut self.0 {
            let path = bin.join(*name);
            let change = change(file, &path).map_err(InstallError::io("read", &path))?;
            if change != Change::Unchanged && !dry_run {
                copies
                    .write(file, &path)
                    .map_err(InstallError::io("write", &path))?;
            }
            done.push(ChangedFile { path, change });
        }
        copies.rename()?;
        Ok(done)
    }
}

/// What installing the file at the path would change.
fn change(file: &mut File, path: &Path) -> io::Result<Change> {
    let Some(there) = io::Result::if_present(File::open(path))? else {
        return Ok(Change::Added);
    };
    let executable = there.metadata()?.permissions().mode() & 0o7777 == MODE;
    let same = executable && same(file, there)?;
    file.seek(SeekFrom::Start(0))?;
    Ok(if same { Change::Unchanged } else { Change::Replaced })
}

const MODE: u32 = 0o755;

/// Bytes that are compared at once: one after the other, 300 MB of a debug build took 20 s of a processor.
const PIECE: u64 = 1 << 20;

fn same(one: &mut File, mut other: File) -> io::Result<bool> {
    if one.metadata()?.len() != other.metadata()?.len() {
        return Ok(false);
    }
    let piece = |file: &mut File| {
        let mut bytes = Vec::new();
        file.take(PIECE).read_to_end(&mut bytes).map(|_| bytes)
    };
    loop {
        let (ours, theirs) = (piece(one)?, piece(&mut other)?);
        if ours != theirs || ours.is_empty() {
            return Ok(ours == theirs);
        }
    }
}

/// Copies that do not have their names yet. Those that do not get them are removed.
#[derive(Default)]
struct Copies(Vec<(PathBuf, PathBuf)>);

impl Copies {
    fn write(&mut self, file: &mut File, to: &Path) -> io::Result<()> {
        let mut name = std::ffi::OsString::from(".");
        name.push(to.file_name().unwrap_or_default());
        name.push(".new");
        let copy = to.with_file_name(name);
        // Of an installation that was killed.
        io::Result::if_present(fs::remove_file(&copy))?;
        let mut written = File::create_new(&copy)?;
        self.0.push((copy, to.to_owned()));
        io::copy(file, &mut written)?;
        written.set_permissions(fs::Permissions::from_mode(MODE))?;
        written.sync_all()
    }

    fn rename(&mut self) -> Result<(), InstallError> {
        for (copy, to) in self.0.drain(..) {
            fs::rename(&copy, &to).map_err(InstallError::io("replace", &to))?;
        }
        Ok(())
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        for (copy, _) in &self.0 {
            let _removed = fs::remove_file(copy);
        }
    }
}

/// Removes the programs.
pub fn remove(bin: &Path, dry_run: bool) -> Result<Vec<ChangedFile>, InstallError> {
    let mut done = Vec::new();
    for name in PROGRAMS.into_iter().rev() {
        let path = bin.join(name);
        let there = if dry_run {
            path.symlink_metadata().is_ok().then_some(())
        } else {
            io::Result::if_present(fs::remove_file(&path)).map_err(InstallError::io("remove", &path))?
        };
        done.extend(there.map(|()| ChangedFile {
            path,
            change: Change::Removed,
        }));
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release(dir: &Path, text: &str) -> Release {
        for name in PROGRAMS {
            fs::write(dir.join(name), format!("{name} {text}")).unwrap();
        }
        Release::open(dir).unwrap()
    }

    fn changes(done: &[ChangedFile]) -> Vec<Change> {
        done.iter().map(|done| done.change).collect()
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn only_what_differs_is_replaced_and_all_is_removed() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let bin = to.path().join("usr/local/bin");
        let done = release(from.path(), "1").install(&bin, true).unwrap();
        assert_eq!(changes(&done), [Change::Added; 7]);
        assert!(!bin.exists(), "a dry run made something");
        release(from.path(), "1").install(&bin, false).unwrap();
        let again = release(from.path(), "1").install(&bin, false).unwrap();
        assert_eq!(changes(&again), [Change::Unchanged; 7]);
        fs::set_permissions(bin.join("firn-gpu"), fs::Permissions::from_mode(0o644)).unwrap();
        fs::write(bin.join("other"), "").unwrap();
        let second = release(from.path(), "1").install(&bin, false).unwrap();
        assert_eq!(second[2].change, Change::Replaced);
        let upgraded = release(from.path(), "2").install(&bin, false).unwrap();
        assert_eq!(changes(&upgraded), [Change::Replaced; 7]);
        assert_eq!(fs::read_to_string(bin.join("firn")).unwrap(), "firn 2");
        assert_eq!(remove(&bin, true).unwrap().len(), 7);
        assert_eq!(remove(&bin, false).unwrap().len(), 7);
        assert_eq!(names(&bin), ["other"]);
        assert!(remove(&bin, false).unwrap().is_empty());
    }

    #[test]
    fn a_failure_leaves_the_installed_release() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let bin = to.path();
        release(from.path(), "1").install(bin, false).unwrap();
        // The last copy cannot be written.
        fs::create_dir(bin.join(".firn.new")).unwrap();
        let failed = release(from.path(), "2").install(bin, false);
        assert!(matches!(failed, Err(InstallError::Io { .. })), "{failed:?}");
        assert_eq!(fs::read_to_string(bin.join("firn-gpu")).unwrap(), "firn-gpu 1");
        fs::remove_dir(bin.join(".firn.new")).unwrap();
        assert_eq!(names(bin).len(), 7, "{:?}", names(bin));
        fs::remove_file(from.path().join("firn-hook")).unwrap();
        let missing = Release::open(from.path());
        assert!(matches!(
            missing.err().unwrap(),
            InstallError::Missing {
                name: "firn-hook",
                ..
            }
        ));
    }
}
