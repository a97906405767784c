use std::os::unix::fs::{PermissionsExt, chown, symlink};

use super::*;

/// A directory of root's, with a file in it.
fn file(lines: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sub/criu.conf");
    std::fs::create_dir(dir.path().join("sub")).unwrap();
    std::fs::write(&path, lines).unwrap();
    (dir, path)
}

fn mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_file_that_others_may_change_is_refused() {
    let (dir, path) = file("tcp-close\n");
    let lines = |path: &Path| UsersFile::Named(path.to_owned()).lines();
    assert_eq!(lines(&path).unwrap(), "tcp-close\n");
    let sub = path.parent().unwrap();
    for (place, before) in [(&*path, 0o644), (sub, 0o755), (dir.path(), 0o700)] {
        let refused = |why: &str| match lines(&path) {
            Err(CriuError::NotRoots { place: named, .. }) => assert_eq!(named, place, "{why}"),
            other => panic!("{why} of {}: {other:?}", place.display()),
        };
        for open in [0o020, 0o002] {
            mode(place, before | open);
            refused("mode");
        }
        mode(place, before);
        chown(place, Some(1000), None).unwrap();
        refused("owner");
        chown(place, Some(0), None).unwrap();
    }
    // As /tmp; and a sticky file is no directory.
    mode(sub, 0o1777);
    assert!(lines(&path).is_ok());
    mode(&path, 0o1666);
    assert!(matches!(lines(&path), Err(CriuError::NotRoots { .. })));
    mode(&path, 0o644);
    // A link of anybody's leads to the same answer.
    let link = dir.path().join("link");
    symlink(&path, &link).unwrap();
    assert!(lines(&link).is_ok());
    chown(&path, Some(1000), None).unwrap();
    assert!(matches!(lines(&link), Err(CriuError::NotRoots { .. })));
    assert_eq!(lines(Path::new("/nonexistent/criu.conf")).unwrap(), "");
}

#[test]
fn lines_that_run_programs_or_write_files_are_the_operators() {
    for harmless in [
        "",
        "  # action-script /x",
        "tcp-close # action-script /x",
        "ghost-limit 2M",
        "ghost-limit=2M",
        "\tnetwork-lock\tskip ",
    ] {
        let (_dir, path) = file(&format!("shell-job\n{harmless}\n"));
        assert!(UsersFile::Named(path).lines().is_ok(), "{harmless}");
    }
    for refused in [
        "action-script /x",
        "action-scrip /x",
        "exec-cmd /x",
        "libdir /x",
        "root /",
        "external mnt[]",
        "page-server",
        "log-file /etc/passwd",
        "work-dir /etc",
        "join-ns pid:1",
        "lsm-profile apparmor:x",
        "cgroup-props-file /x",
        "inherit-fd fd[3]:/x",
        "config /x",
        "tcp-close --action-script /x",
        "ghost-limit --action-script=/x",
        "tcp-close -L/x",
        "tcp-close /x",
        "tcp-close x y",
        "tcp-close#x",
        "\"action-script\" /x",
        "--action-script /x",
        "tcp-close\raction-script /x",
        "tcp-close\u{b}x",
        "ghost-limit=2M action-script",
    ] {
        let (_dir, path) = file(&format!("shell-job\n{refused}\n"));
        let lines = UsersFile::Named(path).lines();
        assert!(
            matches!(lines, Err(CriuError::Option { .. })),
            "{refused:?}: {lines:?}"
        );
        assert!(!is_harmless(refused), "{refused:?}");
    }
}

#[test]
fn lines_that_put_an_image_elsewhere_are_found() {
    for line in [
        "images-dir /srv",
        "images-dir=/srv",
        "  lazy-pages # for the other node",
        "\u{b}lazy-pages",
        "prev-image ../before",
        "im /srv",
        "ghost-limit 1G --page-server",
        "shell-job --images-dir=/srv",
        "shell-job \"--images-dir\" \"/srv\"",
        "shell-job -D /srv",
        "shell-job -s",
    ] {
        let text = format!("shell-job\n{line}\ntcp-close\n");
        assert_eq!(misleading(&text), Some(line));
    }
    for line in [
        "# images-dir /srv",
        "work-dir /srv",
        "log-file stream",
        "ghost-limit 1G page-server",
        "leave-running",
        "",
        "l",
    ] {
        assert_eq!(misleading(line), None, "{line}");
    }
}
