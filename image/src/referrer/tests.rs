//! Which indexes checkpoints name, and what cannot be found out.

use std::os::unix::fs::symlink;

use firn_host::mountinfo::MountEntry;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::*;
use crate::fixtures;
use crate::manifest::{Manifest, StoredMemory};
use firn_config::names;

/// A directory with a firn.json that names this index, or none.
fn image(dir: &Path, index: Option<Digest>) {
    fs::create_dir_all(dir).unwrap();
    let bulk = index.map(|index| StoredMemory {
        store: "7c2f".to_owned(),
        index,
        bytes: 1,
        written: 0,
        reused: 0,
    });
    let manifest = Manifest {
        bulk,
        ..fixtures::manifest(&[0])
    };
    manifest.write(dir).unwrap();
}

/// What makes a firn.json one that may name any index.
fn spoil(dir: &Path, step: usize) -> bool {
    let path = dir.join(names::MANIFEST);
    let text = fs::read_to_string(&path).unwrap_or_default();
    let newer = text.replace("\"major\":1", "\"major\":2");
    let needs = text.replace("\"needs\":[", "\"needs\":[\"new\",");
    match step {
        0 => fs::write(&path, "{").unwrap(),
        1 => fs::write(&path, "{\"of a format\":\"to come\"}").unwrap(),
        2 => fs::write(&path, newer).unwrap(),
        3 => fs::write(&path, needs).unwrap(),
        4 => fs::write(&path, vec![b' '; (5 << 20) as usize]).unwrap(),
        5 => {
            fs::remove_file(&path).unwrap();
            fs::create_dir(&path).unwrap();
        }
        6 => {
            fs::remove_file(&path).unwrap();
            mkfifo(&path, Mode::S_IRWXU).unwrap();
        }
        7 => {
            fs::remove_file(&path).unwrap();
            symlink("/proc/self/mem", &path).unwrap();
        }
        _ => return false,
    }
    true
}

#[test]
fn checkpoints_with_a_name_and_rescued_ones_name_their_indexes() {
    let dir = tempfile::tempdir().unwrap();
    let ids = [b"1", b"2", b"3", b"4"].map(|name: &[u8; 1]| Digest::of(name));
    let (named, rescue) = (dir.path().join("named"), dir.path().join("rescue"));
    image(&named.join("ml/warm/checkpoint"), Some(ids[0]));
    image(&named.join("ml/filled"), Some(ids[1]));
    image(&named.join("ml/inline"), None);
    fs::write(named.join("ml/notes"), "").unwrap();
    fs::create_dir(named.join("ml/empty")).unwrap();
    image(&rescue.join("default-job"), Some(ids[2]));
    // A name may be a link.
    image(&dir.path().join("elsewhere"), Some(ids[3]));
    symlink(dir.path().join("elsewhere"), named.join("ml/link")).unwrap();
    symlink(dir.path().join("named/ml/notes"), named.join("ml/file")).unwrap();
    let mut all = Referrers::default();
    all.add_named_in(&named).unwrap();
    all.add_images_in(&rescue).unwrap();
    all.add_named_in(&dir.path().join("none")).unwrap();
    for (id, place) in ids
        .iter()
        .zip(["warm/checkpoint", "filled", "default-job", "ml/link"])
    {
        let by = all.of(id).unwrap();
        assert!(by.ends_with(&format!("{place} is there")), "{by}");
    }
    assert_eq!(all.of(&Digest::of(b"other")), None);
}

#[test]
fn what_cannot_be_read_may_name_anything() {
    let dir = tempfile::tempdir().unwrap();
    let (named, rescue) = (dir.path().join("named"), dir.path().join("rescue"));
    let fails = |what: &str| {
        let mut all = Referrers::default();
        let done = all.add_named_in(&named).and_then(|()| all.add_images_in(&rescue));
        let error = done.expect_err(what);
        assert_eq!(error.code(), "FIRN-STORE-UNUSABLE", "{what}");
        assert!(error.to_string().ends_with("nothing was removed"), "{error}");
    };
    for place in [
        named.join("ml/warm"),
        named.join("ml/warm/checkpoint"),
        rescue.join("job"),
    ] {
        for step in 0.. {
            let _ = fs::remove_dir_all(&named);
            let _ = fs::remove_dir_all(&rescue);
            image(&place, Some(Digest::of(b"1")));
            if !spoil(&place, step) {
                break;
            }
            fails(&format!("{} {step}", place.display()));
        }
    }
    // A file system that is not mounted, behind a link to it: its mount point is gone, or empty.
    fs::remove_dir_all(&rescue).unwrap();
    fs::create_dir_all(dir.path().join("mnt")).unwrap();
    for target in ["none", "mnt"] {
        for link in ["ml", "ml/warm"] {
            let _ = fs::remove_dir_all(&named);
            let link = named.join(link);
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            symlink(dir.path().join(target), &link).unwrap();
            fails(&format!("{} to {target}", link.display()));
        }
    }
    // What is no directory is no place for checkpoints.
    fs::remove_dir_all(&named).unwrap();
    fs::write(&named, "").unwrap();
    fails("a file");
}

#[test]
fn a_link_to_nothing_is_lost_and_another_error_is_shown() {
    let dir = tempfile::tempdir().unwrap();
    let link = |name: &str, to: &str| {
        let path = dir.path().join(name);
        symlink(to, &path).unwrap();
        leads_to_directory(&path)
    };
    assert!(matches!(
        link("nothing", "none"),
        Err(ReferrerError::Lost { path }) if path.ends_with("nothing")
    ));
    assert!(matches!(
        link("loop", "loop"),
        Err(ReferrerError::List { path, .. }) if path.ends_with("loop")
    ));
}

#[test]
fn an_image_directory_may_name_an_index_unless_it_names_another() {
    let dir = tempfile::tempdir().unwrap();
    let (id, other) = (Digest::of(b"index"), Digest::of(b"other"));
    let at = dir.path().join("image");
    let root = [MountEntry {
        mount_point: "/".into(),
        ..MountEntry::default()
    }];
    let of = |mount: Option<&str>, mounts: &[MountEntry]| {
        let index = Index {
            image: at.clone(),
            owner: None,
            mount: mount.map(PathBuf::from),
            ..firn_store::fixtures::index(Vec::new())
        };
        may_name(&index, &id, mounts)
    };
    let here = || of(Some("/"), &root);
    assert_eq!(here(), None);
    assert_eq!(of(None, &[]), None);
    // Its file system is not mounted, or that cannot be found out.
    for (mount, mounts) in [("/mnt/images", &root[..]), ("/", &[])] {
        assert!(
            of(Some(mount), mounts)
                .unwrap()
                .ends_with("is not mounted, where its image is")
        );
    }
    // As a dump leaves it until its firn.json is written.
    fs::create_dir(&at).unwrap();
    fs::write(at.join("criu.log"), "").unwrap();
    assert_eq!(here(), None);
    symlink("/dev/null", at.join("pages-1.img")).unwrap();
    assert!(here().unwrap().ends_with("has no firn.json yet"));
    for (named, is_kept) in [(Some(id), true), (Some(other), false), (None, false)] {
        image(&at, named);
        assert_eq!(here().is_some(), is_kept, "{named:?}");
    }
    for step in 0.. {
        let _ = fs::remove_dir_all(&at);
        image(&at, Some(other));
        if !spoil(&at, step) {
            break;
        }
        assert!(here().unwrap().ends_with("and may name it"), "{step}");
    }
    // Where the directory was is something else.
    fs::remove_dir_all(&at).unwrap();
    fs::write(&at, "").unwrap();
    assert!(here().is_some());
}
