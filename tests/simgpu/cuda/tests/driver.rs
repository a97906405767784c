//! What the simulated driver does to a process, call by call, against what the real one was seen to do.

mod support;

use std::fs;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use support::freezer::{self, Group};
use support::{Node, TWO, eventually, field, missing, range};

const IDENTITY: &[(usize, usize)] = &[(0, 0), (1, 1)];
const SWAP: &[(usize, usize)] = &[(0, 1), (1, 0)];

#[test]
fn goes_through_the_states_and_moves_to_another_gpu() {
    require!(missing());
    let node = Node::new(TWO);
    let counter = node.counter(&["--mib", "16"]);
    counter.iteration();
    let pid = counter.pid();
    assert_eq!(
        (node.used(0), node.used(1)),
        (20, 0),
        "16 MiB, results and context"
    );
    assert_eq!(
        node.step("state,lock,state,checkpoint,state", pid, &[]),
        ["0", "SUCCESS", "1", "SUCCESS", "2"]
    );
    let last = counter.drain();
    assert_eq!(
        (node.used(0), node.used(1)),
        (0, 0),
        "a checkpoint frees the GPUs"
    );
    assert_eq!(
        node.step("restore,state,unlock,state", pid, SWAP),
        ["SUCCESS", "1", "SUCCESS", "0"]
    );
    assert_eq!((node.used(0), node.used(1)), (0, 20));
    let line = counter.line();
    if let Some(last) = last {
        assert_eq!(field(&line, "iter"), (last + 1).to_string());
    }
    assert_eq!(
        field(&line, "uuid"),
        node.uuids[0],
        "the process continues reporting what it saw first"
    );
    let computed = firn_workloads::counter::checksum(16 << 20, field(&line, "iter").parse().unwrap());
    assert_eq!(field(&line, "checksum"), computed.to_string());
}

#[test]
fn does_not_run_while_locked() {
    require!(missing());
    let node = Node::new(TWO);
    let counter = node.counter(&["--threads", "2", "--gpu", "0,1"]);
    counter.iteration();
    assert_eq!(node.step("lock", counter.pid(), &[]), ["SUCCESS"]);
    // Each of the four workers may be past its last call and about to print.
    let printed_before = counter.drain().is_some();
    let late = counter.lines_until_quiet(Duration::from_millis(500));
    assert!(
        late <= 4,
        "{late} lines after the lock; lines before: {printed_before}"
    );
    assert_eq!(node.step("unlock", counter.pid(), &[]), ["SUCCESS"]);
    counter.iteration();
}

#[test]
fn leaves_no_device_open_and_keeps_the_bytes_in_private_memory() {
    require!(missing());
    let node = Node::new(TWO);
    let counter = node.counter(&["--mib", "64"]);
    counter.iteration();
    let uses = counter.device_uses(&node);
    for device in ["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"] {
        let fd = format!("fd {}", node.dev().join(device).display());
        assert!(uses.contains(&fd), "{device} is not open: {uses:?}");
    }
    assert!(
        uses.iter()
            .any(|line| line.starts_with("204a00000-204c00000 rw-s 204a00000")),
        "{uses:?}"
    );
    assert!(counter.private_region(64 << 20).is_none());
    assert_eq!(
        node.step("lock,checkpoint", counter.pid(), &[]),
        ["SUCCESS", "SUCCESS"]
    );
    assert_eq!(counter.device_uses(&node), [""; 0]);
    assert!(counter.private_region(64 << 20).is_some());
    assert_eq!(
        node.step("restore,unlock", counter.pid(), &[]),
        ["SUCCESS", "SUCCESS"]
    );
    assert!(counter.private_region(64 << 20).is_none());
    assert_eq!(counter.device_uses(&node).len(), uses.len());
}

#[test]
fn bytes_not_carried_are_lost() {
    require!(missing());
    let node = Node::new(TWO);
    let counter = node.counter(&["--mib", "64"]);
    counter.iteration();
    assert_eq!(
        node.step("lock,checkpoint", counter.pid(), &[]),
        ["SUCCESS", "SUCCESS"]
    );
    let start = counter.private_region(64 << 20).unwrap();
    let memory = fs::File::options()
        .write(true)
        .open(format!("/proc/{}/mem", counter.pid()))
        .unwrap();
    memory.write_all_at(&[0; 4096], start + (32 << 20)).unwrap();
    assert_eq!(
        node.step("restore,unlock", counter.pid(), &[]),
        ["SUCCESS", "SUCCESS"]
    );
    let (status, errors) = counter.end();
    assert!(!status.success());
    assert!(
        errors.contains("elements do not hold what they should"),
        "{errors}"
    );
}

