//! What failures have left on this node, and its removal: nothing that a living transaction uses.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use firn_config::{find_program, names};
use firn_host::{UnlessAbsent, mountinfo, procfs};
use firn_oci::Spec;
use firn_process::cgroup::{Cgroup, FreezerState};
use firn_transaction::criu_leftovers::{self, CGYARD, ROOT};
use firn_transaction::journal::{Outcome, Record};
use firn_transaction::options::RuncOptions;
use firn_transaction::recovery;
use nix::fcntl::{Flock, FlockArg};

use super::Check;
use crate::containerd::{block_on, bundles};
use crate::program;
use crate::ps::container::Ending;

const NAME: &str = "leftovers";
const LIMIT: Duration = Duration::from_secs(30);
/// Sockets and directories that are younger may be those of a program that just starts.
const YOUNG: Duration = Duration::from_secs(60);
/// The directory of shims' sockets below containerd's state directory.
const SOCKETS: &str = "s";
/// Programs that care for a container's init, as the kernel has their names.
const KEEPERS: [&str; 3] = ["containerd-shim", "conmon", "firn-runc"];

/// Something that is left, and how it is removed.
struct Remnant {
    what: String,
    fix: Fix,
}

enum Fix {
    /// Ends and clears the transaction whose journal is in the bundle.
    Recover(PathBuf),
    /// Kills the processes of the bundle's container, which nobody can resume.
    Kill(PathBuf),
    Unmount(PathBuf),
    Directory(PathBuf),
    Tree(PathBuf),
    File(PathBuf),
    /// Lets firn-runc roll back, which any call for the container does: root directory of runc, id.
    Runc(String, String),
}

/// `state` is containerd's state directory.
pub fn checks(state: &Path, fix: bool) -> Vec<Check> {
    let (bundles, unread) = match bundles(state).if_present() {
        Ok(found) => (found.unwrap_or_default(), None),
        Err(error) => (Vec::new(), Some(unread(state, &error))),
    };
    let mut left = Vec::new();
    left.extend(bundles.iter().filter_map(|bundle| journal(bundle)));
    left.extend(bundles.iter().filter_map(|bundle| frozen(bundle)));
    left.extend(criu(Path::new("/tmp")));
    left.extend(directories(Path::new(names::RESTORE_DIR)));
    left.extend(sockets(&state.join(SOCKETS)));
    left.extend(of_runc(Path::new(names::RUNC_TRANSACTIONS)));
    let stands_still = |bundle: &PathBuf| suspended(bundle).or_else(|| kept(bundle));
    let mut checks: Vec<Check> = bundles.iter().filter_map(stands_still).collect();
    if left.is_empty() {
        checks.push(Check::ok(NAME, "none"))
    } else {
        checks.extend(left.into_iter().map(|left| left.into_check(fix)))
    }
    checks.extend(unread);
    checks
}

fn unread(state: &Path, error: &io::Error) -> Check {
    let found = format!("the bundles in {} cannot be read: {error}", state.display());
    Check::warn(NAME, found, "see `dmesg`, and the owners of these directories")
}

impl Remnant {
    fn into_check(self, fix: bool) -> Check {
        if !fix {
            return Check::warn(NAME, self.what, "`firn doctor --fix`");
        }
        match self.fix.apply() {
            Ok(()) => Check::ok(NAME, format!("{}: fixed", self.what)),
            Err(error) => Check::warn(
                NAME,
                format!("{}; it stays: {error:#}", self.what),
                "`sudo firn doctor --fix`",
            ),
        }
    }
}

impl Fix {
    fn apply(self) -> Result<()> {
        match self {
            Self::Recover(bundle) => {
                block_on(recovery::recover(&bundle))?;
                if Record::read(&bundle)?.is_some() {
                    bail!("its journal cannot be removed");
                }
            }
            Self::Kill(bundle) => {
                // What was found may have ended since then, and its pid be another process's.
                let Some((_, cgroup)) = orphan(&bundle) else {
                    bail!("it is not there any more");
                };
                block_on(cgroup.kill_all(LIMIT))??;
            }
            Self::Unmount(path) => {
                block_on(criu_leftovers::unmount(&path))?;
                if mountinfo::is_mount_point(&mountinfo::mounted()?, &path) {
                    bail!("it is still mounted");
                }
                // Unless it has files of its own below the mount.
                let _kept = fs::remove_dir(&path);
            }
            Self::Directory(path) => fs::remove_dir(&path)?,
            Self::Tree(path) => fs::remove_dir_all(&path)?,
            Self::File(path) => fs::remove_file(&path)?,
            Self::Runc(root, id) => {
                let runc = find_program(names::RUNC_PROGRAM, None)?;
                let output = program::run(&runc, &["--root", &root, "state", &id], LIMIT)?;
                if Path::new(names::RUNC_TRANSACTIONS)
                    .join(root.trim_start_matches('/'))
                    .join(&id)
                    .exists()
                {
                    bail!("{}", output.stderr.trim());
                }
            }
        }
        Ok(())
    }
}

