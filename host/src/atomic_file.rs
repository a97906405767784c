//! Replacing a file as a whole: whoever reads sees the old content or the new, also after a crash.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use crate::UnlessAbsent;

/// Writes `bytes` to `dir/name` through a temporary file in the same directory, and makes both durable.
///
/// The caller is the only writer of that name. The temporary name is fixed, so that what a killed writer
/// has left is removed by the next instead of piling up. Whatever else stands there is removed, too, and
/// not opened: the directory may be another user's.
pub fn write(dir: &Path, name: &str, bytes: &[u8], mode: u32) -> io::Result<()> {
    let temporary = dir.join(format!(".{name}.tmp"));
    let result =
        write_new(&temporary, bytes, mode).and_then(|()| std::fs::rename(&temporary, dir.join(name)));
    if result.is_err() {
        // The first failure is the one to report; what cannot be removed now is removed by the next attempt.
        let _ = std::fs::remove_file(&temporary);
    }
    result?;
    File::open(dir)?.sync_all()
}

fn write_new(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    std::fs::remove_file(path).unless_absent()?;
    let mut file = OpenOptions::new()
        .write(true)
        // O_EXCL: neither a link nor anything that was made meanwhile.
        .create_new(true)
        .mode(mode)
        .open(path)?;
    // The mode given to open is cut by the umask.
    file.set_permissions(std::fs::Permissions::from_mode(mode))?;
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_content_and_mode_and_leaves_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), "old").unwrap();
        std::fs::write(dir.path().join(".f.tmp"), "left over by a killed writer").unwrap();
        write(dir.path(), "f", b"new", 0o640).unwrap();
        assert_eq!(std::fs::read(dir.path().join("f")).unwrap(), b"new");
        assert_eq!(
            dir.path().join("f").metadata().unwrap().permissions().mode() & 0o777,
            0o640
        );
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_stands_in_the_way_is_neither_written_nor_waited_for_nor_kept() {
        use std::os::unix::fs::{MetadataExt, chown, symlink};
        type Make<'a> = &'a dyn Fn(&Path);
        let victim = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&victim, "untouched").unwrap();
        let cases: [Make<'_>; 4] = [
            &|path| symlink(&victim, path).unwrap(),
            &|path| std::fs::hard_link(&victim, path).unwrap(),
            // Nobody reads from it.
            &|path| nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap(),
            &|path| {
                std::fs::write(path, "of a user").unwrap();
                chown(path, Some(1000), None).unwrap();
            },
        ];
        for make in cases {
            let dir = tempfile::tempdir_in(victim.path().parent().unwrap()).unwrap();
            make(&dir.path().join(".f.tmp"));
            write(dir.path(), "f", b"new", 0o600).unwrap();
            let file = dir.path().join("f");
            assert_eq!(std::fs::read(&file).unwrap(), b"new");
            let metadata = std::fs::symlink_metadata(&file).unwrap();
            assert!(
                metadata.is_file() && metadata.uid() == 0 && metadata.nlink() == 1,
                "{metadata:?}"
            );
            assert_eq!(std::fs::read(&victim).unwrap(), b"untouched");
        }
        // A directory is an error.
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join(".f.tmp")).unwrap();
        write(dir.path(), "f", b"new", 0o600).unwrap_err();
    }
}
