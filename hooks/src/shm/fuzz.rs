//! What must hold for an archive of a pod's /dev/shm, whatever its bytes are.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use super::fill::Filler;
use super::open_dir;
use crate::layer::fuzz::taken;

/// Bytes that a file takes in addition to its own: the last page of each piece, and of the file.
const PAGES: u64 = 64 << 10;

/// It takes no more than its bytes, makes no device and no set-user-ID file, and nothing outside of its
/// directory.
pub fn pod_shm(bytes: &[u8]) {
    let dir = tempfile::tempdir_in("/dev/shm").expect("there is shared memory");
    let (root, kept) = (dir.path().join("root"), dir.path().join("kept"));
    fs::create_dir(&root).expect("the directory is writable");
    fs::write(&kept, "kept").expect("the directory is writable");
    let record = tempfile::tempfile().expect("there is a temporary directory");
    let filler = Filler::new(open_dir(&root).expect("it is there"), record, |_| false);
    drop(filler.fill(io::Cursor::new(bytes)));
    let made = fs::read_dir(dir.path()).expect("it is there").count();
    assert_eq!(made, 2, "something was made outside");
    assert_eq!(fs::read_to_string(&kept).expect("it is there"), "kept");
    let taken = taken(&root, |found| {
        assert!(!found.is_file() || found.mode() & 0o6000 == 0, "set-user-ID");
    });
    assert!(taken <= bytes.len() as u64 * PAGES, "{taken} bytes");
    // Modes and names are the archive's.
    drop(fs::remove_dir_all(&root));
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kept_inputs_pass() {
        crate::kept::run("pod_shm", super::pod_shm);
    }
}
