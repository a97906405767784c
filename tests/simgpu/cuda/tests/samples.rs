//! The samples of `gpu-sample` whose calls the simulated driver has: each computes in as many processes as it should.

mod support;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use support::{Node, TWO, missing};

/// Number of processes that print, by habit.
const HABITS: [(&str, usize); 10] = [
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
