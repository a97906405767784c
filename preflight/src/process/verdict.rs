//! What signs refuse a checkpoint, for the shim's transaction and for `firn audit` alike.
//!
//! What is only suspected is left to the driver or to CRIU where these refuse without harm, as the driver does managed
//! memory. Memory that processes share it takes, and cannot give it back: several CUDA processes are refused unless
//! something says that they share none.

use std::path::{Path, PathBuf};

use super::{Certainty, Finding, Sign};
use firn_config::names;
use firn_host::proc_maps as maps;
use firn_host::{Problem, Remedy, remedy};
use firn_oci::Spec;

/// What the container's owner has said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// Its processes share no GPU memory.
    pub shares_nothing: bool,
}

/// Whether the container's owner asserts that its processes share no GPU memory.
pub fn shares_nothing(spec: &Spec) -> bool {
    spec.annotation(names::ANNOTATION_IPC) == Some("none")
}

/// Why a workload is not checkpointed. Nothing has been touched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error(
        "process {pid} ({comm}) uses {bytes} bytes of managed (UVM) memory, which the driver cannot checkpoint"
    )]
    ManagedMemory { pid: i32, comm: String, bytes: u64 },
    #[error("process {pid} ({comm}) is a client of the MPS daemon at {}", directory.display())]
    Mps {
        pid: i32,
        comm: String,
        directory: PathBuf,
    },
    #[error(
        "process {pid} ({comm}) is a rank of NCCL that may share GPU memory with others: it was started without {}",
        missing.join(", ")
    )]
    Nccl {
        pid: i32,
        comm: String,
        missing: Vec<&'static str>,
    },
    #[error("process {pid} ({comm}) has loaded {file}, which shares GPU memory with other processes")]
    SharingLibrary { pid: i32, comm: String, file: String },
    #[error("process {pid} ({comm}) has {file} open, by which GPU memory is shared with other machines")]
    Imex { pid: i32, comm: String, file: String },
    #[error(
        "CUDA processes {} may share GPU memory, which the driver takes and cannot give back",
        listed(processes)
    )]
    Ipc { processes: Vec<(i32, String)> },
    #[error("process {pid} ({comm}) has an io_uring, which CRIU cannot dump")]
    IoUring { pid: i32, comm: String },
    #[error("process {pid} ({comm}) has the RDMA device {file} open, which CRIU cannot dump")]
    Rdma { pid: i32, comm: String, file: String },
    #[error(
        "process {pid} ({comm}) was forked from a CUDA process, has {file} open from there and uses no CUDA itself: the driver \
         does not close it, and CRIU cannot dump it"
    )]
    LeakedGpu { pid: i32, comm: String, file: String },
}

impl Problem for Refusal {
    fn remedy(&self) -> Remedy<'_> {
        match self {
            Self::ManagedMemory { .. } => remedy(
                "FIRN-UVM",
                "start the program with plain device memory (cudaMalloc)",
            ),
            Self::Mps { .. } => remedy("FIRN-MPS", "start the container without MPS"),
            Self::Nccl { .. } => remedy(
                "FIRN-NCCL",
                "create the container with the annotation firn.dev/nccl=sockets, or start the job with NCCL_P2P_DISABLE=1, \
                 NCCL_SHM_DISABLE=1 and NCCL_NVLS_ENABLE=0 in its environment; if its processes share nothing, create the \
                 container with the annotation firn.dev/ipc=none",
            ),
            Self::SharingLibrary { .. } | Self::Ipc { .. } => remedy(
                "FIRN-IPC",
                "if they share none, create the container with the annotation firn.dev/ipc=none; ranks of NCCL: \
                 firn.dev/nccl=sockets",
            ),
            Self::Imex { .. } => remedy(
                "FIRN-IPC",
                "if it shares none, create the container with the annotation firn.dev/ipc=none",
            ),
            Self::IoUring { .. } => remedy(
                "FIRN-IO-URING",
                "let a seccomp profile block io_uring, as containerd's default does, or tell the program: libuv heeds \
                 UV_USE_IO_URING=0, PyTorch's store USE_LIBUV=0",
            ),
            Self::Rdma { .. } => remedy(
                "FIRN-RDMA",
                "start the program without RDMA; NCCL heeds NCCL_IB_DISABLE=1",
            ),
            Self::LeakedGpu { .. } => remedy(
                "FIRN-GPU-FD",
                "start such children as programs of their own (Python's multiprocessing: spawn), or before CUDA",
            ),
        }
    }
}

