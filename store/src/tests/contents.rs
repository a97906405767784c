//! What a store shows of itself.

use super::*;

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
fn what_writers_have_left_is_counted_and_removed() {
    let scratch = Scratch::new();
    assert_eq!(scratch.store.unfinished().unwrap(), 0);
    let writer = scratch.store.writer(None).unwrap();
    writer.put(b"one").unwrap();
    writer.put(b"three").unwrap();
    assert_eq!(scratch.store.unfinished().unwrap(), 8);
    drop(writer);
    let rules = removal::rules(0);
    let removed = scratch
        .store
        .removal()
        .unwrap()
        .collect(&Needs::new(), &rules)
        .unwrap();
    assert_eq!(removed.unfinished, 8);
    assert_eq!(scratch.store.unfinished().unwrap(), 0);
}
