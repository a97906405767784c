//! Which findings refuse a checkpoint.
//!
//! A suspicion refuses nothing where the driver or CRIU refuses without harm, as the driver does for managed
//! memory. The driver checkpoints memory that processes share and then cannot restore it. Several CUDA
//! processes are therefore refused unless something shows that they share none.

use super::{Certainty, Finding};
use crate::Refusal;

/// Drops what the owner's word about peer access answers.
pub(crate) fn without_peer_access(findings: &mut Vec<Finding>) {
    findings.retain(|finding| !matches!(finding.refusal, Refusal::PeerAccess { .. }));
}

/// Drops the same of these processes.
pub(crate) fn without_peer_access_of(findings: &mut Vec<Finding>, pids: &[i32]) {
    findings.retain(|finding| match &finding.refusal {
        Refusal::PeerAccess { pid, .. } => !pids.contains(pid),
        _ => true,
    });
}

/// All refusals that follow from the findings, and the findings that refuse nothing. `shares_nothing`: the
/// owner asserts that the processes share no GPU memory.
pub(crate) fn evaluate(mut findings: Vec<Finding>, shares_nothing: bool) -> (Vec<Refusal>, Vec<Finding>) {
    let sharing = if shares_nothing {
        None
    } else {
        sharing(&findings).map(|at| findings.remove(at))
    };
    let refusing = findings.extract_if(.., |finding| refuses(finding));
    let refusals = refusing.chain(sharing).map(|finding| finding.refusal);
    (refusals.collect(), findings)
}

/// Whether a finding refuses the checkpoint by itself.
fn refuses(finding: &Finding) -> bool {
    let is_certain = finding.certainty == Certainty::Certain;
    is_certain && !matches!(finding.refusal, Refusal::Nccl { .. } | Refusal::Ipc { .. })
}

/// The finding that refuses a CUDA process that may share GPU memory with other machines, or several CUDA
/// processes, unless all are ranks of NCCL over sockets and none has another library that shares memory.
fn sharing(findings: &[Finding]) -> Option<usize> {
    let first = |is_kind: fn(&Refusal) -> bool| findings.iter().position(|found| is_kind(&found.refusal));
    let imex = first(|found| matches!(found, Refusal::Imex { .. }));
    if imex.is_some() {
        return imex;
    }
    let several = first(|found| matches!(found, Refusal::Ipc { .. }))?;
    let not_over_sockets = first(|found| match found {
        Refusal::Nccl { missing, .. } => !missing.is_empty(),
        found => matches!(found, Refusal::SharingLibrary { .. }),
    });
    if not_over_sockets.is_some() {
        return not_over_sockets;
    }
    let is_rank = |found: &&Finding| matches!(found.refusal, Refusal::Nccl { .. });
    let ranks = findings.iter().filter(is_rank).count();
    let are_all_ranks =
        matches!(&findings[several].refusal, Refusal::Ipc { processes } if processes.len() == ranks);
    (!are_all_ranks).then_some(several)
}

#[cfg(test)]
mod tests {
    use firn_host::Problem;

    use super::*;

    /// The owner asserts nothing.
    const NO_ASSERTION: bool = false;
    const SHARES_NOTHING: bool = true;

    fn all(findings: Vec<Finding>, shares_nothing: bool) -> Vec<Refusal> {
        evaluate(findings, shares_nothing).0
    }

    fn first(findings: Vec<Finding>, shares_nothing: bool) -> Option<Refusal> {
        all(findings, shares_nothing).into_iter().next()
    }

    fn finding(refusal: Refusal, certainty: Certainty) -> Finding {
        Finding { refusal, certainty }
    }

    fn comm() -> String {
        "python".to_owned()
    }

    fn nccl(pid: i32, p2p_disabled: bool, shm_disabled: bool, nvls_disabled: bool) -> Finding {
        let settings = [
            (p2p_disabled, "NCCL_P2P_DISABLE=1"),
            (shm_disabled, "NCCL_SHM_DISABLE=1"),
            (nvls_disabled, "NCCL_NVLS_ENABLE=0"),
        ];
        let missing = settings.into_iter().filter(|(is_set, _)| !is_set);
        let missing = missing.map(|(_, setting)| setting).collect();
        let comm = comm();
        finding(Refusal::Nccl { pid, comm, missing }, Certainty::Certain)
    }

    fn over_sockets(pid: i32) -> Finding {
        nccl(pid, true, true, true)
    }

    /// The findings of an inspection of these CUDA processes.
    fn of(pids: &[i32], mut findings: Vec<Finding>) -> Vec<Finding> {
        if pids.len() > 1 {
            let processes = pids.iter().map(|&pid| (pid, comm())).collect();
            findings.push(finding(Refusal::Ipc { processes }, Certainty::Certain));
        }
        findings
    }

    #[test]
    fn one_process_shares_nothing() {
        assert!(first(vec![], NO_ASSERTION).is_none());
        assert!(first(of(&[7], vec![nccl(7, false, false, false)]), NO_ASSERTION).is_none());
    }