/// Every reason to refuse that the findings give, the first being what the transaction tells.
pub fn judge(proc_root: &Path, findings: &[Finding], owner: Owner) -> Vec<Refusal> {
    let comm = |pid| maps::comm(proc_root, pid);
    let mut refusals = Vec::new();
    for finding in findings {
        let pid = finding.pid.unwrap_or_default();
        if finding.certainty != Certainty::Certain {
            continue;
        }
        match &finding.sign {
            &Sign::ManagedMemory { bytes, .. } => refusals.push(Refusal::ManagedMemory {
                pid,
                comm: comm(pid),
                bytes,
            }),
            Sign::Mps { directory } => refusals.push(Refusal::Mps {
                pid,
                comm: comm(pid),
                directory: directory.clone(),
            }),
            Sign::IoUring => refusals.push(Refusal::IoUring { pid, comm: comm(pid) }),
            Sign::Rdma { file } => refusals.push(Refusal::Rdma {
                pid,
                comm: comm(pid),
                file: file.clone(),
            }),
            Sign::LeakedGpu { file } => refusals.push(Refusal::LeakedGpu {
                pid,
                comm: comm(pid),
                file: file.clone(),
            }),
            Sign::Nccl { .. }
            | Sign::SharingLibrary { .. }
            | Sign::Imex { .. }
            | Sign::MultipleCudaProcesses { .. } => {}
        }
    }
    if !owner.shares_nothing {
        refusals.extend(by_sharing(findings, &comm));
    }
    refusals
}