#[test]
fn refuses_managed_memory_and_does_no_harm() {
    require!(missing());
    let node = Node::new(TWO);
    let counter = node.counter(&["--mib", "5", "--managed"]);
    counter.iteration();
    let uses = counter.device_uses(&node);
    let managed: Vec<&String> = uses
        .iter()
        .filter(|line| line.contains("nvidia-uvm") && !line.starts_with("204a"))
        .collect();
    let [_, mapping] = managed[..] else {
        panic!("one descriptor and one mapping: {managed:?}")
    };
    let (_, rest) = mapping.split_once(" rw-s ").unwrap();
    assert!(
        mapping.starts_with(rest.split(' ').next().unwrap()),
        "offset equals address: {mapping}"
    );
    let (start, end) = range(mapping);
    assert_eq!(end - start, 6 << 20, "rounded to 2 MiB");
    assert_eq!(
        node.step("lock,checkpoint,state,unlock,state", counter.pid(), &[]),
        ["SUCCESS", "NOT_SUPPORTED", "1", "SUCCESS", "0"]
    );
    counter.drain();
    counter.iteration();
    // From then on the driver refuses every checkpoint of the process.
    assert_eq!(
        node.step("lock,checkpoint,state,unlock,state", counter.pid(), &[]),
        ["SUCCESS", "UNKNOWN", "1", "SUCCESS", "0"]
    );
    counter.drain();
    counter.iteration();
}

#[test]
fn large_memory_that_a_peer_may_access_is_checkpointed_and_lost() {
    require!(missing());
    let node = Node::new(&["mem=1024M", "mem=1024M"]);
    for (mib, restored) in [("256", "SUCCESS"), ("512", "INVALID_VALUE")] {
        let counter = node.counter(&["--gpu", "0,1", "--peer-mib", mib]);
        counter.iteration();
        let contexts = counter.device_uses(&node).into_iter().filter(|line| {
            let is_gpu = line.ends_with("nvidia0") || line.ends_with("nvidia1");
            is_gpu && !line.starts_with("fd ") && range(line).1 - range(line).0 == 2 << 20
        });
        assert!(contexts.count() >= 2, "a mapping of 2 MiB for each context");
        assert_eq!(
            node.step("lock,checkpoint,restore", counter.pid(), &[]),
            ["SUCCESS", "SUCCESS", restored],
            "{mib} MiB"
        );
    }
}

#[test]
fn a_process_that_only_sees_a_gpu_has_no_large_mapping_of_it() {
    require!(missing());
    let node = Node::new(TWO);
    let counter = node.counter(&["--gpu", "1"]);
    counter.iteration();
    let uses = counter.device_uses(&node);
    let of = |name| {
        uses.iter()
            .filter(move |line| line.ends_with(name) && !line.starts_with("fd "))
    };
    let size = |line: &String| range(line).1 - range(line).0;
    assert!(of("nvidia0").all(|line| size(line) < 2 << 20), "{uses:?}");
    assert!(of("nvidia1").any(|line| size(line) >= 2 << 20), "{uses:?}");
}

#[test]
fn ipc_is_checkpointed_and_the_importer_lost() {
    require!(missing());
    let node = Node::new(TWO);
    let counter = node.counter(&["--ipc"]);
    let importer = field(&counter.line_of("importer"), "pid").parse().unwrap();
    for pid in [counter.pid(), importer] {
        assert_eq!(
            node.step("lock,checkpoint,state", pid, &[]),
            ["SUCCESS", "SUCCESS", "2"]
        );
    }
    for _ in 0..2 {
        assert_eq!(node.step("restore,state", importer, &[]), ["INVALID_VALUE", "2"]);
    }
    assert_eq!(
        node.step("restore,unlock,state", counter.pid(), &[]),
        ["SUCCESS", "SUCCESS", "0"]
    );
    counter.drain();
    counter.line_of("counter");
}

#[test]
fn every_gpu_that_the_process_could_see_needs_a_pair() {
    require!(missing());
    let node = Node::new(TWO);
    let mut command = node.command("gpu-counter");
    command
        .args(["--interval-ms", "10", "--mib", "4"])
        .env("CUDA_VISIBLE_DEVICES", "1");
    let counter = support::Counter::start(&mut command);
    assert_eq!(
        field(&counter.line(), "uuid"),
        node.uuids[1],
        "the filter changes the ordinals"
    );
    assert_eq!(
        node.step("lock,checkpoint", counter.pid(), &[]),
        ["SUCCESS", "SUCCESS"]
    );
    assert_eq!(
        node.step("restore,state", counter.pid(), &[(1, 1)]),
        ["NOT_SUPPORTED", "2"]
    );
    assert_eq!(
        node.step("restore,unlock,state", counter.pid(), IDENTITY),
        ["SUCCESS", "SUCCESS", "0"]
    );
    counter.drain();
    counter.iteration();
}

