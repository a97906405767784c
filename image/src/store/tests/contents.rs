//! What a store shows of itself, and what is removed from it.

use super::*;
use crate::store::layout::try_lock;

#[test]
fn extents_and_images_are_listed_and_nothing_else() {
    let scratch = Scratch::new();
    let (digest, index) = scratch.holds(&[b"one", b"three", &[0; 100]]);
    let [one, three] = [0, 1].map(|at: usize| index.pieces[at].extents[0].unwrap());
    let root = scratch.root();
    fs::write(root.join("images/readme"), "").unwrap();
    fs::write(root.join("extents/file"), "").unwrap();
    // Its name leads nobody there.
    let other = Digest::of(b"other").to_string();
    let fan = scratch.extent(&one).parent().unwrap().to_owned();
    assert!(!fan.ends_with(&other[..2]));
    fs::write(fan.join(&other), "other").unwrap();
    symlink("/etc", root.join("extents/link")).unwrap();
    let store = &scratch.store;
    assert_eq!(store.images().unwrap().into_iter().collect::<Vec<_>>(), [digest]);
    assert_eq!(store.extents().unwrap(), [(one, 3), (three, 5)].into());
    fs::remove_file(scratch.extent(&one)).unwrap();
    fs::create_dir(scratch.extent(&one)).unwrap();
    assert_eq!(store.extents().unwrap(), [(one, 0), (three, 5)].into());
    let free = store.free().unwrap();
    assert!(free > 0 && free < u64::MAX / 2, "{free}");
}

#[test]
fn the_last_checkpoint_of_a_container_is_found_among_others() {
    let scratch = Scratch::new();
    let of = |container: &str, host: &str, made: u64| {
        let index = Index {
            container: container.to_owned(),
            host: host.to_owned(),
            made,
            ..index(Vec::new())
        };
        let id = scratch.store.writer(None).unwrap().finish(&index).unwrap();
        // Written in the same tick of the file system's clock, otherwise.
        let file = fs::File::options()
            .append(true)
            .open(scratch.root().join(format!("images/{id}")));
        file.unwrap()
            .set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(made))
            .unwrap();
        id
    };
    let last_of = |container| scratch.store.last_of(container, "node");
    assert_eq!(last_of("job"), None);
    let (second, other) = (of("job", "node", 2), of("other", "node", 4));
    of("job", "node", 1);
    of("job", "another node", 3);
    assert_eq!((last_of("job"), last_of("other")), (Some(second), Some(other)));
    assert_eq!(last_of("third"), None);
    // One that cannot be read is passed over.
    fs::write(scratch.root().join(format!("images/{other}")), "{").unwrap();
    assert_eq!((last_of("job"), last_of("other")), (Some(second), None));
    for made in 10..30 {
        of("busy", "node", made);
    }
    assert_eq!(last_of("job"), None, "too many are read");
}

#[test]
fn what_writers_have_left_is_counted_and_removed() {
    let scratch = Scratch::new();
    assert_eq!(scratch.store.unfinished().unwrap(), 0);
    let writer = scratch.store.writer(None).unwrap();
    writer.put(b"one").unwrap();
    writer.put(b"three").unwrap();
    assert_eq!(scratch.store.unfinished().unwrap(), 8);
    drop(writer);
    scratch.store.removal().unwrap().unfinished().unwrap();
    assert_eq!(scratch.store.unfinished().unwrap(), 0);
}

#[test]
fn pins_last_until_they_are_taken_away() {
    let scratch = Scratch::new();
    let (digest, _) = scratch.holds(&[b"one"]);
    let store = &scratch.store;
    assert!(store.pinned().unwrap().is_empty());
    assert!(!store.unpin(&digest).unwrap());
    store.pin(&digest).unwrap();
    store.pin(&digest).unwrap();
    let again = Store::open(&scratch.root(), &Packing::default()).unwrap();
    assert_eq!(again.pinned().unwrap(), [digest].into());
    assert!(store.unpin(&digest).unwrap());
    assert!(store.pinned().unwrap().is_empty());
    assert_eq!(code(store.pin(&Digest::of(b"none"))), "FIRN-STORE-MISSING");
}

#[test]
fn what_is_removed_is_gone_and_the_rest_stays() {
    let scratch = Scratch::new();
    let (digest, index) = scratch.holds(&[b"one", b"two"]);
    let [one, two] = [0, 1].map(|at: usize| index.pieces[at].extents[0].unwrap());
    fs::remove_file(scratch.extent(&two)).unwrap();
    fs::create_dir(scratch.extent(&two)).unwrap();
    let removal = scratch.store.removal().unwrap();
    removal.extent(&two).unwrap();
    removal.extent(&two).unwrap();
    removal.extent(&Digest::of(b"never")).unwrap();
    assert_eq!(scratch.store.missing(&index).unwrap(), [two]);
    removal.image(&digest).unwrap();
    removal.image(&digest).unwrap();
    assert_eq!(code(scratch.store.index(&digest)), "FIRN-STORE-MISSING");
    scratch.store.read(&one, &mut [0; 3]).unwrap();
    let shared = || try_lock(scratch.store.dir(), &scratch.root(), FlockArg::LockSharedNonblock).unwrap();
    assert!(shared().is_none(), "a writer may begin while extents are removed");
    drop(removal);
    assert!(shared().is_some());
}
