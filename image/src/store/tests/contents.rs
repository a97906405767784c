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
