//! What must hold for a checkpoint that is an image, whatever its bytes are.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use firn_image::form;
use sha2::{Digest, Sha256};

use super::{Cap, Parts, Store, Target, parts};

/// Bytes that an image may take.
const CAP: u64 = 1 << 20;
/// Stands in an index for the digest and the size of the second blob.
const DIGEST: &str = "@DIGEST@";
const SIZE: &str = "@SIZE@";

/// An index or a manifest, NUL, and the archive that it names by [`DIGEST`] and [`SIZE`]. Nothing but regular
/// files is made, in the two places, for root alone, and no more than may be.
pub fn checkpoint_image(bytes: &[u8]) {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let (list, blob) = (&bytes[..end], bytes.get(end + 1..).unwrap_or_default());
    let dir = tempfile::tempdir().expect("there is a temporary directory");
    let (blobs, root) = (dir.path().join("blobs/sha256"), dir.path().join("root"));
    let made = fs::create_dir_all(&blobs).and_then(|()| fs::create_dir(&root));
    made.expect("the directory is writable");
    let add = |bytes: &[u8]| {
        let sum = Sha256::digest(bytes);
        let name: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
        fs::write(blobs.join(&name), bytes).expect("the directory is writable");
        format!("sha256:{name}")
    };
    let digest = add(blob);
    let list = String::from_utf8_lossy(list).replace(DIGEST, &digest);
    let list = add(list.replace(SIZE, &blob.len().to_string()).as_bytes());
    let (store, cap) = (Store::new(dir.path()), Cap::new(CAP));
    let target = Target {
        root: root.clone(),
        cap: cap.clone(),
    };
    let unpacked = parts(&store, &list).and_then(|parts| match parts {
        Parts::Archive(archive) => target.archive(store.open(&archive)?),
        Parts::Apart(image, layer) => {
            let layer = layer.map(|layer| store.open(&layer)).transpose()?;
            target.apart(store.open(&image)?, layer)
        }
    });
    let mut taken = 0;
    for entry in fs::read_dir(&root).expect("it is there") {
        let path = entry.expect("it can be read").path();
        let name = path.file_name().unwrap_or_default();
        if name == form::IMAGE {
            for entry in fs::read_dir(&path).expect("it is a directory") {
                taken += size_of(&entry.expect("it can be read").path());
            }
        } else {
            assert_eq!(name, form::LAYER);
            taken += size_of(&path);
        }
    }
    assert!(taken <= CAP - cap.left(), "{taken} bytes were not counted");
    if unpacked.is_ok() {
        assert!(root.join(form::IMAGE).is_dir());
    }
}

fn size_of(path: &Path) -> u64 {
    let found = path.symlink_metadata().expect("it is there");
    assert!(found.is_file() && found.mode() & 0o777 == 0o600 && found.nlink() == 1);
    found.len()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kept_inputs_pass() {
        crate::kept::run("checkpoint_image", super::checkpoint_image);
    }
}
