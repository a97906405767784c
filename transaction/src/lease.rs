//! Which container of firn has which GPUs of this node.
//!
//! Each container with GPUs has a file in `/run/firn/leases` with the nodes of its GPUs. A parked container
//! gives its GPUs free: another one may take them, and the parked one is then not resumed by accident onto
//! GPUs that are in use. Containers that had a GPU together before one of them was parked may have it
//! together afterwards. The files do not show processes that firn did not start.
//!
//! A file is named by the pid of init, and counts only while the process that had this pid lives. So nothing
//! has to be cleaned up after a shim that was killed.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use firn_config::names;
use firn_gpu::{DeviceId, DeviceNode, NodeType};
use firn_host::{Problem, UnlessAbsent, atomic_file};
use firn_oci::{GpuPath, Spec, SpecError, classify};
use firn_remap::AssignmentError;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use firn_host::procfs;

/// The file that is locked while one of the others is written after a look at all.
const LOCK: &str = ".lock";

/// Size limit of a file that is read.
const LIMIT: u64 = 64 << 10;

/// The GPUs of one container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// containerd's namespace.
    pub namespace: String,
    pub container: String,
    /// Init, and when it was started, in clock ticks since the boot.
    pid: i32,
    started: u64,
    gpus: Vec<DeviceId>,
    /// Its GPUs are free.
    parked: bool,
    /// Containers that had one of them, too, when they were given free: by init and its start.
    #[serde(default)]
    sharers: Vec<(i32, u64)>,
}

/// Why a container does not get GPUs.
#[derive(Debug, thiserror::Error, Problem)]
pub enum LeaseError {
    /// Another container has one of them, for which this one is to wait, or not.
    #[error("container {} of namespace {} has {gpu}", holder.container, holder.namespace)]
    #[problem(
        "FIRN-GPU-BUSY",
        "pause or end that container, wait for it (`firn resume --busy wait`), or resume onto other GPUs \
         (`firn resume --gpus`)"
    )]
    Busy {
        holder: Box<Lease>,
        gpu: String,
        awaited: bool,
    },
    #[error("cannot read or write {}", names::LEASES)]
    #[problem("FIRN-LEASES", "see that /run is writable")]
    Files(#[from] io::Error),
}

impl Lease {
    /// Of a container that runs, with the GPUs of its spec. None if it has none, or its init has ended.
    pub fn of(bundle: &Path, container: &str, init: i32, spec: &Spec) -> Result<Option<Self>, SpecError> {
        let gpus = gpus_of(spec)?;
        let lease = |started| Self {
            namespace: namespace_of(bundle),
            container: container.to_owned(),
            pid: init,
            started,
            gpus,
            parked: false,
            sharers: Vec::new(),
        };
        Ok(procfs::started(init)
            .map(lease)
            .filter(|lease| !lease.gpus.is_empty()))
    }

    /// Writes that the container has its GPUs, whoever else has them.
    pub fn note(&self) -> io::Result<()> {
        let dir = Path::new(names::LEASES);
        let locked = lock(dir)?;
        clear(dir, &locked)?;
        self.note_in(dir)
    }

    /// Writes that the GPUs are free. Returns the containers that have one of them, too.
    pub fn park(&self) -> io::Result<Vec<Lease>> {
        self.park_in(Path::new(names::LEASES))
    }

    /// Writes that the container has its GPUs, unless one of them is another container's that is not among
    /// `sharers`. The container has those that it `keeps`, too, whoever else has them.
    pub fn take(&self, keeps: Option<&Lease>, sharers: &[Lease]) -> Result<(), LeaseError> {
        self.take_in(Path::new(names::LEASES), keeps, sharers)
    }

    /// Those of all containers that live.
    pub fn all() -> io::Result<Vec<Self>> {
        Ok(living(Path::new(names::LEASES)).if_present()?.unwrap_or_default())
    }

    /// Whether its container is parked.
    pub fn is_parked(&self) -> bool {
        self.parked
    }

    /// With the GPUs that it keeps.
    pub fn with(&self, keeps: Option<&Lease>) -> Self {
        let mut with = self.clone();
        with.gpus.extend(keeps.into_iter().flat_map(|keeps| &keeps.gpus));
        with
    }

