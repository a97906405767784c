use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::process::Command;
use std::thread;

use firn_host::Problem;
use nix::fcntl::FlockArg;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tempfile::TempDir;

use super::*;
use crate::fixtures::index;

mod contents;
mod form;
mod layout;
mod removal;
mod write;

/// A store in a directory of its own.
struct Scratch {
    dir: TempDir,
    store: Store,
}

impl Scratch {
    fn new() -> Self {
        Self::packed(&Packing::default())
    }

    fn packed(packing: &Packing) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(&dir.path().join("store"), packing).unwrap();
        Self { dir, store }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("store")
    }

    /// A checkpoint with these extents, each a piece of its own.
    fn holds(&self, contents: &[&[u8]]) -> (Digest, Index) {
        let writer = self.store.writer(None).unwrap();
        let put = |content: &&[u8]| piece(content.len() as u64, vec![writer.put(content).unwrap()]);
        let index = index(contents.iter().map(put).collect());
        (writer.finish(&index).unwrap(), index)
    }

    fn extent(&self, digest: &Digest) -> PathBuf {
        self.store.extent_path(&self.store.form().name(digest))
    }

    /// Names of all files, and of directories in `new/`.
    fn files(&self) -> Vec<String> {
        let mut found = Vec::new();
        for room in ["extents", "images", "new"] {
            walk(&self.root().join(room), &mut found);
        }
        let root = self.root();
        let name = |path: &PathBuf| path.strip_prefix(&root).unwrap().display().to_string();
        found.iter().map(name).collect()
    }
}

fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            walk(&path, found)
        } else {
            found.push(path)
        }
    }
}

fn piece(length: u64, extents: Vec<Option<Digest>>) -> Piece {
    Piece {
        pid: 1,
        address: 0x7000_0000_0000,
        length,
        extents,
    }
}

fn code<T: std::fmt::Debug>(result: Result<T, StoreError>) -> String {
    result.unwrap_err().code().to_owned()
}

#[test]
fn memory_is_read_as_it_was_written() {
    let scratch = Scratch::new();
    let whole: Vec<u8> = (0..=250).cycle().take(EXTENT).collect();
    let (digest, index) = scratch.holds(&[&whole, b"short", &[0; 8192]]);
    let store = Store::open(&scratch.root(), &Packing::default()).unwrap();
    assert_eq!(store.id(), scratch.store.id());
    assert_eq!(store.index(&digest).unwrap(), index);
    let extents: Vec<_> = index.extents().collect();
    let mut buffer = vec![1; EXTENT];
    store.read(&extents[0].0.unwrap(), &mut buffer).unwrap();
    assert_eq!(buffer, whole);
    store.read(&extents[1].0.unwrap(), &mut buffer[..5]).unwrap();
    assert_eq!(&buffer[..5], b"short");
    assert_eq!(extents[2], (None, 8192));
    assert_eq!(
        (index.bytes(), index.zero_bytes()),
        (EXTENT as u64 + 5 + 8192, 8192)
    );
    assert_eq!(store.missing(&index).unwrap(), []);
}

#[test]
fn a_range_has_extents_of_one_size_and_a_shorter_last_one() {
    let digest = Digest::of(b"x");
    let range = piece(2 * EXTENT as u64 + 7, vec![None, Some(digest), None]);
    let lengths: Vec<_> = range.extents().map(|(_, length)| length).collect();
    assert_eq!(lengths, [EXTENT, EXTENT, 7]);
    assert_eq!(index(vec![range]).zero_bytes(), EXTENT as u64 + 7);
}

#[test]
fn what_is_not_there_is_named_with_its_store_and_a_remedy() {
    let scratch = Scratch::new();
    let (digest, index) = scratch.holds(&[b"one", b"two"]);
    let one = index.pieces[0].extents[0].unwrap();
    fs::remove_file(scratch.extent(&one)).unwrap();
    assert_eq!(scratch.store.missing(&index).unwrap(), [one]);
    let error = scratch.store.read(&one, &mut [0; 3]).unwrap_err();
    assert_eq!(error.code(), "FIRN-STORE-MISSING");
    let text = error.to_string();
    assert!(
        text.contains(scratch.store.id()) && text.contains(&one.short()),
        "{text}"
    );
    assert!(error.hint().contains("firn store pull"), "{}", error.hint());
    fs::remove_file(scratch.root().join("images").join(digest.to_string())).unwrap();
    assert_eq!(code(scratch.store.index(&digest)), "FIRN-STORE-MISSING");
}

/// Each way in which an extent can have another content than its name stands for.
#[test]
fn a_damaged_extent_is_found_when_it_is_read() {
    let damages: [fn(&Path, &Path); 7] = [
        |extent, _| fs::write(extent, b"onf").unwrap(),
        |extent, _| fs::write(extent, b"on").unwrap(),
        |extent, _| fs::write(extent, b"ones").unwrap(),
        |extent, other| fs::rename(other, extent).unwrap(),
        |extent, other| {
            fs::remove_file(extent).unwrap();
            symlink(other, extent).unwrap();
        },
        // Nobody writes into it: whoever opened it would wait for ever.
        |extent, _| {
            fs::remove_file(extent).unwrap();
            mkfifo(extent, Mode::S_IRUSR).unwrap();
        },
        |extent, _| {
            fs::remove_file(extent).unwrap();
            fs::create_dir(extent).unwrap();
        },
    ];
    for (number, damage) in damages.into_iter().enumerate() {
        let scratch = Scratch::new();
        let (_, index) = scratch.holds(&[b"one", b"two"]);
        let [one, two] = [0, 1].map(|at: usize| index.pieces[at].extents[0].unwrap());
        damage(&scratch.extent(&one), &scratch.extent(&two));
        let read = scratch.store.read(&one, &mut [0; 3]);
        assert_eq!(code(read), "FIRN-STORE-DAMAGED", "damage {number}");
    }
}

