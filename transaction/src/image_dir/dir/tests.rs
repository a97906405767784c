use std::os::unix::fs::symlink;

use super::*;

const TIGHTEN: Option<OpenImageDir> = Some(OpenImageDir::Tighten);

fn found(path: &Path) -> ImageDir {
    ImageDir::look(path, false).unwrap()
}

fn entered(path: &Path) -> ImageDir {
    let image = found(path);
    image.enter(TIGHTEN).unwrap();
    image
}

/// A directory with this mode in a parent that only the test can enter.
fn with_mode(mode: u32) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    (dir, path)
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

fn is_gone(result: Result<(), ImageDirError>) -> bool {
    matches!(result, Err(ImageDirError::Gone { .. }))
}

#[test]
fn a_directory_that_was_there_is_emptied_and_kept() {
    let (_dir, path) = with_mode(0o700);
    let image = entered(&path);
    fs::write(path.join("core-1.img"), "x").unwrap();
    fs::create_dir(path.join("sub")).unwrap();
    image.clear();
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
}

#[test]
fn a_created_directory_is_private_to_root_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a/b");
    let image = entered(&path);
    assert_eq!((mode(&path), mode(&dir.path().join("a"))), (0o700, 0o700));
    fs::write(path.join("core-1.img"), "x").unwrap();
    image.clear();
    assert!(!path.exists());
}

#[test]
fn a_directory_that_is_created_after_the_cleanup_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let image = found(&path);
    // The checkpoint has failed because creating the directory took too long.
    image.clear();
    assert!(is_gone(image.enter(TIGHTEN)));
    assert!(!path.exists());
}

#[test]
fn files_of_others_are_never_removed() {
    let (_dir, path) = with_mode(0o700);
    fs::write(path.join("theirs"), "x").unwrap();
    let image = entered(&path);
    fs::write(path.join("core-1.img"), "x").unwrap();
    image.clear();
    assert!(path.join("theirs").exists());
}

#[test]
fn a_directory_that_vanished_is_an_error_and_not_recreated() {
    // While the request waits for its turn, while CRIU writes, and when all files are there.
    for phase in 0..3 {
        let (_dir, path) = with_mode(0o700);
        let image = found(&path);
        if phase > 0 {
            image.enter(TIGHTEN).unwrap();
        }
        if phase > 1 {
            fs::write(image.inside().join("inventory.img"), "x").unwrap();
        }
        fs::remove_dir_all(&path).unwrap();
        assert!(
            is_gone(image.enter(TIGHTEN)) && is_gone(image.check()),
            "in {phase}"
        );
        assert!(
            fs::write(image.inside().join("pages-1.img"), "secret").is_err(),
            "in {phase}"
        );
        image.clear();
        assert!(!path.exists(), "in {phase}");
    }
}

#[test]
fn containerds_directory_is_not_created_for_a_client_that_has_gone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ctrd-checkpoint123");
    assert!(matches!(
        ImageDir::look(&path, false),
        Err(ImageDirError::Gone { .. })
    ));
    assert!(!path.exists());
    assert_eq!(found(&dir.path().join("own")).was(), ImageWas::Absent);
}

#[test]
fn a_replacement_of_the_directory_receives_no_files() {
    for links in [false, true] {
        let (dir, path) = with_mode(0o700);
        let image = ImageDir::look(&path, links).unwrap();
        image.enter(TIGHTEN).unwrap();
        let (away, other) = (dir.path().join("away"), dir.path().join("other"));
        fs::rename(&path, &away).unwrap();
        fs::create_dir(&other).unwrap();
        symlink(&other, &path).unwrap();
        assert!(is_gone(image.check()));
        fs::write(image.inside().join("pages-1.img"), "secret").unwrap();
        assert!(away.join("pages-1.img").exists() && !other.join("pages-1.img").exists());
        image.clear();
        assert!(!away.join("pages-1.img").exists(), "memory is left");
        assert!(path.is_symlink(), "what is not the image was removed");
    }
}

#[test]
fn a_removed_file_is_detected_unless_it_is_firns_own() {
    let (_dir, path) = with_mode(0o700);
    let image = entered(&path);
    for name in ["inventory.img", "pstree.img", "core-1.img", ".firn.json.tmp"] {
        fs::write(path.join(name), "x").unwrap();
    }
    fs::rename(path.join(".firn.json.tmp"), path.join("firn.json")).unwrap();
    image.check().unwrap();
    fs::remove_file(path.join("core-1.img")).unwrap();
    image.check_complete().unwrap();
    assert!(is_gone(image.check()));
    assert!(is_gone(image.check()), "the loss was forgotten");
}

