//! Which node this is. Names of nodes are not distinct: `localhost`, and copies of one installation.

use std::path::Path;

use firn_host::bounded::read_at_most;

use crate::block_hash::hex;

const PATH: &str = "/etc/machine-id";
/// More than the file has.
const LIMIT: u64 = 1 << 10;
const DIGITS: usize = 32;

/// systemd asks programs not to show the id itself: who knows it may take it for a secret elsewhere.
const PURPOSE: &str = "firn-store 2026-11 which machine";

/// The id of this node in an index: 32 digits that are made from its machine-id. None where it has none, as
/// before its first start: then no index is known to be its own.
pub fn machine() -> Option<String> {
    of(Path::new(PATH))
}

fn of(path: &Path) -> Option<String> {
    let bytes = read_at_most(std::fs::File::open(path).ok()?, LIMIT).ok()??;
    let id = bytes.trim_ascii();
    let is_id = id.len() == DIGITS && id.iter().all(u8::is_ascii_hexdigit);
    let mut made = is_id.then(|| hex(&blake3::derive_key(PURPOSE, id)))?;
    made.truncate(DIGITS);
    Some(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_known_by_its_machine_id() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("machine-id");
        let of = |text: &str| {
            std::fs::write(&path, text).unwrap();
            of(&path)
        };
        let one = of("3d1219c7c4c5404aaa1f6d2a48adfda4\n").unwrap();
        assert_eq!(
            (one.len(), &*one),
            (DIGITS, &*of("3d1219c7c4c5404aaa1f6d2a48adfda4").unwrap())
        );
        assert!(!one.contains("3d1219c7"));
        assert_ne!(of("3d1219c7c4c5404aaa1f6d2a48adfda5"), Some(one));
        assert_eq!(machine(), super::of(Path::new(PATH)));
        for none in [
            "",
            "uninitialized\n",
            "3d1219c7",
            "3d1219c7c4c5404aaa1f6d2a48adfda4a",
            "zd1219c7c4c5404aaa1f6d2a48adfda4",
        ] {
            assert_eq!(of(none), None, "{none:?}");
        }
    }
}
