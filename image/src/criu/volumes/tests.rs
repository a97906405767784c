use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::criu::tests::{Out, write_file};

/// A volume at /data with one of the host below it, a file at /etc/hosts, and a tmpfs.
struct Case {
    image: TempDir,
    bundle: TempDir,
}

impl Case {
    fn new(files: &[(&str, Option<u64>)]) -> Self {
        let (image, bundle) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let files: Vec<Out> = (1..)
            .zip(files)
            .map(|(id, (name, size))| {
                let regular = Out::new().number(1, id).text(6, name);
                let regular = size.iter().fold(regular, |out, size| out.number(8, *size));
                Out::new().number(1, 1).number(2, id).message(3, &regular)
            })
            .collect();
        write_file(&image.path().join(NAME), MAGIC, &files);
        fs::create_dir_all(bundle.path().join("volume/below")).unwrap();
        for (name, text) in [("volume/file", "text"), ("other", "other"), ("hosts", "hosts\n")] {
            fs::write(bundle.path().join(name), text).unwrap();
        }
        Self { image, bundle }
    }

    fn check(&self) -> Result<(), ImageFault> {
        expect_volumes(&self.spec(), self.image.path(), self.bundle.path(), None)
    }

    fn spec(&self) -> Spec {
        let source = |name: &str| self.bundle.path().join(name);
        Spec::from(json!({
            "annotations": {"io.kubernetes.cri.sandbox-id": "7"},
            "mounts": [
                {"destination": "/data", "type": "bind", "source": source("volume"), "options": ["rbind"]},
                {"destination": "/data/tmp", "type": "tmpfs", "source": "tmpfs"},
                // As a path of the bundle.
                {"destination": "/etc/hosts", "type": "bind", "source": "hosts", "options": ["bind"]},
                {"destination": "/dev/shm", "type": "bind", "options": ["bind"],
                 "source": "/run/io.containerd.grpc.v1.cri/sandboxes/7/shm"},
            ],
        }))
    }
}

fn check_file(name: &str, size: u64) -> Result<(), ImageFault> {
    Case::new(&[(name, Some(size))]).check()
}

#[test]
fn files_that_are_as_they_were_pass() {
    for (name, size) in [
        ("/data/file", 4),
        ("/etc/hosts", 6),
        // No regular file, whose size is no matter.
        ("/data/below", 7),
        // On no volume: CRIU has it, or the client.
        ("/file", 7),
        ("/database", 7),
        ("/data/tmp/file", 7),
        // Made before CRIU opens it.
        ("/dev/shm/file", 7),
    ] {
        assert_eq!(check_file(name, size), Ok(()), "{name}");
    }
    // Files that are only appended to have no size.
    assert_eq!(
        Case::new(&[("/data/file", None), ("/data/gone", None)]).check(),
        Ok(())
    );
}

#[test]
fn files_of_another_size_and_files_that_are_gone_are_refused() {
    for (name, size, now) in [
        ("/data/file", 3, 4),
        ("/data/file", 1 << 40, 4),
        ("/etc/hosts", 0, 6),
    ] {
        match check_file(name, size) {
            Err(ImageFault::Size {
                path, then, now: is, ..
            }) => {
                assert_eq!((&*path, then, is), (name, size, now));
            }
            other => panic!("{name}: {other:?}"),
        }
    }
    for name in ["/data/gone", "/data/gone/file"] {
        assert!(
            matches!(check_file(name, 4), Err(ImageFault::Gone { .. })),
            "{name}"
        );
    }
}

#[test]
fn deleted_files_are_opened_by_other_names() {
    let case = Case::new(&[("/data/gone", Some(4)), ("/data/link_remap.1", Some(4))]);
    assert!(case.check().is_err());
    let remap = Out::new().number(1, 1).number(2, 2).number(3, 0);
    write_file(&case.image.path().join(REMAPS), REMAPS_MAGIC, &[remap]);
    assert_eq!(case.check(), Ok(()));
}

/// They are CRIU's to open, and a name of the image may be hostile.
#[test]
fn links_are_not_followed_out_of_a_volume() {
    let case = Case::new(&[("/data/link/other", Some(1)), ("/data/../other", Some(1))]);
    symlink("..", case.bundle.path().join("volume/link")).unwrap();
    assert_eq!(case.check(), Ok(()));
}

