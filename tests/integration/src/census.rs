//! What there is on a node and what a shim has, to be compared later: nothing may pile up.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_node::wait_for;

use crate::{BUNDLES, GC, GpuHost};

/// How long a node may take to be as before.
const AT_REST: Duration = Duration::from_secs(30);

/// Leases of containers.
const LEASES: &str = "/run/firn/leases/";

/// The programs of a call of gc. One that is about to end has no arguments any more.
const STARTS_GC: [&str; 3] = ["timeout", "env", "firn"];

/// What there is on a node, by kind; of each the names that show what is new.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Census(BTreeMap<String, Vec<String>>);

/// Prints all names, after a line for each kind. Left out is what clients and daemons leave, with any shim:
/// the fifos of detached execs, the unpacked image of a restore; and what is kept to be read: the timings of
/// a checkpoint, runc's note of it, the log of a dump that failed, the output of hooks. So is what the bundle
/// has for CRIU's plugin, which each checkpoint writes again. The directory of leases stays, too, and is
/// empty but for its lock.
const SCRIPT: &str = "
    echo '== mounts'; cut -d' ' -f5 /proc/self/mountinfo
    echo '== cgroups'; find /sys/fs/cgroup -type d
    echo '== sockets'; find /run/containerd/s -type s 2>/dev/null
    echo '== files'; find /run/containerd /run/runc /run/firn /tmp /srv \
        /var/lib/containerd/io.containerd.runtime.v2.task \
        '(' -path /run/containerd/fifo -o -name 'ctrd-checkpoint*' -o -name rootfs -o \
        -path '/run/containerd/runc/*/checkpoint' ')' -prune -o \
        '!' -path /run/firn '!' -path /run/firn/leases '!' -path /run/firn/leases/.lock \
        '!' -name criu-dump.log '!' -name firn-timings.json '!' -name 'firn-hook-*.log' \
        '!' -name firn-inherited.json '!' -path '*/firn-criu-libs/*' \
        -print 2>/dev/null
    true";

impl Census {
    /// Looks.
    pub fn take(host: &GpuHost) -> Result<Self> {
        let mut kinds: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let output = host.node().run(&["sh", "-c", SCRIPT])?.stdout;
        let mut names = kinds.entry("other".to_owned()).or_default();
        for line in output.lines() {
            match line.strip_prefix("== ") {
                Some(kind) => names = kinds.entry(kind.to_owned()).or_default(),
                None => names.push(line.to_owned()),
            }
        }
        let processes = host.node().processes().into_iter();
        // Clients that were killed end when they end, and gc runs when it runs, with what has started it.
        let gc = GC.map(str::to_owned);
        let is_gc = |process: &firn_node::Process| {
            let is_ending = process.args.is_empty() && STARTS_GC.contains(&process.command.as_str());
            process.args.ends_with(&gc) || is_ending
        };
        let processes = processes
            .filter(|process| process.command != "ctr" && !is_gc(process))
            .map(|process| process.command);
        let processes = processes.collect();
        kinds.insert("processes".to_owned(), processes);
        kinds.retain(|kind, _| kind != "other");
        kinds.values_mut().for_each(|names| names.sort());
        Ok(Self(kinds))
    }

    /// Waits until the node is as it was then.
    pub fn comes_back(&self, host: &GpuHost) -> Result<Self> {
        let mut now = Self::take(host)?;
        let waited = wait_for("the node to be as before", AT_REST, || {
            now = Self::take(host)?;
            Ok(self.difference(&now).is_empty().then_some(()))
        });
        ensure!(waited.is_ok(), "{}", self.difference(&now));
        Ok(now)
    }

    fn difference(&self, now: &Self) -> String {
        let mut reported = Vec::new();
        for (kind, names) in &self.0 {
            let (new, mut gone) = (beyond(&now.0[kind], names), beyond(names, &now.0[kind]));
            // The lease of a container that was killed goes when the next one is written.
            gone.retain(|name| !name.starts_with(LEASES));
            let (then, now) = (names.len(), now.0[kind].len());
            if !new.is_empty() || !gone.is_empty() {
                reported.push(format!(
                    "{kind}: {then} then, {now} now; new: {new:?}; gone: {gone:?}"
                ));
            }
        }
        reported.join("\n")
    }
}

/// Names of `these` that those others lack, as often as they lack them.
fn beyond<'a>(these: &'a [String], others: &[String]) -> Vec<&'a String> {
    let mut others: Vec<&String> = others.iter().collect();
    let mut found = Vec::new();
    for name in these {
        match others.iter().position(|other| *other == name) {
            Some(at) => drop(others.swap_remove(at)),
            None => found.push(name),
        }
    }
    found
}

impl fmt::Display for Census {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = self
            .0
            .iter()
            .map(|(kind, names)| format!("{} {kind}", names.len()));
        f.write_str(&counts.collect::<Vec<_>>().join(", "))
    }
}

/// What a shim has of the node's resources.
#[derive(Debug)]
pub struct ShimUse {
    /// Threads.
    pub threads: i64,
    /// Resident memory.
    pub rss_kib: i64,
    /// Memory that it shares with nobody.
    pub private_kib: i64,
    /// What its descriptors lead to.
    pub descriptors: Vec<String>,
}

impl ShimUse {
    /// The shim of a container.
    pub fn of(host: &GpuHost, id: &str) -> Result<Self> {
        let pid = host.node().read(format!("{BUNDLES}/{id}/shim.pid"));
        let pid = match pid {
            Ok(pid) => pid,
            Err(_) => host.shim_of(id)?.pid.to_string(),
        };
        let pid = pid.trim();
        let status = host.node().read(format!("/proc/{pid}/status"))?;
        let rollup = host.node().read(format!("/proc/{pid}/smaps_rollup"))?;
        let list = host
            .node()
            .run(&["sh", "-c", &format!("ls -l /proc/{pid}/fd | sed 's/.* -> //'")])?;
        let private = number(&rollup, "Private_Clean:")? + number(&rollup, "Private_Dirty:")?;
        Ok(Self {
            threads: number(&status, "Threads:")?,
            rss_kib: number(&status, "VmRSS:")?,
            private_kib: private,
            descriptors: list.stdout.lines().skip(1).map(str::to_owned).collect(),
        })
    }
}

impl ShimUse {
    /// The shim of a container once threads that wait for more work have ended, with no more descriptors than
    /// `then`.
    pub fn at_rest(host: &GpuHost, id: &str, then: Option<&Self>) -> Result<Self> {
        let mut last = Self::of(host, id)?;
        let waited = wait_for("the shim to come to rest", AT_REST, || {
            last = Self::of(host, id)?;
            let as_then = then.is_none_or(|then| last.descriptors.len() <= then.descriptors.len());
            Ok((last.threads == 1 && as_then).then_some(()))
        });
        ensure!(waited.is_ok(), "then {then:?}, now {last:?}");
        Ok(last)
    }
}

impl fmt::Display for ShimUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            threads,
            rss_kib,
            private_kib,
            descriptors,
        } = self;
        let count = descriptors.len();
        write!(
            f,
            "{count} descriptors, {threads} threads, {rss_kib} KiB resident, {private_kib} KiB private"
        )
    }
}

fn number(text: &str, field: &str) -> Result<i64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.with_context(|| format!("no {field} in:\n{text}"))
}
