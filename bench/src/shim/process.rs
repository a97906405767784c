//! Memory and CPU time of a shim, from /proc.

use anyhow::{Context, Result, ensure};
use firn_node::Node;

/// Pid, in the node, of the shim that was started for this container.
pub(super) fn shim_of(node: &Node, id: &str) -> Result<i32> {
    let shims: Vec<i32> = node
        .processes()
        .iter()
        .filter(|process| {
            let args = &process.args;
            args.first()
                .is_some_and(|program| program.contains("containerd-shim"))
                && args.windows(2).any(|pair| pair[0] == "-id" && pair[1] == id)
        })
        .map(|process| process.pid)
        .collect();
    ensure!(shims.len() == 1, "container {id} has {} shims", shims.len());
    Ok(shims[0])
}

/// Memory of a process in MiB.
#[derive(Debug, PartialEq)]
pub(super) struct Memory {
    /// Resident.
    pub(super) rss: f64,
    /// Resident, every page divided by the processes that have it.
    pub(super) pss: f64,
    /// Resident and of this process alone.
    pub(super) private: f64,
}

impl Memory {
    /// Of a process of the node.
    pub(super) fn of(node: &Node, pid: i32) -> Result<Self> {
        Self::parse(&node.read(format!("/proc/{pid}/smaps_rollup"))?)
            .with_context(|| format!("cannot read the memory of {pid}"))
    }

    fn parse(rollup: &str) -> Option<Self> {
        let mib = |name| Some(field(rollup, name)?.strip_suffix(" kB")?.parse::<f64>().ok()? / 1024.0);
        Some(Self {
            rss: mib("Rss")?,
            pss: mib("Pss")?,
            private: mib("Private_Clean")? + mib("Private_Dirty")?,
        })
    }
}

/// CPU time and context switches of a process so far: of the threads that have not ended.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Work {
    /// Microseconds on a CPU.
    pub(super) micros: f64,
    /// Context switches.
    pub(super) switches: f64,
}

impl Work {
    /// Of a process of the node.
    pub(super) fn of(node: &Node, pid: i32) -> Result<Self> {
        let tasks = node.path(format!("/proc/{pid}/task"));
        let mut work = Self::default();
        for task in std::fs::read_dir(&tasks).with_context(|| format!("list {}", tasks.display()))? {
            let task = task?.path();
            let read = |file| std::fs::read_to_string(task.join(file));
            // The thread has ended meanwhile.
            let (Ok(schedstat), Ok(status)) = (read("schedstat"), read("status")) else {
                continue;
            };
            let thread = Self::parse(&schedstat, &status)
                .with_context(|| format!("cannot read the CPU time of {pid}"))?;
            work.micros += thread.micros;
            work.switches += thread.switches;
        }
        Ok(work)
    }

    fn parse(schedstat: &str, status: &str) -> Option<Self> {
        let nanos: f64 = schedstat.split_whitespace().next()?.parse().ok()?;
        let count = |name| field(status, name)?.parse::<f64>().ok();
        Some(Self {
            micros: nanos / 1000.0,
            switches: count("voluntary_ctxt_switches")? + count("nonvoluntary_ctxt_switches")?,
        })
    }
}

/// The value of `name: value` on a line of its own.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut values = text
        .lines()
        .filter_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    values.next().map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rollup_of_a_process_is_read() {
        let rollup = "5566-7788 ---p 00000000 00:00 0 [rollup]\nRss:            4096 kB\n\
                      Pss:            2048 kB\n\
                      Pss_Anon:        512 kB\nPrivate_Clean:   512 kB\nPrivate_Dirty:   512 kB\n";
        let memory = Memory {
            rss: 4.0,
            pss: 2.0,
            private: 1.0,
        };
        assert_eq!(Memory::parse(rollup), Some(memory));
        assert_eq!(Memory::parse("Rss: 4096 kB\n"), None);
    }

    #[test]
    fn the_work_of_a_thread_is_read() {
        let status = "Name:\tcontainerd-shim\nvoluntary_ctxt_switches:\t30\nnonvoluntary_ctxt_switches:\t4\n";
        let work = Work {
            micros: 5.5,
            switches: 34.0,
        };
        assert_eq!(Work::parse("5500 120 34\n", status), Some(work));
        assert_eq!(Work::parse("", status), None);
        assert_eq!(Work::parse("5500 120 34\n", "Name:\tx\n"), None);
    }
}
