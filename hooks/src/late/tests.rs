use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use serde_json::json;

use super::*;

const RELEASED: [(&str, &str); 2] = [
    ("firn.dev/gpu", "released-by-hook"),
    ("firn.dev/hook-prepare", "exec: /x"),
];

/// A process with mounts of its own.
struct Init(Child);

impl Init {
    fn start() -> Self {
        let child = Command::new("unshare").args(["--mount", "sleep", "1000"]).spawn();
        let init = Self(child.unwrap());
        let (own, began) = (fs::read_link("/proc/self/ns/mnt").unwrap(), Instant::now());
        while fs::read_link(format!("/proc/{}/ns/mnt", init.pid())).is_ok_and(|of| of == own) {
            assert!(
                began.elapsed() < Duration::from_secs(20),
                "it has no mounts of its own"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        init
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap()
    }
}

impl Drop for Init {
    fn drop(&mut self) {
        let _killed = self.0.kill();
        let _ended = self.0.wait();
    }
}

#[test]
fn what_the_spec_has_and_the_container_has_not_is_mounted_there_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    for (name, text) in [("source", "of the driver"), ("place", "of the image")] {
        fs::write(path(name), text).unwrap();
    }
    let init = Init::start();
    let late = |annotations: serde_json::Value| {
        let bind =
            |at: &str| json!({"destination": path(at), "source": path("source"), "options": ["rbind"]});
        let proc = json!({"destination": "/proc", "type": "proc", "source": "proc"});
        let spec = json!({"annotations": annotations, "mounts": [proc, bind("absent/place"), bind("place")]});
        fs::write(path("config.json"), spec.to_string()).unwrap();
        complete(dir.path(), init.pid()).unwrap();
    };
    let inside = || fs::read_to_string(format!("/proc/{}/root{}", init.pid(), path("place").display()));
    late(json!({}));
    assert_eq!(inside().unwrap(), "of the image", "it is no such container");
    let released = json!({"firn.dev/gpu": "released-by-hook", "firn.dev/hook-prepare": "exec: /x"});
    for _ in 0..2 {
        late(released.clone());
        assert_eq!(inside().unwrap(), "of the driver");
        let mounts = mountinfo::of_process(init.pid()).unwrap();
        let made: Vec<_> = mounts
            .iter()
            .filter(|mount| mount.mount_point == path("place"))
            .collect();
        assert!(made.len() == 1 && !made[0].propagates, "{made:?}");
    }
    assert_eq!(fs::read_to_string(path("place")).unwrap(), "of the image");
}

/// The options of the mounts that the container has below the directory, by the path in it.
fn options_below(init: &Init, dir: &Path) -> Vec<(PathBuf, Vec<String>)> {
    let mounts = mountinfo::of_process(init.pid()).unwrap();
    let below = mounts.into_iter().filter_map(|mount| {
        let path = mount.mount_point.strip_prefix(dir).ok()?.to_owned();
        let words = mount.options.split(',').map(str::to_owned);
        Some((path, words.filter(|word| word != "relatime").collect()))
    });
    let mut below: Vec<_> = below.collect();
    below.sort();
    below
}

/// A source with a mount in it, and places in a container's files, some of them behind links.
fn laid(dir: &Path) -> [Mounted; 2] {
    let path = |name: &str| dir.join(name);
    for name in ["source/below", "run/secrets/token", "plain", "nested/a"] {
        fs::create_dir_all(path(name)).unwrap();
    }
    fs::create_dir_all(path("var")).unwrap();
    symlink(path("run"), path("var/run")).unwrap();
    symlink("../../../../../../../../../../../../etc", path("var/out")).unwrap();
    let host = Mounted::tmpfs(&path("source"));
    fs::create_dir(path("source/below")).unwrap();
    let below = Mounted::tmpfs(&path("source/below"));
    [below, host]
}

/// Behind a link in the container's files a mount is as restricted as the spec has it, and made once.
#[test]
fn late_mounts_have_their_flags_wherever_they_lead() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let _mounted = laid(dir.path());
    let source = path("source");
    let init = Init::start();
    let bind = |at: &str, options: &str| {
        let options: Vec<&str> = options.split(',').collect();
        json!({"destination": path(at), "source": source, "options": options})
    };
    let strict = "rbind,ro,nosuid,nodev,noexec";
    let mounts = json!([
        bind("var/run/secrets/token", strict),
        bind("plain", "rbind,rro,rnosuid,nodev"),
        bind("nested", "bind,ro"),
        bind("nested/below", "rbind,rw,noexec"),
        bind("var/out/no-such-place-of-firn", strict),
    ]);
    let annotations: serde_json::Map<_, _> = RELEASED
        .iter()
        .map(|(k, v)| ((*k).to_owned(), json!(v)))
        .collect();
    let spec = json!({"annotations": annotations, "mounts": mounts});
    fs::write(path("config.json"), spec.to_string()).unwrap();
    let all = &["ro", "nosuid", "nodev", "noexec"][..];
    for _ in 0..2 {
        complete(dir.path(), init.pid()).unwrap();
        let made = options_below(&init, dir.path());
        let made: Vec<(&str, Vec<&str>)> = made
            .iter()
            .filter(|(path, _)| !path.starts_with("source"))
            .map(|(path, words)| (path.to_str().unwrap(), words.iter().map(String::as_str).collect()))
            .collect();
        assert_eq!(
            made,
            [
                ("nested", vec!["ro"]),
                ("nested/below", vec!["rw"]),
                ("nested/below", vec!["rw", "noexec"]),
                ("nested/below/below", vec!["rw"]),
                ("plain", vec!["ro", "nosuid", "nodev"]),
                ("plain/below", vec!["ro", "nosuid"]),
                ("run/secrets/token", all.to_vec()),
                ("run/secrets/token/below", vec!["rw"]),
            ]
        );
    }
    // Nothing of it is on the host.
    let here = mountinfo::mounted().unwrap();
    let here: Vec<_> = here
        .iter()
        .filter(|mount| mount.mount_point.starts_with(dir.path()))
        .collect();
    assert_eq!(here.len(), 2, "{here:?}");
    assert!(
        here.iter().all(|mount| mount.options.starts_with("rw")),
        "{here:?}"
    );
}

/// A file system of this test.
struct Mounted(PathBuf);

impl Mounted {
    fn tmpfs(at: &Path) -> Self {
        let made = nix::mount::mount(
            Some("none"),
            at,
            Some("tmpfs"),
            nix::mount::MsFlags::empty(),
            None::<&str>,
        );
        made.unwrap();
        Self(at.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _unmounted = nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH);
    }
}
