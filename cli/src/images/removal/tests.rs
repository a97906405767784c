use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use firn_containerd::images::ImageMessage;
use firn_containerd::leases::{Lease, ListResourcesResponse, ListResponse, Resource};
use firn_containerd::node::{Namespace, NamespacesResponse};
use firn_host::ProblemReport;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

use super::super::find;
use super::*;
use crate::containerd::fake::{Fake, reply};
use crate::containerd::{BUNDLES, Descriptor, Image, Socket};
use crate::leftovers::{self, tests::give, tests::image};
use crate::oci_image::Part;

/// A directory for temporary files, as /tmp, and a state directory of containerd.
struct World {
    dir: tempfile::TempDir,
    tmp: PathBuf,
    used: Used,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let tmp = dir.path().join("tmp");
        fs::create_dir(&tmp).unwrap();
        give(&tmp, 0, 0o1777);
        let used = Used {
            state: dir.path().join("state"),
            ..Used::default()
        };
        fs::create_dir_all(used.state.join(BUNDLES)).unwrap();
        Self { dir, tmp, used }
    }

    /// What containerd and firn have left there.
    fn left(&self) -> Vec<Checkpoint> {
        let rescue = self.dir.path().join("rescue");
        let left = leftovers::below(BTreeSet::from([self.tmp.clone()]), &rescue);
        find::left(left).collect()
    }

    /// The image that is left there alone.
    fn one(&self) -> Checkpoint {
        let mut left = self.left();
        let one = left.remove(0);
        assert!(left.is_empty());
        one
    }

    /// Why it stays.
    fn kept(&self, checkpoint: &Checkpoint) -> String {
        let error = self.used.prove(checkpoint).err().expect("nothing keeps it");
        let report = ProblemReport::from(error);
        format!("{} {}", report.code, report.message)
    }

    /// Removes it as `prune` does.
    fn remove(&self, checkpoint: &Checkpoint) -> Result<(), String> {
        let unused = self.used.prove(checkpoint);
        let unused = unused.map_err(|error| ProblemReport::from(error).message)?;
        remove_directory(&unused).map_err(|error| error.to_string())
    }

    fn bundle(&self, file: &str, content: &str) {
        let bundle = self.used.state.join("io.containerd.runtime.v2.task/default/job");
        fs::create_dir_all(&bundle).unwrap();
        fs::write(bundle.join(file), content).unwrap();
    }
}

fn remove_directory(unused: &Unused) -> io::Result<()> {
    unused.directory.as_ref().expect("a directory").remove()
}

fn entries(dir: &Path) -> usize {
    fs::read_dir(dir).unwrap().count()
}

#[test]
fn what_is_left_goes_with_all_its_files() {
    let world = World::new();
    let path = image(&world.tmp, "ctrd-checkpoint1", 0, 0o700);
    for name in [names::MANIFEST, "restore.log", "stats-dump", names::SIGNATURE] {
        fs::write(path.join(name), "").unwrap();
    }
    image(&world.tmp, "elses", 0, 0o700);
    world.remove(&world.one()).unwrap();
    assert!(!path.exists() && world.tmp.join("elses").exists());
}

#[test]
fn an_archive_goes_with_the_image_in_it() {
    let world = World::new();
    let path = image(&world.tmp, "ctrd-checkpoint1", 0, 0o700);
    fs::remove_file(path.join("inventory.img")).unwrap();
    let inside = image(&path, form::IMAGE, 0, 0o700);
    fs::write(path.join("spec.dump"), "").unwrap();
    let one = world.one();
    fs::write(inside.join("notes"), "").unwrap();
    assert!(
        world.kept(&one).contains("holds checkpoint/notes,"),
        "{}",
        world.kept(&one)
    );
    fs::remove_file(inside.join("notes")).unwrap();
    let nested = image(&inside, form::IMAGE, 0, 0o700);
    assert!(world.kept(&one).contains("holds checkpoint/checkpoint,"));
    fs::remove_dir_all(nested).unwrap();
    world.remove(&one).unwrap();
    assert!(!path.exists());
}

