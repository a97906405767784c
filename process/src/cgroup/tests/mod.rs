use std::fs;
use std::io::{Error, ErrorKind};

use tempfile::TempDir;
use tokio::time::{sleep, timeout};

use super::testing::{LIMIT, Scratch, fake, until};
use super::*;
use crate::reaper::Reaper;

/// A unified cgroup made of plain files.
fn fake_unified(files: &[(&str, &str)]) -> (TempDir, Cgroup) {
    fake(Version::V2, files)
}

#[tokio::test]
async fn a_cgroup_is_found_by_its_process_and_by_its_path() {
    let reaper = Reaper::start().unwrap();
    let Some(scratch) = Scratch::v1().or_else(Scratch::v2) else {
        return;
    };
    let path = format!("/{}", scratch.name);
    let by_spec = Cgroup::by_spec(&path, "", false).unwrap();
    if by_spec.version != scratch.cgroup.version {
        return;
    }
    assert!(by_spec.exists());
    assert!(by_spec.pids().unwrap().is_empty());
    let outer = scratch.spawn(&reaper, "", "exec sleep 1000");
    let inner = scratch.spawn(&reaper, "inner", "exec sleep 1000");
    scratch.all_entered().await;
    let mut expected = [outer.pid(), inner.pid()];
    expected.sort_unstable();
    assert_eq!(by_spec.pids().unwrap(), expected);
    assert_eq!(Cgroup::of_pid(outer.pid()).unwrap().primary(), by_spec.primary());
}

#[tokio::test]
async fn frozen_processes_do_not_run_until_thawed() {
    let reaper = Reaper::start().unwrap();
    for scratch in Scratch::all() {
        let dir = TempDir::new().unwrap();
        let beat = dir.path().join("beat");
        let script = format!("while :; do echo beat > {}; done", beat.display());
        let _children = [
            scratch.spawn(&reaper, "", &script),
            scratch.spawn(&reaper, "inner", &script),
        ];
        scratch.all_entered().await;
        until("the first beat", || beat.exists()).await;
        let cgroup = &scratch.cgroup;
        assert_eq!(cgroup.freezer_state().unwrap(), FreezerState::Thawed);
        for _ in 0..2 {
            cgroup.freeze(LIMIT).await.unwrap();
            assert_eq!(cgroup.freezer_state().unwrap(), FreezerState::Frozen);
        }
        // On kernel 6.18 with v2 a process was seen to complete its current system call after the cgroup was
        // reported as frozen.
        let mut still = false;
        for _ in 0..3 {
            fs::write(&beat, "frozen").unwrap();
            for _ in 0..20 {
                sleep(Duration::from_millis(2)).await;
                still = fs::read_to_string(&beat).unwrap() == "frozen";
                if !still {
                    break;
                }
            }
            if still {
                break;
            }
        }
        assert!(still, "{:?} {:?}", cgroup.version, cgroup.freezer_state());
        for _ in 0..2 {
            cgroup.thaw(LIMIT).await.unwrap();
            assert_eq!(cgroup.freezer_state().unwrap(), FreezerState::Thawed);
        }
        until("the beat after the thaw", || {
            fs::read_to_string(&beat).unwrap() == "beat\n"
        })
        .await;
        cgroup.kill_all(LIMIT).await.unwrap();
    }
}

#[tokio::test]
async fn processes_that_fork_all_the_time_freeze_too() {
    let reaper = Reaper::start().unwrap();
    for scratch in Scratch::all() {
        let _child = scratch.spawn(&reaper, "", "while :; do /bin/true & /bin/true; done");
        scratch.all_entered().await;
        for _ in 0..5 {
            scratch.cgroup.freeze(LIMIT).await.unwrap();
            assert_eq!(scratch.cgroup.freezer_state().unwrap(), FreezerState::Frozen);
            scratch.cgroup.thaw(LIMIT).await.unwrap();
        }
        scratch.cgroup.kill_all(LIMIT).await.unwrap();
    }
}

#[tokio::test]
async fn an_empty_cgroup_freezes_at_once() {
    for scratch in Scratch::all() {
        scratch.cgroup.freeze(LIMIT).await.unwrap();
        assert_eq!(scratch.cgroup.freezer_state().unwrap(), FreezerState::Frozen);
        scratch.cgroup.thaw(LIMIT).await.unwrap();
    }
}

