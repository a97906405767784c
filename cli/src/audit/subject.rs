//! Which processes are audited: those of a container, or a process outside of a container with its
//! descendants.
//!
//! Reads the bundles of containerd's shims and /proc, and does not connect to containerd.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use firn_host::{ProblemReport, open_regular, procfs};
use firn_oci::Spec;
use firn_preflight::Tree;
use serde_json::Value;

use crate::args::AuditArgs;

/// Directory of the shims' bundles below containerd's state directory: NAMESPACE/ID.
const BUNDLES: &str = "io.containerd.runtime.v2.task";

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

/// The journal of an unfinished checkpoint or restore, in the bundle.
const JOURNAL: &str = "firn-journal";

/// How much of the journal is read.
const MAX_JOURNAL: u64 = 1 << 20;

impl Subject {
    pub fn of(args: &AuditArgs) -> Result<Self> {
        match args.subject.parse() {
            Ok(pid) => Self::of_pid(pid, &args.state),
            Err(_) => Self::of_container(&args.subject, &args.namespace, &args.state),
        }
    }

    /// All processes.
    pub fn pids(&self) -> Vec<i32> {
        [&self.tree[..], &self.outside].concat()
    }

    /// Why the subject is no workload.
    pub fn unfit(&self) -> Option<ProblemReport> {
        const HINT: &str = "name a process of a workload, or the id of a container";
        let own = i32::try_from(std::process::id()).unwrap_or_default();
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.init)).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        // PF_KTHREAD, of the ninth field.
        let flags: u64 = fields
            .get(6)
            .and_then(|flags| flags.parse().ok())
            .unwrap_or_default();
        let what = match self.init {
            1 => "is the first of this node, with all others below it",
            _ if flags & 0x0020_0000 != 0 => "is a thread of the kernel",
            _ if fields.first() == Some(&"Z") => "has ended",
            _ if self.tree.contains(&own) => "has this audit below it",
            _ => return None,
        };
        let message = format!("process {} {what}", self.init);
        Some(ProblemReport {
            code: "FIRN-SUBJECT".to_owned(),
            message,
            hint: HINT.to_owned(),
        })
    }

    /// An unfinished checkpoint or restore, which prevents another.
    pub fn unfinished_transaction(&self) -> io::Result<Option<ProblemReport>> {
        let Some(bundle) = &self.bundle else {
            return Ok(None);
        };
        let mut text = String::new();
        match open_regular(&bundle.join(JOURNAL)) {
            Ok(file) => file.take(MAX_JOURNAL).read_to_string(&mut text)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        Ok(unfinished(&text))
    }

    fn of_container(id: &str, namespace: &str, state: &Path) -> Result<Self> {
        if id.contains('/') || namespace.contains('/') {
            bail!("{id} is neither an image directory, a pid nor the id of a container");
        }
        let bundle = state.join(BUNDLES).join(namespace).join(id);
        if !bundle.is_dir() {
            bail!(
                "no container {id} runs in namespace {namespace}. hint: --namespace, or --state where \
                 containerd's is not {}",
                state.display()
            );
        }
        Self::of_bundle(format!("container {id} in namespace {namespace}"), &bundle)
    }

    fn of_pid(pid: i32, state: &Path) -> Result<Self> {
        if !Path::new("/proc").join(pid.to_string()).is_dir() {
            bail!("there is no process {pid}");
        }
        if let Some(bundle) = cgroup(pid).and_then(|path| bundle_of(&path, &state.join(BUNDLES))) {
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
        let cgroup = cgroup(init).with_context(|| format!("the first process of {name} has ended"))?;
        let is_in = |pid: &i32| self::cgroup(*pid).is_some_and(|path| is_below(&path, &cgroup));
        let members: Vec<i32> = procfs::all().into_iter().filter(is_in).collect();
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

/// The problem that the lines of a journal show.
fn unfinished(journal: &str) -> Option<ProblemReport> {
    let lines = journal.lines().map(serde_json::from_str::<Value>);
    let lines: Vec<Value> = lines.map_while(Result::ok).collect();
    let value = |event: &str, key: &str| {
        let line = lines.iter().rfind(|line| line["event"] == event)?;
        line[key].as_str().map(str::to_owned)
    };
    let operation = value("begin", "op")?;
    match value("end", "outcome").as_deref() {
        Some("suspended" | "lost") => Some(ProblemReport {
            code: "FIRN-GPU-SUSPENDED".to_owned(),
            message:
                "the container is frozen since a checkpoint that failed, and its GPU state could not be \
                      restored"
                    .to_owned(),
            hint: "`ctr tasks resume` tries again; otherwise kill and delete it".to_owned(),
        }),
        Some(_) => None,
        None => {
            let phase = value("enter", "phase").map_or_else(String::new, |phase| format!(" (phase {phase})"));
            Some(ProblemReport {
                code: "FIRN-BUSY".to_owned(),
                message: format!(
                    "a {operation} of the container is in progress{phase}, or its shim was killed"
                ),
                hint: "wait until it has ended".to_owned(),
            })
        }
    }
}

fn is_below(path: &str, cgroup: &str) -> bool {
    path == cgroup
        || path
            .strip_prefix(cgroup)
            .is_some_and(|rest| rest.starts_with('/'))
}

/// The bundle of the container with this cgroup, whose name is the id, or `PREFIX-ID.scope` with systemd.
fn bundle_of(cgroup: &str, bundles: &Path) -> Option<PathBuf> {
    let name = cgroup.rsplit('/').next()?.trim_end_matches(".scope");
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

/// The cgroup of a process, in the first hierarchy in which it is not in the root.
fn cgroup(pid: i32) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let hierarchy = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        Some((fields.next()?.to_owned(), fields.next()?.to_owned()))
    };
    let all: Vec<(String, String)> = text.lines().filter_map(hierarchy).collect();
    // The unified hierarchy, or those in which runc always makes a cgroup.
    let order = ["", "devices", "freezer", "memory"];
    order.into_iter().find_map(|name| {
        let (_, path) = all
            .iter()
            .find(|(controllers, _)| controllers.split(',').any(|c| c == name))?;
        (path != "/").then(|| path.clone())
    })
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

    #[test]
    fn cgroups_are_compared_by_whole_names() {
        assert!(is_below("/default/job", "/default/job") && is_below("/default/job/x", "/default/job"));
        assert!(!is_below("/default/job2", "/default/job"));
    }
}
