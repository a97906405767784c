//! Directories at places where others may write: which of them only root has made and filled.
//!
//! The name proves nothing there, and where containers can write, neither does the owner: a container's
//! root is uid 0, too. So both the directory and the one around it are looked at, each by its descriptor.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// Whether no other user can exchange what root has put into this directory: it is root's, and others may not
/// write there, or only names of their own (the sticky bit, as in /tmp).
pub fn holds_for_root(parent: &Metadata) -> bool {
    is_roots(parent) || parent.is_dir() && parent.uid() == 0 && parent.mode() & 0o1000 != 0
}

/// Whether this is a directory of root's in which others change nothing.
pub fn is_roots(dir: &Metadata) -> bool {
    dir.is_dir() && dir.uid() == 0 && dir.mode() & 0o022 == 0
}

/// Whether this is a directory of root's that others may not even enter.
pub fn is_roots_alone(dir: &Metadata) -> bool {
    dir.is_dir() && dir.uid() == 0 && dir.mode() & 0o077 == 0
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown};

    use super::*;

    #[test]
    fn owner_and_mode_decide() {
        let dir = tempfile::tempdir().unwrap();
        let of = |owner: u32, mode: u32| {
            fs::set_permissions(dir.path(), Permissions::from_mode(mode)).unwrap();
            chown(dir.path(), Some(owner), None).unwrap();
            let metadata = fs::metadata(dir.path()).unwrap();
            [holds_for_root, is_roots, is_roots_alone].map(|rule| rule(&metadata))
        };
        assert_eq!(of(0, 0o700), [true, true, true]);
        assert_eq!(of(0, 0o755), [true, true, false]);
        assert_eq!(of(0, 0o710), [true, true, false]);
        assert_eq!(of(0, 0o1777), [true, false, false]);
        for mode in [0o777, 0o720, 0o702] {
            assert_eq!(of(0, mode), [false; 3], "{mode:o}");
        }
        for mode in [0o700, 0o755, 0o1777] {
            assert_eq!(of(1000, mode), [false; 3], "{mode:o}");
        }
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        let metadata = fs::metadata(&file).unwrap();
        assert!(
            ![holds_for_root, is_roots, is_roots_alone]
                .iter()
                .any(|rule| rule(&metadata))
        );
    }
}
