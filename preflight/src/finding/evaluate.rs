//! Which findings refuse a checkpoint.
//!
//! A suspicion refuses nothing where the driver or CRIU refuses without harm, as the driver does for managed
//! memory. The driver checkpoints memory that processes share and then cannot restore it. Several CUDA
//! processes are therefore refused unless something shows that they share none.

use std::path::Path;

use firn_host::proc_maps as maps;

use super::{Certainty, Finding, FindingKind};
use crate::Refusal;

/// All refusals that follow from the findings. `shares_nothing`: the owner asserts that the processes share
/// no GPU memory.
pub(crate) fn evaluate(proc_root: &Path, findings: &[Finding], shares_nothing: bool) -> Vec<Refusal> {
    let comm = |pid| maps::comm(proc_root, pid);
    let mut refusals = Vec::new();
    for finding in findings {
        let pid = finding.pid.unwrap_or_default();
        if finding.certainty != Certainty::Certain {
            continue;
        }
        match &finding.kind {
            &FindingKind::ManagedMemory { bytes, .. } => refusals.push(Refusal::ManagedMemory {
                pid,
                comm: comm(pid),
                bytes,
            }),
            FindingKind::Mps { directory } => refusals.push(Refusal::Mps {
                pid,
                comm: comm(pid),
                directory: directory.clone(),
            }),
            FindingKind::IoUring => refusals.push(Refusal::IoUring { pid, comm: comm(pid) }),
            FindingKind::Rdma { file } => refusals.push(Refusal::Rdma {
                pid,
                comm: comm(pid),
                file: file.clone(),
            }),
            FindingKind::LeakedGpu { file } => refusals.push(Refusal::LeakedGpu {
                pid,
                comm: comm(pid),
                file: file.clone(),
            }),
            FindingKind::Nccl { .. }
            | FindingKind::SharingLibrary { .. }
            | FindingKind::Imex { .. }
            | FindingKind::MultipleCudaProcesses { .. } => {}
        }
    }
    if !shares_nothing {
        refusals.extend(by_sharing(findings, &comm));
    }
    refusals
}

/// Refuses a CUDA process that may share GPU memory with other machines, and several CUDA processes, unless
/// all are ranks of NCCL over sockets and none has another library that shares memory.
fn by_sharing(findings: &[Finding], comm: &dyn Fn(i32) -> String) -> Option<Refusal> {
    for Finding { pid, kind, .. } in findings {
        if let FindingKind::Imex { file } = kind {
            let (pid, file) = (pid.unwrap_or_default(), file.clone());
            return Some(Refusal::Imex {
                pid,
                comm: comm(pid),
                file,
            });
        }
    }
    let pids = findings.iter().find_map(|finding| match &finding.kind {
        FindingKind::MultipleCudaProcesses { pids } => Some(pids),
        _ => None,
    })?;
    let mut sockets_only = 0;
    for Finding { pid, kind, .. } in findings {
        let pid = pid.unwrap_or_default();
        match kind {
            &FindingKind::Nccl {
                p2p_disabled,
                shm_disabled,
                nvls_disabled,
            } => {
                let missing = unset(&[
                    (p2p_disabled, "NCCL_P2P_DISABLE=1"),
                    (shm_disabled, "NCCL_SHM_DISABLE=1"),
                    (nvls_disabled, NVLS_OFF),
                ]);
                if !missing.is_empty() {
                    let comm = comm(pid);
                    return Some(Refusal::Nccl { pid, comm, missing });
                }
                sockets_only += 1;
            }
            FindingKind::SharingLibrary { file } => {
                return Some(Refusal::SharingLibrary {
                    pid,
                    comm: comm(pid),
                    file: file.clone(),
                });
            }
            FindingKind::ManagedMemory { .. }
            | FindingKind::Mps { .. }
            | FindingKind::IoUring
            | FindingKind::Rdma { .. }
            | FindingKind::Imex { .. }
            | FindingKind::LeakedGpu { .. }
            | FindingKind::MultipleCudaProcesses { .. } => {}
        }
    }
    (sockets_only != pids.len()).then(|| Refusal::Ipc {
        processes: pids.iter().map(|&pid| (pid, comm(pid))).collect(),
    })
}

const NVLS_OFF: &str = "NCCL_NVLS_ENABLE=0";