/// Of this process, which has its mounts where they are.
#[test]
fn files_that_a_process_has_open_are_those_of_an_image_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let volume = at("volume");
    fs::create_dir_all(volume.join("dir")).unwrap();
    let long_ago = SystemTime::now() - QUIET * 2;
    for name in ["read", "read and written", "written", "deleted", "linked", "new"] {
        let file = File::create(volume.join(name)).unwrap();
        (&file).write_all(name.as_bytes()).unwrap();
        if name != "new" {
            file.set_modified(long_ago).unwrap();
        }
    }
    fs::write(at("elsewhere"), "").unwrap();
    let open = |name: &str| File::open(volume.join(name)).unwrap();
    let mut options = File::options();
    let mut write = |name: &str| options.write(true).open(volume.join(name)).unwrap();
    let _written = [write("written"), write("read and written")];
    let names = ["read", "read and written", "deleted", "linked", "dir", "new"];
    let _read = (names.map(open), File::open(at("elsewhere")).unwrap());
    fs::hard_link(volume.join("linked"), at("link")).unwrap();
    for name in ["deleted", "linked"] {
        fs::remove_file(volume.join(name)).unwrap();
    }
    let bind = json!({"destination": volume, "type": "bind", "source": "volume", "options": ["rbind"]});
    let spec = Spec::from(json!({"mounts": [bind]}));
    let me = i32::try_from(std::process::id()).unwrap();
    let found = VolumeFile::of_processes(&[me, i32::MAX], &spec).unwrap();
    let file = |name: &str, size| VolumeFile {
        path: volume.join(name),
        size,
    };
    let expected = [
        file("new", None),
        file("read", Some(4)),
        file("read and written", None),
        file("written", None),
    ];
    assert_eq!(found, expected);
    assert_eq!(expect_files(&found, &spec, dir.path()), Ok(()));
    fs::write(volume.join("written"), "more than before").unwrap();
    assert_eq!(expect_files(&found, &spec, dir.path()), Ok(()));
    fs::write(volume.join("read"), "more than before").unwrap();
    let size = expect_files(&found, &spec, dir.path());
    assert!(matches!(size, Err(ImageFault::Size { now: 16, .. })), "{size:?}");
    fs::remove_file(volume.join("written")).unwrap();
    let gone = expect_files(&found[3..], &spec, dir.path());
    assert!(matches!(gone, Err(ImageFault::Gone { .. })), "{gone:?}");
    let mounts = json!([{"destination": volume, "type": "bind", "source": "volume"}]);
    let capabilities = json!({"bounding": ["CAP_SYS_ADMIN"]});
    let mounting = json!({"mounts": mounts, "process": {"capabilities": capabilities}}).into();
    assert_eq!(
        expect_files(&found, &mounting, dir.path()),
        Ok(()),
        "it may have other mounts there"
    );
    // A mount without a source is not this check's.
    fs::remove_dir_all(&volume).unwrap();
    assert_eq!(expect_files(&found, &spec, dir.path()), Ok(()));
}

#[test]
fn files_that_a_process_has_mapped_are_those_of_an_image_of_it() {
    let program = fs::canonicalize("/bin/cat").unwrap();
    let programs = program.parent().unwrap();
    let bind = json!({"destination": programs, "type": "bind", "source": programs, "options": ["rbind"]});
    let pipe = || Stdio::piped();
    let mut child = Command::new(&program)
        .stdin(pipe())
        .stdout(pipe())
        .spawn()
        .unwrap();
    // It runs once it answers: only then has it been mapped.
    child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let its = i32::try_from(child.id()).unwrap();
    let found = VolumeFile::of_processes(&[its], &Spec::from(json!({"mounts": [bind]})));
    child.kill().unwrap();
    child.wait().unwrap();
    let size = Some(fs::metadata(&program).unwrap().len());
    assert_eq!(found.unwrap(), [VolumeFile { path: program, size }]);
}

/// A restore leaves out a mount that the source did not have.
#[test]
fn a_mount_that_the_copy_will_not_have_does_not_count() {
    let case = Case::new(&[("/data/gone", Some(4))]);
    let expect = |kept: &[&str]| {
        let kept = kept.iter().map(|destination| RequiredMount {
            destination: destination.into(),
            source_name: String::new(),
            in_use: false,
        });
        let kept: Vec<_> = kept.collect();
        expect_volumes(&case.spec(), case.image.path(), case.bundle.path(), Some(&kept))
    };
    assert_eq!(expect(&["/etc/hosts"]), Ok(()));
    assert!(expect(&["/etc/hosts", "/data"]).is_err());
}
