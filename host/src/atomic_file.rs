//! Replacing a file as a whole: whoever reads sees the old content or the new, also after a crash.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use nix::fcntl::OFlag;

/// Writes `bytes` to `dir/name` through a temporary file in the same directory, and makes both durable.
///
/// The caller is the only writer of that name. The temporary name is fixed, so that what a killed writer has
/// left is taken over by the next instead of piling up.
pub fn write(dir: &Path, name: &str, bytes: &[u8], mode: u32) -> io::Result<()> {
    let temporary = dir.join(format!(".{name}.tmp"));
    let result =
        write_new(&temporary, bytes, mode).and_then(|()| std::fs::rename(&temporary, dir.join(name)));
    if result.is_err() {
        // The first failure is the one to report; what cannot be removed now is overwritten by the next
        // attempt.
        let _ = std::fs::remove_file(&temporary);
    }
    result?;
    File::open(dir)?.sync_all()
}

fn write_new(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .custom_flags(OFlag::O_NOFOLLOW.bits())
        .open(path)?;
    // The mode given to open is cut by the umask and does nothing on a file that was there.
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
    fn a_symlink_in_the_way_is_not_written_through() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        std::fs::write(&victim, "untouched").unwrap();
        std::os::unix::fs::symlink(&victim, dir.path().join(".f.tmp")).unwrap();
        assert!(write(dir.path(), "f", b"new", 0o600).is_err());
        assert_eq!(std::fs::read(&victim).unwrap(), b"untouched");
    }
}
