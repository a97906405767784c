//! What a fault reports, and files that are no files when they are opened.

use std::os::unix::fs::symlink;

use super::{Image, ImageFault, UntrustedDir};
use firn_host::Problem;

#[test]
fn each_fault_has_a_code_and_a_hint() {
    let (file, reason) = (String::new, String::new);
    let none = String::new;
    for (fault, code, hint) in [
        (
            ImageFault::exceeds(file(), none(), none(), none()),
            "FIRN-IMAGE-PRIVILEGE",
            "give the container what its checkpoint had",
        ),
        (
            ImageFault::malformed("", ""),
            "FIRN-IMAGE-CORRUPT",
            "make the checkpoint again",
        ),
        (
            ImageFault::Unreadable {
                file: file(),
                reason: reason(),
            },
            "FIRN-IMAGE-UNREADABLE",
            "check the checkpoint directory",
        ),
        (
            ImageFault::Spec { reason: reason() },
            "FIRN-SPEC-INVALID",
            "create the container again",
        ),
    ] {
        assert_eq!(fault.code(), code);
        assert!(fault.hint().starts_with(hint), "{code}: {}", fault.hint());
    }
}

/// Even if it became one after all files were looked at.
#[test]
fn a_link_is_not_taken_for_a_file_that_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let image = Image {
        dir: UntrustedDir::open(dir.path()).unwrap(),
    };
    assert_eq!(image.bytes("cgroup.img"), Ok(None));
    std::fs::write(dir.path().join("other"), "").unwrap();
    symlink("other", dir.path().join("cgroup.img")).unwrap();
    let fault = image.bytes("cgroup.img").unwrap_err();
    assert_eq!(fault.code(), "FIRN-IMAGE-UNREADABLE", "{fault}");
}
