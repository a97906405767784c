use std::fs;
use std::os::unix::fs::symlink;

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
        let source = |name: &str| self.bundle.path().join(name);
        let spec = Spec::from(json!({
            "annotations": {"io.kubernetes.cri.sandbox-id": "7"},
            "mounts": [
                {"destination": "/data", "type": "bind", "source": source("volume"), "options": ["rbind"]},
                {"destination": "/data/tmp", "type": "tmpfs", "source": "tmpfs"},
                // As a path of the bundle.
                {"destination": "/etc/hosts", "type": "bind", "source": "hosts", "options": ["bind"]},
                {"destination": "/dev/shm", "type": "bind", "options": ["bind"],
                 "source": "/run/io.containerd.grpc.v1.cri/sandboxes/7/shm"},
            ],
        }));
        expect_volumes(&spec, self.image.path(), self.bundle.path())
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