#[test]
fn an_empty_directory_that_others_may_enter_is_closed_to_them() {
    for open in [0o755, 0o701, 0o1777] {
        let (_dir, path) = with_mode(open);
        let image = found(&path);
        image.admit(OpenImageDir::Tighten).unwrap();
        assert_eq!(mode(&path), open, "a refusal may still come");
        image.enter(TIGHTEN).unwrap();
        assert_eq!(mode(&path), 0o700);
    }
}

#[test]
fn a_directory_with_other_files_is_refused_and_unchanged() {
    let (_dir, path) = with_mode(0o755);
    fs::write(path.join("theirs"), "x").unwrap();
    let image = found(&path);
    for refused in [image.admit(OpenImageDir::Tighten), image.enter(TIGHTEN)] {
        assert!(matches!(
            refused,
            Err(ImageDirError::OpenToOthers { mode: 0o755, .. })
        ));
    }
    image.admit(OpenImageDir::Allow).unwrap();
    image.enter(None).unwrap();
    assert_eq!(mode(&path), 0o755);
}

#[test]
fn an_open_directory_is_refused_if_configured() {
    let (_dir, path) = with_mode(0o755);
    let refused = found(&path).admit(OpenImageDir::Refuse);
    assert!(matches!(refused, Err(ImageDirError::OpenToOthers { .. })));
    let (_dir, path) = with_mode(0o700);
    found(&path).admit(OpenImageDir::Refuse).unwrap();
}

#[test]
fn a_directory_of_another_user_becomes_roots() {
    let (_dir, path) = with_mode(0o700);
    if std::os::unix::fs::chown(&path, Some(65534), None).is_err() {
        eprintln!("skipped: needs root");
        return;
    }
    let image = found(&path);
    assert!(image.admit(OpenImageDir::Refuse).is_err());
    image.enter(TIGHTEN).unwrap();
    let metadata = fs::metadata(&path).unwrap();
    assert_eq!((metadata.uid(), metadata.mode() & 0o777), (0, 0o700));
}

#[test]
fn image_files_become_private_and_other_files_keep_their_mode() {
    let written = |was: &Path| {
        for name in ["pages-1.img", "descriptors.json", "stats-dump", "firn.json"] {
            let path = was.join(name);
            fs::write(&path, "x").unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        }
    };
    let (_dir, path) = with_mode(0o700);
    let image = entered(&path);
    written(&path);
    symlink("/etc/hostname", path.join("link.img")).unwrap();
    image.seal();
    for name in ["pages-1.img", "descriptors.json", "stats-dump", "firn.json"] {
        assert_eq!(mode(&path.join(name)), 0o600, "{name}");
    }
    let (_dir, path) = with_mode(0o700);
    written(&path);
    entered(&path).seal();
    assert_eq!(mode(&path.join("pages-1.img")), 0o600);
    assert_eq!(mode(&path.join("stats-dump")), 0o644);
}

#[test]
fn a_link_is_followed_only_where_the_stock_shim_follows_it() {
    let (dir, path) = with_mode(0o700);
    let link = dir.path().join("link");
    symlink(&path, &link).unwrap();
    assert!(matches!(
        ImageDir::look(&link, false),
        Err(ImageDirError::Io { .. })
    ));
    let image = ImageDir::look(&link, true).unwrap();
    image.enter(None).unwrap();
    image.check().unwrap();
}

#[test]
fn recovery_clears_only_the_directory_that_the_shim_recorded() {
    let (_dir, path) = with_mode(0o700);
    let id = found(&path).id();
    let other = id.map(|id| DirId {
        ino: id.ino + 1,
        ..id
    });
    fs::write(path.join("core-1.img"), "x").unwrap();
    ImageDir::known(&path, ImageWas::Empty, other).clear();
    assert!(path.join("core-1.img").exists());
    ImageDir::known(&path, ImageWas::Empty, id).clear();
    assert!(path.exists() && !path.join("core-1.img").exists());
    fs::write(path.join("core-1.img"), "x").unwrap();
    ImageDir::known(&path, ImageWas::Absent, None).clear();
    assert!(!path.exists());
}

#[test]
fn an_image_without_its_last_files_is_incomplete() {
    let (_dir, path) = with_mode(0o700);
    let image = entered(&path);
    fs::write(path.join("inventory.img"), "x").unwrap();
    assert!(matches!(
        image.check_complete(),
        Err(ImageDirError::Incomplete {
            missing: "pstree.img",
            ..
        })
    ));
    fs::write(path.join("pstree.img"), "x").unwrap();
    assert!(image.check_complete().is_ok());
}