    /// GPUs that containers have whose init is another process.
    pub fn taken_by_others(init: i32) -> io::Result<Vec<DeviceId>> {
        let dir = Path::new(names::LEASES);
        let leases = living(dir)?.into_iter();
        let held = leases.filter(|lease| lease.pid != init && !lease.parked);
        Ok(held.flat_map(|lease| lease.gpus).collect())
    }

    /// Whether the container with this init has given its GPUs free. None if it has no lease.
    pub fn of_init_is_parked(init: i32) -> Option<bool> {
        let lease = read(&Path::new(names::LEASES).join(init.to_string()))?;
        lease.is_living().then_some(lease.parked)
    }

    /// Whether its container still has its GPUs, those and no others.
    pub fn is_in_force(&self) -> bool {
        self.is_in_force_in(Path::new(names::LEASES))
    }

    /// Removes it: the container was deleted.
    pub fn drop_of(bundle: &Path, container: &str, init: i32) {
        let dir = Path::new(names::LEASES);
        let path = dir.join(init.to_string());
        // Another container's with that pid may be written now.
        let _lock = lock(dir).ok();
        // The pid may be another container's by now.
        let is_its = |lease: &Self| lease.container == container && lease.namespace == namespace_of(bundle);
        if !read(&path).as_ref().is_some_and(is_its) {
            return;
        }
        if let Err(error) = fs::remove_file(&path).unless_absent() {
            log::warn!("cannot remove {}: {error}", path.display());
        }
    }

    fn is_in_force_in(&self, dir: &Path) -> bool {
        let now = read(&dir.join(self.pid.to_string()));
        self.is_living()
            && now.is_some_and(|now| now.key() == self.key() && now.gpus == self.gpus && !now.parked)
    }

    fn note_in(&self, dir: &Path) -> io::Result<()> {
        let make = DirBuilder::new().recursive(true).mode(0o700).create(dir);
        make?;
        atomic_file::write(dir, &self.pid.to_string(), &serde_json::to_vec(self)?, 0o600)
    }

    fn park_in(&self, dir: &Path) -> io::Result<Vec<Lease>> {
        let locked = lock(dir)?;
        clear(dir, &locked)?;
        let mut sharers = self.others(dir)?;
        // One that is parked already had the GPU together with this container, if it has noted that.
        sharers.retain(|other| !other.parked || other.sharers.contains(&self.key()));
        let parked = Self {
            parked: true,
            sharers: sharers.iter().map(Self::key).collect(),
            ..self.clone()
        };
        parked.note_in(dir)?;
        Ok(sharers)
    }

    fn take_in(&self, dir: &Path, keeps: Option<&Lease>, sharers: &[Lease]) -> Result<(), LeaseError> {
        // Order matters: who has the GPUs can be read also where nothing can be written.
        let locked = lock(dir);
        if let Ok(locked) = &locked {
            clear(dir, locked)?;
        }
        let is_sharer = |other: &Lease| sharers.iter().any(|sharer| sharer.key() == other.key());
        let mut others = self.others(dir)?.into_iter();
        let other = others.find(|other| !other.parked && !is_sharer(other));
        if let Some(other) = other {
            let gpu = other.gpus.iter().find(|gpu| self.gpus.contains(gpu));
            let gpu = gpu.map_or_else(String::new, named);
            return Err(LeaseError::Busy {
                holder: Box::new(other),
                gpu,
                awaited: false,
            });
        }
        let _lock = locked?;
        Ok(self.with(keeps).note_in(dir)?)
    }

    /// Init, and when it was started.
    fn key(&self) -> (i32, u64) {
        (self.pid, self.started)
    }

    fn is_living(&self) -> bool {
        procfs::is_alive(self.pid) && procfs::started(self.pid) == Some(self.started)
    }

    /// Living containers that have one of these GPUs, or had it when they were parked.
    fn others(&self, dir: &Path) -> io::Result<Vec<Lease>> {
        let has_one = |other: &Lease| other.gpus.iter().any(|gpu| self.gpus.contains(gpu));
        let mut others = living(dir)?;
        others.retain(|other| other.pid != self.pid && has_one(other));
        Ok(others)
    }
}

