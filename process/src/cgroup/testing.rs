//! Cgroups for tests: real ones with real processes on every hierarchy of this host, and fakes made of plain
//! files. Needs root; each test creates its own cgroups and removes them.

use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Instant, SystemTime};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::time::sleep;

use super::{BTreeSet, Cgroup, CgroupDir, Duration, Version, collect_pids, locate, read};
use crate::reaper::{Child, Reaper};

/// Longest wait for anything that should happen.
pub const LIMIT: Duration = Duration::from_secs(20);

/// A cgroup for one test. Dropping it kills its processes and removes it.
pub struct Scratch {
    pub cgroup: Cgroup,
    pub(super) name: String,
    /// Holds one file for each process that has entered the cgroup.
    entered: TempDir,
    spawned: AtomicUsize,
}

impl Scratch {
    /// One per kind of hierarchy that this host has. Prints a message when there is none.
    pub fn all() -> Vec<Self> {
        let found: Vec<_> = [Self::v1(), Self::v2()].into_iter().flatten().collect();
        if found.is_empty() {
            eprintln!("skipped: needs root and a writable cgroup hierarchy");
        }
        found
    }

    pub fn v1() -> Option<Self> {
        let host = locate::host().ok()?;
        let cgroup = locate::by_spec(host, &unique(), "", false).ok()?;
        (cgroup.version == Version::V1)
            .then(|| Self::make(cgroup))
            .flatten()
    }

    pub fn v2() -> Option<Self> {
        let mount = firn_host::mountinfo::mounted()
            .unwrap()
            .into_iter()
            .rev()
            .find(|mount| mount.fs_type == "cgroup2")?;
        let place = CgroupDir {
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
            // A cpuset takes no process before it is set up, and no test needs one.
            if !dir.starts_with("/sys/fs/cgroup/cpuset") {
                fs::create_dir(&dir).ok()?;
            }
        }
        Some(Self {
            cgroup,
            name,
            entered: TempDir::new().ok()?,
            spawned: AtomicUsize::new(0),
        })
    }

    /// A shell that runs in the cgroup or in one below it. Spawn the command once.
    pub fn shell(&self, below: &str, script: &str) -> Command {
        let mut enter = String::new();
        for dir in self.cgroup.own_dirs().unwrap().iter().filter(|dir| dir.exists()) {
            let dir = dir.join(below);
            fs::create_dir_all(&dir).unwrap();
            enter += &format!("echo $$ > {}/cgroup.procs && ", dir.display());
        }
        let mark = self
            .entered
            .path()
            .join(self.spawned.load(Ordering::Relaxed).to_string());
        self.spawned.fetch_add(1, Ordering::Relaxed);
        let script = format!("{enter} : > {} && {{ {script}\n}}", mark.display());
        let mut command = Command::new("sh");
        command.arg("-c").arg(script);
        command
    }

    /// Spawns such a shell.
    pub fn spawn(&self, reaper: &Reaper, below: &str, script: &str) -> Child {
        reaper.spawn(&mut self.shell(below, script)).unwrap()
    }

    /// Waits until all spawned shells are in the cgroup, in every hierarchy.
    pub async fn all_entered(&self) {
        until("the processes to enter", || self.have_all_entered()).await;
    }

    /// As [`Self::all_entered`], on this thread.
    pub fn wait_all_entered(&self) {
        let limit = Instant::now() + LIMIT;
        while !self.have_all_entered() {
            assert!(Instant::now() < limit, "the processes do not enter");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn have_all_entered(&self) -> bool {
        let here = fs::read_dir(self.entered.path()).unwrap().count();
        here == self.spawned.load(Ordering::Relaxed)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let dirs = self.cgroup.own_dirs().unwrap();
        for version_dir in &dirs {
            assert!(version_dir.ends_with(&self.name) && self.name.starts_with("firn-test-"));
            // Order matters: a process that is frozen in one hierarchy does not die.
            let _ = read::write(&version_dir.join("freezer.state"), "THAWED");
            let _ = read::write(&version_dir.join("cgroup.freeze"), "0");
        }
        for version_dir in dirs {
            let begun = Instant::now();
            while version_dir.exists() && begun.elapsed() < LIMIT {
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

/// A name that no other test uses, not even an earlier one with the same pid that was killed.
fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("/firn-test-{}-{now}-{number}", std::process::id())
}

/// Waits until the condition holds.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < LIMIT, "{what} did not happen");
        sleep(Duration::from_millis(2)).await;
    }
}

/// A cgroup made of plain files, for states that a kernel does not enter on request.
pub fn fake(version: Version, files: &[(&str, &str)]) -> (TempDir, Cgroup) {
    let dir = TempDir::new().unwrap();
    fs::create_dir(dir.path().join("box")).unwrap();
    for (name, text) in files {
        fs::write(dir.path().join("box").join(name), text).unwrap();
    }
    let hierarchy = match version {
        Version::V1 => "freezer",
        Version::V2 => "",
    };
    let place = CgroupDir {
        mount_point: dir.path().to_owned(),
        path: "box".into(),
    };
    let places = [(hierarchy.to_owned(), place)].into();
    (dir, Cgroup { version, places })
}