/// NAMESPACE/ID
fn name_of(bundle: &Path) -> String {
    let part = |path: Option<&Path>| {
        path.and_then(Path::file_name)
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    };
    format!("{}/{}", part(bundle.parent()), part(Some(bundle)))
}

/// Whether a process names the container on its command line, as a shim or its clean-up does.
fn has_program(bundle: &Path) -> bool {
    let id = bundle.file_name().unwrap_or_default().as_bytes();
    let names_it = |pid: i32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = words.split(|byte| *byte == 0).collect();
        words.windows(2).any(|pair| pair[0] == b"-id" && pair[1] == id)
    };
    procfs::all().into_iter().any(names_it)
}

fn is_living(record: &Record) -> bool {
    let comm = procfs::comm(record.shim.cast_signed());
    record.same_boot && KEEPERS.iter().any(|keeper| comm.starts_with(keeper))
}

/// A transaction whose shim was killed, and whose clean-up has not been done.
fn journal(bundle: &Path) -> Option<Remnant> {
    let record = Record::read(bundle).ok()??;
    if is_living(&record) || has_program(bundle) {
        return None;
    }
    let phase = record.phase.map_or("begin", |phase| phase.name());
    let (name, operation) = (name_of(bundle), record.begin.op);
    Some(Remnant {
        what: format!("{operation} of {name} ended in {phase} with its shim, and was not cleaned up"),
        fix: Fix::Recover(bundle.to_owned()),
    })
}

/// A container that waits for its Resume.
fn suspended(bundle: &Path) -> Option<Check> {
    let record = Record::read(bundle).ok()??;
    let is_suspended = record.outcome == Some(Outcome::Suspended) && is_living(&record);
    let (namespace, id) = name_of(bundle)
        .split_once('/')
        .map(|(a, b)| (a.to_owned(), b.to_owned()))?;
    is_suspended.then(|| {
        Check::warn(
            "suspended",
            format!("{namespace}/{id} is frozen: the driver could not restore its GPU state"),
            format!("`ctr --namespace {namespace} tasks resume {id}` once the GPU is free"),
        )
    })
}

/// A container that stays paused because its copy may run.
fn kept(bundle: &Path) -> Option<Check> {
    Ending::of(bundle).filter(|ending| *ending == Ending::Left)?;
    let freezer = Cgroup::of_pid(init_of(bundle)?).and_then(|cgroup| cgroup.freezer_state());
    let is_paused = matches!(freezer, Ok(FreezerState::Frozen)) && orphan(bundle).is_none();
    is_paused.then(|| {
        let name = name_of(bundle);
        Check::warn(
            "paused",
            format!("{name} is paused: a command of firn was about to end it, and its copy may run"),
            "look whether its copy runs, or has done its work, on the node to which it was moved, or whether \
             its checkpoint is complete: then end it here; if none of that is so, resume it",
        )
    })
}

/// A container of firn that is frozen, and whose shim has ended.
fn frozen(bundle: &Path) -> Option<Remnant> {
    let (pid, _) = orphan(bundle)?;
    Some(Remnant {
        what: format!(
            "{} is frozen (pid {pid}), and its shim has ended: nobody can resume it",
            name_of(bundle)
        ),
        fix: Fix::Kill(bundle.to_owned()),
    })
}

/// The pid of its init, as the bundle has it.
fn init_of(bundle: &Path) -> Option<i32> {
    let pid = fs::read_to_string(bundle.join("init.pid")).ok()?;
    pid.trim().parse().ok()
}

