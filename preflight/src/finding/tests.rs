use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::*;

/// Inspects CUDA processes.
fn inspect(proc_root: &Path, cuda: &[i32]) -> Result<Vec<Finding>, Unreadable> {
    let processes = Processes {
        cuda,
        ..Processes::default()
    };
    Ok(super::inspect(proc_root, &processes)?.0)
}

/// What every CUDA process maps, shortened from an H200 with driver 580.
const BASELINE: &str = "\
200000000-200200000 ---p 00000000 00:00 0
200400000-200600000 rw-s 00000000 00:06 610                              /dev/nvidiactl
204a00000-204c00000 rw-s 204a00000 00:06 612                             /dev/nvidia-uvm
7f6a10000000-7f6a14000000 rw-s 00000000 00:06 615                        /dev/nvidia0
7f6a20000000-7f6a25000000 r-xp 00000000 fe:01 99                         /usr/lib/libcuda.so.580.159.04
";

fn processes(all: &[(i32, &str, &str)]) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for (pid, extra_maps, environment) in all {
        let process = root.path().join(pid.to_string());
        fs::create_dir_all(process.join("fd")).unwrap();
        fs::create_dir_all(process.join("root/tmp")).unwrap();
        fs::write(process.join("maps"), format!("{BASELINE}{extra_maps}")).unwrap();
        fs::write(process.join("environ"), environment.replace(' ', "\0")).unwrap();
        symlink("/dev/nvidia-uvm", process.join("fd/7")).unwrap();
        symlink("socket:[4711]", process.join("fd/8")).unwrap();
    }
    root
}

/// What a finding is.
#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Managed { ranges: usize, bytes: u64 },
    Nccl { missing: Vec<&'static str> },
    Sharing { file: String },
    Mps { directory: PathBuf },
    Several { pids: Vec<i32> },
    Peers { gpus: Vec<String> },
}

/// Kind, process and certainty of a finding.
fn known(Finding { refusal, certainty }: Finding) -> (Kind, i32, Certainty) {
    let (kind, pid) = match refusal {
        Refusal::ManagedMemory {
            pid, ranges, bytes, ..
        } => (Kind::Managed { ranges, bytes }, pid),
        Refusal::Nccl { pid, missing, .. } => (Kind::Nccl { missing }, pid),
        Refusal::SharingLibrary { pid, file, .. } => (Kind::Sharing { file }, pid),
        Refusal::Mps { pid, directory, .. } => (Kind::Mps { directory }, pid),
        Refusal::Ipc { processes } => {
            let pids = processes.into_iter().map(|(pid, _)| pid).collect();
            (Kind::Several { pids }, 0)
        }
        Refusal::PeerAccess { pid, gpus, .. } => (Kind::Peers { gpus }, pid),
        other => panic!("{other}"),
    };
    (kind, pid, certainty)
}

/// The findings of CUDA processes.
fn found(root: &TempDir, cuda: &[i32]) -> Vec<(Kind, i32, Certainty)> {
    let findings = inspect(root.path(), cuda).unwrap();
    findings.into_iter().map(known).collect()
}

/// Findings about one process.
fn kinds(extra_maps: &str, environment: &str) -> Vec<(Kind, Certainty)> {
    let root = processes(&[(7, extra_maps, environment)]);
    let of_process = |(kind, pid, certainty)| {
        assert_eq!(pid, 7);
        (kind, certainty)
    };
    found(&root, &[7]).into_iter().map(of_process).collect()
}

#[test]
fn a_plain_cuda_process_shows_nothing() {
    assert_eq!(kinds("", "PATH=/bin HOME=/"), []);
}

#[test]
fn managed_memory_differs_from_the_drivers_own_mapping() {
    let managed = "7f5fd0000000-7f5fd4000000 rw-s 7f5fd0000000 00:06 612    /dev/nvidia-uvm\n\
        7f5fe0000000-7f5fe0200000 rw-s 7f5fe0000000 00:06 612    /dev/nvidia-uvm\n";
    assert_eq!(
        kinds(managed, ""),
        [(
            Kind::Managed {
                ranges: 2,
                bytes: 66 << 20
            },
            Certainty::Certain
        )]
    );
}

