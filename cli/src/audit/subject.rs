//! Which processes are audited: those of a container, or a process outside of a container with its
//! descendants.
//!
//! Reads the bundles of containerd's shims and /proc.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use firn_host::{Problem, procfs};
use firn_oci::Spec;
use firn_preflight::Tree;
use firn_process::cgroup::Cgroup;
use firn_transaction::journal::{Outcome, Record};

use crate::args::AuditArgs;
use crate::containerd::{BUNDLES, bundles_called};
use crate::serving::{START_UNDER_FIRN, other_shim};
use crate::view::args::SubjectArgs;

/// Flag of a thread of the kernel, in its stat.
const PF_KTHREAD: u64 = 0x0020_0000;

/// The processes of a workload, and the container that they are in.
#[derive(Debug)]
pub struct Subject {
    pub name: String,
    pub spec: Option<Spec>,
    pub bundle: Option<PathBuf>,
    /// The first process.
    pub init: i32,
    /// The first process and its descendants, which CRIU dumps.
    pub tree: Vec<i32>,
    /// The other processes of the container, which CRIU leaves out.
    pub outside: Vec<i32>,
}

/// Why the processes cannot be checkpointed now, whatever they are.
#[derive(Debug, thiserror::Error, Problem)]
pub enum Unready {
    #[error("process {pid} {what}")]
    #[problem("FIRN-SUBJECT", "name a process of a workload, or the id of a container")]
    Unfit { pid: i32, what: &'static str },
    #[error(
        "the container is frozen since a checkpoint that failed, and its GPU state could not be restored"
    )]
    #[problem(
        "FIRN-GPU-SUSPENDED",
        "`ctr tasks resume` tries again; otherwise kill and delete it"
    )]
    Suspended,
    #[error("the container runs under {}, which is not firn's shim, and has GPUs", shim.display())]
    #[problem("FIRN-RUNTIME-OTHER", START_UNDER_FIRN)]
    OtherShim { shim: PathBuf },
    #[error("a {operation} of the container is in progress{phase}, or its shim was killed")]
    #[problem("FIRN-BUSY", "wait until it has ended: `firn ps` shows how far it is")]
    Busy { operation: &'static str, phase: String },
}

impl Subject {
    pub fn of(args: &AuditArgs) -> Result<Self> {
        let SubjectArgs {
            subject,
            containerd,
            state,
            ..
        } = &args.subject;
        let mut found = match subject.parse() {
            Ok(pid) => Self::of_pid(pid, state),
            Err(_) => Self::of_container(subject, &containerd.namespace, state),
        }?;
        if let Some(spec) = &mut found.spec {
            args.overrides.apply(spec)?;
        }
        Ok(found)
    }

    /// All processes.
    pub fn pids(&self) -> Vec<i32> {
        [&self.tree[..], &self.outside].concat()
    }

    /// The container's namespace and id.
    pub fn called(&self) -> Option<(&str, &str)> {
        let bundle = self.bundle.as_deref()?;
        let namespace = bundle.parent()?.file_name()?.to_str()?;
        Some((namespace, bundle.file_name()?.to_str()?))
    }

    /// Why the subject is no workload.
    pub fn unfit(&self) -> Option<Unready> {
        let own = i32::try_from(std::process::id()).unwrap_or_default();
        let flags: u64 = procfs::stat_field(self.init, 6)?.parse().unwrap_or_default();
        let what = match self.init {
            1 => "is the first of this node, with all others below it",
            _ if flags & PF_KTHREAD != 0 => "is a thread of the kernel",
            _ if procfs::state(self.init) == Some('Z') => "has ended",
            _ if self.tree.contains(&own) => "has this audit below it",
            _ => return None,
        };
        let pid = self.init;
        Some(Unready::Unfit { pid, what })
    }

    /// An unfinished checkpoint or restore, which prevents another.
    pub fn unfinished_transaction(&self) -> io::Result<Option<Unready>> {
        let record = self.bundle.as_deref().map(Record::read).transpose()?.flatten();
        Ok(record.and_then(unfinished))
    }

    /// The shim of somebody else that serves the container, which takes no GPUs into a checkpoint.
    pub fn under_another_shim(&self) -> Option<Unready> {
        self.bundle.as_ref()?;
        let shim = other_shim(self.init)?;
        Some(Unready::OtherShim { shim })
    }

