//! Writers: what they store once, in which order, and what they leave when they end early.

use firn_host::FileId;

use super::*;

/// The length of a file with holes is not what it takes.
const LARGE: usize = 256 << 10;

fn content(seed: u8) -> Vec<u8> {
    vec![seed; LARGE]
}

#[test]
fn the_same_bytes_are_stored_once() {
    let scratch = Scratch::new();
    let writer = scratch.store.writer(None).unwrap();
    let (a, b) = (content(1), content(2));
    let first = writer.put(&a).unwrap();
    assert_eq!(writer.put(&a).unwrap(), first);
    assert_ne!(writer.put(&b).unwrap(), first);
    assert_eq!(writer.put(&[0; LARGE]).unwrap(), None);
    assert_eq!(writer.put(&[]).unwrap(), None);
    let large = LARGE as u64;
    assert_eq!((writer.written(), writer.reused()), (2 * large, large));
    let index_of = |extent| index(vec![piece(large, vec![extent])]);
    writer.finish(&index_of(first)).unwrap();
    let file = FileId::of(&scratch.extent(&first.unwrap()).metadata().unwrap());
    let writer = scratch.store.writer(None).unwrap();
    assert_eq!(writer.put(&a).unwrap(), first);
    assert_eq!((writer.written(), writer.reused()), (0, large));
    writer
        .finish(&Index {
            made: 1,
            ..index_of(first)
        })
        .unwrap();
    assert_eq!(
        FileId::of(&scratch.extent(&first.unwrap()).metadata().unwrap()),
        file
    );
    // Two extents and two indexes, and nothing in new/.
    assert_eq!(scratch.files().len(), 4, "{:?}", scratch.files());
}

#[test]
fn every_byte_makes_an_extent_that_is_stored() {
    let scratch = Scratch::new();
    let writer = scratch.store.writer(None).unwrap();
    for length in [1, 15, 16, 17, 4096, 4097] {
        for at in [0, length / 2, length - 1] {
            let mut bytes = vec![0; length];
            assert_eq!(writer.put(&bytes).unwrap(), None);
            bytes[at] = 1;
            assert_eq!(
                writer.put(&bytes).unwrap(),
                Some(Digest::of(&bytes)),
                "{at} of {length}"
            );
        }
    }
    writer.abort();
}

#[test]
fn files_are_the_owners_alone() {
    let scratch = Scratch::new();
    let (digest, index) = scratch.holds(&[b"one"]);
    let extent = scratch.extent(&index.pieces[0].extents[0].unwrap());
    let image = scratch.root().join("images").join(digest.to_string());
    for (path, mode) in [
        (extent.as_path(), 0o600),
        (extent.parent().unwrap(), 0o700),
        (&image, 0o600),
    ] {
        assert_eq!(
            path.metadata().unwrap().mode() & 0o7777,
            mode,
            "{}",
            path.display()
        );
    }
}

/// A node may crash at any moment: what has its place is durable, so nothing gets it before `finish`.
#[test]
fn nothing_has_its_place_before_it_is_durable() {
    let scratch = Scratch::new();
    let mut writer = scratch.store.writer(None).unwrap();
    let one = writer.put(b"one").unwrap().unwrap();
    assert_eq!(code(scratch.store.read(&one, &mut [0; 3])), "FIRN-STORE-MISSING");
    writer.publish().unwrap();
    scratch.store.read(&one, &mut [0; 3]).unwrap();
    let two = writer.put(b"two").unwrap().unwrap();
    assert_eq!(writer.put(b"one").unwrap(), Some(one));
    assert_eq!(writer.reused(), 3);
    let index = index(vec![piece(3, vec![Some(one)]), piece(3, vec![Some(two)])]);
    writer.finish(&index).unwrap();
    assert_eq!(scratch.store.missing(&index).unwrap(), []);
}

/// What a writer leaves that was killed: while it writes an extent, between extents, while they move to
/// their place, and while it writes the index.
#[test]
fn the_next_writer_alone_removes_what_a_killed_one_has_left() {
    let scratch = Scratch::new();
    let killed = scratch.store.writer(None).unwrap();
    let one = killed.put(b"one").unwrap().unwrap();
    killed.put(b"two").unwrap();
    let own = killed.path();
    fs::write(own.join("7"), "par").unwrap();
    fs::write(own.join("index"), "{").unwrap();
    fs::create_dir(scratch.root().join("extents").join(&one.to_string()[..2])).unwrap();
    fs::rename(own.join(one.to_string()), scratch.extent(&one)).unwrap();
    let other = scratch.store.writer(None).unwrap();
    assert!(own.join("7").exists(), "another's work was removed");
    drop((killed, other));
    fs::write(scratch.root().join("new/file"), "").unwrap();
    symlink("/etc", scratch.root().join("new/link")).unwrap();
    scratch.store.writer(None).unwrap().abort();
    let extent = scratch.extent(&one);
    let left = [extent.strip_prefix(scratch.root()).unwrap().display().to_string()];
    assert_eq!(scratch.files(), left);
    assert_eq!(fs::read_dir(scratch.root().join("new")).unwrap().count(), 0);
    assert!(Path::new("/etc/passwd").exists());
    scratch.holds(&[b"one", b"two"]);
}

