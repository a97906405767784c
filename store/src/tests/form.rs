//! Stores that compress and encrypt.

use super::*;

const SECRET: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
const OTHER: &str = "ffeeddccbbaa99887766554433221100ffeeddccbbaa99887766554433221100";

/// Text of the memory and of its index that noise does not have by chance: eight bytes and more.
const SHOWN: [&str; 3] = ["a word that comes", "/images/job", "checkpoint"];

/// A file of a key, with this mode.
fn file(dir: &TempDir, text: &str, mode: u32) -> PathBuf {
    let path = dir
        .path()
        .join(format!("key-{mode:o}-{}", Digest::of(text.as_bytes())));
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    path
}

fn key(text: &str) -> Key {
    let dir = tempfile::tempdir().unwrap();
    Key::read(&file(&dir, &format!("{text}\n"), 0o600)).unwrap()
}

fn packing(secret: Option<&str>, compressed: bool) -> Packing {
    Packing {
        key: secret.map(key),
        compressed,
    }
}

fn forms() -> [Packing; 3] {
    [
        packing(None, true),
        packing(Some(SECRET), false),
        packing(Some(SECRET), true),
    ]
}

/// Memory that compresses, and some that does not.
fn memory() -> [Vec<u8>; 2] {
    let words = b"a word that comes again and again ".repeat(2000);
    let noise = (0..700_u32).flat_map(|n| *Digest::of(&n.to_ne_bytes()).as_bytes());
    [words, noise.collect()]
}

fn stored(scratch: &Scratch) -> (Digest, Vec<(Digest, Vec<u8>)>) {
    let [words, noise] = memory();
    let (id, index) = scratch.holds(&[&words, &noise, &[0; 4096]]);
    let digests = index.extents().filter_map(|(extent, _)| extent);
    (id, digests.zip([words, noise]).collect())
}

#[test]
fn memory_is_read_as_it_was_written_and_written_once() {
    for packing in forms() {
        let scratch = Scratch::packed(&packing);
        let (id, extents) = stored(&scratch);
        let files = scratch.files();
        let store = Store::open(&scratch.root(), &packing).unwrap();
        let index = store.index(&id).unwrap();
        assert_eq!(store.missing(&index).unwrap(), []);
        for (extent, content) in &extents {
            let mut buffer = vec![1; content.len()];
            store.read(extent, &mut buffer).unwrap();
            assert_eq!(buffer, *content);
            let size = fs::metadata(scratch.extent(extent)).unwrap().len();
            let name = store.form().name(extent);
            assert_eq!(store.extents().unwrap()[&name], size);
            store.compare(&name, size, &mut vec![0; EXTENT]).unwrap();
            let shrinks = size < content.len() as u64 / 10;
            assert_eq!(shrinks, packing.compressed && content.starts_with(b"a word"));
            // Another length is another content.
            assert_eq!(code(store.read(extent, &mut buffer[1..])), "FIRN-STORE-DAMAGED");
        }
        let writer = store.writer(None).unwrap();
        for (extent, content) in &extents {
            assert_eq!(writer.put(content).unwrap(), Some(*extent));
        }
        assert_eq!((writer.written(), writer.finish(&index).unwrap()), (0, id));
        assert_eq!(scratch.files(), files);
    }
}

#[test]
fn an_encrypted_store_shows_nothing_of_the_memory() {
    let scratch = Scratch::packed(&packing(Some(SECRET), false));
    let (id, extents) = stored(&scratch);
    let shown = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        let extent = |(extent, _): &(Digest, Vec<u8>)| text.contains(&extent.to_string());
        SHOWN.iter().any(|&word| text.contains(word)) || text.contains(SECRET) || extents.iter().any(extent)
    };
    // A store in the clear shows each of them.
    let clear = Scratch::new();
    stored(&clear);
    let files = clear
        .files()
        .into_iter()
        .map(|name| fs::read(clear.root().join(name)).unwrap());
    let texts: Vec<_> = files
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .collect();
    for word in SHOWN {
        assert!(texts.iter().any(|text| text.contains(word)), "{word}");
    }
    for name in scratch.files() {
        assert!(!shown(name.as_bytes()), "{name}");
        assert!(!shown(&fs::read(scratch.root().join(&name)).unwrap()), "{name}");
    }
    assert!(!shown(&fs::read(scratch.root().join("firn-store.json")).unwrap()));
    // Another store with the same key has other names.
    let other = Scratch::packed(&packing(Some(SECRET), false));
    let (same, _) = stored(&other);
    assert_eq!(same, id);
    assert_ne!(
        scratch.extent(&extents[0].0).file_name(),
        other.extent(&extents[0].0).file_name()
    );
}

