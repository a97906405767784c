//! Settings of a process that a copy of it has not: CRIU restores none, and nothing fails for it.
//!
//! A policy for memory (`set_mempolicy`) and a session keyring are lost, too, and cannot be seen from
//! outside.

use std::collections::BTreeSet;
use std::fs;

use firn_host::procfs;

use crate::sys;

/// The slack of the timers of a thread that has set none, in nanoseconds.
const SLACK: &str = "50000";

/// More CPUs than a machine has.
const MOST_CPUS: usize = 1 << 16;

/// The classes of I/O priorities.
const CLASSES: [&str; 4] = ["none", "real-time", "best-effort", "idle"];

/// What the copy of a process lacks.
#[derive(Debug, PartialEq, Eq)]
pub struct LostSettings {
    pub pid: i32,
    pub comm: String,
    /// As in "a copy has not its ...".
    pub what: Vec<String>,
}

/// Of those of `pids` that have such settings. `cpus`: the list of CPUs that the container may use, as the
/// kernel writes it; absent if it is not known.
pub fn lost_settings(pids: &[i32], cpus: Option<&str>) -> Vec<LostSettings> {
    let of_process = |&pid: &i32| LostSettings {
        pid,
        comm: procfs::comm(pid),
        what: what(pid, cpus),
    };
    let all = pids.iter().map(of_process);
    all.filter(|lost| !lost.what.is_empty()).collect()
}

/// The first of each kind that a thread has.
fn what(pid: i32, cpus: Option<&str>) -> Vec<String> {
    let threads = procfs::threads(pid).unwrap_or_default();
    let first = |look: &dyn Fn(i32) -> Option<String>| threads.iter().find_map(|tid| look(*tid));
    let found = [
        first(&|tid| affinity(tid, cpus?)),
        first(&io_priority),
        first(&slack),
        personality(pid),
    ];
    found.into_iter().flatten().collect()
}

fn affinity(tid: i32, all: &str) -> Option<String> {
    let allowed = procfs::allowed_cpus(tid)?;
    // It may have more: CPUs that are not online.
    let is_less = !cpus_of(&allowed).is_superset(&cpus_of(all));
    is_less.then(|| format!("CPU affinity ({allowed})"))
}

/// The numbers of a list such as `0-3,8`.
fn cpus_of(list: &str) -> BTreeSet<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    list.split(',')
        .filter_map(range)
        .flatten()
        .take(MOST_CPUS)
        .collect()
}

/// One that was set: the kernel derives it from policy and nice value otherwise.
fn io_priority(tid: i32) -> Option<String> {
    const IDLE_POLICY: &str = "5";
    let value = sys::io_priority(tid)?;
    let (class, level) = (value >> 13, value & 7);
    let nice: i32 = procfs::stat_field(tid, 16)?.parse().ok()?;
    let derived = match procfs::stat_field(tid, 38)?.as_str() {
        "1" | "2" | "6" => 1,
        IDLE_POLICY => 3,
        _ => 2,
    };
    let is_derived = class == 0 || class == derived && (level == (nice + 20) / 5 || class == 3);
    let name = CLASSES.get(usize::try_from(class).ok()?)?;
    (!is_derived).then(|| format!("I/O priority ({name}, {level})"))
}

fn slack(tid: i32) -> Option<String> {
    let slack = fs::read_to_string(format!("/proc/{tid}/timerslack_ns")).ok()?;
    let slack = slack.trim();
    // A thread of a real-time policy has none.
    (slack != SLACK && slack != "0").then(|| format!("timer slack ({slack} ns)"))
}

fn personality(pid: i32) -> Option<String> {
    let personality = fs::read_to_string(format!("/proc/{pid}/personality")).ok()?;
    let value = personality.trim().trim_start_matches('0');
    (!value.is_empty()).then(|| format!("personality (0x{value})"))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    struct Started(Child);

    impl Drop for Started {
        fn drop(&mut self) {
            let _killed = self.0.kill();
            let _ended = self.0.wait();
        }
    }

    /// What a program has once it does what is expected.
    fn of(command: &[&str], cpus: Option<&str>, is_done: impl Fn(&[String]) -> bool) -> Vec<String> {
        let command = [command, &["sleep", "1000"]].concat();
        let child = Command::new(command[0]).args(&command[1..]).spawn().unwrap();
        let started = Started(child);
        let pid = i32::try_from(started.0.id()).unwrap();
        let begun = std::time::Instant::now();
        loop {
            let what = what(pid, cpus);
            if procfs::comm(pid) == "sleep" && is_done(&what) || begun.elapsed().as_secs() > 60 {
                return what;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn cpus_that_are_not_online_count_for_nothing() {
        assert_eq!(cpus_of("0-2,8\n"), BTreeSet::from([0, 1, 2, 8]));
        assert!(cpus_of("0-127").is_superset(&cpus_of("0-3")));
        assert!(!cpus_of("0-1").is_superset(&cpus_of("0-3")));
        assert_eq!(cpus_of(""), BTreeSet::new());
    }

    #[test]
    fn what_is_set_is_named_and_nothing_else() {
        let own = fs::read_to_string("/proc/self/status").unwrap();
        let own = own
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let all = own.unwrap().trim();
        assert_eq!(of(&["env"], Some(all), <[_]>::is_empty), Vec::<String>::new());
        assert_eq!(
            of(&["nice", "-n", "9"], Some(all), <[_]>::is_empty),
            Vec::<String>::new()
        );
        let is_one = |what: &[String]| what.len() == 1;
        assert_eq!(
            of(&["ionice", "-c", "2", "-n", "7"], Some(all), is_one),
            ["I/O priority (best-effort, 7)"]
        );
        assert_eq!(
            of(&["setarch", "-R"], Some(all), is_one),
            ["personality (0x40000)"]
        );
        assert_eq!(
            of(&["env"], Some("0-99999"), is_one),
            [format!("CPU affinity ({all})")]
        );
        assert_eq!(of(&["env"], None, <[_]>::is_empty), Vec::<String>::new());
        assert_eq!(lost_settings(&[i32::MAX], Some(all)), []);
    }
}
