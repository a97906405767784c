//! Refusals by what the processes of a container are and show, before anything is touched.
//!
//! What is only suspected is left to the driver where that refuses without harm, as it does managed memory. Memory that
//! processes share it takes, and cannot give it back: several CUDA processes are refused unless something says that they
//! share none.

use std::collections::BTreeSet;
use std::path::Path;

use firn_config::{Config, Exec, names};
use firn_gpu::preflight::{self, Certainty, Finding, Sign, Unreadable};
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

/// What the CUDA processes show from outside.
///
/// Of ranks that the container's owner has announced NCCL need not show: it may be linked into the program.
pub(super) fn inspect(pids: &[i32], policy: Policy) -> Result<Vec<Finding>, Unreadable> {
    let proc_root = Path::new("/proc");
    let mut findings = preflight::inspect(proc_root, pids)?;
    if policy.sockets {
        for &pid in pids {
            let is_settings =
                |finding: &Finding| finding.pid == Some(pid) && matches!(finding.sign, Sign::Nccl { .. });
            if !findings.iter().any(is_settings) {
                findings.extend(preflight::nccl_settings(proc_root, pid)?);
            }
        }
    }
    Ok(findings)
}

/// Refusals by what the CUDA processes show from outside.
pub(super) fn by_signs(findings: &[Finding], policy: Policy) -> Result<(), EffectError> {
    for Finding { pid, sign, certainty } in findings {
        let pid = pid.unwrap_or_default();
        let comm = || procfs::comm(pid);
        match (certainty, sign) {
            (Certainty::Certain, Sign::ManagedMemory { bytes, .. }) => {
                return Err(EffectError::ManagedMemory {
                    pid,
                    comm: comm(),
                    bytes: *bytes,
                });
            }
            (Certainty::Certain, Sign::Mps { directory }) => {
                return Err(EffectError::Mps {
                    pid,
                    comm: comm(),
                    directory: directory.clone(),
                });
            }
            (_, sign) => log::debug!("pid {pid}: {sign:?}"),
        }
    }
    if policy.shares_nothing {
        return Ok(());
    }
    by_sharing(findings)
}