#[test]
fn a_link_in_the_place_of_a_directory_is_not_followed() {
    let scratch = Scratch::new();
    let (_, index) = scratch.holds(&[b"one"]);
    let one = index.pieces[0].extents[0].unwrap();
    let fan = scratch.extent(&one).parent().unwrap().to_owned();
    let elsewhere = scratch.dir.path().join("elsewhere");
    fs::rename(&fan, &elsewhere).unwrap();
    symlink(&elsewhere, &fan).unwrap();
    assert_eq!(code(scratch.store.read(&one, &mut [0; 3])), "FIRN-STORE-DAMAGED");
    assert_eq!(scratch.store.missing(&index).unwrap(), [one]);
}

#[test]
fn a_damaged_index_is_refused() {
    let scratch = Scratch::new();
    let (digest, _) = scratch.holds(&[b"one"]);
    let path = scratch.root().join("images").join(digest.to_string());
    let flipped = String::from_utf8(fs::read(&path).unwrap())
        .unwrap()
        .replace("job", "jpb");
    fs::write(&path, flipped).unwrap();
    assert_eq!(code(scratch.store.index(&digest)), "FIRN-STORE-DAMAGED");
    fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    let error = scratch.store.index(&digest).unwrap_err();
    assert!(
        matches!(
            error,
            StoreError::Index {
                source: IndexError::TooLarge,
                ..
            }
        ),
        "{error:?}"
    );
    fs::remove_file(&path).unwrap();
    symlink("/etc/passwd", &path).unwrap();
    assert_eq!(code(scratch.store.index(&digest)), "FIRN-STORE-DAMAGED");
}

/// Indexes that no checkpoint writes, by the field that is wrong.
fn bad_indexes() -> Vec<(&'static str, Index)> {
    let extents = |count| vec![Digest::of(b"x"); count].into_iter().map(Some).collect();
    vec![
        ("pieces", index(vec![piece(0, vec![])])),
        ("pieces", index(vec![piece(5, extents(2))])),
        ("pieces", index(vec![piece(EXTENT as u64 + 1, extents(1))])),
        ("pieces", index(vec![piece(u64::MAX, extents(1))])),
        (
            "pieces",
            index(vec![Piece {
                pid: 0,
                ..piece(5, extents(1))
            }]),
        ),
        (
            "image",
            Index {
                image: "job".into(),
                ..index(vec![])
            },
        ),
        (
            "host",
            Index {
                host: "a\u{1b}[2J".to_owned(),
                ..index(vec![])
            },
        ),
        (
            "container",
            Index {
                container: "x".repeat(257),
                ..index(vec![])
            },
        ),
    ]
}

/// An index whose content matches its name was still written by somebody else.
#[test]
fn an_index_with_impossible_values_is_refused() {
    let scratch = Scratch::new();
    for (field, index) in bad_indexes() {
        let bytes = serde_json::to_vec(&serde_json::json!({
            "format": "firn-store-index", "version": 1, "index": index,
        }));
        match place(&scratch, &bytes.unwrap()) {
            StoreError::Index { source, .. } => {
                assert!(
                    matches!(source, IndexError::Value(name) if name == field),
                    "{field}: {source:?}"
                );
            }
            error => panic!("{field}: {error:?}"),
        }
        let written = scratch.store.writer(None).unwrap().finish(&index);
        assert_eq!(code(written), "FIRN-STORE-UNUSABLE", "{field}");
    }
    for bytes in [
        &b""[..],
        b"{}",
        b"null",
        b"{\"format\":\"firn-store-index\",\"version\":1,\"index\":{}}",
    ] {
        assert_eq!(place(&scratch, bytes).code(), "FIRN-STORE-DAMAGED");
    }
    let newer = br#"{"format":"firn-store-index","version":2,"index":["of a shape to come"]}"#;
    let error = place(&scratch, newer);
    assert_eq!(
        (error.code(), error.hint()),
        ("FIRN-STORE-UNUSABLE", "upgrade firn on this node")
    );
}

/// What becomes of an index that consists of these bytes.
fn place(scratch: &Scratch, bytes: &[u8]) -> StoreError {
    let digest = Digest::of(bytes);
    fs::write(scratch.root().join("images").join(digest.to_string()), bytes).unwrap();
    scratch.store.index(&digest).unwrap_err()
}

#[test]
fn a_digest_is_written_in_one_way_only() {
    let digest = Digest::of(b"");
    // The BLAKE3 of nothing, as its specification gives it.
    let text = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
    assert_eq!(digest.to_string(), text);
    assert_eq!(text.parse(), Ok(digest));
    let upper = text.to_uppercase();
    for bad in [
        "",
        &text[2..],
        &upper,
        &format!("{text}00"),
        &text.replace("af", "+f"),
        "../../../../x",
    ] {
        assert_eq!(bad.parse::<Digest>(), Err(NotADigest), "{bad}");
    }
}
