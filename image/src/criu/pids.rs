//! Ids of processes: in a PID namespace that others use, too, another process may have one, and CRIU fails.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use firn_host::procfs;
use firn_oci::Spec;
use serde::{Deserialize, Serialize};

use super::tasks::{PSTREE, PSTREE_MAGIC};
use super::{Host, Image, ImageFault};

/// How often a process that has an id is looked at again, and how far apart: most are about to end.
const LOOKS: usize = 5;
const LOOK: Duration = Duration::from_millis(100);

/// Ids of a container's processes and threads, in its PID namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pids(BTreeSet<i32>);

impl Pids {
    /// Those of an image, which a container with this spec needs; none if it has a namespace of its own.
    ///
    /// # Errors
    /// If the list of processes is not as CRIU writes it.
    pub fn of_image(spec: &Spec, dir: &Path) -> Result<Self, ImageFault> {
        if has_own_namespace(spec) {
            return Ok(Self::default());
        }
        let ids = Image::open(dir)?.read(PSTREE, PSTREE_MAGIC, |process| {
            let mut ids = process.numbers(5)?;
            ids.push(process.required(1)?);
            Ok(ids)
        })?;
        let ids = ids.into_iter().flatten().flatten();
        Ok(Self(ids.filter_map(|id| i32::try_from(id).ok()).collect()))
    }

    /// Those of running processes, which have these ids here, of a container with this spec; none if it has a
    /// namespace of its own.
    pub fn of_processes(spec: &Spec, pids: &[i32]) -> Self {
        if has_own_namespace(spec) {
            return Self::default();
        }
        Self(pids.iter().flat_map(|pid| inner_ids(*pid)).collect())
    }

    /// Expects that they are free where a container with this spec has its processes. Not seen are ids of
    /// namespaces below a joined one, and those that only a session or a group of processes has left.
    ///
    /// # Errors
    /// If another process has one, and keeps it for a while.
    pub fn expect(&self, spec: &Spec) -> Result<(), ImageFault> {
        if self.0.is_empty() || has_own_namespace(spec) {
            return Ok(());
        }
        let joined = spec.namespace_path("pid");
        // The first of a PID namespace of its own, which CRIU makes again.
        if self.0.contains(&1) {
            return match joined {
                Some(_) => Err(ImageFault::PidNamespace),
                None => Ok(()),
            };
        }
        let mut taken = self.taken(joined);
        for _ in 0..LOOKS {
            if taken.is_none() {
                return Ok(());
            }
            std::thread::sleep(LOOK);
            taken = self.taken(joined);
        }
        taken.map_or(Ok(()), |(id, pid)| {
            let comm = procfs::comm(pid);
            Err(ImageFault::PidTaken { id, pid, comm })
        })
    }

    /// An id that a process has in the namespace that is joined, or in this process's, and that process's id
    /// here.
    fn taken(&self, joined: Option<&Path>) -> Option<(i32, i32)> {
        const OWN: &str = "/proc/self/ns/pid";
        let namespace = Host::this().namespace;
        let number = namespace(joined.unwrap_or(Path::new(OWN)))?;
        if Some(number) == namespace(Path::new(OWN)) {
            // Those of namespaces below are there, too. The hook that looks before CRIU will have ended.
            let own = procfs::threads(this()).unwrap_or_default();
            let is_there = |id: &&i32| !own.contains(id) && Path::new("/proc").join(id.to_string()).exists();
            return self.0.iter().find(is_there).map(|id| (*id, *id));
        }
        let is_in = |pid: &i32| {
            let file = Path::new("/proc").join(pid.to_string()).join("ns/pid");
            namespace(&file) == Some(number)
        };
        let members = procfs::all().into_iter().filter(is_in);
        let mut ids = members.flat_map(|pid| inner_ids(pid).into_iter().map(move |id| (id, pid)));
        ids.find(|(id, _)| self.0.contains(id))
    }
}

fn has_own_namespace(spec: &Spec) -> bool {
    spec.has_namespace("pid") && spec.namespace_path("pid").is_none()
}

fn this() -> i32 {
    i32::try_from(std::process::id()).unwrap_or_default()
}

/// Ids of a process and its threads in its own PID namespace; none if it has ended.
fn inner_ids(pid: i32) -> Vec<i32> {
    let threads = procfs::threads(pid).unwrap_or_default();
    let inner = |tid: i32| procfs::inner_pid(&format!("/proc/{pid}/task/{tid}"));
    threads.into_iter().filter_map(inner).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Command, Stdio};

    use serde_json::json;

    use super::*;

    fn spec(namespaces: serde_json::Value) -> Spec {
        Spec::from(json!({"linux": {"namespaces": namespaces}}))
    }

    #[test]
    fn ids_are_free_in_a_namespace_of_ones_own_and_may_be_taken_in_another() {
        let parent = i32::try_from(std::os::unix::process::parent_id()).unwrap();
        let own = spec(json!([{"type": "pid"}]));
        let joined = spec(json!([{"type": "pid", "path": "/proc/self/ns/pid"}]));
        let hosts = spec(json!([]));
        let (taken, free) = (Pids([parent].into()), Pids([i32::MAX].into()));
        taken.expect(&own).unwrap();
        for shared in [&joined, &hosts] {
            free.expect(shared).unwrap();
            let shown = taken.expect(shared).unwrap_err().to_string();
            assert!(shown.contains(&format!("id {parent} ")), "{shown}");
            // This test is not what a restore would meet.
            Pids([this()].into()).expect(shared).unwrap();
        }
        // CRIU makes a namespace for what had one, and nothing joins it then.
        let first = Pids([1, parent].into());
        first.expect(&hosts).unwrap();
        assert!(matches!(first.expect(&joined), Err(ImageFault::PidNamespace)));
        // A namespace that is not there is refused by others.
        let gone = spec(json!([{"type": "pid", "path": "/nonexistent"}]));
        taken.expect(&gone).unwrap();
    }

    /// As of a pod: ids are those that its processes have there.
    #[test]
    fn ids_in_a_namespace_of_others_are_theirs() {
        let script = "sh -c 'echo; exec sleep 60' & wait";
        let child = Command::new("unshare")
            .args(["--pid", "--fork", "--kill-child", "sh", "-c", script])
            .stdout(Stdio::piped())
            .spawn();
        let mut child = child.unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let members = procfs::all();
        let init = members
            .into_iter()
            .find(|of| procfs::stat_field(*of, 1).and_then(|parent| parent.parse().ok()) == Some(pid));
        let path = format!("/proc/{}/ns/pid", init.unwrap());
        let joined = spec(json!([{"type": "pid", "path": path}]));
        let free = Pids([i32::MAX, pid].into()).expect(&joined);
        let taken = Pids([2].into()).expect(&joined);
        child.kill().unwrap();
        child.wait().unwrap();
        free.unwrap();
        let is_taken = matches!(taken, Err(ImageFault::PidTaken { id: 2, .. }));
        assert!(is_taken, "{taken:?}");
    }

    #[test]
    fn threads_have_ids_too() {
        let found = Pids::of_processes(&spec(json!([])), &[this(), i32::MAX]).0;
        let inner = procfs::inner_pid("/proc/self").unwrap();
        assert!(found.contains(&inner) && found.len() > 1, "{found:?}");
        let own = spec(json!([{"type": "pid"}]));
        assert_eq!(Pids::of_processes(&own, &[this()]), Pids::default());
    }
}