#[test]
fn contexts_on_several_gpus_show_by_large_mappings_of_their_nodes() {
    // What a process maps of a GPU that it only sees, and of one with a context, as on an H100.
    let seen = "7f6b10000000-7f6b10010000 rw-s 00000000 00:06 616                        /dev/nvidia1\n";
    assert_eq!(kinds(seen, ""), []);
    for name in ["/dev/nvidia1", "/dev/nvidia1 (deleted)", "/dev/nvidia12"] {
        let context = format!("{seen}209600000-209800000 rw-s 00000000 00:06 616      {name}\n");
        let second = name.trim_start_matches("/dev/").trim_end_matches(" (deleted)");
        let gpus = vec!["nvidia0".to_owned(), second.to_owned()];
        assert_eq!(kinds(&context, ""), [(Kind::Peers { gpus }, Certainty::Certain)]);
    }
    let same = "209600000-209800000 rw-s 00000000 00:06 615      /dev/nvidia0\n";
    assert_eq!(kinds(same, ""), []);
}

#[test]
fn every_context_has_a_mapping_of_the_drivers_own() {
    // As on an H200, a process with three contexts.
    let contexts = "209e00000-20a000000 rw-s 209e00000 00:27 12    /dev/nvidia-uvm\n\
        20f200000-20f400000 rw-s 20f200000 00:27 12    /dev/nvidia-uvm\n";
    assert_eq!(kinds(contexts, ""), []);
}

#[test]
fn a_larger_mapping_among_the_drivers_own_is_a_suspicion() {
    let pool = "204e00000-205200000 rw-s 204e00000 00:06 612    /dev/nvidia-uvm\n";
    assert_eq!(
        kinds(pool, ""),
        [(
            Kind::Managed {
                ranges: 1,
                bytes: 4 << 20
            },
            Certainty::Suspected
        )]
    );
}

#[test]
fn other_mappings_of_the_uvm_node_are_not_managed_memory() {
    let others = "7f5fd0000000-7f5fd4000000 rw-s 00001000 00:06 612    /dev/nvidia-uvm\n\
        7f5fd8000000-7f5fd8001000 r--s 7f5fd8000000 00:06 612    /dev/nvidia-uvm\n\
        7f5fd9000000-7f5fd9001000 rw-s 7f5fd9000000 00:06 613    /dev/nvidia-uvm-tools\n";
    assert_eq!(kinds(others, ""), []);
}

#[test]
fn nccl_is_reported_with_the_transports_that_were_off_at_the_start() {
    let nccl = "7f00-7f10 r-xp 00000000 fe:01 5    /venv/nvidia/nccl/lib/libnccl.so.2\n";
    let (p2p, shm, nvls) = ("NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1", "NCCL_NVLS_ENABLE=0");
    let kind = |missing: &[&'static str]| {
        let missing = missing.to_vec();
        [(Kind::Nccl { missing }, Certainty::Certain)]
    };
    assert_eq!(kinds(nccl, "NCCL_DEBUG=INFO"), kind(&[p2p, shm, nvls]));
    assert_eq!(
        kinds(nccl, "NCCL_P2P_DISABLE=0 NCCL_SHM_DISABLE= XNCCL_SHM_DISABLE=1"),
        kind(&[p2p, shm, nvls])
    );
    assert_eq!(kinds(nccl, "NCCL_P2P_DISABLE=1"), kind(&[shm, nvls]));
    let sockets = "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NVLS_ENABLE=0";
    assert_eq!(kinds(nccl, sockets), kind(&[]));
    assert_eq!(kinds("", sockets), []);
}

#[test]
fn settings_of_nccl_are_read_without_its_library_too() {
    let environment = "NCCL_P2P_DISABLE=1 NCCL_NVLS_ENABLE=0";
    let root = processes(&[(7, "", environment)]);
    let ranks = |ranks| -> Vec<_> {
        let processes = Processes {
            dumped: &[7],
            cuda: &[7, 8],
            ranks,
            ..Processes::default()
        };
        let (findings, _) = super::inspect(root.path(), &processes).unwrap();
        findings.into_iter().map(known).collect()
    };
    let missing = vec!["NCCL_SHM_DISABLE=1"];
    assert_eq!(ranks(true), [(Kind::Nccl { missing }, 7, Certainty::Certain)]);
    assert_eq!(ranks(false), []);
}