#[tokio::test]
async fn a_failed_freeze_is_rolled_back_except_for_threads_that_must_not_run() {
    let (_dir, cgroup) = fake_unified(&[
        ("cgroup.freeze", "0"),
        ("cgroup.events", "populated 1\nfrozen 0\n"),
    ]);
    let error = cgroup.freeze(Duration::from_millis(20)).await.unwrap_err();
    assert!(matches!(error, CgroupError::FreezeTimeout { .. }), "{error}");
    assert_eq!(
        fs::read_to_string(cgroup.primary_dir().join("cgroup.freeze")).unwrap(),
        "0"
    );
    // `keep_frozen` does not thaw.
    let error = cgroup.keep_frozen(Duration::from_millis(20)).await.unwrap_err();
    assert!(matches!(error, CgroupError::FreezeTimeout { .. }), "{error}");
    assert_eq!(
        fs::read_to_string(cgroup.primary_dir().join("cgroup.freeze")).unwrap(),
        "1"
    );

    // Its own processes are frozen, those of a cgroup below are not yet.
    let (_dir, cgroup) = fake_unified(&[
        ("cgroup.freeze", "1"),
        ("cgroup.events", "populated 1\nfrozen 1\n"),
    ]);
    let below = cgroup.primary_dir().join("below");
    fs::create_dir(&below).unwrap();
    fs::write(below.join("cgroup.events"), "populated 1\nfrozen 0\n").unwrap();
    assert_eq!(cgroup.freezer_state().unwrap(), FreezerState::Freezing);
    fs::write(below.join("cgroup.events"), "populated 0\nfrozen 0\n").unwrap();
    assert_eq!(cgroup.freezer_state().unwrap(), FreezerState::Frozen);

    // Frozen by a parent: a thaw of this cgroup has no effect.
    let (_dir, cgroup) = fake_unified(&[
        ("cgroup.freeze", "1"),
        ("cgroup.events", "populated 1\nfrozen 1\n"),
    ]);
    let error = cgroup.thaw(Duration::from_millis(20)).await.unwrap_err();
    assert!(matches!(error, CgroupError::ThawTimeout { .. }), "{error}");
}

#[tokio::test]
async fn a_thaw_ignores_a_stale_frozen_state_of_an_empty_cgroup() {
    let (_dir, cgroup) = fake_unified(&[
        ("cgroup.freeze", "1"),
        ("cgroup.events", "populated 0\nfrozen 1\n"),
    ]);
    assert_eq!(cgroup.freezer_state().unwrap(), FreezerState::Frozen);
    cgroup.thaw(Duration::ZERO).await.unwrap();
    assert_eq!(cgroup.freezer_state().unwrap(), FreezerState::Thawed);
}

#[tokio::test]
async fn frozen_processes_are_killed_and_their_cgroups_removed() {
    let reaper = Reaper::start().unwrap();
    for scratch in Scratch::all() {
        let children = [
            scratch.spawn(&reaper, "", "trap '' TERM INT; sleep 1000"),
            scratch.spawn(&reaper, "inner", "sleep 1000; sleep 1000"),
        ];
        scratch.all_entered().await;
        scratch.cgroup.freeze(LIMIT).await.unwrap();
        scratch.cgroup.kill_all(LIMIT).await.unwrap();
        assert!(scratch.cgroup.pids().unwrap().is_empty());
        for child in children {
            assert_eq!(timeout(LIMIT, child.wait()).await.unwrap().code, 128 + 9);
        }
        for _ in 0..2 {
            scratch.cgroup.kill_all(LIMIT).await.unwrap();
            scratch.cgroup.remove(LIMIT).await.unwrap();
        }
        assert!(!scratch.cgroup.exists());
        assert!(scratch.cgroup.own_dirs().unwrap().iter().all(|dir| !dir.exists()));
    }
}

#[tokio::test]
async fn a_cgroup_that_is_not_the_containers_own_is_refused() {
    let ours = Cgroup::of_pid(locate::own_pid()).unwrap();
    let place = |path: &str| CgroupDir {
        mount_point: "/sys/fs/cgroup".into(),
        path: path.into(),
    };
    let root = Cgroup {
        version: Version::V2,
        places: [(String::new(), place(""))].into(),
    };
    // The own cgroup in each hierarchy, as if there were no other hierarchy.
    let each = ours.places.iter().map(|(name, place)| {
        let version = if name.is_empty() { Version::V2 } else { Version::V1 };
        Cgroup {
            version,
            places: [(name.clone(), place.clone())].into(),
        }
    });
    for cgroup in each.chain([root]) {
        let (own, dirs) = (cgroup.own(), cgroup.own_dirs());
        assert!(matches!(own, Err(CgroupError::NotOwn { .. })), "{own:?}");
        assert!(matches!(dirs, Err(CgroupError::NotOwn { .. })), "{dirs:?}");
    }
}

