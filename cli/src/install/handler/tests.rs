use super::*;

/// As read from this file, without containerd.
fn of(dir: &Path, text: &str) -> Configuration {
    let path = dir.join("config.toml");
    fs::write(&path, text).unwrap();
    Configuration::read(&path).unwrap()
}

fn added(configuration: &Configuration) -> Change {
    let plan = configuration.plan(Path::new("/opt/firn"), &toml::Table::new());
    plan.unwrap().change
}

const OTHER: &str = "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.firn]\n\
                     runtime_path = '/opt/firn/bin/containerd-shim-firn-v2'\n";

#[test]
fn the_tables_name_the_shim_of_the_prefix_and_what_the_version_needs() {
    let dir = tempfile::tempdir().unwrap();
    let was = "[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]\nsandbox_mode = 'x'\n";
    let was = was.parse().unwrap();
    let wanted = |text: &str| of(dir.path(), text).wanted(Path::new("/opt/firn"), &was);
    for text in ["version = 2\n", "version = 3\n"] {
        let table: toml::Table = wanted(text).parse().unwrap();
        let mut runtimes = runtimes(&table);
        let runtimes = runtimes.next().unwrap();
        assert_eq!(
            runtimes["firn"]["runtime_path"].as_str(),
            Some("/opt/firn/bin/containerd-shim-firn-v2")
        );
        let runc = runtimes.get("runc").map(|runc| runc["sandbox_mode"].as_str());
        assert_eq!(runc, text.contains('2').then_some(Some("x")), "{runtimes:?}");
    }
    let runc = "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]\nx = 1\n";
    assert!(!wanted(runc).contains("runtimes.runc"));
}

#[test]
fn what_is_there_decides_what_is_added() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(added(&of(dir.path(), "version = 3\n")), Change::Added);
    let before = "version = 3\nroot = '/x'";
    let configuration = of(dir.path(), before);
    let wanted = configuration.wanted(Path::new("/opt/firn"), &toml::Table::new());
    let ours = format!("{before}\n{BEGIN}{wanted}{END}# after\n");
    assert_eq!(without_ours(&ours), format!("{before}\n# after\n"));
    let installed = of(dir.path(), &format!("{before}\n{BEGIN}{JOINED}{wanted}{END}"));
    assert_eq!(added(&installed), Change::Unchanged);
    let older = of(dir.path(), &format!("{before}\n{BEGIN}# older\n{END}"));
    assert_eq!(added(&older), Change::Replaced);
    assert_eq!(added(&of(dir.path(), OTHER)), Change::Unchanged);
    let imports = OTHER.replace("3\n", "3\nimports = ['conf.d/*.toml']\n");
    assert_eq!(added(&of(dir.path(), &imports)), Change::Unchanged);
    let elsewhere = of(dir.path(), OTHER).plan(Path::new("/usr"), &toml::Table::new());
    assert!(matches!(elsewhere, Err(InstallError::Other { .. })));
    let path = dir.path().join("config.toml");
    fs::write(&path, "disabled_plugins = []\n").unwrap();
    let old = Configuration::read(&path);
    assert!(matches!(
        old.err().unwrap(),
        InstallError::Version { version: 1, .. }
    ));
    fs::write(&path, "version = \n").unwrap();
    let wrong = Configuration::read(&path);
    assert!(matches!(wrong.err().unwrap(), InstallError::Syntax { .. }));
}

#[test]
fn imported_directories_get_a_file_in_version_3() {
    let dir = tempfile::tempdir().unwrap();
    let own = |text: &str| of(dir.path(), text).own_file();
    assert_eq!(
        own("version = 3\nimports = ['/a/one.toml', '/a/conf.d/*.toml']\n"),
        Some("/a/conf.d/firn.toml".into())
    );
    assert_eq!(
        own("version = 3\nimports = ['conf.d/*.toml']\n"),
        Some(dir.path().join("conf.d/firn.toml"))
    );
    assert_eq!(own("version = 2\nimports = ['/a/conf.d/*.toml']\n"), None);
    assert_eq!(own("version = 3\nimports = ['/a/one.toml']\n"), None);
}

#[test]
fn a_file_is_as_before_once_the_handler_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    for before in ["version = 3\n", "# comment\nversion = 3", "version = 2\n\n\n"] {
        let configuration = of(dir.path(), before);
        let wanted = configuration.wanted(Path::new("/usr/local"), &toml::Table::new());
        let joined = if before.ends_with('\n') {
            String::new()
        } else {
            format!("\n{BEGIN}{JOINED}")
        };
        let begin = if joined.is_empty() { BEGIN } else { &joined };
        let after = format!("{before}{begin}{wanted}{END}");
        let removed = of(dir.path(), &after).remove(false).unwrap().unwrap();
        assert_eq!(removed.change, Change::Removed);
        let left = fs::read_to_string(dir.path().join("config.toml")).unwrap();
        assert_eq!(left, before);
    }
    let made = dir.path().join("etc");
    fs::create_dir(&made).unwrap();
    for (first, stays) in [(MADE, true), (MADE_WITH_DIRECTORY, false)] {
        let text = format!("{first}version = 3\n{BEGIN}{END}");
        of(&made, &text).remove(false).unwrap();
        assert_eq!(made.exists(), stays);
        assert!(!made.join("config.toml").exists());
    }
    assert!(of(dir.path(), "version = 3\n").remove(false).unwrap().is_none());
}

#[test]
fn another_value_is_named_and_defaults_are_none() {
    let confirm = |was: &str, is: &str| {
        let dir = tempfile::tempdir().unwrap();
        let of = of(dir.path(), "version = 3\n");
        let confirmed = of.confirm(was.parse().unwrap(), is.parse().unwrap());
        confirmed.map_err(|error| error.to_string())
    };
    let runtimes = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes";
    let was = format!("imports = []\nroot = '/x'\n{runtimes}.runc]\na = 1\nb = ''\n[debug]\nlevel = ''\n");
    let is = format!("imports = ['/y']\nroot = '/x'\n{runtimes}.runc]\na = 1\n{runtimes}.firn]\na = 2\n");
    assert_eq!(confirm(&was, &is), Ok(()));
    let lost = confirm(&was, &is.replace("root = '/x'\n", "")).unwrap_err();
    assert!(lost.ends_with("as it is: root is another"), "{lost}");
    let other = confirm(&was, &is.replace("a = 1", "a = 3")).unwrap_err();
    assert!(other.contains("runtimes.runc.a is another"), "{other}");
    let none = confirm(&was, &was).unwrap_err();
    assert!(none.ends_with("it does not have the handler"), "{none}");
}