/// A container stands still while it is written: what takes the longer the more the store holds is done
/// before.
#[test]
fn a_store_that_is_ready_is_neither_counted_nor_cleared_again() {
    let scratch = Scratch::new();
    scratch.holds(&[b"one", b"three"]);
    let left = scratch.store.writer(None).unwrap().path();
    assert!(left.exists());
    assert_eq!(scratch.store.ready(Some(20)).unwrap(), Some(12));
    assert!(!left.exists(), "what a writer has left is there");
    // What others do from now on.
    scratch.holds(&[&[1; 100]]);
    let left = scratch.store.writer(None).unwrap().path();
    let writer = scratch.store.writer_within(Some(12)).unwrap();
    assert!(left.exists(), "it was looked for");
    writer.put(&[2; 12]).unwrap();
    assert_eq!(code(writer.put(&[3; 1])), "FIRN-STORE-FULL");
    writer.abort();
    assert_eq!(scratch.store.ready(Some(20)).unwrap(), Some(0));
    assert_eq!(scratch.store.ready(None).unwrap(), None);
}

#[test]
fn what_is_aborted_or_cannot_be_finished_leaves_nothing() {
    let scratch = Scratch::new();
    let writer = scratch.store.writer(None).unwrap();
    writer.put(b"one").unwrap();
    writer.abort();
    assert_eq!(scratch.files(), [""; 0]);
    let writer = scratch.store.writer(None).unwrap();
    writer.put(b"one").unwrap();
    let bad = index(vec![piece(0, vec![])]);
    assert_eq!(code(writer.finish(&bad)), "FIRN-STORE-UNUSABLE");
    assert_eq!(fs::read_dir(scratch.root().join("new")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(scratch.root().join("images")).unwrap().count(), 0);
}

/// It may have fields that this version does not know.
#[test]
fn an_index_of_another_store_stays_as_it_is() {
    let (from, to) = (Scratch::new(), Scratch::new());
    let newer = br#"{"format":"firn-store-index","version":1,"minor":7,"index":{"checkpoint":"","made":1,
        "container":"c","host":"h","image":"/i","pieces":[],"more":[]}}"#;
    let digest = Digest::of(newer);
    fs::write(from.root().join("images").join(digest.to_string()), newer).unwrap();
    let bytes = from.store.verified_index(&digest).unwrap().1;
    let written = to.store.writer(None).unwrap().finish_as(&bytes).unwrap();
    assert_eq!(
        (written, to.store.verified_index(&digest).unwrap().1),
        (digest, newer.to_vec())
    );
}

