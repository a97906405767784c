//! `cargo xtask bench shim`: what a container costs under either shim.
//!
//! Times are taken inside the node around `ctr`, so entering the node does not count; `ctr`, containerd and runc do, as
//! for a user. Memory is that of shims whose containers have slept for a while, several of each at a time: one shim
//! alone would be charged for all of its program's pages.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{Built, FIRN, GpuHost, IMAGE, Profile, STOCK, SimGpu};
use firn_node::{Node, Suite};

use super::{Case, Output};

/// Start, stop and memory of containers without GPU
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub(super) output: Output,
    /// Readings of each shim
    #[arg(short, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    n: u32,
}

/// Shims of each kind whose memory is read at a time.
const IDLE: usize = 5;

/// How long they have been idle by then. Part of what is measured: Go gives memory back only after a while.
const SETTLE: Duration = Duration::from_secs(10);

const STOCK_SHIM: &str = "/usr/bin/containerd-shim-runc-v2";

/// Prints the microseconds that a command took, after what it printed itself.
const TIMED: &str =
    r#"begun=$EPOCHREALTIME; "$@" >&2; ended=$EPOCHREALTIME; echo $((${ended/./} - ${begun/./}))"#;

/// Readings of both shims.
#[derive(Default)]
struct Readings {
    stock: Vec<f64>,
    firn: Vec<f64>,
}

impl Readings {
    fn of(&mut self, runtime: &str) -> &mut Vec<f64> {
        if runtime == FIRN {
            &mut self.firn
        } else {
            &mut self.stock
        }
    }

    fn into_case(self, name: &'static str, unit: &'static str) -> Result<Case> {
        Case::new("shim", name, unit, self.stock, self.firn).with_context(|| format!("no reading of {name}"))
    }
}

/// Measures everything.
pub(super) fn measure(options: &Options) -> Result<Vec<Case>> {
    eprintln!("building release programs");
    let built = Built::build(Profile::Release)?;
    let host = GpuHost::start(&built, Suite::Forky, "bench-shim", &[SimGpu::h200(1)])?;
    let node = host.node();
    eprintln!("{} readings of each shim, in turns", options.n);
    let mut cases = times(node, options.n)?;
    eprintln!("{IDLE} idle containers under each shim");
    cases.extend(memory(node)?);
    cases.push(sizes(node, built.shim())?);
    Ok(cases)
}

/// Both shims, the other one first every time.
fn in_turn(round: u32) -> [&'static str; 2] {
    if round.is_multiple_of(2) {
        [STOCK, FIRN]
    } else {
        [FIRN, STOCK]
    }
}

fn times(node: &Node, n: u32) -> Result<Vec<Case>> {
    let (mut run, mut kill_delete, mut run_delete) =
        (Readings::default(), Readings::default(), Readings::default());
    // The first round fills caches and does not count.
    for round in 0..=n {
        for runtime in in_turn(round) {
            let start = [
                "ctr",
                "run",
                "--detach",
                "--runtime",
                runtime,
                IMAGE,
                "timed",
                "sleep",
                "1000000",
            ];
            let whole = ["ctr", "run", "--rm", "--runtime", runtime, IMAGE, "timed", "true"];
            let started = timed(node, &start)?;
            let killed = timed(node, &["ctr", "tasks", "rm", "--force", "timed"])?;
            node.run(&["ctr", "containers", "rm", "timed"])?;
            let whole = timed(node, &whole)?;
            if round > 0 {
                run.of(runtime).push(started);
                kill_delete.of(runtime).push(killed);
                run_delete.of(runtime).push(whole);
            }
        }
    }
    Ok(vec![
        run.into_case("run", "ms")?,
        kill_delete.into_case("kill-delete", "ms")?,
        run_delete.into_case("run-delete", "ms")?,
    ])
}

/// Milliseconds that a command takes in the node.
fn timed(node: &Node, argv: &[&str]) -> Result<f64> {
    let output = node.run(&[&["bash", "-euc", TIMED, "timed"], argv].concat())?;
    let micros: f64 = output
        .stdout
        .trim()
        .parse()
        .with_context(|| format!("no time in {:?}", output.stdout))?;
    Ok(micros / 1000.0)
}

fn memory(node: &Node) -> Result<Vec<Case>> {
    let ids: Vec<(String, &str)> = (0..IDLE)
        .zip(0u32..)
        .flat_map(|(index, round)| {
            in_turn(round).map(|runtime| (format!("idle-{index}-{}", short(runtime)), runtime))
        })
        .collect();
    for (id, runtime) in &ids {
        node.run(&[
            "ctr",
            "run",
            "--detach",
            "--runtime",
            runtime,
            IMAGE,
            id,
            "sleep",
            "1000000",
        ])?;
    }
    thread::sleep(SETTLE);
    let (mut rss, mut pss, mut private) = (Readings::default(), Readings::default(), Readings::default());
    for (id, runtime) in &ids {
        let memory = Memory::of_shim(node, id)?;
        rss.of(runtime).push(memory.rss);
        pss.of(runtime).push(memory.pss);
        private.of(runtime).push(memory.private);
    }
    for (id, _) in &ids {
        node.run(&["ctr", "tasks", "rm", "--force", id])?;
        node.run(&["ctr", "containers", "rm", id])?;
    }
    Ok(vec![
        rss.into_case("rss", "MiB")?,
        pss.into_case("pss", "MiB")?,
        private.into_case("private", "MiB")?,
    ])
}

fn short(runtime: &str) -> &'static str {
    if runtime == FIRN { "firn" } else { "stock" }
}

/// Memory of a process in MiB.
#[derive(Debug, PartialEq)]
struct Memory {
    /// Resident.
    rss: f64,
    /// Resident, every page divided by the processes that have it.
    pss: f64,
    /// Resident and of this process alone.
    private: f64,
}

impl Memory {
    /// Of the shim that serves this container.
    fn of_shim(node: &Node, id: &str) -> Result<Self> {
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
        Self::parse(&node.read(format!("/proc/{}/smaps_rollup", shims[0]))?)
            .with_context(|| format!("the memory of the shim of {id} is not told"))
    }

    fn parse(rollup: &str) -> Option<Self> {
        let mib = |name: &str| -> Option<f64> {
            let line = rollup
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            let kib: f64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
            Some(kib / 1024.0)
        };
        Some(Self {
            rss: mib("Rss")?,
            pss: mib("Pss")?,
            private: mib("Private_Clean")? + mib("Private_Dirty")?,
        })
    }
}

fn sizes(node: &Node, shim: &Path) -> Result<Case> {
    let mib = |path: &Path| -> Result<f64> {
        let bytes = fs::metadata(path)
            .with_context(|| format!("look at {}", path.display()))?
            .len();
        // A program is far smaller than what a float counts exactly.
        #[expect(clippy::cast_precision_loss, reason = "exact below 2^53")]
        Ok(bytes as f64 / f64::from(1 << 20))
    };
    let readings = Readings {
        stock: vec![mib(&node.path(STOCK_SHIM))?],
        firn: vec![mib(shim)?],
    };
    readings.into_case("binary", "MiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rollup_of_a_process_is_read() {
        let rollup = "5566-7788 ---p 00000000 00:00 0 [rollup]\nRss:            4096 kB\nPss:            2048 kB\n\
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
    fn each_shim_is_first_every_other_time() {
        assert_eq!(in_turn(0), [STOCK, FIRN]);
        assert_eq!(in_turn(1), [FIRN, STOCK]);
    }
}
