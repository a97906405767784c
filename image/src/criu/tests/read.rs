//! Which files of an image are read, and which of them CRIU itself would read elsewhere or otherwise.

use super::*;

#[test]
fn only_regular_files_of_one_name_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    std::fs::create_dir(&image).unwrap();
    given().write(&image);
    let spec = Spec::from(given().spec);
    let names: Vec<_> = std::fs::read_dir(&image)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert!(names.len() > 10);
    for name in names {
        let (path, other) = (image.join(&name), dir.path().join("other"));
        std::fs::rename(&path, &other).unwrap();
        let makes: [&dyn Fn(); 5] = [
            &|| symlink(&other, &path).unwrap(),
            &|| std::fs::hard_link(&other, &path).unwrap(),
            &|| std::fs::create_dir(&path).unwrap(),
            &|| nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap(),
            &|| drop(std::os::unix::net::UnixListener::bind(&path).unwrap()),
        ];
        for (number, make) in makes.into_iter().enumerate() {
            make();
            let fault = check(&spec, &image, &host()).unwrap_err();
            assert_eq!(
                fault.code(),
                "FIRN-IMAGE-UNREADABLE",
                "{name:?}, {number}: {fault}"
            );
            match path.symlink_metadata().unwrap().file_type() {
                kind if kind.is_dir() => std::fs::remove_dir(&path).unwrap(),
                kind => {
                    assert!(kind.is_file() || kind.is_symlink() || kind.is_fifo() || kind.is_socket());
                    std::fs::remove_file(&path).unwrap();
                }
            }
        }
        std::fs::rename(&other, &path).unwrap();
    }
    assert_eq!(check(&spec, &image, &host()), Ok(()));
    symlink("/", image.join("parent")).unwrap();
    assert_eq!(
        check(&spec, &image, &host()).unwrap_err().code(),
        "FIRN-IMAGE-UNREADABLE"
    );
}

#[test]
fn what_criu_reads_elsewhere_or_otherwise_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let spec = Spec::from(given().spec);
    let code = || {
        check(&spec, dir.path(), &host())
            .err()
            .map(|fault| fault.code().to_owned())
    };
    given().write(dir.path());
    assert_eq!(code(), None);
    // Where older images have credentials, the policies of AppArmor, and files that are missing.
    for (name, expected) in [
        ("creds-1.img", "FIRN-IMAGE-CORRUPT"),
        ("rlimit-1.img", "FIRN-IMAGE-CORRUPT"),
        ("apparmor.img", "FIRN-IMAGE-PRIVILEGE"),
    ] {
        std::fs::write(dir.path().join(name), "").unwrap();
        assert_eq!(code().as_deref(), Some(expected), "{name}");
        std::fs::remove_file(dir.path().join(name)).unwrap();
    }
    for name in [
        "pstree.img",
        "core-8.img",
        "ids-1.img",
        "mountpoints-13.img",
        "files.img",
    ] {
        let path = dir.path().join(name);
        let whole = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(code().as_deref(), Some("FIRN-IMAGE-CORRUPT"), "without {name}");
        for cut in [3, 7, 9, whole.len() - 1] {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert_eq!(
                code().as_deref(),
                Some("FIRN-IMAGE-CORRUPT"),
                "{name} cut at {cut}"
            );
        }
        // A second message, of which CRIU takes one.
        std::fs::write(&path, [&whole[..], &whole[8..]].concat()).unwrap();
        let is_list = matches!(name, "pstree.img" | "files.img");
        assert!(is_list || code().is_some(), "{name} twice");
        std::fs::write(&path, whole).unwrap();
    }
    assert_eq!(code(), None);
}