#[test]
fn libraries_that_share_memory_are_named_and_others_of_ucx_are_not() {
    let maps = "7f00-7f10 r-xp 00000000 fe:01 5    /opt/ucx/lib/libuct.so.0.0.0\n\
        7f20-7f30 r-xp 00000000 fe:01 6    /opt/ucx/lib/ucx/libuct_cuda.so.0.0.0\n\
        7f40-7f50 r-xp 00000000 fe:01 7    /opt/nvshmem/lib/libnvshmem_host.so.3\n";
    let file = "libuct_cuda.so.0.0.0".to_owned();
    let found = (Kind::Sharing { file }, Certainty::Suspected);
    assert_eq!(kinds(maps, ""), [found]);
}

#[test]
fn nvshmem_is_found_when_it_is_initialised_and_not_when_it_is_loaded() {
    let loaded = "7f40-7f50 r-xp 00000000 fe:01 7    /venv/nvidia/nvshmem/lib/libnvshmem_host.so.3\n";
    assert_eq!(kinds(loaded, ""), []);
    let file = "nvshmem_bootstrap_uid.so.3";
    let initialised = format!("{loaded}7f60-7f70 r-xp 00000000 fe:01 8    /venv/nvidia/nvshmem/lib/{file}\n");
    let file = file.to_owned();
    assert_eq!(
        kinds(&initialised, ""),
        [(Kind::Sharing { file }, Certainty::Suspected)]
    );
}

#[test]
fn processes_that_only_use_nvml_do_not_count() {
    let root = processes(&[(7, "", ""), (8, "", ""), (9, "", "")]);
    // As on an H200.
    let nvml = "5581c0000000-5581c0020000 r-xp 00003000 fe:10 12    /usr/bin/nvidia-smi\n\
        7f6a00000000-7f6a00001000 r-xp 0001b000 fe:10 73    /usr/lib/libnvidia-ml.so.1\n\
        7f6a20000000-7f6a25000000 r-xp 00000000 fe:01 99    /usr/lib/libcuda.so.580.159.04\n";
    fs::write(root.path().join("8/maps"), nvml).unwrap();
    assert_eq!(found(&root, &[7, 8]), []);
    for of_cuda in [
        "204a00000-204c00000 rw-s 204a00000 00:06 612    /host/dev/nvidia-uvm (deleted)\n",
        // After cuInit, without a context.
        "7f31837a7000-7f31837a8000 r--s 00000000 00:27 11    /dev/nvidiactl\n",
        "7f31837a8000-7f31837b8000 -w-s 00000000 00:27 14    /dev/nvidia0 (deleted)\n",
    ] {
        fs::write(root.path().join("8/maps"), of_cuda).unwrap();
        let found = found(&root, &[7, 8]);
        let several = Kind::Several { pids: vec![7, 8] };
        assert!(found.iter().any(|(kind, ..)| *kind == several), "{of_cuda}");
    }
}

#[test]
fn an_mps_client_is_certain_by_its_open_pipe_and_suspected_by_its_environment() {
    let mps = |directory: &str, certainty| {
        [(
            Kind::Mps {
                directory: directory.into(),
            },
            certainty,
        )]
    };
    assert_eq!(
        kinds("", "CUDA_MPS_PIPE_DIRECTORY=/run/mps"),
        mps("/run/mps", Certainty::Suspected)
    );

    let of = |root: &TempDir| -> Vec<_> {
        let found = found(root, &[7]).into_iter();
        found.map(|(kind, _, certainty)| (kind, certainty)).collect()
    };
    let root = processes(&[(7, "", "CUDA_MPS_PIPE_DIRECTORY=/run/mps")]);
    symlink("/run/mps/control_lock", root.path().join("7/fd/9")).unwrap();
    assert_eq!(of(&root), mps("/run/mps", Certainty::Certain));

    let root = processes(&[(7, "", "")]);
    symlink(
        "/tmp/nvidia-mps-of-somebody-else/control",
        root.path().join("7/fd/9"),
    )
    .unwrap();
    assert_eq!(of(&root), []);
    fs::create_dir(root.path().join("7/root/tmp/nvidia-mps")).unwrap();
    fs::write(root.path().join("7/root/tmp/nvidia-mps/control"), "").unwrap();
    assert_eq!(of(&root), mps("/tmp/nvidia-mps", Certainty::Suspected));
}

