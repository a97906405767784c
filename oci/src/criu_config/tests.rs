use super::*;
use crate::edit::set_criu_config;
use serde_json::json;
use tempfile::TempDir;

fn spec(criu_config: &str) -> Spec {
    Spec::from(json!({"annotations": {"org.criu.config": criu_config}}))
}

fn written(config: &CriuConfig, operation: Operation) -> Vec<String> {
    config.write(operation).unwrap();
    std::fs::read_to_string(config.path())
        .unwrap()
        .lines()
        .map(str::to_owned)
        .collect()
}

fn libdir(bundle: &TempDir) -> String {
    format!("libdir {}", bundle.path().join("firn-criu-libs").display())
}

/// What the links in the bundle's plugin directory lead to.
fn plugins(bundle: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(bundle.join("firn-criu-libs")).unwrap();
    let to = entries.map(|entry| std::fs::read_link(entry.unwrap().path()).unwrap());
    let mut to: Vec<_> = to.map(|to| to.to_str().unwrap().to_owned()).collect();
    to.sort();
    to
}

#[test]
fn the_operators_plugins_are_given_and_firns_own_where_it_is_needed() {
    let (bundle, libs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let at = |name: &str| libs.path().join(name).to_str().unwrap().to_owned();
    for name in ["a b.so", "libfirn_criu.so"] {
        std::fs::write(at(name), "").unwrap();
    }
    let set = |libs_dir: Option<&Path>, plugin: Option<&str>| {
        set_plugins(bundle.path(), libs_dir, plugin.map(Path::new)).unwrap();
        plugins(bundle.path())
    };
    let (theirs, ours) = (at("a b.so"), "/firn/libfirn_criu.so");
    let libs_dir = Some(libs.path());
    for _ in 0..2 {
        assert_eq!(set(libs_dir, Some(ours)), [ours, &theirs]);
        assert_eq!(set(libs_dir, None), [&*theirs]);
    }
    // The configuration has changed meanwhile.
    assert_eq!(set(None, Some(ours)), [ours]);
    assert_eq!(set(Some(Path::new("/nonexistent")), None), [""; 0]);
}

#[test]
fn without_a_users_file_only_firns_lines_are_there() {
    let bundle = tempfile::tempdir().unwrap();
    for users_file in ["", "/nonexistent/criu.conf"] {
        let config = CriuConfig::new(&spec(users_file), bundle.path(), None);
        let libdir = libdir(&bundle);
        let dump = ["ghost-limit 1024G", "skip-in-flight", &libdir].map(str::to_owned);
        assert_eq!(written(&config, Operation::Dump), dump);
        assert_eq!(
            written(&config, Operation::Restore),
            [
                libdir,
                "manage-cgroups=ignore".to_owned(),
                "leave-stopped".to_owned()
            ]
        );
        assert_eq!(
            written(&config, Operation::Dump),
            dump,
            "a dump must not leave tasks stopped"
        );
        assert_eq!(plugins(bundle.path()), [""; 0]);
    }
}

#[test]
fn the_users_lines_come_first_and_are_read_every_time() {
    let bundle = tempfile::tempdir().unwrap();
    let users = bundle.path().join("users.conf");
    std::fs::write(&users, "tcp-established\nfile-locks").unwrap();
    let config = CriuConfig::new(
        &spec(users.to_str().unwrap()),
        bundle.path(),
        Some(Path::new("/empty")),
    );
    let libdir = libdir(&bundle);
    let lines = written(&config, Operation::Restore);
    assert_eq!(
        lines,
        [
            "tcp-established",
            "file-locks",
            &libdir,
            "manage-cgroups=ignore",
            "leave-stopped"
        ]
    );
    std::fs::write(&users, "ghost-limit 2M").unwrap();
    assert_eq!(
        written(&config, Operation::Dump),
        ["ghost-limit 1024G", "skip-in-flight", "ghost-limit 2M", &libdir]
    );
}

#[test]
fn only_a_dump_that_closes_connections_has_criu_close_them() {
    let bundle = tempfile::tempdir().unwrap();
    let config = CriuConfig::new(&spec(""), bundle.path(), None);
    let libdir = &*libdir(&bundle);
    for (tcp, expected) in [
        (Tcp::Refuse, &[libdir][..]),
        (Tcp::Close, &[libdir, "tcp-close"]),
        (Tcp::Keep, &[libdir, "no-tcp-close"]),
        (Tcp::Auto, &[libdir, "no-tcp-close"]),
    ] {
        let config = config.clone().with_tcp(tcp);
        assert_eq!(written(&config, Operation::Dump)[2..], *expected, "{tcp:?}");
        let restore = written(&config, Operation::Restore);
        let continues = matches!(tcp, Tcp::Keep | Tcp::Auto);
        assert_eq!(
            restore.contains(&"no-tcp-close".to_owned()),
            continues,
            "{restore:?}"
        );
        assert!(!restore.contains(&"tcp-close".to_owned()), "{restore:?}");
    }
}

#[test]
fn only_a_dump_with_deleted_names_has_criu_make_links() {
    let bundle = tempfile::tempdir().unwrap();
    let users = bundle.path().join("users.conf");
    std::fs::write(&users, "link-remap").unwrap();
    for (file, link_remap) in [("", true), ("", false), (users.to_str().unwrap(), false)] {
        let config = CriuConfig::new(&spec(file), bundle.path(), None).with_link_remap(link_remap);
        let lines = written(&config, Operation::Dump);
        assert_eq!(
            lines.contains(&"link-remap".to_owned()),
            link_remap || !file.is_empty(),
            "{lines:?}"
        );
        assert_eq!(
            had_link_remap(bundle.path()),
            link_remap,
            "the user's own line is not firn's"
        );
        let lines = written(&config.with_tcp(Tcp::Close), Operation::Restore);
        assert_eq!(
            lines.contains(&"link-remap".to_owned()),
            !file.is_empty(),
            "{lines:?}"
        );
    }
    CriuConfig::of_criu(&spec(users.to_str().unwrap()), bundle.path())
        .write(Operation::Dump)
        .unwrap();
    assert!(!had_link_remap(bundle.path()));
    assert!(!had_link_remap(Path::new("/nonexistent")));
}

#[test]
fn only_a_dump_looks_where_files_are_watched() {
    let bundle = tempfile::tempdir().unwrap();
    let config = |path: &str| {
        CriuConfig::new(&spec(""), bundle.path(), None).with_scanned(vec!["/app".into(), path.into()])
    };
    let named = |operation| {
        let lines = written(&config("/srv/b"), operation).into_iter();
        lines.filter(|line| line.starts_with("irmap")).collect::<Vec<_>>()
    };
    assert_eq!(
        named(Operation::Dump),
        ["irmap-scan-path /srv/b", "irmap-scan-path /app"]
    );
    assert_eq!(named(Operation::Restore), [""; 0]);
    let other = config("/a\nlibdir /tmp").write(Operation::Dump);
    assert!(matches!(other, Err(CriuError::Path { .. })), "{other:?}");
    let users = bundle.path().join("users.conf");
    for line in [
        "irmap-scan-path /app # of ours",
        "  irmap-scan-path=/app",
        "irmap-scan-path   /app",
    ] {
        std::fs::write(&users, format!("file-locks\n{line}\n")).unwrap();
        let users = spec(users.to_str().unwrap());
        // An annotation cannot bring it; the operator's file can.
        assert_eq!(users_scanned(&users, None), Vec::<PathBuf>::new(), "{line}");
        assert_eq!(scanned_of(line), [Path::new("/app")], "{line}");
    }
}

#[test]
fn what_a_users_file_sets_for_connections_is_known_also_from_an_edited_spec() {
    let bundle = tempfile::tempdir().unwrap();
    let users = bundle.path().join("users.conf");
    for (lines, expected) in [
        ("ghost-limit 2M\n# tcp-established\n", None),
        ("ghost-limit 2M\n  tcp-established # of ours\n", Some(Tcp::Keep)),
        ("tcp-close\n", Some(Tcp::Close)),
    ] {
        std::fs::write(&users, lines).unwrap();
        let spec_of_user = spec(users.to_str().unwrap());
        let config = CriuConfig::new(&spec_of_user, bundle.path(), None).with_tcp(Tcp::Close);
        assert_eq!(config.users_tcp(), expected, "{lines}");
        config.write(Operation::Dump).unwrap();
        let mut edited = spec_of_user.clone();
        set_criu_config(&mut edited, &config.path()).unwrap();
        assert_eq!(users_tcp(&edited, Some(bundle.path())), expected, "{lines}");
        assert_eq!(users_tcp(&spec_of_user, None), expected, "{lines}");
    }
    assert_eq!(users_tcp(&spec("/nonexistent"), None), None);
    for (lines, expected) in [
        ("# ext-unix-sk\n", false),
        ("tcp-close\n ext-unix-sk # log\n", true),
    ] {
        std::fs::write(&users, lines).unwrap();
        let spec_of_user = spec(users.to_str().unwrap());
        assert_eq!(users_external_unix(&spec_of_user, None), expected, "{lines}");
        let config = CriuConfig::new(&spec_of_user, bundle.path(), None);
        assert_eq!(config.users_external_unix(), expected, "{lines}");
    }
}

#[test]
fn restores_run_firns_script() {
    let bundle = tempfile::tempdir().unwrap();
    let users = bundle.path().join("users.conf");
    std::fs::write(&users, "file-locks").unwrap();
    let link = bundle.path().join("firn-criu-script");
    let ours = format!("action-script {}", link.display());
    let spec = spec(users.to_str().unwrap());
    let plugins = CriuConfig::of_criu(&spec, bundle.path()).with_script(Path::new("/a hook"));
    for _ in 0..2 {
        let lines = written(&plugins, Operation::Restore);
        let ours = ["file-locks", &ours, "manage-cgroups=ignore"];
        assert_eq!(lines, ours, "CRIU's own restore");
        assert_eq!(std::fs::read_link(&link).unwrap(), Path::new("/a hook"));
    }
    assert_eq!(written(&plugins, Operation::Dump), ["file-locks"]);
    std::fs::write(&users, "ghost-limit 2M").unwrap();
    let dumps = std::fs::read_to_string(plugins.path()).unwrap();
    assert_eq!(dumps, "ghost-limit 2M", "as it is at the dump");
    assert_eq!(
        written(&plugins, Operation::Restore),
        ["ghost-limit 2M", &ours, "manage-cgroups=ignore"]
    );
    assert_eq!(std::fs::read_to_string(&users).unwrap(), "ghost-limit 2M");
    let own =
        CriuConfig::new(&spec, bundle.path(), Some(Path::new("/empty"))).with_script(Path::new("/hook"));
    let lines = written(&own, Operation::Restore);
    assert_eq!(
        lines[1..],
        [&libdir(&bundle), &ours, "manage-cgroups=ignore", "leave-stopped"]
    );
    assert_eq!(std::fs::read_link(&link).unwrap(), Path::new("/hook"));
    // A dump runs only its own.
    let lines = |config: &CriuConfig| written(config, Operation::Dump);
    assert!(!lines(&own).contains(&ours));
    let own = own.with_dump_script(Some("/dump hook".into()));
    assert_eq!(lines(&own).iter().filter(|line| **line == ours).count(), 1);
    assert_eq!(std::fs::read_link(&link).unwrap(), Path::new("/dump hook"));
}

#[test]
fn only_a_cgroup_namespace_has_criu_look_at_the_images_cgroups() {
    let bundle = tempfile::tempdir().unwrap();
    for (namespace, mode) in [
        ("cgroup", "manage-cgroups=none"),
        ("pid", "manage-cgroups=ignore"),
    ] {
        let namespaces = json!([{ "type": namespace }]);
        let spec =
            Spec::from(json!({"linux": {"namespaces": namespaces}, "annotations": {"org.criu.config": ""}}));
        let config = CriuConfig::of_criu(&spec, bundle.path());
        assert_eq!(written(&config, Operation::Restore), [mode]);
        let config = CriuConfig::new(&spec, bundle.path(), Some(Path::new("/empty"))).without_state();
        assert_eq!(written(&config, Operation::Restore), [&libdir(&bundle), mode]);
    }
}

#[test]
fn without_annotation_runcs_own_file_counts() {
    let config = CriuConfig::new(&Spec::from(json!({})), Path::new("/b"), None);
    assert_eq!(config.users_file.path(), Some(Path::new("/etc/criu/runc.conf")));
}

/// What a spec names that firn has edited is in the bundle, and nowhere else.
#[test]
fn firns_own_file_is_no_users() {
    let bundle = tempfile::tempdir().unwrap();
    let edited = |more: Option<&str>| {
        let mut annotations = json!({"org.criu.config": "/other/bundle/firn-criu.conf"});
        if let Some(more) = more {
            annotations["firn.dev/criu-config"] = json!(more);
        }
        let spec = Spec::from(json!({"annotations": annotations}));
        CriuConfig::new(&spec, bundle.path(), None).users_file
    };
    for (users, found) in [
        (spec("/mine.conf"), Some("/mine.conf")),
        (spec(""), None),
        (Spec::from(json!({})), Some("/etc/criu/runc.conf")),
    ] {
        let config = CriuConfig::new(&users, bundle.path(), None);
        config.write(Operation::Dump).unwrap();
        for more in [None, Some("/theirs.conf")] {
            assert_eq!(edited(more).path(), found.map(Path::new), "{users:?} {more:?}");
        }
    }
    let elsewhere = CriuConfig::new(&spec("/a/firn-criu.conf"), Path::new(""), None);
    assert_eq!(elsewhere.users_file, UsersFile::Operators);
}

#[test]
fn a_users_file_that_is_no_text_is_refused() {
    let bundle = tempfile::tempdir().unwrap();
    let users = bundle.path().join("users.conf");
    for content in [&b"\xff\xfe"[..], b"a\0b", &[b'#'; 70_000]] {
        std::fs::write(&users, content).unwrap();
        let config = CriuConfig::new(&spec(users.to_str().unwrap()), bundle.path(), None);
        assert!(matches!(
            config.write(Operation::Dump),
            Err(CriuError::NotText { .. })
        ));
        assert!(!config.path().exists());
    }
    let config = CriuConfig::new(&spec(bundle.path().to_str().unwrap()), bundle.path(), None);
    assert!(matches!(
        config.write(Operation::Dump),
        Err(CriuError::Read { .. })
    ));
}

#[test]
fn paths_that_criu_would_misread_are_refused() {
    for bad in ["/a#b", "/a\"b", "/a\nleave-running", "/a\\b", "/a b"] {
        let config = CriuConfig::new(&spec(""), Path::new(bad), None);
        assert!(
            matches!(config.content(Operation::Dump), Err(CriuError::Path { .. })),
            "{bad}"
        );
    }
}