/// Refuses CUDA processes that may share GPU memory: several, unless all are ranks of NCCL that talk over sockets and
/// nothing else speaks for sharing.
fn by_sharing(findings: &[Finding]) -> Result<(), EffectError> {
    let several = findings.iter().find_map(|finding| match &finding.sign {
        Sign::MultipleCudaProcesses { pids } => Some(pids),
        _ => None,
    });
    let Some(pids) = several else {
        return Ok(());
    };
    let mut sockets_only = 0;
    for Finding { pid, sign, .. } in findings {
        let pid = pid.unwrap_or_default();
        let comm = || procfs::comm(pid);
        match sign {
            &Sign::Nccl {
                p2p_disabled,
                shm_disabled,
                nvls_disabled,
            } => {
                let settings = [
                    (p2p_disabled, "NCCL_P2P_DISABLE=1"),
                    (shm_disabled, "NCCL_SHM_DISABLE=1"),
                    (nvls_disabled, "NCCL_NVLS_ENABLE=0"),
                ];
                let missing: Vec<_> = settings
                    .iter()
                    .filter(|(is_set, _)| !is_set)
                    .map(|(_, name)| *name)
                    .collect();
                if !missing.is_empty() {
                    let comm = comm();
                    return Err(EffectError::Nccl { pid, comm, missing });
                }
                sockets_only += 1;
            }
            Sign::SharingLibrary { file } => {
                return Err(EffectError::SharingLibrary {
                    pid,
                    comm: comm(),
                    file: file.clone(),
                });
            }
            Sign::ManagedMemory { .. } | Sign::Mps { .. } | Sign::MultipleCudaProcesses { .. } => {}
        }
    }
    if sockets_only == pids.len() {
        return Ok(());
    }
    Err(EffectError::Ipc {
        processes: pids.iter().map(|&pid| (pid, procfs::comm(pid))).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAYS_NOTHING: Policy = Policy {
        shares_nothing: false,
        sockets: false,
        exec: Exec::Refuse,
    };
    const SHARES_NOTHING: Policy = Policy {
        shares_nothing: true,
        ..SAYS_NOTHING
    };
    const OMITS: Policy = Policy {
        exec: Exec::Omit,
        ..SAYS_NOTHING
    };

    fn finding(pid: i32, sign: Sign, certainty: Certainty) -> Finding {
        Finding {
            pid: Some(pid),
            sign,
            certainty,
        }
    }

    fn nccl(pid: i32, p2p_disabled: bool, shm_disabled: bool, nvls_disabled: bool) -> Finding {
        let sign = Sign::Nccl {
            p2p_disabled,
            shm_disabled,
            nvls_disabled,
        };
        finding(pid, sign, Certainty::Certain)
    }

    fn over_sockets(pid: i32) -> Finding {
        nccl(pid, true, true, true)
    }

    /// As the inspection of these processes finds it; one alone is no finding.
    fn of(pids: &[i32], mut findings: Vec<Finding>) -> Vec<Finding> {
        if pids.len() > 1 {
            findings.push(Finding {
                pid: None,
                sign: Sign::MultipleCudaProcesses { pids: pids.to_vec() },
                certainty: Certainty::Certain,
            });
        }
        findings
    }

    #[test]
    fn one_process_shares_with_nobody() {
        assert!(by_signs(&[], SAYS_NOTHING).is_ok());
        assert!(by_signs(&of(&[7], vec![nccl(7, false, false, false)]), SAYS_NOTHING).is_ok());
    }

    #[test]
    fn several_processes_are_refused_unless_their_owner_says_that_they_share_nothing() {
        let two = of(&[7, 8], vec![]);
        let Err(EffectError::Ipc { processes }) = by_signs(&two, SAYS_NOTHING) else {
            panic!("not refused");
        };
        assert_eq!(processes.iter().map(|(pid, _)| *pid).collect::<Vec<_>>(), [7, 8]);
        assert!(by_signs(&two, SHARES_NOTHING).is_ok());
    }

    #[test]
    fn ranks_are_allowed_only_when_every_transport_that_shares_is_off_in_every_one() {
        for bits in 0_i32..1 << 6 {
            let off = |bit: i32| bits & 1 << bit != 0;
            let ranks = vec![nccl(7, off(0), off(1), off(2)), nccl(8, off(3), off(4), off(5))];
            let found = by_signs(&of(&[7, 8], ranks), SAYS_NOTHING);
            match bits {
                0b111_111 => assert!(found.is_ok(), "a job over sockets can be moved"),
                _ => {
                    let Err(EffectError::Nccl { pid, missing, .. }) = found else {
                        panic!("{bits:b}: {found:?}");
                    };
                    let of_pid = if pid == 7 { bits & 0b111 } else { bits >> 3 };
                    let off = usize::try_from(of_pid.count_ones()).unwrap();
                    assert_eq!(missing.len(), 3 - off, "{bits:b}: {missing:?}");
                    assert_eq!(missing.contains(&"NCCL_SHM_DISABLE=1"), of_pid & 0b010 == 0);
                }
            }
        }
    }

    #[test]
    fn ranks_over_sockets_say_nothing_about_others_or_about_other_libraries() {
        let with_another = of(&[7, 8, 9], vec![over_sockets(7), over_sockets(8)]);
        assert!(matches!(
            by_signs(&with_another, SAYS_NOTHING),
            Err(EffectError::Ipc { .. })
        ));
        let ucx = Sign::SharingLibrary {
            file: "libuct_cuda.so.0".into(),
        };
        let with_ucx = vec![
            over_sockets(7),
            over_sockets(8),
            finding(8, ucx, Certainty::Suspected),
        ];
        assert!(matches!(
            by_signs(&of(&[7, 8], with_ucx.clone()), SAYS_NOTHING),
            Err(EffectError::SharingLibrary { pid: 8, .. })
        ));
        assert!(by_signs(&of(&[7, 8], with_ucx), SHARES_NOTHING).is_ok());
    }

    #[test]
    fn managed_memory_is_refused_when_it_is_certain_whatever_the_owner_says() {
        let managed = |certainty| {
            let sign = Sign::ManagedMemory {
                ranges: 1,
                bytes: 1 << 26,
            };
            vec![finding(7, sign, certainty)]
        };
        for policy in [SAYS_NOTHING, SHARES_NOTHING] {
            assert!(matches!(
                by_signs(&managed(Certainty::Certain), policy),
                Err(EffectError::ManagedMemory {
                    bytes: 67_108_864,
                    ..
                })
            ));
            assert!(by_signs(&managed(Certainty::Suspected), policy).is_ok());
        }
    }

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
