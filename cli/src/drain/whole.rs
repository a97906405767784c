//! What an agent and a kubelet have printed: whether a checkpoint is whole, and the body of an answer.

use serde::Deserialize;

/// What firn.json has that matters here.
#[derive(Deserialize)]
struct Manifest {
    bulk: Option<Stored>,
    images: Vec<File>,
}

#[derive(Deserialize)]
struct Stored {
    store: String,
}

#[derive(Deserialize)]
struct File {
    name: String,
    size: u64,
}

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
    let mut values = serde_json::Deserializer::from_str(shown).into_iter::<Manifest>();
    let manifest = values.next().and_then(Result::ok);
    let manifest = manifest.ok_or_else(|| Lack::File("its firn.json cannot be read".to_owned()))?;
    let files = shown.get(values.byte_offset()..).unwrap_or_default();
    if let Some(bulk) = manifest.bulk {
        return Err(Lack::Store(bulk.store));
    }
    for File { name, size } in manifest.images {
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
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_whole_if_every_file_has_its_size() {
        let json =
            r#"{"bulk": null, "images": [{"name": "a.img", "size": 10}, {"name": "b.img", "size": 2}]}"#;
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
        let json = r#"{"bulk": {"store": "abc", "bytes": 7}, "images": []}"#;
        assert_eq!(expect(json), Err(Lack::Store("abc".to_owned())));
        let absent = r#"{"images": []}"#;
        assert_eq!(expect(absent), Ok(()));
        for wrong in ["", "{}", "cat: firn.json: No such file"] {
            assert!(matches!(expect(wrong), Err(Lack::File(_))), "{wrong}");
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