/// Adds which containers have a GPU that has no room. For a spec of somebody who owns the node alone: the
/// author of a pod learns nothing of other tenants, nor which GPUs the node has.
pub fn name_holders(error: AssignmentError, spec: &Spec) -> AssignmentError {
    let AssignmentError::Occupied(mut occupied) = error else {
        return error;
    };
    if spec.author().owns_node() {
        let has_it = |lease: &Lease| {
            let node = occupied.gpu.node.as_ref().map(DeviceNode::id);
            !lease.parked && node.is_some_and(|node| lease.gpus.contains(&node))
        };
        let holders = Lease::all().unwrap_or_default().into_iter().filter(has_it);
        let named = |lease: Lease| format!("container {} of namespace {}", lease.container, lease.namespace);
        occupied.holders = holders.map(named).collect();
    } else {
        occupied.others = Vec::new();
    }
    AssignmentError::Occupied(occupied)
}

/// containerd's namespace, by the path of a bundle.
pub(crate) fn namespace_of(bundle: &Path) -> String {
    let namespace = bundle.parent().and_then(Path::file_name).unwrap_or_default();
    namespace.to_string_lossy().into_owned()
}

/// Those of living containers.
fn living(dir: &Path) -> io::Result<Vec<Lease>> {
    let mut living = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let is_lease = path
            .file_name()
            .is_some_and(|name| name.to_str().is_some_and(is_pid));
        match is_lease.then(|| read(&path)).flatten() {
            Some(lease) if lease.is_living() => living.push(lease),
            _ => {}
        }
    }
    Ok(living)
}

/// Removes those of containers that have gone: nobody else does if the shim was killed. Under the lock,
/// because a new container may have one of their pids.
fn clear(dir: &Path, _lock: &Flock<File>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let is_lease = entry.file_name().to_str().is_some_and(is_pid);
        let lease = is_lease.then(|| read(&entry.path())).flatten();
        if lease.is_some_and(|lease| !lease.is_living()) {
            fs::remove_file(entry.path()).unless_absent()?;
        }
    }
    Ok(())
}

/// What is no lease counts as none: the directory is root's alone.
fn read(path: &Path) -> Option<Lease> {
    let mut text = Vec::new();
    let file = File::open(path).ok()?;
    io::Read::read_to_end(&mut io::Read::take(file, LIMIT), &mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

fn is_pid(name: &str) -> bool {
    name.parse::<i32>().is_ok()
}

fn lock(dir: &Path) -> io::Result<Flock<File>> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let path: PathBuf = dir.join(LOCK);
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| errno.into())
}

fn gpus_of(spec: &Spec) -> Result<Vec<DeviceId>, SpecError> {
    let nodes = spec.devices()?.into_iter().map(|device| device.node);
    let is_gpu = |node: &DeviceNode| classify(&node.path) == Some(GpuPath::Gpu);
    Ok(nodes.filter(is_gpu).map(|node| node.id()).collect())
}

