//! Real cgroups with real processes, on every hierarchy that this host has; files in a directory where the host lacks
//! a controller. Needs root; each test makes cgroups of its own and removes them.

mod metrics;

use std::cell::Cell;
use std::fs;
use std::io::{Error, ErrorKind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use containerd_shim_protos::{cgroups, cgroups_v2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use protobuf::Message as _;
use tempfile::TempDir;
use tokio::time::{sleep, timeout};

use super::*;
use crate::reaper::{Child, Reaper};

/// Longest time for anything here that should happen.
const LIMIT: Duration = Duration::from_secs(20);

/// A cgroup for one test, removed with all that is in it.
struct Scratch {
    cgroup: Cgroup,
    name: String,
    /// A file of each process that is in it for good.
    entered: TempDir,
    spawned: Cell<usize>,
}

impl Scratch {
    /// One per kind of hierarchy that can be used here. An empty list is said aloud.
    fn all() -> Vec<Self> {
        let found: Vec<_> = [Self::v1(), Self::v2()].into_iter().flatten().collect();
        if found.is_empty() {
            eprintln!("skipped: needs root and a writable cgroup hierarchy");
        }
        found
    }

    fn v1() -> Option<Self> {
        let host = locate::host().ok()?;
        let cgroup = locate::by_spec(host, &unique(), "", false).ok()?;
        (cgroup.version == Version::V1)
            .then(|| Self::make(cgroup))
            .flatten()
    }

    fn v2() -> Option<Self> {
        let mount = crate::mounts::mounted()
            .unwrap()
            .into_iter()
            .rev()
            .find(|mount| mount.fs_type == "cgroup2")?;
        let place = Place {
            mount_point: mount.mount_point,
            path: unique().trim_start_matches('/').into(),
        };
        Self::make(Cgroup {
            version: Version::V2,
            places: [(String::new(), place)].into(),
        })
    }

    fn make(cgroup: Cgroup) -> Option<Self> {
        let name = cgroup.primary_dir().file_name()?.to_str()?.to_owned();
        for dir in cgroup.own_dirs().ok()? {
            // cpusets take no process before they are set up, and no test wants them.
            if !dir.starts_with("/sys/fs/cgroup/cpuset") {
                fs::create_dir(&dir).ok()?;
            }
        }
        Some(Self {
            cgroup,
            name,
            entered: TempDir::new().ok()?,
            spawned: Cell::new(0),
        })
    }

    /// Starts a shell in the cgroup, or in one below.
    fn spawn(&self, reaper: &Reaper, below: &str, script: &str) -> Child {
        let mut enter = String::new();
        for dir in self.cgroup.own_dirs().unwrap().iter().filter(|dir| dir.exists()) {
            let dir = dir.join(below);
            fs::create_dir_all(&dir).unwrap();
            enter += &format!("echo $$ > {}/cgroup.procs && ", dir.display());
        }
        let mark = self.entered.path().join(self.spawned.get().to_string());
        self.spawned.set(self.spawned.get() + 1);
        let script = format!("{enter} : > {} && {{ {script}\n}}", mark.display());
        let mut command = std::process::Command::new("sh");
        command.arg("-c").arg(script);
        reaper.spawn(&mut command).unwrap()
    }

    /// Waits until all that were spawned are in it, in every hierarchy.
    async fn all_entered(&self) {
        let here = || fs::read_dir(self.entered.path()).unwrap().count();
        until("the processes to enter", || here() == self.spawned.get()).await;
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        for version_dir in self.cgroup.own_dirs().unwrap() {
            assert!(version_dir.ends_with(&self.name) && self.name.starts_with("firn-test-"));
            let begun = Instant::now();
            while version_dir.exists() && begun.elapsed() < LIMIT {
                let _ = read::write(&version_dir.join("freezer.state"), "THAWED");
                let _ = read::write(&version_dir.join("cgroup.freeze"), "0");
                let mut pids = BTreeSet::new();
                let _ = collect_pids(&version_dir, &mut pids);
                for pid in pids {
                    let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                }
                for child in read::children(&version_dir).unwrap_or_default() {
                    let _ = fs::remove_dir(child);
                }
                let _ = fs::remove_dir(&version_dir);
            }
        }
    }
}

fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!(
        "/firn-test-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    )
}

/// Waits for something that should become true.
async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < LIMIT, "{what} did not happen");
        sleep(Duration::from_millis(2)).await;
    }
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
async fn frozen_processes_stand_still_until_thawed() {
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
        // On kernel 6.18 with v2 a process was seen to end the call that it was in after the cgroup was told to be frozen.
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

/// A unified cgroup made of plain files, which does what no kernel does on request.
fn fake_unified(files: &[(&str, &str)]) -> (TempDir, Cgroup) {
    let dir = TempDir::new().unwrap();
    fs::create_dir(dir.path().join("box")).unwrap();
    for (name, text) in files {
        fs::write(dir.path().join("box").join(name), text).unwrap();
    }
    let place = Place {
        mount_point: dir.path().to_owned(),
        path: "box".into(),
    };
    (
        dir,
        Cgroup {
            version: Version::V2,
            places: [(String::new(), place)].into(),
        },
    )
}

#[tokio::test]
async fn a_freeze_that_does_not_succeed_is_undone_but_for_threads_that_must_not_run() {
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
    // Of processes none of which may run it is not.
    let error = cgroup.keep_frozen(Duration::from_millis(20)).await.unwrap_err();
    assert!(matches!(error, CgroupError::FreezeTimeout { .. }), "{error}");
    assert_eq!(
        fs::read_to_string(cgroup.primary_dir().join("cgroup.freeze")).unwrap(),
        "1"
    );

    // Its own processes are frozen, and not yet those of a cgroup below.
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

    // Frozen by a parent: our own order has no effect.
    let (_dir, cgroup) = fake_unified(&[
        ("cgroup.freeze", "1"),
        ("cgroup.events", "populated 1\nfrozen 1\n"),
    ]);
    let error = cgroup.thaw(Duration::from_millis(20)).await.unwrap_err();
    assert!(matches!(error, CgroupError::ThawTimeout { .. }), "{error}");
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
async fn a_cgroup_that_is_not_the_containers_own_is_left_alone() {
    let ours = Cgroup::of_pid(locate::own_pid()).unwrap();
    let place = |path: &str| Place {
        mount_point: "/sys/fs/cgroup".into(),
        path: path.into(),
    };
    let root = Cgroup {
        version: Version::V2,
        places: [(String::new(), place(""))].into(),
    };
    // Ours in each hierarchy, as if that were the only one.
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
async fn running_out_of_memory_is_told_and_the_watch_ends_with_the_cgroup() {
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
    // The next container of the name, made before the end of this one was seen.
    fs::create_dir(&memory).unwrap();
    let rest = async { while watch.recv().await.is_some() {} };
    timeout(LIMIT, rest).await.expect("the watch ends");
    assert_eq!(watch.recv().await, None);
}

#[tokio::test]
async fn a_host_that_accounts_no_memory_is_told_from_a_cgroup_that_has_gone() {
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
    // The kill that was counted before is not an event.
    assert!(timeout(Duration::from_millis(20), watch.recv()).await.is_err());
    fs::write(file("memory.events"), "oom 2\noom_kill 2\n").unwrap();
    assert_eq!(timeout(LIMIT, watch.recv()).await.unwrap(), Some(()));
    // One that is asked for is not told again.
    fs::write(file("memory.events"), "oom 2\noom_kill 3\n").unwrap();
    assert!(watch.take() && !watch.take());
    assert!(timeout(Duration::from_millis(20), watch.recv()).await.is_err());
    // The last kill ends the container: it is told before the end.
    fs::write(file("memory.events"), "oom 3\noom_kill 4\n").unwrap();
    fs::write(file("cgroup.events"), "populated 0\nfrozen 0\n").unwrap();
    assert_eq!(timeout(LIMIT, watch.recv()).await.unwrap(), Some(()));
    assert_eq!(timeout(LIMIT, watch.recv()).await.unwrap(), None);
}

#[test]
fn what_is_above_hands_on_its_controllers() {
    let (dir, cgroup) = fake_unified(&[]);
    for parent in ["", "a"] {
        fs::create_dir_all(dir.path().join(parent)).unwrap();
        fs::write(dir.path().join(parent).join("cgroup.subtree_control"), "").unwrap();
    }
    fs::write(dir.path().join("cgroup.controllers"), "pids memory\n").unwrap();
    cgroup.enable_controllers();
    // A file of its own keeps what is written last.
    let written =
        |parent: &str| fs::read_to_string(dir.path().join(parent).join("cgroup.subtree_control")).unwrap();
    assert_eq!(written(""), "+memory");
    let deeper = Cgroup {
        version: Version::V2,
        places: [(
            String::new(),
            Place {
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
