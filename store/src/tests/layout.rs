//! Which directories become stores, and which are refused.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;

use super::*;
use crate::layout::{VERSION, lock};

#[test]
fn an_empty_directory_becomes_a_store_that_only_its_owner_can_enter() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("deep/store");
    Store::create(&root, &Packing::default()).unwrap();
    // As mount -t tmpfs and mkfs leave it.
    let mounted = dir.path().join("mounted");
    fs::create_dir_all(mounted.join("lost+found")).unwrap();
    fs::set_permissions(&mounted, Permissions::from_mode(0o1777)).unwrap();
    Store::create(&mounted, &Packing::default()).unwrap();
    for root in [root, mounted] {
        for dir in ["", "extents", "images", "new"] {
            let mode = root.join(dir).metadata().unwrap().mode();
            assert_eq!(mode & 0o7777, 0o700, "{}/{dir}", root.display());
        }
        let mode = root.join("firn-store.json").metadata().unwrap().mode();
        assert_eq!(mode & 0o7777, 0o600);
    }
}

#[test]
fn it_stays_the_same_store() {
    let scratch = Scratch::new();
    scratch.holds(&[b"one"]);
    let _writer = scratch.store.writer(None).unwrap();
    let before = (scratch.files(), scratch.store.id().to_owned());
    let begun = std::time::Instant::now();
    let again = Store::create(&scratch.root(), &Packing::default()).unwrap();
    let waited = begun.elapsed();
    assert!(waited.as_secs() < 10, "it has waited for the writer: {waited:?}");
    assert_eq!((scratch.files(), again.id().to_owned()), before);
    let other = Scratch::new();
    assert_ne!(other.store.id(), again.id());
}

#[test]
fn two_that_make_it_at_once_make_one() {
    for _ in 0..20 {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("store");
        let make = || Store::create(&root, &Packing::default()).unwrap().id().to_owned();
        let ids: Vec<String> = thread::scope(|scope| {
            let makers: Vec<_> = (0..4).map(|_| scope.spawn(make)).collect();
            makers.into_iter().map(|maker| maker.join().unwrap()).collect()
        });
        assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    }
}

#[test]
fn what_a_killed_maker_has_left_becomes_a_store() {
    let dir = tempfile::tempdir().unwrap();
    for left in [
        &["lock"][..],
        &["lock", "extents/"],
        &["lock", "extents/", "images/", ".firn-store.json.tmp"],
    ] {
        let root = dir.path().join(left.len().to_string());
        fs::create_dir(&root).unwrap();
        for name in left {
            match name.strip_suffix('/') {
                Some(name) => DirBuilder::new().mode(0o700).create(root.join(name)).unwrap(),
                None => fs::write(root.join(name), "{").unwrap(),
            }
        }
        Store::create(&root, &Packing::default()).unwrap();
    }
}

#[test]
fn a_directory_with_anything_else_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["photo.jpg", "images/photo.jpg", "new/work"] {
        let root = dir.path().join(name.replace('/', "-"));
        fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
        fs::write(root.join(name), "mine").unwrap();
        fs::set_permissions(&root, Permissions::from_mode(0o755)).unwrap();
        let error = Store::create(&root, &Packing::default()).unwrap_err();
        assert_eq!(error.code(), "FIRN-STORE-UNUSABLE");
        assert!(error.to_string().contains(name), "{error}");
        assert_eq!(root.metadata().unwrap().mode() & 0o7777, 0o755);
        assert!(!root.join("lock").exists());
    }
}