#[test]
fn writers_and_threads_with_the_same_bytes_do_not_harm_each_other() {
    let scratch = Scratch::new();
    let contents: Vec<Vec<u8>> = (1..40).map(content).collect();
    let write = || {
        let writer = scratch.store.writer(None).unwrap();
        let put = || -> Vec<_> {
            contents
                .iter()
                .map(|content| writer.put(content).unwrap())
                .collect()
        };
        let extents = thread::scope(|scope| {
            let other = scope.spawn(put);
            let own = put();
            assert_eq!(other.join().unwrap(), own);
            own
        });
        let pieces = extents
            .into_iter()
            .map(|extent| piece(LARGE as u64, vec![extent]));
        let index = index(pieces.collect());
        (writer.finish(&index).unwrap(), index)
    };
    let made: Vec<_> = thread::scope(|scope| {
        let writers: Vec<_> = (0..3).map(|_| scope.spawn(write)).collect();
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    for (digest, index) in made {
        assert_eq!(scratch.store.index(&digest).unwrap(), index);
        for (extent, length) in index.extents() {
            scratch
                .store
                .read(&extent.unwrap(), &mut vec![0; length])
                .unwrap();
        }
    }
    assert_eq!(scratch.files().len(), contents.len() + 1);
}

#[test]
fn an_extent_of_another_size_is_written_again() {
    let scratch = Scratch::new();
    let (_, index) = scratch.holds(&[b"one"]);
    let one = index.pieces[0].extents[0].unwrap();
    for damage in [&b"on"[..], b"ones", b""] {
        fs::write(scratch.extent(&one), damage).unwrap();
        assert_eq!(scratch.store.missing(&index).unwrap(), [one]);
        scratch.holds(&[b"one"]);
        scratch.store.read(&one, &mut [0; 3]).unwrap();
    }
    fs::remove_file(scratch.extent(&one)).unwrap();
    symlink("/etc/passwd", scratch.extent(&one)).unwrap();
    scratch.holds(&[b"one"]);
    scratch.store.read(&one, &mut [0; 3]).unwrap();
    assert_ne!(fs::read("/etc/passwd").unwrap(), b"one");
}

#[test]
fn the_cap_counts_what_is_there_and_what_is_written() {
    let scratch = Scratch::new();
    scratch.holds(&[&content(1)]);
    let large = LARGE as u64;
    let writer = scratch.store.writer(Some(2 * large + 1)).unwrap();
    writer.put(&content(1)).unwrap();
    writer.put(&content(2)).unwrap();
    writer.put(&content(2)).unwrap();
    writer.put(&[0; LARGE]).unwrap();
    let error = writer.put(&content(3)).unwrap_err();
    assert_eq!(error.code(), "FIRN-STORE-FULL");
    assert!(
        error
            .to_string()
            .ends_with("has room for 1 bytes more by its cap, 262144 are needed"),
        "{error}"
    );
    writer.put(b"x").unwrap();
    assert_eq!(code(writer.put(b"y")), "FIRN-STORE-FULL");
    writer.abort();
    // Smaller than what is there already.
    let writer = scratch.store.writer(Some(1)).unwrap();
    writer.put(&content(1)).unwrap();
    assert_eq!(code(writer.put(b"x")), "FIRN-STORE-FULL");
    writer.abort();
}

/// A file system of one MiB, until it is dropped.
struct SmallDisk(TempDir);

impl SmallDisk {
    fn mount() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount
            .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
            .arg(dir.path());
        assert!(mount.status().unwrap().success(), "needs root");
        Self(dir)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(self.0.path()).status();
        assert!(unmounted.unwrap().success());
    }
}

#[test]
fn a_full_disk_is_reported_and_gets_its_room_back() {
    let disk = SmallDisk::mount();
    let store = Store::create(disk.0.path(), &Packing::default()).unwrap();
    let writer = store.writer(None).unwrap();
    let failed = (1..8).find_map(|seed| writer.put(&content(seed)).err()).unwrap();
    assert_eq!(failed.code(), "FIRN-STORE-FULL");
    let text = failed.to_string();
    assert!(text.ends_with("by its file system, 262144 are needed"), "{text}");
    // The rest of the extent that did not fit is gone, so a smaller one fits.
    writer.put(b"small").unwrap();
    writer.abort();
    let writer = store.writer(None).unwrap();
    let extent = writer.put(&content(1)).unwrap();
    writer
        .finish(&index(vec![piece(LARGE as u64, vec![extent])]))
        .unwrap();
    drop(store);
}

#[test]
fn a_file_system_that_refuses_is_reported() {
    let scratch = Scratch::new();
    let writer = scratch.store.writer(None).unwrap();
    fs::remove_dir(writer.path()).unwrap();
    assert_eq!(code(writer.put(b"one")), "FIRN-STORE-IO");
}

#[test]
fn who_compares_writes_a_damaged_extent_again() {
    let scratch = Scratch::new();
    let (_, index) = scratch.holds(&[b"weights", b"state"]);
    let weights = index.pieces[0].extents[0].unwrap();
    let path = scratch.extent(&weights);
    let put = |compares: bool| {
        let writer = scratch.store.writer(None).unwrap().comparing(compares);
        for content in [&b"weights"[..], b"state", b"weights"] {
            writer.put(content).unwrap();
        }
        let counts = (writer.written(), writer.reused());
        writer.finish(&index).unwrap();
        counts
    };
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    fs::write(&path, b"weighty").unwrap();
    assert_eq!(put(false), (0, 19), "one that only looks at sizes sees nothing");
    assert_eq!(fs::read(&path).unwrap(), b"weighty");
    // Once, also where the memory has it twice.
    assert_eq!(put(true), (7, 12));
    assert_eq!(fs::read(&path).unwrap(), b"weights");
    assert_eq!(put(true), (0, 19));
}