/// The pid of such a container, and its cgroup: that of its spec, which the process of this pid is in. The
/// pid alone may be that of any process by now.
fn orphan(bundle: &Path) -> Option<(i32, Cgroup)> {
    let has = |name: &str| bundle.join(name).exists();
    if !has(names::BUNDLE_CRIU_CONFIG) || has(names::BUNDLE_OTHERS_CGROUP) {
        return None;
    }
    let pid = init_of(bundle)?;
    let parent = procfs::stat_field(pid, PARENT)?.parse().ok()?;
    let keeper = procfs::comm(parent);
    if KEEPERS.iter().any(|name| keeper.starts_with(name)) || has_program(bundle) {
        return None;
    }
    let (spec, options) = (Spec::load(bundle).ok()?, RuncOptions::load(bundle).ok()?);
    let id = bundle.file_name()?.to_str()?;
    let cgroup = Cgroup::by_spec(
        spec.cgroups_path().unwrap_or_default(),
        id,
        options.systemd_cgroup,
    )
    .ok()?;
    let is_frozen = cgroup.freezer_state().ok()? != FreezerState::Thawed;
    (is_frozen && cgroup.holds(pid)).then_some((pid, cgroup))
}

/// Which field of /proc/PID/stat has the parent, as [`procfs::stat_field`] counts.
const PARENT: usize = 1;

/// What a killed CRIU has mounted and made. While any CRIU runs, it may be that one's.
fn criu(temporary: &Path) -> Vec<Remnant> {
    let mounts = mountinfo::mounted().unwrap_or_default();
    let is_own = |path: &Path| {
        let name = path.file_name().unwrap_or_default().as_bytes();
        name.starts_with(CGYARD.as_bytes()) || name.starts_with(ROOT.as_bytes())
    };
    let mounted = mounts
        .iter()
        .map(|mount| &mount.mount_point)
        .filter(|path| is_own(path));
    let mut left: Vec<Remnant> = mounted
        .map(|path| Remnant {
            what: format!("{} is mounted, by a CRIU that was killed", path.display()),
            fix: Fix::Unmount(path.clone()),
        })
        .collect();
    let entries = fs::read_dir(temporary)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    let is_root = |path: &PathBuf| {
        path.file_name()
            .is_some_and(|name| name.as_bytes().starts_with(ROOT.as_bytes()))
    };
    let empty = |path: &PathBuf| fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
    let roots =
        entries.filter(|path| is_root(path) && empty(path) && !mountinfo::is_mount_point(&mounts, path));
    left.extend(roots.map(|path| Remnant {
        what: format!("{} is empty, and of a CRIU that was killed", path.display()),
        fix: Fix::Directory(path),
    }));
    // Order matters: one that starts after the look has made none of this.
    if criu_leftovers::criu_runs() {
        Vec::new()
    } else {
        left
    }
}

/// Directories of `firn restore` that was killed: `ID-PID`.
fn directories(parent: &Path) -> Vec<Remnant> {
    let entries = fs::read_dir(parent)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    let is_left = |path: &PathBuf| {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let pid = name.rsplit_once('-').and_then(|(_, pid)| pid.parse().ok());
        pid.is_some_and(|pid: i32| procfs::comm(pid) != "firn") && path.is_dir()
    };
    let left = entries.filter(is_left);
    left.map(|path| Remnant {
        what: format!("{} is of a `firn` that was killed", path.display()),
        fix: Fix::Tree(path),
    })
    .collect()
}

/// Sockets of shims that have ended.
fn sockets(dir: &Path) -> Vec<Remnant> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let is_old = |entry: &fs::DirEntry| {
        let changed = entry.metadata().and_then(|meta| meta.modified()).ok();
        changed
            .and_then(|at| at.elapsed().ok())
            .is_some_and(|age| age > YOUNG)
    };
    let refuses = |path: &PathBuf| {
        UnixStream::connect(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    };
    let dead = entries.filter(is_old).map(|entry| entry.path()).filter(refuses);
    dead.map(|path| Remnant {
        what: format!("{} is the socket of a shim that has ended", path.display()),
        fix: Fix::File(path),
    })
    .collect()
}

/// Transactions of firn-runc that nobody works on: their files can be locked.
fn of_runc(dir: &Path) -> Vec<Remnant> {
    let mut left = Vec::new();
    let mut open = vec![dir.to_owned()];
    while let Some(at) = open.pop() {
        for path in fs::read_dir(&at)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
        {
            if path.is_dir() {
                open.push(path);
                continue;
            }
            let Ok(file) = File::open(&path) else { continue };
            if Flock::lock(file, FlockArg::LockExclusiveNonblock).is_err() {
                continue;
            }
            let root = at.strip_prefix(dir).unwrap_or(&at).display().to_string();
            let id = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            left.push(Remnant {
                what: format!("firn-runc was killed in a transaction of {id}, or {id} is suspended"),
                fix: Fix::Runc(format!("/{root}"), id),
            });
        }
    }
    left
}

#[cfg(test)]
mod tests;