/// Refuses CUDA processes that may share GPU memory: one that shares it with other machines, and several, unless all are
/// ranks of NCCL that talk over sockets, and nothing else speaks for sharing.
fn by_sharing(findings: &[Finding], comm: &dyn Fn(i32) -> String) -> Option<Refusal> {
    for Finding { pid, sign, .. } in findings {
        if let Sign::Imex { file } = sign {
            let (pid, file) = (pid.unwrap_or_default(), file.clone());
            return Some(Refusal::Imex {
                pid,
                comm: comm(pid),
                file,
            });
        }
    }
    let pids = findings.iter().find_map(|finding| match &finding.sign {
        Sign::MultipleCudaProcesses { pids } => Some(pids),
        _ => None,
    })?;
    let mut sockets_only = 0;
    for Finding { pid, sign, .. } in findings {
        let pid = pid.unwrap_or_default();
        match sign {
            &Sign::Nccl {
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
            Sign::SharingLibrary { file } => {
                return Some(Refusal::SharingLibrary {
                    pid,
                    comm: comm(pid),
                    file: file.clone(),
                });
            }
            Sign::ManagedMemory { .. }
            | Sign::Mps { .. }
            | Sign::IoUring
            | Sign::Rdma { .. }
            | Sign::Imex { .. }
            | Sign::LeakedGpu { .. }
            | Sign::MultipleCudaProcesses { .. } => {}
        }
    }
    (sockets_only != pids.len()).then(|| Refusal::Ipc {
        processes: pids.iter().map(|&pid| (pid, comm(pid))).collect(),
    })
}

const NVLS_OFF: &str = "NCCL_NVLS_ENABLE=0";

/// The settings that a process was started without.
fn unset(settings: &[(bool, &'static str)]) -> Vec<&'static str> {
    let missing = settings.iter().filter(|(is_set, _)| !is_set);
    missing.map(|(_, name)| *name).collect()
}

/// Pids and names, `7 (python), 8 (python)`; the first few of many.
fn listed(processes: &[(i32, String)]) -> String {
    const SHOWN: usize = 8;
    let mut names: Vec<String> = processes
        .iter()
        .take(SHOWN)
        .map(|(pid, comm)| format!("{pid} ({comm})"))
        .collect();
    if processes.len() > SHOWN {
        names.push(format!("{} more", processes.len() - SHOWN));
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAYS_NOTHING: Owner = Owner {
        shares_nothing: false,
    };
    const SHARES_NOTHING: Owner = Owner { shares_nothing: true };

    fn first(findings: &[Finding], owner: Owner) -> Option<Refusal> {
        judge(Path::new("/nonexistent"), findings, owner)
            .into_iter()
            .next()
    }

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
        assert!(first(&[], SAYS_NOTHING).is_none());
        assert!(first(&of(&[7], vec![nccl(7, false, false, false)]), SAYS_NOTHING).is_none());
    }

    #[test]
    fn several_processes_are_refused_unless_their_owner_says_that_they_share_nothing() {
        let two = of(&[7, 8], vec![]);
        let Some(Refusal::Ipc { processes }) = first(&two, SAYS_NOTHING) else {
            panic!("not refused");
        };
        assert_eq!(processes.iter().map(|(pid, _)| *pid).collect::<Vec<_>>(), [7, 8]);
        assert!(first(&two, SHARES_NOTHING).is_none());
    }

    #[test]
    fn ranks_are_allowed_only_when_every_transport_that_shares_is_off_in_every_one() {
        for bits in 0_i32..1 << 6 {
            let off = |bit: i32| bits & 1 << bit != 0;
            let ranks = vec![nccl(7, off(0), off(1), off(2)), nccl(8, off(3), off(4), off(5))];
            let found = first(&of(&[7, 8], ranks), SAYS_NOTHING);
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
    fn ranks_over_sockets_say_nothing_about_others_or_about_other_libraries() {
        let with_another = of(&[7, 8, 9], vec![over_sockets(7), over_sockets(8)]);
        assert!(matches!(
            first(&with_another, SAYS_NOTHING),
            Some(Refusal::Ipc { .. })
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
            first(&of(&[7, 8], with_ucx.clone()), SAYS_NOTHING),
            Some(Refusal::SharingLibrary { pid: 8, .. })
        ));
        assert!(first(&of(&[7, 8], with_ucx), SHARES_NOTHING).is_none());
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
                first(&managed(Certainty::Certain), policy),
                Some(Refusal::ManagedMemory {
                    bytes: 67_108_864,
                    ..
                })
            ));
            assert!(first(&managed(Certainty::Suspected), policy).is_none());
        }
    }

    #[test]
    fn what_criu_cannot_dump_is_refused_when_it_is_certain() {
        let file = || "/dev/x".to_owned();
        let cases: [(Sign, &str); 3] = [
            (Sign::IoUring, "FIRN-IO-URING"),
            (Sign::Rdma { file: file() }, "FIRN-RDMA"),
            (Sign::LeakedGpu { file: file() }, "FIRN-GPU-FD"),
        ];
        for (sign, code) in cases {
            for owner in [SAYS_NOTHING, SHARES_NOTHING] {
                let refusal = first(&[finding(7, sign.clone(), Certainty::Certain)], owner).unwrap();
                assert_eq!(refusal.code(), code);
                assert!(refusal.to_string().contains("process 7") && !refusal.hint().is_empty());
                let suspected = [finding(7, sign.clone(), Certainty::Suspected)];
                assert_eq!(first(&suspected, owner), None);
            }
        }
    }

    #[test]
    fn memory_of_other_machines_is_shared_memory() {
        let file = "/dev/nvidia-caps-imex-channels/channel0".to_owned();
        let imex = [finding(7, Sign::Imex { file }, Certainty::Suspected)];
        assert_eq!(first(&imex, SAYS_NOTHING).unwrap().code(), "FIRN-IPC");
        assert_eq!(first(&imex, SHARES_NOTHING), None);
    }

    #[test]
    fn every_reason_is_told() {
        let managed = Sign::ManagedMemory { ranges: 1, bytes: 1 };
        let findings = of(
            &[7, 8],
            vec![
                finding(7, managed, Certainty::Certain),
                finding(8, Sign::IoUring, Certainty::Certain),
            ],
        );
        let refusals = judge(Path::new("/nonexistent"), &findings, SAYS_NOTHING);
        let codes: Vec<_> = refusals.iter().map(Problem::code).collect();
        assert_eq!(codes, ["FIRN-UVM", "FIRN-IO-URING", "FIRN-IPC"]);
    }
}
