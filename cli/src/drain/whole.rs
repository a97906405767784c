//! What an agent and a kubelet have printed: whether a checkpoint is whole, and the body of an answer.

use std::path::Path;

use firn_config::names;
use firn_host::Chain;
use firn_image::manifest::{ImageFile, Manifest};
use serde::de::IgnoredAny;

/// What a checkpoint lacks.
#[derive(Debug, PartialEq, Eq)]
pub enum Lack {
    /// Its memory, which lies in this store.
    Store(String),
    /// A file, or the size of one.
    File(String),
}

/// Compares firn.json with the files that are next to it: its lines, an empty one at the end, and for each
/// file its size and name.
pub fn expect(shown: &str) -> Result<(), Lack> {
    let unreadable = |why: String| Lack::File(format!("its firn.json cannot be read: {why}"));
    let mut values = serde_json::Deserializer::from_str(shown).into_iter::<IgnoredAny>();
    match values.next() {
        Some(Ok(_)) => {}
        Some(Err(error)) => return Err(unreadable(error.to_string())),
        None => return Err(unreadable("it is not there".to_owned())),
    }
    let (json, files) = shown.split_at(values.byte_offset());
    let manifest = Manifest::decode(json.as_bytes(), Path::new(names::MANIFEST));
    let manifest = manifest.map_err(|error| unreadable(Chain(&error).to_string()))?;
    if let Some(bulk) = manifest.bulk {
        return Err(Lack::Store(bulk.store));
    }
    for ImageFile { name, size, .. } in manifest.images {
        let wanted = format!("{size} {name}");
        if !files.lines().any(|line| line == wanted) {
            return Err(Lack::File(format!("{name} has not its {size} bytes")));
        }
    }
    Ok(())
}

/// The body of an answer of HTTP that reports a success.
pub fn body(answer: &str) -> Option<&str> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?;
    (head.starts_with("HTTP/1.") && status == "200").then_some(body)
}

#[cfg(test)]
pub mod tests {
    use firn_image::fixtures;
    use firn_image::manifest::StoredMemory;
    use firn_store::Digest;

    use super::*;

    /// As firn writes it: files a.img of 10 bytes and b.img of 2, and its memory in a store, if so.
    pub fn firn_json(store: Option<&str>) -> String {
        let mut manifest = fixtures::manifest(&[0]);
        manifest.images = [("a.img", 10), ("b.img", 2)]
            .map(|(name, size)| ImageFile {
                name: name.to_owned(),
                size,
                sha256: Some("0".repeat(64)),
                blake3: None,
                sha256_of_blocks: None,
            })
            .into();
        manifest.bulk = store.map(|store| StoredMemory {
            store: store.to_owned(),
            index: Digest::of(b"index"),
            bytes: 7,
            written: 7,
            reused: 0,
        });
        let dir = tempfile::tempdir().unwrap();
        manifest.write(dir.path()).unwrap();
        std::fs::read_to_string(dir.path().join(names::MANIFEST)).unwrap()
    }

    #[test]
    fn a_checkpoint_is_whole_if_every_file_has_its_size() {
        let json = firn_json(None);
        let of = |files: &str| expect(&format!("{json}\n\n{files}"));
        assert_eq!(of("2 b.img\n10 a.img\n5 firn.json\n"), Ok(()));
        let lack = |files: &str| match of(files) {
            Err(Lack::File(why)) => why,
            other => panic!("{other:?}"),
        };
        assert!(lack("10 a.img\n").contains("b.img"));
        assert!(lack("10 a.img\n1 b.img\n").contains("b.img"));
        assert!(lack("110 a.img\n2 b.img\n").contains("a.img"));
        assert!(lack("").contains("a.img"));
    }

    #[test]
    fn memory_in_a_store_is_no_whole_checkpoint() {
        assert_eq!(
            expect(&firn_json(Some("abc"))),
            Err(Lack::Store("abc".to_owned()))
        );
        let damaged = firn_json(None).replace("a.img", "c.img");
        for wrong in ["", "{}", "cat: firn.json: No such file", &damaged] {
            let lack = expect(wrong);
            assert!(
                matches!(&lack, Err(Lack::File(why)) if why.contains("cannot be read")),
                "{wrong}: {lack:?}"
            );
        }
    }

    #[test]
    fn only_a_success_has_a_body() {
        let ok = "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}";
        assert_eq!(body(ok), Some("{}"));
        assert_eq!(
            body("HTTP/1.0 500 Internal Server Error\r\n\r\nFIRN-GPU-BUSY"),
            None
        );
        for none in ["", "{}", "HTTP/1.0 200 OK\r\n", "200 200\r\n\r\n{}"] {
            assert_eq!(body(none), None, "{none}");
        }
    }
}
