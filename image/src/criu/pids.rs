//! Ids of processes: in a PID namespace that others use, too, another process may have one, and CRIU fails.

use std::collections::BTreeSet;
use std::path::Path;

use firn_host::procfs;
use firn_oci::Spec;
use serde::{Deserialize, Serialize};

use super::tasks::PSTREE_MAGIC;
use super::{Host, Image, ImageFault};

/// Ids of a container's processes and threads, in its PID namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pids(BTreeSet<i32>);

impl Pids {
    /// Those of an image.
    ///
    /// # Errors
    /// If the list of processes is not as CRIU writes it.
    pub fn of_image(dir: &Path) -> Result<Self, ImageFault> {
        let ids = Image::open(dir)?.read("pstree.img", PSTREE_MAGIC, |process| {
            let mut ids = process.numbers(5)?;
            ids.push(process.required(1)?);
            Ok(ids)
        })?;
        let ids = ids.into_iter().flatten().flatten();
        Ok(Self(ids.filter_map(|id| i32::try_from(id).ok()).collect()))
    }

    /// Those of running processes, which have these ids here.
    pub fn of_processes(pids: &[i32]) -> Self {
        Self(pids.iter().flat_map(|pid| inner_ids(*pid)).collect())
    }

    /// Expects that they are free where a container with this spec has its processes.
    ///
    /// # Errors
    /// If another process has one.
    pub fn expect(&self, spec: &Spec) -> Result<(), ImageFault> {
        const OWN: &str = "/proc/self/ns/pid";
        let joined = spec.namespace_path("pid");
        if spec.has_namespace("pid") && joined.is_none() {
            return Ok(());
        }
        let namespace = Host::this().namespace;
        let number = namespace(joined.unwrap_or(Path::new(OWN)));
        let taken = if number == namespace(Path::new(OWN)) {
            // Those of namespaces below are there, too.
            let is_there = |id: &&i32| Path::new("/proc").join(id.to_string()).exists();
            self.others().find(is_there).map(|id| (*id, *id))
        } else {
            let is_in = |pid: &i32| {
                let file = Path::new("/proc").join(pid.to_string()).join("ns/pid");
                number.is_some() && namespace(&file) == number
            };
            let members = procfs::all().into_iter().filter(is_in);
            let mut ids = members.flat_map(|pid| inner_ids(pid).into_iter().map(move |id| (id, pid)));
            ids.find(|(id, _)| self.0.contains(id))
        };
        taken.map_or(Ok(()), |(id, pid)| {
            let comm = procfs::comm(pid);
            Err(ImageFault::PidTaken { id, comm })
        })
    }

    /// All but that of this process, which will have ended.
    fn others(&self) -> impl Iterator<Item = &i32> {
        let own = i32::try_from(std::process::id()).unwrap_or_default();
        self.0.iter().filter(move |id| **id != own)
    }
}

/// Ids of a process and its threads in its own PID namespace; none if it has ended.
fn inner_ids(pid: i32) -> Vec<i32> {
    let threads = procfs::threads(pid).unwrap_or_default();
    let inner = |tid: i32| procfs::inner_pid(&format!("/proc/{pid}/task/{tid}"));
    threads.into_iter().filter_map(inner).collect()
}

#[cfg(test)]
mod tests {
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
            let this = i32::try_from(std::process::id()).unwrap();
            Pids([this].into()).expect(shared).unwrap();
        }
        // A namespace that is not there is refused by others.
        let gone = spec(json!([{"type": "pid", "path": "/nonexistent"}]));
        taken.expect(&gone).unwrap();
    }

    #[test]
    fn threads_have_ids_too() {
        let this = i32::try_from(std::process::id()).unwrap();
        let found = Pids::of_processes(&[this, i32::MAX]).0;
        let inner = procfs::inner_pid("/proc/self").unwrap();
        assert!(found.contains(&inner) && found.len() > 1, "{found:?}");
    }
}
