//! Which processes of a container a dump takes, and what becomes of the others.

use std::collections::BTreeSet;

use firn_config::{Config, Exec, names};

use super::Refusal;
use firn_host::procfs;
use firn_oci::Spec;

/// Value of the annotation by which processes are left out that CRIU leaves out.
const OMIT: &str = "omit";

/// The processes of a container, as a dump sees them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tree {
    /// Init and its descendants: what CRIU dumps.
    pub dumped: BTreeSet<i32>,
    /// What it leaves out.
    pub outside: Vec<i32>,
}

impl Tree {
    /// Of these processes; those that have ended are in neither part.
    pub fn of(init: i32, all: &[i32]) -> Self {
        let mut dumped = procfs::tree(init, all);
        if dumped.len() < all.len() {
            // A process whose parent ended between two reads seems to have none; at a second look it has been adopted.
            dumped.append(&mut procfs::tree(init, all));
        }
        let is_outside = |pid: &i32| !dumped.contains(pid) && !procfs::has_ended(*pid);
        let outside = all.iter().copied().filter(is_outside).collect();
        Self { dumped, outside }
    }
}

/// What becomes of processes outside the tree: as the container's annotation says, else the node's configuration.
pub fn exec_policy(spec: Option<&Spec>, config: &Config) -> Exec {
    match spec.and_then(|spec| spec.annotation(names::ANNOTATION_EXEC)) {
        None => config.checkpoint.exec,
        Some(OMIT) => Exec::Omit,
        Some(_) => Exec::Refuse,
    }
}

/// Refuses processes that CRIU would leave out, as those of execs, unless they are to be; one that uses CUDA always.
pub fn by_outside(outside: &[i32], cuda: &[i32], exec: Exec) -> Result<(), Refusal> {
    let with_cuda: BTreeSet<i32> = cuda.iter().copied().collect();
    if let Some(&pid) = outside.iter().find(|pid| with_cuda.contains(pid)) {
        let comm = procfs::comm(pid);
        return Err(Refusal::CudaExec { pid, comm });
    }
    match (outside.first(), exec) {
        (Some(&pid), Exec::Refuse) => {
            let comm = procfs::comm(pid);
            Err(Refusal::Exec { pid, comm })
        }
        (None, Exec::Refuse) | (_, Exec::Omit) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_container_may_say_that_its_execs_are_left_out_and_that_they_are_not() {
        let node = |exec| Config {
            checkpoint: firn_config::Checkpoint {
                exec,
                ..firn_config::Checkpoint::default()
            },
            ..Config::default()
        };
        for (annotation, of_node, expected) in [
            (None, Exec::Refuse, Exec::Refuse),
            (None, Exec::Omit, Exec::Omit),
            (Some("omit"), Exec::Refuse, Exec::Omit),
            (Some("refuse"), Exec::Omit, Exec::Refuse),
            (Some("Omit"), Exec::Omit, Exec::Refuse),
        ] {
            let spec: Spec = match annotation {
                Some(value) => json!({"annotations": {"firn.dev/exec": value}}).into(),
                None => json!({}).into(),
            };
            assert_eq!(
                exec_policy(Some(&spec), &node(of_node)),
                expected,
                "{annotation:?}"
            );
        }
        assert_eq!(exec_policy(None, &node(Exec::Omit)), Exec::Omit);
    }

    #[test]
    fn processes_outside_the_tree_are_refused_or_omitted_and_those_with_cuda_always_refused() {
        for exec in [Exec::Refuse, Exec::Omit] {
            by_outside(&[], &[5], exec).unwrap();
            let refused = by_outside(&[7, 8], &[5, 8], exec).unwrap_err();
            assert!(matches!(refused, Refusal::CudaExec { pid: 8, .. }), "{refused}");
        }
        let refused = by_outside(&[7], &[5], Exec::Refuse).unwrap_err();
        assert!(matches!(refused, Refusal::Exec { pid: 7, .. }), "{refused}");
        by_outside(&[7], &[5], Exec::Omit).unwrap();
    }

    #[test]
    fn children_are_in_the_tree_and_what_has_ended_is_nowhere() {
        let me = i32::try_from(std::process::id()).unwrap();
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let tree = Tree::of(me, &[me, pid, i32::MAX]);
        assert_eq!(tree.dumped, BTreeSet::from([me, pid]));
        assert!(tree.outside.is_empty());
        assert_eq!(Tree::of(pid, &[me, pid]).outside, [me]);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