/// The settings that the process was started without.
fn unset(settings: &[(bool, &'static str)]) -> Vec<&'static str> {
    let missing = settings.iter().filter(|(is_set, _)| !is_set);
    missing.map(|(_, name)| *name).collect()
}

#[cfg(test)]
mod tests {
    use firn_host::Problem;

    use super::*;

    /// The owner asserts nothing.
    const NO_ASSERTION: bool = false;
    const SHARES_NOTHING: bool = true;

    fn all(findings: &[Finding], shares_nothing: bool) -> Vec<Refusal> {
        evaluate(Path::new("/nonexistent"), findings, shares_nothing)
    }

    fn first(findings: &[Finding], shares_nothing: bool) -> Option<Refusal> {
        all(findings, shares_nothing).into_iter().next()
    }

    fn finding(pid: i32, kind: FindingKind, certainty: Certainty) -> Finding {
        Finding {
            pid: Some(pid),
            kind,
            certainty,
        }
    }

    fn nccl(pid: i32, p2p_disabled: bool, shm_disabled: bool, nvls_disabled: bool) -> Finding {
        let kind = FindingKind::Nccl {
            p2p_disabled,
            shm_disabled,
            nvls_disabled,
        };
        finding(pid, kind, Certainty::Certain)
    }

    fn over_sockets(pid: i32) -> Finding {
        nccl(pid, true, true, true)
    }

    /// The findings of an inspection of these CUDA processes.
    fn of(pids: &[i32], mut findings: Vec<Finding>) -> Vec<Finding> {
        if pids.len() > 1 {
            findings.push(Finding {
                pid: None,
                kind: FindingKind::MultipleCudaProcesses { pids: pids.to_vec() },
                certainty: Certainty::Certain,
            });
        }
        findings
    }

    #[test]
    fn one_process_shares_nothing() {
        assert!(first(&[], NO_ASSERTION).is_none());
        assert!(first(&of(&[7], vec![nccl(7, false, false, false)]), NO_ASSERTION).is_none());
    }

    #[test]
    fn several_processes_are_refused_unless_their_owner_asserts_that_they_share_nothing() {
        let two = of(&[7, 8], vec![]);
        let Some(Refusal::Ipc { processes }) = first(&two, NO_ASSERTION) else {
            panic!("not refused");
        };
        assert_eq!(processes.iter().map(|(pid, _)| *pid).collect::<Vec<_>>(), [7, 8]);
        assert!(first(&two, SHARES_NOTHING).is_none());
    }

    #[test]
    fn ranks_are_accepted_only_with_every_sharing_transport_off() {
        for bits in 0_i32..1 << 6 {
            let off = |bit: i32| bits & 1 << bit != 0;
            let ranks = vec![nccl(7, off(0), off(1), off(2)), nccl(8, off(3), off(4), off(5))];
            let found = first(&of(&[7, 8], ranks), NO_ASSERTION);
            match bits {
                0b111_111 => assert!(found.is_none(), "a job over sockets can be moved"),
                _ => {
                    let Some(Refusal::Nccl { pid, missing, .. }) = found else {
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
    fn ranks_over_sockets_do_not_excuse_other_processes_or_libraries() {
        let with_another = of(&[7, 8, 9], vec![over_sockets(7), over_sockets(8)]);
        assert!(matches!(
            first(&with_another, NO_ASSERTION),
            Some(Refusal::Ipc { .. })
        ));
        let ucx = FindingKind::SharingLibrary {
            file: "libuct_cuda.so.0".into(),
        };
        let with_ucx = vec![
            over_sockets(7),
            over_sockets(8),
            finding(8, ucx, Certainty::Suspected),
        ];
        assert!(matches!(
            first(&of(&[7, 8], with_ucx.clone()), NO_ASSERTION),
            Some(Refusal::SharingLibrary { pid: 8, .. })
        ));
        assert!(first(&of(&[7, 8], with_ucx), SHARES_NOTHING).is_none());
    }

    #[test]
    fn certain_managed_memory_is_refused_whatever_the_owner_asserts() {
        let managed = |certainty| {
            let kind = FindingKind::ManagedMemory {
                ranges: 1,
                bytes: 1 << 26,
            };
            vec![finding(7, kind, certainty)]
        };
        for owner in [NO_ASSERTION, SHARES_NOTHING] {
            assert!(matches!(
                first(&managed(Certainty::Certain), owner),
                Some(Refusal::ManagedMemory {
                    bytes: 67_108_864,
                    ..
                })
            ));
            assert!(first(&managed(Certainty::Suspected), owner).is_none());
        }
    }

    #[test]
    fn certain_findings_that_criu_cannot_dump_are_refused() {
        let file = || "/dev/x".to_owned();
        let cases: [(FindingKind, &str); 3] = [
            (FindingKind::IoUring, "FIRN-IO-URING"),
            (FindingKind::Rdma { file: file() }, "FIRN-RDMA"),
            (FindingKind::LeakedGpu { file: file() }, "FIRN-GPU-FD"),
        ];
        for (kind, code) in cases {
            for owner in [NO_ASSERTION, SHARES_NOTHING] {
                let refusal = first(&[finding(7, kind.clone(), Certainty::Certain)], owner).unwrap();
                assert_eq!(refusal.code(), code);
                assert!(refusal.to_string().contains("process 7") && !refusal.hint().is_empty());
                let suspected = [finding(7, kind.clone(), Certainty::Suspected)];
                assert!(first(&suspected, owner).is_none());
            }
        }
    }

    #[test]
    fn imex_channels_are_shared_memory() {
        let file = "/dev/nvidia-caps-imex-channels/channel0".to_owned();
        let imex = [finding(7, FindingKind::Imex { file }, Certainty::Suspected)];
        assert_eq!(first(&imex, NO_ASSERTION).unwrap().code(), "FIRN-IPC");
        assert!(first(&imex, SHARES_NOTHING).is_none());
    }

    #[test]
    fn all_refusals_are_returned() {
        let managed = FindingKind::ManagedMemory { ranges: 1, bytes: 1 };
        let findings = of(
            &[7, 8],
            vec![
                finding(7, managed, Certainty::Certain),
                finding(8, FindingKind::IoUring, Certainty::Certain),
            ],
        );
        let refusals = all(&findings, NO_ASSERTION);
        let codes: Vec<_> = refusals.iter().map(Problem::code).collect();
        assert_eq!(codes, ["FIRN-UVM", "FIRN-IO-URING", "FIRN-IPC"]);
    }
}