#[test]
fn what_was_changed_is_damage() {
    for packing in forms() {
        let scratch = Scratch::packed(&packing);
        let (id, extents) = stored(&scratch);
        let (first, second) = (scratch.extent(&extents[0].0), scratch.extent(&extents[1].0));
        let (kept, other) = (fs::read(&first).unwrap(), fs::read(&second).unwrap());
        let mut changes: Vec<Vec<u8>> = [0, 1, kept.len() / 2, kept.len() - 1]
            .map(|at| {
                let mut changed = kept.clone();
                changed[at] ^= 1;
                changed
            })
            .into();
        changes.extend([
            Vec::new(),
            vec![0],
            kept[..kept.len() - 1].to_vec(),
            other.clone(),
            memory()[0].clone(),
        ]);
        for changed in &changes {
            fs::write(&first, changed).unwrap();
            let mut buffer = vec![0; extents[0].1.len()];
            let read = scratch.store.read(&extents[0].0, &mut buffer);
            assert_eq!(code(read), "FIRN-STORE-DAMAGED", "{:?}", changed.get(..4));
            let name = scratch.store.form().name(&extents[0].0);
            let compared = scratch
                .store
                .compare(&name, changed.len() as u64, &mut vec![0; EXTENT]);
            assert_eq!(code(compared), "FIRN-STORE-DAMAGED");
        }
        let index = scratch.root().join(id.image_path());
        let mut bytes = fs::read(&index).unwrap();
        bytes[9] ^= 1;
        fs::write(&index, bytes).unwrap();
        assert_eq!(code(scratch.store.index(&id)), "FIRN-STORE-DAMAGED");
    }
}

#[test]
fn what_would_become_larger_than_an_extent_is_not_unpacked() {
    let scratch = Scratch::packed(&packing(None, true));
    let (_, extents) = stored(&scratch);
    let bomb = zstd::bulk::compress(&vec![7; 64 << 20], 1).unwrap();
    fs::write(scratch.extent(&extents[0].0), [&[1], bomb.as_slice()].concat()).unwrap();
    let read = scratch.store.read(&extents[0].0, &mut vec![0; EXTENT]);
    assert_eq!(code(read), "FIRN-STORE-DAMAGED");
}

#[test]
fn a_store_is_opened_with_its_key_alone() {
    let open = |scratch: &Scratch, packing: &Packing| {
        let opened = [
            Store::open(&scratch.root(), packing),
            Store::create(&scratch.root(), packing),
        ];
        opened.map(|opened| opened.map_or_else(|error| error.code().to_owned(), |_| String::new()))
    };
    let encrypted = Scratch::packed(&packing(Some(SECRET), false));
    assert_eq!(open(&encrypted, &packing(Some(SECRET), false)), ["", ""]);
    assert_eq!(
        open(&encrypted, &packing(Some(OTHER), false)),
        ["FIRN-STORE-KEY"; 2]
    );
    assert_eq!(open(&encrypted, &packing(None, false)), ["FIRN-STORE-KEY"; 2]);
    let plain = Scratch::new();
    assert_eq!(open(&plain, &packing(Some(SECRET), false)), ["FIRN-STORE-KEY"; 2]);
    assert_eq!(open(&plain, &packing(None, true)), ["FIRN-STORE-UNUSABLE"; 2]);
    // What it was made with stays.
    let compressed = Scratch::packed(&packing(None, true));
    assert_eq!(open(&compressed, &packing(None, false)), ["", ""]);
}

#[test]
fn a_description_whose_version_does_not_fit_is_refused() {
    let scratch = Scratch::packed(&packing(Some(SECRET), true));
    let path = scratch.root().join("firn-store.json");
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(r#""version":2,"#), "{text}");
    for changed in [
        text.replace(r#""version":2,"#, r#""version":1,"#),
        text.replace(r#""version":2,"#, r#""version":3,"#),
        r#"{"format":"firn-store","version":2,"id":"x"}"#.to_owned(),
    ] {
        fs::write(&path, &changed).unwrap();
        let opened = Store::open(&scratch.root(), &packing(Some(SECRET), true));
        assert_eq!(code(opened), "FIRN-STORE-UNUSABLE", "{changed}");
    }
}

#[test]
fn a_key_is_64_digits_in_a_file_that_nobody_else_reads() {
    let dir = tempfile::tempdir().unwrap();
    for text in [
        "",
        "x",
        &SECRET[1..],
        &SECRET.to_uppercase(),
        &format!("{SECRET} {SECRET}"),
    ] {
        assert_eq!(
            code(Key::read(&file(&dir, text, 0o600))),
            "FIRN-STORE-KEY",
            "{text}"
        );
    }
    for mode in [0o640, 0o604, 0o644, 0o660] {
        assert_eq!(
            code(Key::read(&file(&dir, SECRET, mode))),
            "FIRN-STORE-KEY",
            "{mode:o}"
        );
    }
    for path in [dir.path().to_owned(), dir.path().join("none")] {
        assert_eq!(code(Key::read(&path)), "FIRN-STORE-KEY", "{}", path.display());
    }
    let read = Key::read(&file(&dir, SECRET, 0o400)).unwrap();
    assert_eq!(format!("{read:?}"), "Key");
}
