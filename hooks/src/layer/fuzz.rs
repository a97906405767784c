//! What must hold for an archive of written files, whatever its bytes are.

use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt, chroot};
use std::path::Path;

use nix::sched::{CloneFlags, unshare};

use super::{decompressed, unpack};
use crate::cap::Cap;

/// Bytes that an archive may take.
const CAP: u64 = 1 << 20;

/// It takes no more than it may, makes no device, and nothing outside of its root.
pub fn layer(bytes: &[u8]) {
    let dir = tempfile::tempdir().expect("there is a temporary directory");
    let (root, kept) = (dir.path().join("root"), dir.path().join("kept"));
    fs::create_dir(&root).expect("the directory is writable");
    fs::write(&kept, "kept").expect("the directory is writable");
    // As the program: what an absolute link leads to is in the new root. Of a thread it is its own.
    std::thread::scope(|scope| {
        let unpacked = scope.spawn(|| {
            unshare(CloneFlags::CLONE_FS).expect("the thread has its own root");
            chroot(&root).expect("this is root");
            std::env::set_current_dir("/").expect("it is there");
            decompressed(bytes).and_then(|source| unpack(source, Path::new("/"), &Cap::new(CAP)))
        });
        drop(unpacked.join().expect("nothing panics"));
    });
    let made = fs::read_dir(dir.path()).expect("it is there").count();
    assert_eq!(made, 2, "something was made outside");
    assert_eq!(fs::read_to_string(&kept).expect("it is there"), "kept");
    let taken = taken(&root, |_| {});
    assert!(taken <= CAP, "{taken} bytes");
    // Modes and names are the archive's.
    drop(fs::remove_dir_all(&root));
}

/// Bytes that files take. None is a device, and each passes the check.
pub fn taken(dir: &Path, check: fn(&Metadata)) -> u64 {
    let entries = fs::read_dir(dir).expect("root reads it");
    entries.fold(0, |taken, entry| {
        let entry = entry.expect("root reads it");
        let found = entry.metadata().expect("it is there");
        let kind = found.file_type();
        assert!(!kind.is_block_device() && !kind.is_char_device(), "a device");
        check(&found);
        taken
            + if kind.is_dir() {
                self::taken(&entry.path(), check)
            } else {
                found.blocks() * 512
            }
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kept_inputs_pass() {
        crate::kept::run("layer", super::layer);
    }
}