#[test]
fn several_cuda_processes_are_a_finding_of_their_own() {
    let root = processes(&[(7, "", ""), (8, "", "")]);
    let several = [(Kind::Several { pids: vec![7, 8] }, 0, Certainty::Certain)];
    assert_eq!(found(&root, &[7, 8]), several);
    assert_eq!(found(&root, &[7, 8, 9]), several, "9 has ended");
    assert_eq!(found(&root, &[7, 9]), []);
}

/// `maps` of a process that has called cuInit and has no context, from an H200 with driver 580.
const WITHOUT_CONTEXT: &str = "\
200400000-200600000 rw-s 00000000 00:06 610                              /dev/nvidiactl
7f6a10000000-7f6a10010000 rw-s 00000000 00:06 615                        /dev/nvidia0
7f6a20000000-7f6a25000000 r-xp 00000000 fe:01 99                         /usr/lib/libcuda.so.580.159.04
7f6a30000000-7f6a35000000 r-xp 00000000 fe:01 98                         /usr/lib/libnccl.so.2
";

#[test]
fn a_compile_worker_without_a_context_does_not_count() {
    const MAIN: &str = "torch/_inductor/compile_worker/__main__.py";
    let root = processes(&[(7, "", ""), (8, "", "")]);
    let maps = root.path().join("8/maps");
    let found_with = |command: &str| {
        fs::write(root.path().join("8/cmdline"), command.replace(' ', "\0")).unwrap();
        found(&root, &[7, 8]).len()
    };
    let packages = format!("/usr/lib/python3/dist-packages/{MAIN}");
    fs::write(&maps, WITHOUT_CONTEXT).unwrap();
    assert_eq!(found_with(&format!("python3 {packages} --kind=fork")), 0);
    assert_eq!(found_with(&format!("python3 -u -X dev {packages} ")), 0);
    for other in ["", "python3", "python3 train.py", &format!("python3 my{MAIN}")] {
        assert_eq!(found_with(other), 2, "{other}: NCCL, and several processes");
    }
    let behind = format!("python3 train.py {packages}");
    assert_eq!(found_with(&behind), 2, "an argument of another program");
    fs::write(&maps, format!("{BASELINE}{WITHOUT_CONTEXT}")).unwrap();
    assert_eq!(found_with(&format!("python3 {packages}")), 2, "with a context");
}

#[test]
fn ended_processes_have_no_findings_and_unreadable_ones_are_an_error() {
    let root = processes(&[]);
    assert_eq!(found(&root, &[7]), []);
    fs::create_dir_all(root.path().join("7/maps")).unwrap();
    let error = inspect(root.path(), &[7]).unwrap_err();
    assert_eq!(error.to_string(), "cannot read maps of process 7");
}

#[test]
fn an_environment_as_long_as_a_process_likes_is_not_read_to_its_end() {
    let root = processes(&[(7, "", "A=b")]);
    let environ = fs::OpenOptions::new()
        .write(true)
        .open(root.path().join("7/environ"));
    environ.unwrap().set_len(3 << 30).unwrap();
    let error = inspect(root.path(), &[7]).unwrap_err();
    assert_eq!(error.to_string(), "cannot read environ of process 7");
    let cause = std::error::Error::source(&error).unwrap();
    assert_eq!(cause.to_string(), "it is longer than 8 MiB");
}

#[test]
fn links_of_a_process_are_followed_in_its_own_root() {
    let root = processes(&[(7, "", "")]);
    // A directory of the host, and what is there for the process under the same name.
    let host = tempfile::tempdir().unwrap();
    fs::write(host.path().join("control"), "").unwrap();
    symlink(host.path(), root.path().join("7/root/tmp/nvidia-mps")).unwrap();
    assert_eq!(found(&root, &[7]), []);
    let inside = root
        .path()
        .join("7/root")
        .join(host.path().strip_prefix("/").unwrap());
    fs::create_dir_all(&inside).unwrap();
    fs::write(inside.join("control"), "").unwrap();
    assert_eq!(inspect(root.path(), &[7]).unwrap().len(), 1);
}