#[test]
fn one_that_is_not_there_is_not_made_by_opening_it() {
    let dir = tempfile::tempdir().unwrap();
    for root in [dir.path().join("none"), dir.path().to_owned()] {
        let error = Store::open(&root, &Packing::default()).unwrap_err();
        assert!(matches!(error, StoreError::Absent { .. }), "{error:?}");
        assert_eq!(error.code(), "FIRN-STORE-UNUSABLE");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn one_that_others_can_reach_is_refused() {
    for part in ["", "extents", "images"] {
        let scratch = Scratch::new();
        let path = scratch.root().join(part);
        for mode in [0o701, 0o750, 0o702] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            for opened in [
                Store::open(&scratch.root(), &Packing::default()),
                Store::create(&scratch.root(), &Packing::default()),
            ] {
                let error = opened.unwrap_err();
                assert!(
                    matches!(error, StoreError::Mode { mode: found, .. } if found == mode),
                    "{error:?}"
                );
                assert_eq!(error.code(), "FIRN-STORE-UNUSABLE");
            }
        }
        fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
        chown(&path, Some(65_534), None).expect("needs root");
        for opened in [
            Store::open(&scratch.root(), &Packing::default()),
            Store::create(&scratch.root(), &Packing::default()),
        ] {
            let error = opened.unwrap_err();
            assert!(
                matches!(error, StoreError::Owner { owner: 65_534, .. }),
                "{error:?}"
            );
        }
    }
}

#[test]
fn links_and_files_are_refused() {
    for part in ["", "extents", "images"] {
        let scratch = Scratch::new();
        let path: PathBuf = scratch.root().join(part).components().collect();
        let elsewhere = scratch.dir.path().join("elsewhere");
        fs::rename(&path, &elsewhere).unwrap();
        symlink(&elsewhere, &path).unwrap();
        let root = scratch.root().join("");
        let trials = [
            Store::open(&scratch.root(), &Packing::default()),
            Store::open(&root, &Packing::default()),
            Store::create(&root, &Packing::default()),
        ];
        for error in trials.map(Result::unwrap_err) {
            assert!(matches!(error, StoreError::NotADirectory { .. }), "{error:?}");
        }
        fs::remove_file(&path).unwrap();
        fs::write(&path, "").unwrap();
        assert_eq!(
            code(Store::open(&scratch.root(), &Packing::default())),
            "FIRN-STORE-UNUSABLE"
        );
    }
}

#[test]
fn another_description_is_refused() {
    let scratch = Scratch::new();
    let path = scratch.root().join("firn-store.json");
    let good = fs::read_to_string(&path).unwrap();
    let newer = good.replace("\"version\":1", "\"version\":3");
    fs::write(&path, &newer).unwrap();
    let error = Store::open(&scratch.root(), &Packing::default()).unwrap_err();
    assert!(matches!(error, StoreError::Version { found: 3, .. }), "{error:?}");
    assert!(error.to_string().contains(&VERSION.to_string()));
    let id = scratch.store.id();
    for bad in [
        String::new(),
        "{}".to_owned(),
        good.replace("firn-store", "other"),
        good.replace(id, ""),
        good.replace(id, "../x"),
        good.replace(id, &"1".repeat(65)),
        format!("{good}{}", " ".repeat(1 << 20)),
    ] {
        fs::write(&path, &bad).unwrap();
        let error = Store::open(&scratch.root(), &Packing::default()).unwrap_err();
        assert!(matches!(error, StoreError::Description { .. }), "{error:?}");
        assert_eq!(
            code(Store::create(&scratch.root(), &Packing::default())),
            "FIRN-STORE-UNUSABLE"
        );
    }
    fs::remove_file(&path).unwrap();
    mkfifo(&path, Mode::S_IRUSR).unwrap();
    assert_eq!(
        code(Store::open(&scratch.root(), &Packing::default())),
        "FIRN-STORE-UNUSABLE"
    );
}

#[test]
fn a_lock_that_is_a_link_locks_nothing_else() {
    let scratch = Scratch::new();
    let path = scratch.root().join("lock");
    fs::remove_file(&path).unwrap();
    symlink("/etc/hostname", &path).unwrap();
    assert_eq!(code(scratch.store.writer(None)), "FIRN-STORE-IO");
}

#[test]
fn who_holds_the_lock_keeps_gc_out_and_writers_share_it() {
    let scratch = Scratch::new();
    let alone = || {
        let how = FlockArg::LockExclusiveNonblock;
        crate::layout::try_lock(scratch.store.dir(), &scratch.root(), how).unwrap()
    };
    let first = scratch.store.writer(None).unwrap();
    let second = scratch.store.writer(None).unwrap();
    assert!(alone().is_none());
    first.abort();
    assert!(alone().is_none());
    second.abort();
    let gc = alone().unwrap();
    let waiting = thread::scope(|scope| {
        let writer = scope.spawn(|| scratch.store.writer(None).map(Writer::abort));
        thread::sleep(std::time::Duration::from_millis(50));
        let waited = !writer.is_finished();
        drop(gc);
        writer.join().unwrap().unwrap();
        waited
    });
    assert!(waiting, "a writer began while gc had the lock");
    lock(
        scratch.store.dir(),
        &scratch.root(),
        FlockArg::LockExclusiveNonblock,
    )
    .unwrap();
}

#[test]
fn errors_of_the_lock_have_a_code() {
    let busy = StoreError::Busy {
        path: "/store".into(),
    };
    assert_eq!(busy.code(), "FIRN-STORE-BUSY");
}