#[test]
fn whatever_is_no_file_of_a_checkpoint_keeps_the_directory() {
    use std::os::unix::ffi::OsStrExt;
    let world = World::new();
    let path = image(&world.tmp, "ctrd-checkpoint1", 0, 0o700);
    let one = world.one();
    let elsewhere = image(world.dir.path(), "elsewhere", 0, 0o700);
    type Make<'a> = &'a dyn Fn(&Path);
    let cases: [(&[u8], Make<'_>); 5] = [
        (b"notes", &|path| fs::write(path, "").unwrap()),
        (b"pages-\xff.img", &|path| fs::write(path, "").unwrap()),
        (b"pages-2.img", &|path| symlink(&elsewhere, path).unwrap()),
        (b"pages-2.img", &|path| fs::create_dir(path).unwrap()),
        (b"checkpoint", &|path| symlink(&elsewhere, path).unwrap()),
    ];
    let files = entries(&path);
    for (name, make) in cases {
        let file = path.join(std::ffi::OsStr::from_bytes(name));
        make(&file);
        assert!(
            world.kept(&one).starts_with("FIRN-PRUNE-FOREIGN "),
            "{}",
            file.display()
        );
        assert_eq!((entries(&path), entries(&elsewhere)), (files + 1, 2));
        fs::remove_file(&file).or_else(|_| fs::remove_dir(&file)).unwrap();
    }
    // One that comes after the proof stays, and the directory with it.
    let unused = world.used.prove(&one).ok().unwrap();
    fs::write(path.join("notes"), "").unwrap();
    remove_directory(&unused).unwrap_err();
    assert_eq!(entries(&path), 1);
}

#[test]
fn what_is_in_use_stays() {
    let world = World::new();
    let path = image(&world.tmp, "ctrd-checkpoint1", 0, 0o700);
    let one = world.one();
    let link = world.dir.path().join("link");
    symlink(&world.tmp, &link).unwrap();
    let by_link = link.join("ctrd-checkpoint1/checkpoint");
    for used in [&path, &path.join("checkpoint"), &by_link] {
        world.bundle(names::BUNDLE_RESTORED_FROM, &format!("{}\n", used.display()));
        assert!(
            world.kept(&one).starts_with("FIRN-PRUNE-IN-USE "),
            "{}",
            used.display()
        );
    }
    world.bundle(names::BUNDLE_RESTORED_FROM, "/tmp/ctrd-checkpoint12\n");
    assert!(world.used.prove(&one).is_ok());
    let journal = serde_json::json!({
        "event": "begin", "version": 1, "boot": "", "shim": 1, "at": 1, "op": "restore", "container": "job",
        "gpu": true, "exit": false, "image": path, "work": "/w", "work_is_ours": true, "was_frozen": false,
    });
    world.bundle("firn-journal", &format!("{journal}\n"));
    let why = world.kept(&one);
    assert!(why.contains("a restore of container job is in progress"), "{why}");
    assert!(path.exists());
}

#[test]
fn pins_and_leases_keep_a_checkpoint() {
    let index = firn_store::Digest::of(b"index");
    let mut checkpoint = Checkpoint::unread(Kind::Image, "checkpoint/job", "ml");
    checkpoint.blobs = vec![Part {
        digest: "sha256:1".to_owned(),
        ..Part::default()
    }];
    let mut used = Used::default();
    assert!(used.prove(&checkpoint).is_ok());
    used.leased = HashSet::from(["other/sha256:1".to_owned(), "ml/sha256:2".to_owned()]);
    assert!(used.prove(&checkpoint).is_ok());
    used.leased.insert("ml/sha256:1".to_owned());
    assert!(matches!(used.prove(&checkpoint), Err(PruneError::InUse { .. })));
    used.leased.clear();
    let mut manifest = firn_image::fixtures::manifest(&[]);
    manifest.bulk = Some(firn_image::manifest::StoredMemory {
        store: String::new(),
        index,
        bytes: 1,
        written: 0,
        reused: 0,
    });
    checkpoint.manifest = Some(manifest);
    assert!(used.prove(&checkpoint).is_ok());
    used.pinned.insert(index.to_string());
    assert!(matches!(used.prove(&checkpoint), Err(PruneError::InUse { .. })));
}

/// The state directory of another containerd, or one that cannot be read, shows nothing of what is in use.
#[test]
fn what_is_in_use_is_not_known_without_the_bundles() {
    let mut world = World::new();
    image(&world.tmp, "ctrd-checkpoint1", 0, 0o700);
    let one = world.one();
    let bundles = world.used.state.join(BUNDLES);
    fs::remove_dir(&bundles).unwrap();
    let kept = world.kept(&one);
    assert!(kept.contains("it is not known what is in use"), "{kept}");
    // A machine without containerd.
    world.used.may_be_absent = true;
    assert!(world.used.prove(&one).is_ok());
    fs::write(&bundles, "").unwrap();
    assert!(world.kept(&one).contains("it is not known what is in use"));
    fs::remove_file(&bundles).unwrap();
    world.bundle(names::BUNDLE_RESTORED_FROM, "/elsewhere\n");
    assert!(world.used.prove(&one).is_ok());
    let note = bundles.join("default/job").join(names::BUNDLE_RESTORED_FROM);
    fs::remove_file(&note).unwrap();
    fs::create_dir(&note).unwrap();
    assert!(world.kept(&one).contains("it is not known what is in use"));
}

#[test]
fn the_state_directory_is_that_of_the_socket() {
    let common = |state: Option<&str>| Common {
        no_containerd: false,
        socket: Socket {
            address: "/run/k3s/containerd/containerd.sock".into(),
        },
        state: state.map(PathBuf::from),
        json: false,
    };
    assert_eq!(common(None).state(), Path::new("/run/k3s/containerd"));
    assert_eq!(common(Some("/other")).state(), Path::new("/other"));
}

/// What a client has done since the images were listed.
#[test]
fn an_image_is_looked_at_again_before_it_goes() {
    let blob = |digest: &str| Resource {
        id: digest.to_owned(),
        r#type: "content".to_owned(),
    };
    // The digest of the index, what a lease keeps, whether it may go.
    for (digest, leased, goes) in [
        ("sha256:index", "sha256:other", true),
        ("sha256:another", "sha256:other", false),
        ("", "sha256:other", false),
        ("sha256:index", "sha256:index", false),
    ] {
        let fake = Fake::new(move |call, _| match call {
            "Namespaces/List" => reply(Ok(NamespacesResponse {
                namespaces: vec![Namespace {
                    name: "ml".to_owned(),
                }],
            })),
            "Leases/List" => reply(Ok(ListResponse {
                leases: vec![Lease {
                    id: "lease".to_owned(),
                }],
            })),
            "Leases/ListResources" => reply(Ok(ListResourcesResponse {
                resources: vec![blob(leased)],
            })),
            "Images/Get" => reply(Ok(ImageMessage {
                image: (!digest.is_empty()).then(|| Image {
                    target: Some(Descriptor {
                        digest: digest.to_owned(),
                        ..Descriptor::default()
                    }),
                    ..Default::default()
                }),
            })),
            "Images/Delete" => reply(Ok(())),
            other => panic!("{other}"),
        });
        let state = tempfile::tempdir().unwrap();
        fs::create_dir(state.path().join(BUNDLES)).unwrap();
        let address = fake.socket();
        let common = Common {
            no_containerd: false,
            socket: Socket { address },
            state: Some(state.path().to_owned()),
            json: false,
        };
        let mut checkpoint = Checkpoint::unread(Kind::Image, "checkpoint/job", "ml");
        checkpoint.blobs = vec![Part {
            digest: "sha256:index".to_owned(),
            ..Part::default()
        }];
        let removed = remove(&checkpoint, &common);
        assert_eq!(
            (removed.is_ok(), fake.count("Images/Delete")),
            (goes, usize::from(goes))
        );
    }
}

#[test]
fn a_directory_that_is_not_roots_any_more_stays() {
    let world = World::new();
    let path = image(&world.tmp, "ctrd-checkpoint1", 0, 0o700);
    let one = world.one();
    for (owner, mode) in [(0, 0o755), (0, 0o770), (1000, 0o700)] {
        give(&path, owner, mode);
        world.remove(&one).unwrap_err();
    }
    give(&path, 0, 0o700);
    for (owner, mode) in [(0, 0o777), (1000, 0o755)] {
        give(&world.tmp, owner, mode);
        world.remove(&one).unwrap_err();
    }
    give(&world.tmp, 0, 0o1777);
    // Another one at its place was not listed.
    fs::rename(&path, world.dir.path().join("first")).unwrap();
    image(&world.tmp, "ctrd-checkpoint1", 0, 0o700);
    assert!(world.remove(&one).unwrap_err().contains("cannot remove"));
    let unused = world.used.prove(&world.left()[0]).ok().map(|_| ());
    assert_eq!((entries(&path), unused), (2, Some(())));
    // It comes between the proof and the removal.
    let listed = world.one();
    let unused = world.used.prove(&listed).ok().unwrap();
    fs::rename(&path, world.dir.path().join("second")).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(remove_directory(&unused).is_err() && path.exists());
}

/// The directory of an image and a link to another directory change places all the time.
#[test]
fn an_exchange_removes_nothing_elsewhere() {
    let world = World::new();
    let elsewhere = image(world.dir.path(), "elsewhere", 0, 0o700);
    let (path, link) = (world.tmp.join("ctrd-checkpoint1"), world.tmp.join("other"));
    symlink(&elsewhere, &link).unwrap();
    let (stop, mut removed) = (AtomicBool::new(false), 0);
    let exchange = || {
        // A place stays what it is for no time, and at times for as long as a removal takes: otherwise none
        // would meet it on a fast machine.
        for pause in (0..16).cycle().take_while(|_| !stop.load(Ordering::Relaxed)) {
            let _ = renameat2(AT_FDCWD, &path, AT_FDCWD, &link, RenameFlags::RENAME_EXCHANGE);
            if pause == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(exchange);
        for _ in 0..3000 {
            for place in [&path, &link] {
                // What a removal that met an exchange has left of it is no image any more.
                if removed == 0 && world.left().is_empty() {
                    let _ = fs::remove_dir_all(place);
                }
                // Wherever the directory is now: one of both is made again.
                if fs::symlink_metadata(place).is_err() {
                    let made = image(&world.tmp, "made", 0, 0o700);
                    let _ = renameat2(AT_FDCWD, &made, AT_FDCWD, place, RenameFlags::RENAME_NOREPLACE);
                    let _ = fs::remove_dir_all(&made);
                }
            }
            let done = world
                .left()
                .iter()
                .filter(|one| world.remove(one).is_ok())
                .count();
            removed += done;
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(entries(&elsewhere), 2, "what the link leads to is lost");
    assert!(removed > 0);
}