#[test]
fn refuses_targets_that_do_not_fit_and_can_be_tried_again() {
    require!(missing());
    let node = Node::new(&["mem=64M", "mem=64M,name=NVIDIA A100", "mem=8M", "mem=64M"]);
    let counter = node.counter(&["--mib", "16"]);
    counter.iteration();
    let pid = counter.pid();
    assert_eq!(node.step("lock,checkpoint", pid, &[]), ["SUCCESS", "SUCCESS"]);
    let other_model = &[(0, 1), (1, 0), (2, 2), (3, 3)];
    let twice = &[(0, 3), (1, 1), (2, 2), (3, 3)];
    assert_eq!(
        node.step("restore,state", pid, other_model),
        ["INVALID_VALUE", "2"]
    );
    assert_eq!(node.step("restore,state", pid, twice), ["INVALID_VALUE", "2"]);
    assert_eq!(
        [0, 1, 2, 3].map(|gpu| node.used(gpu)),
        [0; 4],
        "a failed restore takes nothing"
    );
    assert_eq!(counter.device_uses(&node), [""; 0]);
    let fits = &[(0, 3), (1, 1), (2, 2), (3, 0)];
    assert_eq!(node.step("restore,unlock", pid, fits), ["SUCCESS", "SUCCESS"]);
    assert_eq!(node.used(3), 20);
    counter.drain();
    counter.iteration();
}

#[test]
fn a_restore_that_finds_too_little_memory_spoils_the_state() {
    require!(missing());
    let node = Node::new(&["mem=64M", "mem=64M"]);
    let counter = node.counter(&["--mib", "40"]);
    counter.iteration();
    let pid = counter.pid();
    assert_eq!(node.step("lock,checkpoint", pid, &[]), ["SUCCESS", "SUCCESS"]);
    let other = node.counter(&["--mib", "40"]);
    other.iteration();
    assert_eq!(node.step("restore,state", pid, &[]), ["OUT_OF_MEMORY", "2"]);
    other.kill();
    assert_eq!(node.used(0), 0, "a failed restore takes nothing");
    assert_eq!(
        node.step("restore,state,unlock,lock", pid, &[]),
        ["OPERATING_SYSTEM", "2", "ILLEGAL_STATE", "ILLEGAL_STATE"]
    );
    counter.kill();
}

#[test]
fn makes_a_missing_node_and_refuses_a_stale_one() {
    require!(missing());
    let node = Node::new(TWO);
    let counter = node.counter(&[]);
    counter.iteration();
    let pid = counter.pid();
    let (gpu, other) = (node.dev().join("nvidia1"), node.dev().join("nvidia0"));
    let kept = node.dev().join("kept");
    assert_eq!(node.step("lock,checkpoint", pid, &[]), ["SUCCESS", "SUCCESS"]);
    fs::rename(&gpu, &kept).unwrap();
    fs::hard_link(&other, &gpu).unwrap();
    assert_eq!(node.step("restore,state", pid, SWAP), ["INVALID_VALUE", "2"]);
    fs::remove_file(&gpu).unwrap();
    assert_eq!(
        node.step("restore,unlock,state", pid, SWAP),
        ["SUCCESS", "SUCCESS", "0"]
    );
    assert!(
        gpu.exists(),
        "with the right to make nodes, the driver makes the one that it misses"
    );
    assert_eq!(node.used(1), 8);
    fs::remove_file(kept).unwrap();
}

#[test]
fn the_device_cgroup_decides_what_a_process_sees_and_where_it_can_be_restored() {
    require!(missing().or_else(freezer::no_device_rules));
    let node = Node::new(TWO);
    let counter = node.counter(&[]);
    counter.iteration();
    let group = Group::with("devices", counter.pid());
    group.deny(&node.dev().join("nvidia1"));
    assert_eq!(
        node.step("lock,checkpoint", counter.pid(), &[]),
        ["SUCCESS", "SUCCESS"]
    );
    assert_eq!(
        node.step("restore,state", counter.pid(), SWAP),
        ["INVALID_VALUE", "2"]
    );
    drop(group);
    assert_eq!(
        node.step("restore,unlock", counter.pid(), SWAP),
        ["SUCCESS", "SUCCESS"]
    );
    counter.drain();
    counter.iteration();

    // A shell waits in the group for its go before it becomes the counter.
    let mut command = std::process::Command::new("sh");
    node.enter(&mut command);
    let program = node.command("gpu-counter").get_program().to_owned();
    command
        .args(["-c", "read go; exec \"$@\"", "sh"])
        .arg(program)
        .args(["--mib", "4", "--gpu", "1"]);
    let mut child = command
        .stdin(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let group = Group::with("devices", i32::try_from(child.id()).unwrap());
    group.deny(&node.dev().join("nvidia1"));
    drop(child.stdin.take());
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        errors.contains("CUDA_ERROR_INVALID_DEVICE"),
        "there is one device, ordinal 0: {errors}"
    );
}

