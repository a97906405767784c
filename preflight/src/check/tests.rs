use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, Command};

use firn_config::Exec;
use firn_image::fixtures::{inventory, spec};
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::{Assertions, Capacity, OtherVendors};

fn me() -> i32 {
    i32::try_from(std::process::id()).unwrap()
}

/// A child of this process.
struct Sleep(Child);

impl Sleep {
    fn start() -> Self {
        Self(Command::new("sleep").arg("1000").spawn().unwrap())
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap()
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        let _killed = self.0.kill();
        let _ended = self.0.wait();
    }
}

/// A mapping that every process has after cuInit.
const CUDA: &str = "204a00000-204c00000 rw-s 204a00000 00:06 612 /dev/nvidia-uvm\n";
const MANAGED: &str = "7f5fd0000000-7f5fd4000000 rw-s 7f5fd0000000 00:06 612 /dev/nvidia-uvm\n";
/// Contexts on two GPUs.
const PEERS: &str = "200600000-200800000 rw-s 00000000 00:06 615 /dev/nvidia0\n\
    209600000-209800000 rw-s 00000000 00:06 616 /dev/nvidia1\n";
/// NCCL without and with CUDA.
const NCCL: &str = "7f00-7f10 r-xp 00000000 fe:01 5 /venv/libnccl.so.2\n";
const RANK: &str = "204a00000-204c00000 rw-s 204a00000 00:06 612 /dev/nvidia-uvm\n\
    7f00-7f10 r-xp 00000000 fe:01 5 /venv/libnccl.so.2\n";

/// Pid, mappings and open files of a process.
type Shown<'a> = (i32, &'a str, &'a [&'a str]);

/// A directory like /proc.
fn proc_root(processes: &[Shown<'_>]) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for (pid, maps, open) in processes {
        let process = root.path().join(pid.to_string());
        fs::create_dir_all(process.join("fd")).unwrap();
        fs::create_dir_all(process.join("root")).unwrap();
        fs::write(process.join("maps"), maps).unwrap();
        fs::write(process.join("environ"), "CUDA_MPS_PIPE_DIRECTORY=/run/mps").unwrap();
        fs::write(process.join("status"), format!("PPid:\t{}\n", me())).unwrap();
        for (fd, to) in open.iter().enumerate() {
            symlink(to, process.join("fd").join(fd.to_string())).unwrap();
        }
    }
    root
}

/// The codes of all refusals of `check`. Asserts that `check_until_refused` returns the first of them.
fn codes(root: &Path, workload: &Workload) -> Vec<String> {
    let run = |until_refused| {
        let run = Run {
            proc_root: root,
            ..Run::new(workload, &|_| {}, until_refused)
        };
        let refusals = run.apply().unwrap().refusals;
        let reports = refusals.iter().map(Problem::report);
        reports
            .map(|report| (report.code, report.message))
            .collect::<Vec<_>>()
    };
    let (all, until_refused) = (run(false), run(true));
    let messages = |found: &[(String, String)]| found.first().map(|(code, _)| code.clone());
    assert_eq!(messages(&until_refused), messages(&all), "{workload:?}");
    all.into_iter().map(|(code, _)| code).collect()
}