/// For messages.
fn named(gpu: &DeviceId) -> String {
    let kind = match gpu.kind {
        NodeType::Char => "c",
        NodeType::Block => "b",
    };
    format!("the GPU with node {kind} {}:{}", gpu.major, gpu.minor)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A container whose init is this process or one of its children.
    fn lease(init: i32, minors: &[u64]) -> Lease {
        Lease {
            namespace: "default".to_owned(),
            container: format!("c{init}"),
            pid: init,
            started: procfs::started(init).unwrap(),
            gpus: minors
                .iter()
                .map(|minor| (NodeType::Char, 195, *minor).into())
                .collect(),
            parked: false,
            sharers: Vec::new(),
        }
    }

    struct Sleeper(std::process::Child);

    impl Sleeper {
        fn start() -> Self {
            Self(std::process::Command::new("sleep").arg("1000").spawn().unwrap())
        }

        fn lease(&self, minors: &[u64]) -> Lease {
            lease(i32::try_from(self.0.id()).unwrap(), minors)
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            // Another test's reaper may be first.
            let _reaped = self.0.wait();
            let pid = i32::try_from(self.0.id()).unwrap();
            while procfs::is_alive(pid) {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn a_gpu_that_was_given_free_is_taken_by_one_container() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (Sleeper::start(), Sleeper::start());
        let (first, second) = (a.lease(&[0, 1]), b.lease(&[1, 2]));
        first.note_in(dir.path()).unwrap();
        assert!(first.park_in(dir.path()).unwrap().is_empty());
        second.take_in(dir.path(), None, &[]).unwrap();
        let busy = first.take_in(dir.path(), None, &[]).unwrap_err();
        assert_eq!(
            busy.to_string(),
            format!(
                "container {} of namespace default has the GPU with node c 195:1",
                second.container
            )
        );
        assert!(second.is_in_force_in(dir.path()));
        second.park_in(dir.path()).unwrap();
        assert!(!second.is_in_force_in(dir.path()));
        first.take_in(dir.path(), None, &[]).unwrap();
        assert!(second.take_in(dir.path(), None, &[]).is_err());
        assert!(first.is_in_force_in(dir.path()));
        drop(a);
        assert!(!first.is_in_force_in(dir.path()));
        second.take_in(dir.path(), None, &[]).unwrap();
        assert!(
            !dir.path().join(first.pid.to_string()).exists(),
            "that of a dead container stays"
        );
    }

    #[test]
    fn containers_that_had_a_gpu_together_have_it_together_again() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b, c) = (Sleeper::start(), Sleeper::start(), Sleeper::start());
        let (first, second, third) = (a.lease(&[0]), b.lease(&[0]), c.lease(&[0]));
        first.note_in(dir.path()).unwrap();
        second.note_in(dir.path()).unwrap();
        let sharers = first.park_in(dir.path()).unwrap();
        assert_eq!(sharers, [second]);
        first.take_in(dir.path(), None, &sharers).unwrap();
        first.park_in(dir.path()).unwrap();
        third.note_in(dir.path()).unwrap();
        assert!(
            first.take_in(dir.path(), None, &sharers).is_err(),
            "the third came later"
        );
    }

    #[test]
    fn a_directory_that_cannot_be_made_has_a_code() {
        let error = Sleeper::start()
            .lease(&[0])
            .take_in(Path::new("/proc/leases"), None, &[])
            .unwrap_err();
        assert_eq!(error.code(), "FIRN-LEASES");
    }

    #[test]
    fn two_that_share_a_gpu_may_be_parked_both_and_share_it_again() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b, c) = (Sleeper::start(), Sleeper::start(), Sleeper::start());
        let (first, second, third) = (a.lease(&[0]), b.lease(&[0]), c.lease(&[0]));
        first.note_in(dir.path()).unwrap();
        second.note_in(dir.path()).unwrap();
        let of_first = first.park_in(dir.path()).unwrap();
        let of_second = second.park_in(dir.path()).unwrap();
        assert_eq!(of_second.len(), 1, "the first had it, too");
        first.take_in(dir.path(), None, &of_first).unwrap();
        second.take_in(dir.path(), None, &of_second).unwrap();
        // One that takes a turn on a GPU shares it with nobody who is parked.
        first.park_in(dir.path()).unwrap();
        second.park_in(dir.path()).unwrap();
        third.take_in(dir.path(), None, &[]).unwrap();
        assert!(third.park_in(dir.path()).unwrap().is_empty());
    }

    #[test]
    fn a_container_that_moves_has_its_own_gpus_until_it_has_left_them() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (Sleeper::start(), Sleeper::start());
        let (old, new) = (a.lease(&[0]), a.lease(&[1]));
        old.note_in(dir.path()).unwrap();
        new.take_in(dir.path(), Some(&old), &[]).unwrap();
        for gpu in [0, 1] {
            assert!(b.lease(&[gpu]).take_in(dir.path(), None, &[]).is_err(), "{gpu}");
        }
        new.note_in(dir.path()).unwrap();
        assert!(!old.is_in_force_in(dir.path()), "it has left one of the GPUs");
        b.lease(&[0]).take_in(dir.path(), None, &[]).unwrap();
    }

    #[test]
    fn what_is_no_lease_is_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("1"), "nonsense").unwrap();
        fs::write(dir.path().join("notes"), "{}").unwrap();
        fs::create_dir(dir.path().join("2")).unwrap();
        let a = Sleeper::start();
        a.lease(&[0]).take_in(dir.path(), None, &[]).unwrap();
    }
}