    #[test]
    fn several_processes_are_refused_unless_their_owner_asserts_that_they_share_nothing() {
        let two = || of(&[7, 8], vec![]);
        let Some(Refusal::Ipc { processes }) = first(two(), NO_ASSERTION) else {
            panic!("not refused");
        };
        assert_eq!(processes.iter().map(|(pid, _)| *pid).collect::<Vec<_>>(), [7, 8]);
        assert!(first(two(), SHARES_NOTHING).is_none());
    }

    #[test]
    fn ranks_are_accepted_only_with_every_sharing_transport_off() {
        for bits in 0_i32..1 << 6 {
            let off = |bit: i32| bits & 1 << bit != 0;
            let ranks = vec![nccl(7, off(0), off(1), off(2)), nccl(8, off(3), off(4), off(5))];
            let found = first(of(&[7, 8], ranks), NO_ASSERTION);
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
            first(with_another, NO_ASSERTION),
            Some(Refusal::Ipc { .. })
        ));
        let with_ucx = || {
            let file = "libuct_cuda.so.0".into();
            let (pid, comm) = (8, comm());
            let ucx = Refusal::SharingLibrary { pid, comm, file };
            let ucx = finding(ucx, Certainty::Suspected);
            of(&[7, 8], vec![over_sockets(7), over_sockets(8), ucx])
        };
        assert!(matches!(
            first(with_ucx(), NO_ASSERTION),
            Some(Refusal::SharingLibrary { pid: 8, .. })
        ));
        assert!(first(with_ucx(), SHARES_NOTHING).is_none());
    }

    #[test]
    fn certain_managed_memory_is_refused_whatever_the_owner_asserts() {
        let managed = |certainty| {
            let managed = Refusal::ManagedMemory {
                pid: 7,
                comm: comm(),
                ranges: 1,
                bytes: 1 << 26,
            };
            vec![finding(managed, certainty)]
        };
        for owner in [NO_ASSERTION, SHARES_NOTHING] {
            assert!(matches!(
                first(managed(Certainty::Certain), owner),
                Some(Refusal::ManagedMemory {
                    bytes: 67_108_864,
                    ..
                })
            ));
            assert!(first(managed(Certainty::Suspected), owner).is_none());
        }
    }

    #[test]
    fn a_process_on_several_gpus_is_refused_unless_its_owner_asserts_that_there_is_no_peer_access() {
        let several = || {
            let gpus = vec!["nvidia0".to_owned(), "nvidia1".to_owned()];
            let (pid, comm) = (7, comm());
            vec![finding(
                Refusal::PeerAccess { pid, comm, gpus },
                Certainty::Certain,
            )]
        };
        for owner in [NO_ASSERTION, SHARES_NOTHING] {
            assert_eq!(first(several(), owner).unwrap().code(), "FIRN-PEER");
        }
        let mut findings = several();
        without_peer_access_of(&mut findings, &[8]);
        assert_eq!(findings.len(), 1);
        without_peer_access_of(&mut findings, &[8, 7]);
        assert!(findings.is_empty());
        let mut findings = several();
        without_peer_access(&mut findings);
        assert!(findings.is_empty());
    }

    #[test]
    fn certain_findings_that_criu_cannot_dump_are_refused() {
        let pid = 7;
        let kinds = || {
            let (comm, file) = (comm(), "/dev/x".to_owned());
            let ring = Refusal::IoUring {
                pid,
                comm: comm.clone(),
            };
            let rdma = Refusal::Rdma {
                pid,
                comm: comm.clone(),
                file: file.clone(),
            };
            let gpu = Refusal::LeakedGpu { pid, comm, file };
            [(ring, "FIRN-IO-URING"), (rdma, "FIRN-RDMA"), (gpu, "FIRN-GPU-FD")]
        };
        for owner in [NO_ASSERTION, SHARES_NOTHING] {
            for (kind, code) in kinds() {
                let refusal = first(vec![finding(kind, Certainty::Certain)], owner).unwrap();
                assert_eq!(refusal.code(), code);
                assert!(refusal.to_string().contains("process 7") && !refusal.hint().is_empty());
            }
            for (kind, _) in kinds() {
                assert!(first(vec![finding(kind, Certainty::Suspected)], owner).is_none());
            }
        }
    }

    #[test]
    fn imex_channels_are_shared_memory() {
        let imex = || {
            let file = "/dev/nvidia-caps-imex-channels/channel0".to_owned();
            let (pid, comm) = (7, comm());
            vec![finding(Refusal::Imex { pid, comm, file }, Certainty::Suspected)]
        };
        assert_eq!(first(imex(), NO_ASSERTION).unwrap().code(), "FIRN-IPC");
        assert!(first(imex(), SHARES_NOTHING).is_none());
    }

    #[test]
    fn all_refusals_are_returned() {
        let managed = Refusal::ManagedMemory {
            pid: 7,
            comm: comm(),
            ranges: 1,
            bytes: 1,
        };
        let ring = Refusal::IoUring { pid: 8, comm: comm() };
        let findings = of(
            &[7, 8],
            vec![
                finding(managed, Certainty::Certain),
                finding(ring, Certainty::Certain),
            ],
        );
        let refusals = all(findings, NO_ASSERTION);
        let codes: Vec<_> = refusals.iter().map(Problem::code).collect();
        assert_eq!(codes, ["FIRN-UVM", "FIRN-IO-URING", "FIRN-IPC"]);
    }
}