#[test]
fn every_finding_refuses_the_transaction_as_the_audit_shows_it() {
    const CRIUS: [&str; 3] = ["FIRN-IO-URING", "FIRN-RDMA", "FIRN-GPU-FD"];
    let (first, second) = (Sleep::start(), Sleep::start());
    let (one, two) = (first.pid(), second.pid());
    let table: [(&[Shown<'_>], &[i32], &[&str]); 12] = [
        (&[(one, CUDA, &[])], &[one], &[]),
        (&[(one, MANAGED, &[])], &[one], &["FIRN-UVM"]),
        (&[(one, PEERS, &[])], &[one], &["FIRN-PEER"]),
        (&[(one, CUDA, &["/run/mps/control"])], &[one], &["FIRN-MPS"]),
        (&[(one, "", &["anon_inode:[io_uring]"])], &[], &["FIRN-IO-URING"]),
        (&[(one, "", &["/dev/infiniband/uverbs0"])], &[], &["FIRN-RDMA"]),
        (&[(one, "", &["/dev/nvidia0"])], &[me()], &["FIRN-GPU-FD"]),
        (
            &[(one, CUDA, &["/dev/nvidia-caps-imex-channels/channel0"])],
            &[one],
            &["FIRN-IPC"],
        ),
        (&[(one, CUDA, &[]), (two, NCCL, &[])], &[one, two], &[]),
        (&[(one, CUDA, &[]), (two, CUDA, &[])], &[one, two], &["FIRN-IPC"]),
        (&[(one, CUDA, &[]), (two, RANK, &[])], &[one, two], &["FIRN-NCCL"]),
        (
            &[(one, MANAGED, &["anon_inode:[io_uring]"]), (two, CUDA, &[])],
            &[one, two],
            &["FIRN-UVM", "FIRN-IO-URING", "FIRN-IPC"],
        ),
    ];
    for (processes, cuda, expected) in table {
        let root = proc_root(processes);
        let workload = Workload {
            init: me(),
            pids: [vec![me()], processes.iter().map(|(pid, ..)| *pid).collect()].concat(),
            cuda: cuda.to_vec(),
            processes: Some(Assertions::default()),
            ..Workload::default()
        };
        assert_eq!(codes(root.path(), &workload), expected, "{processes:?}");
        // What CRIU alone cannot dump does not refuse a pause.
        let pause = Workload {
            pause: true,
            ..workload
        };
        let expected: Vec<_> = expected
            .iter()
            .copied()
            .filter(|code| !CRIUS.contains(code))
            .collect();
        assert_eq!(codes(root.path(), &pause), expected, "a pause: {processes:?}");
    }
}

#[test]
fn what_criu_refuses_or_loses_by_itself_is_refused_without_gpus_too() {
    let child = Sleep::start();
    let pid = child.pid();
    let table: [(&str, &[&str], &[&str]); 5] = [
        ("", &["anon_inode:[io_uring]"], &["FIRN-IO-URING"]),
        ("", &["/dev/infiniband/uverbs0"], &["FIRN-RDMA"]),
        ("", &["anon_inode:[userfaultfd]"], &["FIRN-OBJECT"]),
        // For the driver alone.
        (MANAGED, &["/run/mps/control"], &[]),
        (PEERS, &["/dev/null"], &[]),
    ];
    for (maps, open, expected) in table {
        let root = proc_root(&[(pid, maps, open)]);
        let workload = Workload {
            init: pid,
            pids: vec![pid],
            by_criu: Some(Assertions::by_criu(None)),
            ..Workload::default()
        };
        assert_eq!(codes(root.path(), &workload), expected, "{maps} {open:?}");
        let pause = Workload {
            pause: true,
            ..workload
        };
        assert_eq!(codes(root.path(), &pause), [""; 0], "{maps} {open:?}");
    }
}

/// CRIU leaves out what is not below the first process, and the audit names it.
#[test]
fn a_process_of_exec_is_left_out_of_a_dump_without_gpus() {
    let (child, other) = (Sleep::start(), Sleep::start());
    let root = proc_root(&[(child.pid(), "", &[])]);
    let workload = Workload {
        init: child.pid(),
        pids: vec![child.pid(), other.pid()],
        by_criu: Some(Assertions::by_criu(None)),
        ..Workload::default()
    };
    let run = Run {
        proc_root: root.path(),
        ..Run::new(&workload, &|_| {}, false)
    };
    let outcome = run.apply().unwrap();
    assert!(outcome.refusals.is_empty(), "{:?}", outcome.refusals);
    assert_eq!(outcome.left_out, [other.pid()]);
}

#[test]
fn the_owners_word_about_peer_access_lets_a_process_have_several_gpus() {
    let child = Sleep::start();
    let root = proc_root(&[(child.pid(), PEERS, &[])]);
    let spec = |value: &str| serde_json::json!({"annotations": {"firn.dev/peer-access": value}}).into();
    for (value, expected) in [("none", &[][..]), ("some", &["FIRN-PEER"])] {
        let assertions = Assertions::of(Some(&spec(value)), &firn_config::Config::default(), None);
        let workload = Workload {
            init: me(),
            pids: vec![me(), child.pid()],
            cuda: vec![child.pid()],
            processes: Some(assertions),
            // What a pause of the driver alone could not restore is refused, too.
            pause: true,
            ..Workload::default()
        };
        assert_eq!(codes(root.path(), &workload), expected, "{value}");
    }
}

#[test]
fn a_workload_with_every_fault_is_refused_for_each() {
    let child = Sleep::start();
    let root = proc_root(&[(child.pid(), MANAGED, &[])]);
    let bundle = tempfile::tempdir().unwrap();
    fs::write(bundle.path().join("config.json"), "{}").unwrap();
    let workload = Workload {
        init: child.pid(),
        // The parent is outside of the tree.
        pids: vec![child.pid(), me()],
        cuda: vec![child.pid()],
        other_vendors: Some(OtherVendors::default()),
        processes: Some(Assertions::default()),
        capacity: Some(Capacity {
            gpu_memory: u64::MAX,
            stored: false,
            image: bundle.path().into(),
            work: bundle.path().into(),
        }),
        bundle: Some(bundle.path().into()),
        ..Workload::default()
    };
    let found = codes(root.path(), &workload);
    let expected = ["FIRN-EXEC", "FIRN-UVM", "FIRN-HOST-MEMORY", "FIRN-IMAGE-SPACE"];
    assert_eq!(found[..4], expected);
    let omitted = Workload {
        processes: Some(Assertions {
            exec: Exec::Omit,
            ..Assertions::default()
        }),
        capacity: None,
        bundle: None,
        ..workload.clone()
    };
    assert_eq!(codes(root.path(), &omitted), ["FIRN-UVM"]);
    let nothing = Workload {
        init: child.pid(),
        pids: vec![child.pid(), me()],
        ..Workload::default()
    };
    assert!(
        codes(root.path(), &nothing).is_empty(),
        "a part that is absent is not checked"
    );
    let missing = Workload {
        bundle: Some(PathBuf::from("/nonexistent")),
        ..nothing
    };
    assert!(matches!(check(&missing), Err(CheckError::Spec(_))));
}

#[test]
fn an_unreadable_process_and_an_unreadable_limit_are_distinguished() {
    let source = |kind: io::ErrorKind| io::Error::from(kind);
    let unreadable = |kind| {
        CheckError::from(Unreadable {
            pid: 7,
            what: "maps",
            source: source(kind),
        })
    };
    let error = unreadable(io::ErrorKind::PermissionDenied);
    assert_eq!(error.code(), "FIRN-PROC");
    assert!(error.report().message.contains("cannot read maps of process 7"));
    assert_ne!(error.hint(), unreadable(io::ErrorKind::FileTooLarge).hint());
    let limit = CheckError::Limit(source(io::ErrorKind::InvalidData));
    assert_eq!(limit.code(), "FIRN-FREEZER");
}

#[test]
fn the_gpus_of_a_node_are_those_of_the_spec_or_all() {
    let mut node = inventory(195, 2);
    for gpu in &mut node.gpus {
        (gpu.memory_total, gpu.memory_free) = (10, 7);
    }
    let granted = check_node(&node, Some(&spec(195, &[1]))).accepted().unwrap();
    assert_eq!(granted.gpus, node.gpus[1..]);
    assert_eq!(granted.gpu_memory_in_use(), 3);
    let all = check_node(&node, None).accepted().unwrap();
    assert_eq!(all.gpu_memory_in_use(), 6);

    let of_another_node = json!({"linux": {"devices": [
        {"path": "/dev/nvidia7", "type": "c", "major": 195, "minor": 7},
    ]}});
    node.checkpoint_api = false;
    let refused = check_node(&node, Some(&of_another_node.into()));
    let codes: Vec<&str> = refused.refusals.iter().map(Problem::code).collect();
    assert_eq!(codes, ["FIRN-DRIVER-TOO-OLD", "FIRN-GRANT-UNRESOLVED"]);
    assert_eq!(refused.accepted().unwrap_err().code(), "FIRN-DRIVER-TOO-OLD");
}

#[test]
fn hooks_and_divided_gpus_are_refused() {
    let mut node = inventory(195, 2);
    node.gpus[1].mig = true;
    assert!(check_node(&node, Some(&spec(195, &[0]))).refusals.is_empty());
    let refused = check_node(&node, Some(&spec(195, &[1]))).accepted().unwrap_err();
    assert_eq!(refused.code(), "FIRN-GPU-MIG");
    assert!(refused.to_string().contains(&node.gpus[1].uuid.to_string()));
    let hook = json!({"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["hook", "prestart"]});
    let with_hook = json!({
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]},
        "hooks": {"prestart": [hook]},
    });
    let refused = check_node(&node, Some(&with_hook.into())).accepted().unwrap_err();
    assert_eq!(refused.code(), "FIRN-GPU-HOOK");
}

/// A job that lets go of its devices in its hook: a checkpoint looks after the hook, an audit before it.
#[test]
fn a_job_that_lets_go_of_its_devices_is_refused_only_if_it_has_not() {
    let (job, exec) = (Sleep::start(), Sleep::start());
    let (job, exec) = (job.pid(), exec.pid());
    let root = proc_root(&[(job, MANAGED, &["/dev/null"]), (exec, "", &["/dev/nvidiactl"])]);
    let workload = |pids: &[i32], cuda: &[i32]| Workload {
        init: job,
        pids: pids.to_vec(),
        cuda: cuda.to_vec(),
        processes: Some(Assertions {
            device_free: true,
            exec: Exec::Omit,
            ..Assertions::default()
        }),
        ..Workload::default()
    };
    let run = |workload: &Workload, until_refused| {
        let run = Run {
            proc_root: root.path(),
            ..Run::new(workload, &|_| {}, until_refused)
        };
        run.apply().unwrap()
    };
    for (pids, cuda, named) in [
        (&[exec][..], &[][..], "/dev/nvidiactl open"),
        (&[job], &[job], "/dev/nvidia-uvm mapped"),
        (&[7], &[job], "GPU state of CUDA"),
    ] {
        let workload = workload(pids, cuda);
        let held = run(&workload, true).refusals.remove(0);
        assert_eq!(held.code(), "FIRN-GPU-HELD");
        assert!(held.to_string().ends_with(&format!("it has {named}")), "{held}");
        let audited = run(&workload, false);
        assert!(audited.refusals.is_empty(), "{:?}", audited.refusals);
        let to_be_released = audited.devices_to_be_released.unwrap();
        assert_eq!(to_be_released.to_string(), held.to_string());
    }
    assert!(run(&workload(&[7], &[]), true).refusals.is_empty());
}

#[test]
fn a_driver_without_checkpoint_and_divided_gpus_are_no_matter_without_state() {
    let mut node = inventory(195, 1);
    node.checkpoint_api = false;
    node.gpus[0].mig = true;
    let mut released = spec(195, &[0]);
    let annotations = released.object_mut("annotations").unwrap();
    annotations.insert("firn.dev/gpu".to_owned(), json!("released-by-hook"));
    assert_eq!(check_node(&node, Some(&released)).refusals.len(), 2, "no hook");
    let annotations = released.object_mut("annotations").unwrap();
    annotations.insert("firn.dev/hook-prepare".to_owned(), json!("exec: /x"));
    let found = check_node(&node, Some(&released)).accepted().unwrap();
    assert_eq!(found.gpus, node.gpus);
}

#[test]
fn the_fixtures_have_every_kind_of_refusal() {
    let (code, fixtures) = (include_str!("../refusal.rs"), include_str!("../fixtures.rs"));
    let (_, body) = code.split_once("pub enum Refusal {").unwrap();
    let (body, _) = body.split_once("\n}\n").unwrap();
    let names = body.lines().filter_map(|line| {
        let line = line.strip_prefix("    ")?;
        let name = line.split(|letter: char| !letter.is_alphanumeric()).next()?;
        name.starts_with(|letter: char| letter.is_ascii_uppercase())
            .then_some(name)
    });
    let names: Vec<_> = names.collect();
    assert!(names.len() > 30, "the refusals are elsewhere: {names:?}");
    let missing = |name: &&str| ![" {", "(", ","].iter().any(|end| has(fixtures, name, end));
    let missing: Vec<_> = names.into_iter().filter(missing).collect();
    assert!(missing.is_empty(), "fixtures.rs lacks {missing:?}");
}

fn has(fixtures: &str, name: &str, end: &str) -> bool {
    fixtures.contains(&format!("Refusal::{name}{end}"))
}

#[test]
fn every_kind_of_refusal_has_a_code_and_a_hint() {
    for refusal in crate::fixtures::refusals() {
        let report = refusal.report();
        assert!(
            report.code.starts_with("FIRN-") && !report.hint.is_empty(),
            "{report:?}"
        );
        assert!(!report.message.is_empty(), "{report:?}");
    }
}
