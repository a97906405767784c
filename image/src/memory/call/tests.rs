//! Whose memory a request gets from the store.

use firn_host::Problem;
use tempfile::TempDir;

use super::*;

/// A store with the memory of a container in namespace `web`, as its image names it.
fn webs(owner: Option<Owner>) -> (TempDir, Stored) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let store = Store::create(&path, &Packing::default()).unwrap();
    let index = Index {
        checkpoint: "5b0f".to_owned(),
        made: 1,
        container: "web".to_owned(),
        host: String::new(),
        machine: None,
        owner,
        image: "/image".into(),
        mount: None,
        pieces: Vec::new(),
    };
    let memory = StoredMemory {
        store: store.id().to_owned(),
        index: store.writer(None).unwrap().finish(&index).unwrap(),
        bytes: 0,
        written: 0,
        reused: 0,
    };
    let stored = Stored {
        store: Some(path),
        key: None,
        memory,
        checkpoint: Some("5b0f".to_owned()),
        reader: Reader::Root,
    };
    (dir, stored)
}

/// The codes of both requests that read the store: before a restore, and in it.
fn codes(stored: &Stored) -> [String; 2] {
    let fill = Fill {
        stored: stored.clone(),
        pids: BTreeMap::new(),
    };
    let code = |error: MemoryError| error.code().to_string();
    let looked = complete(stored).map_or_else(code, |_| String::new());
    let filled = filled(&fill, &Counter::default()).map_or_else(code, |_| String::new());
    [looked, filled]
}

#[test]
fn an_image_that_names_the_memory_of_another_tenant_is_refused() {
    let pod = |namespace: &str| Reader::Pod(Some(namespace.to_owned()));
    let web = Owner::Kubernetes("web".to_owned());
    let (_dir, mut stored) = webs(Some(web));
    assert_eq!(codes(&stored), ["", ""], "root restores by hand");
    stored.reader = pod("web");
    assert_eq!(codes(&stored), ["", ""]);
    stored.reader = pod("ml");
    assert_eq!(codes(&stored), ["FIRN-STORE-OWNER"; 2]);
    let error = complete(&stored).unwrap_err().to_string();
    let name = stored.memory.index.to_string();
    assert!(
        error.contains(&name[..12]) && !error.contains(&name[..13]),
        "{error}"
    );
    assert!(!error.contains("web"), "it shows whose it is: {error}");
    // Before firn noted owners, and of a container of containerd's clients.
    for owner in [None, Some(Owner::Containerd("ml".to_owned()))] {
        let (_dir, mut stored) = webs(owner);
        assert_eq!(codes(&stored), ["", ""]);
        stored.reader = pod("ml");
        assert_eq!(codes(&stored), ["FIRN-STORE-OWNER"; 2]);
    }
}

#[test]
fn an_image_that_names_the_memory_of_another_checkpoint_is_refused() {
    let (_dir, mut stored) = webs(Some(Owner::Kubernetes("web".to_owned())));
    stored.checkpoint = Some("another".to_owned());
    assert_eq!(codes(&stored), ["FIRN-IMAGE-CORRUPT"; 2]);
    // An older shim does not send it.
    stored.checkpoint = None;
    assert_eq!(codes(&stored), ["", ""]);
}

#[test]
fn memory_goes_into_no_other_store_than_the_one_that_was_made_ready() {
    let (dir, stored) = webs(None);
    let path = dir.path().join("store");
    let make = MakeReady {
        store: path.clone(),
        key: None,
        cap: Some(100),
    };
    let found = ready(&make).unwrap();
    let expected = Ready {
        id: stored.memory.store,
        room: Some(100),
    };
    assert_eq!(found, expected);
    let save = Save {
        store: path.clone(),
        key: None,
        cap: None,
        ready: Some(found),
        exit: false,
        processes: Vec::new(),
        owner: None,
        checkpoint: String::new(),
        container: String::new(),
        image: "/image".into(),
    };
    let code = || writer(&save).map_or_else(|error| error.code().to_string(), |_| String::new());
    assert_eq!(code(), "");
    // Its file system is not mounted any more: another store is below, or none.
    std::fs::rename(&path, dir.path().join("other")).unwrap();
    assert_eq!(code(), "FIRN-STORE-UNUSABLE");
    Store::create(&path, &Packing::default()).unwrap();
    assert_eq!(code(), "FIRN-STORE-UNUSABLE");
}