    fn of_container(id: &str, namespace: &str, state: &Path) -> Result<Self> {
        if id.contains('/') || namespace.contains('/') {
            bail!("{id} is neither an image directory, a pid nor the id of a container");
        }
        let dir = state.join(BUNDLES).join(namespace);
        if let Err(error) = fs::read_dir(&dir)
            && error.kind() == io::ErrorKind::PermissionDenied
        {
            bail!("cannot list {}: {error}. hint: run it as root", dir.display());
        }
        let bundle = match &bundles_called(&dir, id)[..] {
            [bundle] => bundle.clone(),
            [] => bail!(
                "no container {id} runs in namespace {namespace}. hint: --namespace, or --state where \
                 containerd's is not {}",
                state.display()
            ),
            _ => bail!("several containers are called {id}. hint: `firn ps` shows their whole ids"),
        };
        Self::of_bundle(format!("container {id} in namespace {namespace}"), &bundle)
    }

    fn of_pid(pid: i32, state: &Path) -> Result<Self> {
        if !Path::new("/proc").join(pid.to_string()).is_dir() {
            bail!("there is no process {pid}");
        }
        let cgroup = Cgroup::of_pid(pid).ok();
        if let Some(bundle) = cgroup.and_then(|cgroup| bundle_of(&cgroup, &state.join(BUNDLES))) {
            let name = format!("container {} of process {pid}", bundle.display());
            return Self::of_bundle(name, &bundle);
        }
        let (tree, _) = split(pid, &procfs::all());
        Ok(Self {
            name: format!(
                "process {pid} ({}), in no container of containerd",
                procfs::comm(pid)
            ),
            spec: None,
            bundle: None,
            init: pid,
            tree,
            outside: Vec::new(),
        })
    }

    fn of_bundle(name: String, bundle: &Path) -> Result<Self> {
        let spec = Spec::load(bundle).with_context(|| format!("read the spec of {name}"))?;
        let file = bundle.join("init.pid");
        let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        let init: i32 = (text.trim().parse()).with_context(|| format!("{} holds no pid", file.display()))?;
        let members = Cgroup::of_pid(init).and_then(|cgroup| cgroup.pids());
        let members = members.with_context(|| format!("the first process of {name} has ended"))?;
        let (tree, outside) = split(init, &members);
        Ok(Self {
            name,
            spec: Some(spec),
            bundle: Some(bundle.to_owned()),
            init,
            tree,
            outside,
        })
    }
}

/// The problem that a journal shows.
fn unfinished(record: Record) -> Option<Unready> {
    match record.outcome {
        Some(Outcome::Suspended) => Some(Unready::Suspended),
        Some(_) => None,
        None => Some(Unready::Busy {
            operation: record.begin.op.name(),
            phase: record
                .phase
                .map_or_else(String::new, |phase| format!(" (phase {})", phase.name())),
        }),
    }
}

/// The bundle of the container with this cgroup, whose name is the id, or `PREFIX-ID.scope` with systemd.
fn bundle_of(cgroup: &Cgroup, bundles: &Path) -> Option<PathBuf> {
    let dir = cgroup.primary_dir();
    let name = dir.file_name()?.to_str()?.trim_end_matches(".scope");
    let short = name.rsplit_once('-').map_or(name, |(_, id)| id);
    let namespaces: Vec<PathBuf> = fs::read_dir(bundles)
        .ok()?
        .flatten()
        .map(|dir| dir.path())
        .collect();
    let bundles = [name, short].into_iter().filter(|id| !id.is_empty());
    bundles
        .flat_map(|id| namespaces.iter().map(move |namespace| namespace.join(id)))
        .find(|bundle| bundle.join("config.json").is_file())
}

/// A process and its descendants, and the others that have not ended.
fn split(init: i32, members: &[i32]) -> (Vec<i32>, Vec<i32>) {
    let Tree { dumped, outside } = Tree::of(init, members);
    (dumped.into_iter().collect(), outside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_outside_of_a_container_is_audited_with_its_descendants() {
        let me = i32::try_from(std::process::id()).unwrap();
        let state = Path::new("/run/containerd");
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let subject = Subject::of_pid(me, state).unwrap();
        assert!(subject.tree.contains(&me) && subject.tree.contains(&pid));
        assert!(!subject.tree.contains(&1) && subject.outside.is_empty() && subject.spec.is_none());
        assert_eq!(Subject::of_pid(pid, state).unwrap().tree, [pid]);
        let (tree, outside) = split(pid, &[me, pid]);
        assert_eq!((tree, outside), (vec![pid], vec![me]));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Subject::of_pid(i32::MAX, state).is_err());
    }
}
