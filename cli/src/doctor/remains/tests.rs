//! What failures leave, and what does not count as such.

use std::os::unix::net::UnixListener;
use std::time::SystemTime;

use firn_process::cgroup::testing::Scratch;

use super::super::Status;
use super::*;

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn sockets_without_a_listener_are_removed() {
    let dir = dir();
    let (dead, living) = (dir.path().join("dead"), dir.path().join("living"));
    drop(UnixListener::bind(&dead).unwrap());
    let _listens = UnixListener::bind(&living).unwrap();
    assert!(sockets(dir.path()).is_empty(), "it is young");
    let old = SystemTime::now() - 2 * YOUNG;
    let seconds = old.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let at = nix::sys::time::TimeSpec::new(i64::try_from(seconds).unwrap(), 0);
    for path in [&dead, &living] {
        let follow = nix::sys::stat::UtimensatFlags::NoFollowSymlink;
        nix::sys::stat::utimensat(nix::fcntl::AT_FDCWD, path, &at, &at, follow).unwrap();
    }
    let mut left = sockets(dir.path());
    let found = left.remove(0);
    assert!(left.is_empty() && found.what.contains("dead"), "{}", found.what);
    assert_eq!(found.into_check(true).status, Status::Ok);
    assert!(!dead.exists() && living.exists());
}

#[test]
fn directories_of_killed_programs_are_removed() {
    let dir = dir();
    for name in ["job-2147483646", "job-x", "job"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    let mut left = directories(dir.path());
    assert_eq!(left.len(), 1);
    let check = left.remove(0).into_check(false);
    assert_eq!(check.remedy.unwrap(), "`firn doctor --fix`");
    for left in directories(dir.path()) {
        assert_eq!(left.into_check(true).status, Status::Ok);
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn a_locked_transaction_of_firn_runc_is_not_left() {
    let dir = dir();
    let root = dir.path().join("run/runc");
    fs::create_dir_all(&root).unwrap();
    fs::write(root.join("job"), "/bundle").unwrap();
    let left = of_runc(dir.path());
    assert!(matches!(&left[0].fix, Fix::Runc(root, id) if root == "/run/runc" && id == "job"));
    let held = Flock::lock(File::open(root.join("job")).unwrap(), FlockArg::LockExclusive);
    assert!(of_runc(dir.path()).is_empty());
    drop(held);
}

/// The bundle of a frozen container whose shim has ended.
fn bundle(dir: &Path, pid: u32, cgroup: &str) -> PathBuf {
    let bundle = dir.join("default/frozen-job");
    fs::create_dir_all(&bundle).unwrap();
    fs::write(bundle.join(names::BUNDLE_CRIU_CONFIG), "").unwrap();
    fs::write(bundle.join("init.pid"), pid.to_string()).unwrap();
    let spec = serde_json::json!({ "linux": { "cgroupsPath": cgroup } });
    fs::write(bundle.join(names::BUNDLE_SPEC), spec.to_string()).unwrap();
    bundle
}

#[test]
fn a_pid_that_another_container_has_by_now_kills_nothing() {
    for scratch in Scratch::all() {
        let name = format!("/{}", scratch.cgroup.primary_dir().file_name().unwrap().display());
        let own = Cgroup::by_spec(&name, "", false).unwrap();
        if own.version() != scratch.cgroup.version() {
            continue;
        }
        let mut child = scratch.shell("", "exec sleep 100").spawn().unwrap();
        block_on(async {
            scratch.all_entered().await;
            scratch.cgroup.freeze(LIMIT).await.unwrap();
        })
        .unwrap();
        let dir = dir();
        // The process is another container's, which stands still for a checkpoint.
        let path = bundle(dir.path(), child.id(), "/firn-test-of-another");
        assert!(frozen(&path).is_none());
        Fix::Kill(path).apply().unwrap_err();
        let path = bundle(dir.path(), child.id(), &name);
        let left = frozen(&path).unwrap();
        assert!(left.what.contains("frozen-job is frozen"), "{}", left.what);
        // Another one takes its place, after the look and before the removal.
        bundle(dir.path(), std::process::id(), &name);
        Fix::Kill(path).apply().unwrap_err();
        assert!(child.try_wait().unwrap().is_none());
        let path = bundle(dir.path(), child.id(), &name);
        // A restore has found others in its cgroup.
        let others = path.join(names::BUNDLE_OTHERS_CGROUP);
        fs::write(&others, "").unwrap();
        assert!(frozen(&path).is_none());
        fs::remove_file(others).unwrap();
        let ended = std::thread::spawn(move || child.wait());
        Fix::Kill(path).apply().unwrap();
        ended.join().unwrap().unwrap();
    }
}
