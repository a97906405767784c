//! Containers that come and go by the hundred leave nothing: no process, mount, cgroup, socket or file on the node, and no
//! descriptor, thread or memory in a shim that lives through all of them.
//!
//! `FIRN_CYCLES=1000 cargo test -p firn-integration --test cycles -- --nocapture` is the whole; a plain run is shorter.
//! The figures are printed.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{BUNDLES, Container, FIRN, GpuHost, IMAGE, SimGpu, on};
use firn_node::{Cgroup, Suite, wait_for};

/// Cycles of a plain run, per kind.
const FEW: usize = 40;
/// Cycles that one script does.
const BATCH: usize = 10;
/// Cycles between two moves of a GPU container through an image.
const PER_MOVE: usize = 20;
/// Cycles between two reports.
const PER_REPORT: usize = 100;
/// What a shim's private memory may have grown by. Samples of one run that does not leak lie 256 apart.
const GROWTH_KIB: i64 = 384;
/// How long a node or shim may take to be as before.
const SETTLED: Duration = Duration::from_secs(30);

/// Puts containers into one shim.
const GROUP: [&str; 2] = ["--annotation", "io.containerd.runc.v2.group=pod"];

/// One life of a container, with an exec, one that fails, and a container that cannot be made.
const CYCLE: &str = "
    ctr run --detach $OPTIONS $IMAGE c sleep 1000
    [ \"$(ctr tasks exec --exec-id e c echo out)\" = out ]
    ! ctr tasks exec --exec-id f c /nosuch 2>/dev/null
    ctr tasks exec --detach --exec-id g c sleep 1000
    ctr tasks kill --signal SIGKILL c
    ctr tasks delete --force c 2>/dev/null
    ctr containers delete c
    ! ctr run --detach $OPTIONS $IMAGE c /nosuch 2>/dev/null
    ctr containers delete c
";

fn cycles(host: &GpuHost, count: usize, options: &[&str]) -> Result<()> {
    let options = [&["--runtime", FIRN], host.limits(), options].concat().join(" ");
    for begun in (0..count).step_by(BATCH) {
        let batch = BATCH.min(count - begun);
        let script =
            format!("OPTIONS='{options}'; IMAGE={IMAGE}; for n in $(seq {batch}); do\nset -e\n{CYCLE}\ndone");
        host.node()
            .run_within(Duration::from_secs(600), &["sh", "-c", &script])
            .with_context(|| format!("cycles after {begun}"))?;
    }
    Ok(())
}

/// A GPU container of the group goes through an image and back.
fn move_once(host: &GpuHost) -> Result<()> {
    let job = Container::count_with(host, "job", &["0"], 1, &GROUP, &[])?;
    job.goes_on(2)?;
    job.checkpoint("checkpoint/job")?;
    job.goes_on(2)?;
    job.remove()?;
    let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
    copy.goes_on(2)?;
    copy.remove()?;
    host.remove_image("checkpoint/job")
}

/// What there is on a node, by kind; of each the names that tell what is new.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Census(BTreeMap<&'static str, Vec<String>>);

/// How the names of a kind are had.
const KINDS: &[(&str, &str)] = &[
    ("mounts", "cut -d' ' -f5 /proc/self/mountinfo"),
    ("cgroups", "find /sys/fs/cgroup -type d"),
    ("sockets", "find /run/containerd/s -type s 2>/dev/null || true"),
    // But what clients and daemons leave, with any shim: the fifos of detached execs, the unpacked image of a restore.
    (
        "files",
        "find /run/containerd /run/runc /run/firn /tmp \
            '(' -path /run/containerd/fifo -o -name 'ctrd-checkpoint*' ')' -prune -o -print 2>/dev/null || true",
    ),
];

impl Census {
    fn take(host: &GpuHost) -> Result<Self> {
        let mut kinds: BTreeMap<_, Vec<String>> = BTreeMap::new();
        for (kind, script) in KINDS {
            let said = host.node().run(&["sh", "-c", script])?.stdout;
            kinds.insert(*kind, said.lines().map(str::to_owned).collect());
        }
        let processes = host.node().processes().into_iter();
        kinds.insert("processes", processes.map(|process| process.command).collect());
        kinds.values_mut().for_each(|names| names.sort());
        Ok(Self(kinds))
    }

    /// Waits until the node is as it was then.
    fn comes_back(&self, host: &GpuHost) -> Result<Self> {
        let mut now = Self::take(host)?;
        let waited = wait_for("the node to be as before", SETTLED, || {
            now = Self::take(host)?;
            Ok((now == *self).then_some(()))
        });
        ensure!(waited.is_ok(), "{}", self.difference(&now));
        Ok(now)
    }

    fn difference(&self, now: &Self) -> String {
        let mut told = Vec::new();
        for (kind, names) in &self.0 {
            let new = now.0[kind].iter().filter(|name| !names.contains(name));
            let gone = names.iter().filter(|name| !now.0[kind].contains(name));
            told.push(format!(
                "{kind}: {} then, {} now; new: {:?}; gone: {:?}",
                names.len(),
                now.0[kind].len(),
                new.collect::<Vec<_>>(),
                gone.collect::<Vec<_>>()
            ));
        }
        told.join("\n")
    }
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

/// What a shim has.
#[derive(Debug)]
struct Shim {
    threads: i64,
    rss_kib: i64,
    private_kib: i64,
    descriptors: Vec<String>,
}

impl Shim {
    /// The shim of a container.
    fn of(host: &GpuHost, id: &str) -> Result<Self> {
        let pid = host.node().read(format!("{BUNDLES}/{id}/shim.pid"));
        let pid = match pid {
            Ok(pid) => pid,
            Err(_) => pid_of(host, id)?,
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

impl fmt::Display for Shim {
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

fn pid_of(host: &GpuHost, id: &str) -> Result<String> {
    let processes = host.node().processes().into_iter();
    let mut shims = processes.filter(|process| process.command.starts_with("containerd-shim"));
    let shim = shims.find(|process| process.args.windows(2).any(|pair| pair == ["-id", id]));
    Ok(shim.with_context(|| format!("{id} has no shim"))?.pid.to_string())
}

fn number(text: &str, field: &str) -> Result<i64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.with_context(|| format!("no {field} in:\n{text}"))
}

fn nothing_stays(suite: Suite, cgroup: Cgroup, name: &str) -> Result<()> {
    let count = match std::env::var("FIRN_CYCLES") {
        Ok(count) => count.parse().context("FIRN_CYCLES")?,
        Err(_) => FEW,
    };
    let host = GpuHost::for_test(suite, cgroup, name, &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        let told = |what: &str| println!("{name}: {what}");
        // The first containers make directories that stay.
        cycles(host, 1, &[])?;
        let empty = Census::take(host)?;
        told(&format!("before: {empty}"));
        let anchor = [&["--runtime", FIRN], &GROUP[..]].concat();
        let anchor = Container::run(host, "anchor", &anchor, &["sleep", "100000"])?;
        // What is made once and kept.
        cycles(host, BATCH + count / 10, &GROUP)?;
        move_once(host)?;
        let full = Census::take(host)?;
        let young = settled(host, None)?;
        told(&format!("the shim of a group, before: {young}"));

        for begun in (0..count).step_by(PER_MOVE) {
            let some = PER_MOVE.min(count - begun);
            cycles(host, some, &[])?;
            cycles(host, some, &GROUP)?;
            move_once(host)?;
            let done = begun + some;
            if done % PER_REPORT == 0 {
                told(&format!(
                    "{done} cycles of each kind: {}",
                    Shim::of(host, "anchor")?
                ));
            }
        }
        full.comes_back(host)?;
        let old = settled(host, Some(&young))?;
        let moves = count.div_ceil(PER_MOVE);
        told(&format!(
            "the shim of a group, after {count} cycles and {moves} moves of a GPU container: {old}"
        ));
        let growth = old.private_kib - young.private_kib;
        ensure!(
            growth <= GROWTH_KIB,
            "{growth} KiB more private memory: {young}; {old}"
        );
        anchor.remove()?;
        host.idle()?;
        let after = empty.comes_back(host)?;
        told(&format!(
            "after {count} cycles in shims of their own too: {after}"
        ));
        Ok(())
    })
}

/// The shim of the group once threads that wait for more work have ended; with the descriptors and threads of `then`.
fn settled(host: &GpuHost, then: Option<&Shim>) -> Result<Shim> {
    let mut last = Shim::of(host, "anchor")?;
    let waited = wait_for("the shim to come to rest", SETTLED, || {
        last = Shim::of(host, "anchor")?;
        let as_then = then.is_none_or(|then| last.descriptors.len() <= then.descriptors.len());
        Ok((last.threads == 1 && as_then).then_some(()))
    });
    ensure!(waited.is_ok(), "then {then:?}, now {last:?}");
    Ok(last)
}

#[test]
fn nothing_stays_on_forky() -> Result<()> {
    nothing_stays(Suite::Forky, Cgroup::Auto, "cy-f")
}

#[test]
fn nothing_stays_on_trixie_with_cgroup_v2() -> Result<()> {
    nothing_stays(Suite::Trixie, Cgroup::V2, "cy-t2")
}