#[tokio::test]
async fn running_out_of_memory_is_reported_and_the_watch_ends_with_the_cgroup() {
    let reaper = Reaper::start().unwrap();
    let Some(scratch) = Scratch::v1() else {
        return eprintln!("skipped: needs root and cgroup v1");
    };
    let memory = scratch.cgroup.dir("memory").unwrap();
    read::write(&memory.join("memory.limit_in_bytes"), "16M").unwrap();
    let watch = scratch.cgroup.watch_oom().unwrap();
    let child = scratch.spawn(&reaper, "", "exec sh -c 'head -c 64M /dev/zero | tail'");
    assert_eq!(
        timeout(LIMIT, watch.recv()).await.expect("an event comes"),
        Some(())
    );
    timeout(LIMIT, child.wait()).await.unwrap();
    scratch.cgroup.kill_all(LIMIT).await.unwrap();
    scratch.cgroup.remove(LIMIT).await.unwrap();
    // The next container's cgroup of the same name, created before the watch has seen the end of this one.
    fs::create_dir(&memory).unwrap();
    let rest = async { while watch.recv().await.is_some() {} };
    timeout(LIMIT, rest).await.expect("the watch ends");
    assert_eq!(watch.recv().await, None);
}

#[tokio::test]
async fn a_missing_memory_controller_is_distinguished_from_a_removed_cgroup() {
    let (dir, cgroup) = fake_unified(&[("cgroup.events", "populated 1\nfrozen 0\n")]);
    assert!(matches!(cgroup.watch_oom(), Err(CgroupError::NoMemory)));
    drop(dir);
    assert!(matches!(cgroup.watch_oom(), Err(CgroupError::OomWatch { .. })));
}

#[tokio::test]
async fn each_growth_of_the_kill_count_is_an_event() {
    let (_dir, cgroup) = fake_unified(&[
        ("memory.events", "oom 1\noom_kill 1\n"),
        ("cgroup.events", "populated 1\nfrozen 0\n"),
    ]);
    let file = |name: &str| cgroup.primary_dir().join(name);
    let watch = cgroup.watch_oom().unwrap();
    // A kill that was counted before the watch is not an event.
    assert!(timeout(Duration::from_millis(20), watch.recv()).await.is_err());
    fs::write(file("memory.events"), "oom 2\noom_kill 2\n").unwrap();
    assert_eq!(timeout(LIMIT, watch.recv()).await.unwrap(), Some(()));
    // `recv` does not repeat an event that `take` has returned.
    fs::write(file("memory.events"), "oom 2\noom_kill 3\n").unwrap();
    assert!(watch.take() && !watch.take());
    assert!(timeout(Duration::from_millis(20), watch.recv()).await.is_err());
    // The last kill ends the container: it is reported before the end.
    fs::write(file("memory.events"), "oom 3\noom_kill 4\n").unwrap();
    fs::write(file("cgroup.events"), "populated 0\nfrozen 0\n").unwrap();
    assert_eq!(timeout(LIMIT, watch.recv()).await.unwrap(), Some(()));
    assert_eq!(timeout(LIMIT, watch.recv()).await.unwrap(), None);
}

#[test]
fn parent_cgroups_enable_their_controllers() {
    let (dir, cgroup) = fake_unified(&[]);
    for parent in ["", "a"] {
        fs::create_dir_all(dir.path().join(parent)).unwrap();
        fs::write(dir.path().join(parent).join("cgroup.subtree_control"), "").unwrap();
    }
    fs::write(dir.path().join("cgroup.controllers"), "pids memory\n").unwrap();
    cgroup.enable_controllers();
    // A file of its own keeps only what was written last.
    let written =
        |parent: &str| fs::read_to_string(dir.path().join(parent).join("cgroup.subtree_control")).unwrap();
    assert_eq!(written(""), "+memory");
    let deeper = Cgroup {
        version: Version::V2,
        places: [(
            String::new(),
            CgroupDir {
                mount_point: dir.path().into(),
                path: "a/box".into(),
            },
        )]
        .into(),
    };
    deeper.enable_controllers();
    assert_eq!(written("a"), "+memory");
    assert!(!dir.path().join("a/box").exists());
}

#[tokio::test]
async fn the_watch_ends_although_another_cgroup_has_the_name() {
    let files = [
        ("memory.events", "oom_kill 0\n"),
        ("cgroup.events", "populated 1\nfrozen 0\n"),
    ];
    let (_dir, cgroup) = fake_unified(&files);
    let dir = cgroup.primary_dir();
    let watch = cgroup.watch_oom().unwrap();
    fs::rename(&dir, dir.with_extension("old")).unwrap();
    fs::create_dir(&dir).unwrap();
    for (name, text) in files {
        fs::write(dir.join(name), text).unwrap();
        fs::remove_file(dir.with_extension("old").join(name)).unwrap();
    }
    assert_eq!(timeout(LIMIT, watch.recv()).await.unwrap(), None);
}

#[test]
fn a_process_that_is_gone_is_absent() {
    let error = Cgroup::of_pid(i32::MAX).unwrap_err();
    assert!(error.is_absent(), "{error}");
    let other = CgroupError::Process {
        pid: 1,
        source: Error::from(ErrorKind::PermissionDenied),
    };
    assert!(!other.is_absent());
}
