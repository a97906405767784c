//! Refusals by what the processes of a container are and show, before anything is touched.
//!
//! What signs mean is decided in [`firn_gpu::preflight`], which `firn audit` asks too.

use std::collections::BTreeSet;
use std::path::Path;

use firn_config::{Config, Exec, names};
use firn_gpu::preflight::{self, Owner, Subject};
use firn_oci::{Spec, nccl};

use super::error::EffectError;
use crate::procfs;
use crate::worker::CudaProcess;

/// Value of the annotation by which a container's owner says that its processes share no GPU memory.
const SHARES_NOTHING: &str = "none";

/// Value of the annotation by which processes are left out that CRIU leaves out.
const OMIT: &str = "omit";

/// What the container's owner has said about it, and for what he has not the node's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Policy {
    shares_nothing: bool,
    /// Its CUDA processes are ranks of NCCL that talk over sockets.
    sockets: bool,
    exec: Exec,
}

impl Policy {
    pub(super) fn of(spec: &Spec, config: &Config) -> Self {
        Self {
            shares_nothing: spec.annotation(names::ANNOTATION_IPC) == Some(SHARES_NOTHING),
            sockets: nccl::is_asked(spec),
            exec: match spec.annotation(names::ANNOTATION_EXEC) {
                None => config.checkpoint.exec,
                Some(OMIT) => Exec::Omit,
                Some(_) => Exec::Refuse,
            },
        }
    }
}

/// The processes of a container, as a dump sees them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tree {
    /// Init and its descendants: what CRIU dumps.
    pub dumped: BTreeSet<i32>,
    /// What it leaves out.
    pub omitted: Vec<i32>,
}

/// Refuses processes that CRIU would leave out, as those of execs, unless the policy says to leave them out.
pub(super) fn by_tree(
    init: i32,
    all: &[i32],
    cuda: &[CudaProcess],
    policy: Policy,
) -> Result<Tree, EffectError> {
    let mut dumped = procfs::tree(init, all);
    if dumped.len() < all.len() {
        // A process whose parent ended between two reads seems to have none; at a second look it has been adopted.
        dumped.append(&mut procfs::tree(init, all));
    }
    let is_outside = |pid: &i32| !dumped.contains(pid) && !procfs::has_ended(*pid);
    let outside: Vec<i32> = all.iter().copied().filter(is_outside).collect();
    decide(dumped, outside, cuda, policy)
}

fn decide(
    dumped: BTreeSet<i32>,
    outside: Vec<i32>,
    cuda: &[CudaProcess],
    policy: Policy,
) -> Result<Tree, EffectError> {
    let uses_cuda = |pid: &&i32| cuda.iter().any(|process| process.pid == **pid);
    if let Some(&pid) = outside.iter().find(uses_cuda) {
        let comm = procfs::comm(pid);
        return Err(EffectError::CudaOutsideTree { pid, comm });
    }
    match (outside.first(), policy.exec) {
        (Some(&pid), Exec::Refuse) => {
            let comm = procfs::comm(pid);
            Err(EffectError::OutsideTree { pid, comm })
        }
        (None, Exec::Refuse) | (_, Exec::Omit) => Ok(Tree {
            dumped,
            omitted: outside,
        }),
    }
}

/// Refusals by what the processes that are dumped show from outside.
pub(super) fn by_signs(
    dumped: &[i32],
    cuda: &[i32],
    policy: Policy,
    job: Option<&Path>,
) -> Result<(), EffectError> {
    let proc_root = Path::new("/proc");
    let subject = Subject {
        dumped,
        cuda,
        ranks: policy.sockets,
    };
    let findings = preflight::inspect(proc_root, &subject)?;
    for finding in &findings {
        log::debug!("preflight: {finding:?}");
    }
    let owner = Owner {
        shares_nothing: policy.shares_nothing,
        job,
    };
    match preflight::judge(proc_root, &findings, owner).into_iter().next() {
        None => Ok(()),
        Some(refusal) => Err(refusal.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAYS_NOTHING: Policy = Policy {
        shares_nothing: false,
        sockets: false,
        exec: Exec::Refuse,
    };
    const OMITS: Policy = Policy {
        exec: Exec::Omit,
        ..SAYS_NOTHING
    };

    #[test]
    fn only_the_word_none_says_that_nothing_is_shared() {
        for (value, shares_nothing) in [("none", true), ("", false), ("None", false), ("all", false)] {
            let spec: Spec = serde_json::json!({"annotations": {"firn.dev/ipc": value}}).into();
            let policy = Policy::of(&spec, &Config::default());
            assert_eq!(policy.shares_nothing, shares_nothing, "{value:?}");
        }
    }

    #[test]
    fn a_container_may_say_that_its_execs_are_left_out_and_that_they_are_not() {
        let node = |exec| Config {
            checkpoint: firn_config::Checkpoint { exec },
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
                Some(value) => serde_json::json!({"annotations": {"firn.dev/exec": value}}).into(),
                None => serde_json::json!({}).into(),
            };
            assert_eq!(Policy::of(&spec, &node(of_node)).exec, expected, "{annotation:?}");
        }
    }

    #[test]
    fn processes_outside_the_tree_are_refused_or_omitted_and_those_with_cuda_always_refused() {
        let cuda = |pid| CudaProcess {
            pid,
            restore_tid: pid + 1,
        };
        let tree = BTreeSet::from([1, 5]);
        let alone = Tree {
            dumped: tree.clone(),
            omitted: vec![],
        };
        for policy in [SAYS_NOTHING, OMITS] {
            assert_eq!(decide(tree.clone(), vec![], &[cuda(5)], policy).unwrap(), alone);
            assert!(matches!(
                decide(tree.clone(), vec![7, 8], &[cuda(5), cuda(8)], policy),
                Err(EffectError::CudaOutsideTree { pid: 8, .. })
            ));
        }
        assert!(matches!(
            decide(tree.clone(), vec![7], &[cuda(5)], SAYS_NOTHING),
            Err(EffectError::OutsideTree { pid: 7, .. })
        ));
        let omitting = decide(tree, vec![7], &[cuda(5)], OMITS).unwrap();
        assert_eq!(omitting.omitted, [7]);
    }

    #[test]
    fn children_are_in_the_tree_and_what_has_ended_is_nowhere() {
        let me = i32::try_from(std::process::id()).unwrap();
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let tree = by_tree(me, &[me, pid, i32::MAX], &[], SAYS_NOTHING).unwrap();
        assert_eq!(tree.dumped, BTreeSet::from([me, pid]));
        let refused = by_tree(pid, &[me, pid], &[], SAYS_NOTHING);
        assert!(
            matches!(refused, Err(EffectError::OutsideTree { .. })),
            "{refused:?}"
        );
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