#[test]
fn calls_out_of_order_change_nothing() {
    require!(missing());
    let node = Node::new(TWO);
    let counter = node.counter(&[]);
    counter.iteration();
    let pid = counter.pid();
    assert_eq!(
        node.step("checkpoint,restore,unlock,state", pid, &[]),
        ["ILLEGAL_STATE"; 3]
            .iter()
            .chain(&["0"])
            .copied()
            .collect::<Vec<_>>()
    );
    assert_eq!(
        node.step("lock,lock,restore,state", pid, &[]),
        ["SUCCESS", "ILLEGAL_STATE", "ILLEGAL_STATE", "1"]
    );
    assert_eq!(
        node.step("checkpoint,lock,checkpoint,unlock,state", pid, &[]),
        ["SUCCESS", "ILLEGAL_STATE", "ILLEGAL_STATE", "ILLEGAL_STATE", "2"]
    );
    assert_eq!(
        node.step("restore,unlock,state", pid, &[]),
        ["SUCCESS", "SUCCESS", "0"]
    );
}

#[test]
fn processes_without_cuda_have_no_state() {
    require!(missing());
    let node = Node::new(TWO);
    let own = i32::try_from(std::process::id()).unwrap();
    assert_eq!(node.step("state,tid,lock", own, &[]), ["NOT_INITIALIZED"; 3]);
    let nobody = 1 << 22;
    assert_eq!(node.step("state,tid", nobody, &[]), ["OPERATING_SYSTEM"; 2]);
}

#[test]
fn several_processes_and_threads_survive_together() {
    require!(missing());
    let node = Node::new(TWO);
    let counter = node.counter(&["--procs", "3", "--threads", "2", "--gpu", "0,1"]);
    let mut pids: Vec<i32> = Vec::new();
    eventually("three processes", || {
        let pid = field(&counter.line(), "pid").parse().unwrap();
        if !pids.contains(&pid) {
            pids.push(pid);
        }
        (pids.len() == 3).then_some(())
    });
    for calls in ["lock", "checkpoint", "restore", "unlock"] {
        let mut callers: Vec<_> = pids
            .iter()
            .map(|pid| node.patient_caller(calls, *pid, SWAP))
            .collect();
        for caller in &mut callers {
            assert_eq!(caller.answers(support::PATIENCE).unwrap(), ["SUCCESS"], "{calls}");
        }
    }
    counter.drain();
    for pid in &pids {
        counter.line_of(&format!("counter pid={pid} "));
    }
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pids[1]), nix::sys::signal::SIGKILL).unwrap();
    let (status, errors) = counter.end();
    assert_eq!(status.code(), Some(1));
    assert!(
        errors.contains(&format!("child {} ended with signal: 9", pids[1])),
        "{errors}"
    );
    eventually("the end of the others", || {
        (node.used(0) == 0 && node.used(1) == 0).then_some(())
    });
}

#[test]
fn memory_of_killed_processes_comes_back() {
    require!(missing());
    let node = Node::new(TWO);
    let counter = node.counter(&["--mib", "200"]);
    counter.iteration();
    assert!(node.used(0) >= 200);
    counter.kill();
    // Without anybody looking: the next process needs it.
    let next = node.counter(&["--mib", "200"]);
    next.iteration();
    next.kill();
    assert_eq!(node.used(0), 0);
}

#[test]
fn memory_overwritten_behind_its_back_is_noticed() {
    require!(missing());
    let node = Node::new(TWO);
    let counter = node.counter(&["--mib", "64"]);
    counter.iteration();
    let uses = counter.device_uses(&node);
    let buffer = uses
        .iter()
        .filter(|line| line.ends_with("nvidia0") && line.contains(" rw-s "));
    let line = buffer.max_by_key(|line| range(line).1 - range(line).0).unwrap();
    let offset = u64::from_str_radix(line.split(' ').nth(2).unwrap(), 16).unwrap();
    let gpu = fs::File::options()
        .write(true)
        .open(node.dev().join("nvidia0"))
        .unwrap();
    gpu.write_all_at(&[0x5a; 4096], offset + (20 << 20)).unwrap();
    let (status, errors) = counter.end();
    assert_eq!(status.code(), Some(1));
    assert!(errors.contains("1024 elements do not hold"), "{errors}");
}
