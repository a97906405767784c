//! The samples of `gpu-sample` whose calls the simulated driver has: each computes in as many processes as it
//! should.

mod support;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::Instant;

use support::{Node, TWO, device_uses, eventually, missing};

/// Number of processes that print, by habit.
const HABITS: [(&str, usize); 12] = [
    ("plain", 1),
    ("managed", 1),
    ("managed-small", 1),
    ("managed-freed", 1),
    ("streams", 1),
    ("ipc", 2),
    ("ipc-closed", 2),
    ("two", 2),
    ("fork", 1),
    ("nvml", 1),
    ("monitored", 2),
    ("init", 1),
];

#[test]
fn every_sample_computes_in_each_of_its_processes() {
    require!(missing());
    let node = Node::new(TWO);
    for (habit, processes) in HABITS {
        let mut command = node.command("gpu-sample");
        let mut sample = command
            .args([habit, "--interval-ms", "10"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines: BTreeMap<String, u32> = BTreeMap::new();
        for line in BufReader::new(sample.stdout.take().unwrap()).lines() {
            let line = line.unwrap();
            let words: Vec<&str> = line.split(' ').collect();
            let ["sample", name, pid, _, "ok"] = words[..] else {
                panic!("{habit}: {line}");
            };
            assert_eq!(name, habit);
            *lines.entry(pid.to_owned()).or_default() += 1;
            assert!(lines.values().sum::<u32>() < 1000, "{habit}: {lines:?}");
            if lines.len() == processes && lines.values().all(|count| *count >= 3) {
                break;
            }
        }
        let ended = sample.try_wait().unwrap();
        sample.kill().unwrap();
        let output = sample.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(ended.is_none(), "{habit}: {ended:?}: {errors}");
        assert_eq!(lines.len(), processes, "{habit}: {errors}");
    }
}

/// As seen on an H200: the driver knows who only uses NVML, or has no context; they have devices open and no
/// UVM mapped.
#[test]
fn processes_without_a_context_are_checkpointed_and_go_on() {
    require!(missing());
    let node = Node::new(TWO);
    for habit in ["nvml", "init"] {
        let began = Instant::now();
        let mut command = node.command("gpu-sample");
        let mut sample = command
            .args([habit, "--interval-ms", "100"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(sample.stdout.take().unwrap()).lines();
        let mut next = |what: &str| match lines.next() {
            Some(Ok(line)) if line.ends_with(" ok") => {}
            other => panic!("{habit} {what}: {other:?}"),
        };
        next("begins");
        let pid = i32::try_from(sample.id()).unwrap();
        // NVML opens the devices again in every call.
        let before = eventually("a rest", || {
            let uses = device_uses(&node, pid);
            (habit == "init" || uses.iter().all(|line| line.starts_with("fd "))).then_some(uses)
        });
        for device in ["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"] {
            let fd = format!("fd {}", node.dev().join(device).display());
            assert!(before.contains(&fd), "{habit}: {device} is not open: {before:?}");
        }
        let mapped: Vec<_> = before.iter().filter(|line| !line.starts_with("fd ")).collect();
        assert_eq!(mapped.is_empty(), habit == "nvml", "{mapped:?}");
        assert!(
            !mapped.iter().any(|line| line.contains(" 204a00000 ")),
            "{mapped:?}"
        );
        assert_eq!(node.step("lock,checkpoint", pid, &[]), ["SUCCESS"; 2], "{habit}");
        eventually("no device to be open", || {
            device_uses(&node, pid).is_empty().then_some(())
        });
        let swap = &[(0, 1), (1, 0)];
        assert_eq!(node.step("restore,unlock", pid, swap), ["SUCCESS"; 2], "{habit}");
        eventually("the devices to be open", || {
            (device_uses(&node, pid).len() == before.len()).then_some(())
        });
        // More than it can have printed before, with one line in 100 ms.
        let most = began.elapsed().as_millis() / 100 + 1;
        (0..most + 3).for_each(|_| next("continues"));
        sample.kill().unwrap();
        sample.wait().unwrap();
    }
}
