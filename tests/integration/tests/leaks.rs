//! Containers that come and go by the hundred leave nothing: no process, mount, cgroup, socket or file on the
//! node, and no descriptor, thread or memory in a shim that lives through all of them.
//!
//! `FIRN_CYCLES=1000 cargo suites leaks:: --nocapture` is the whole; a plain run
//! is shorter. The figures are printed.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{Census, Container, FIRN, GpuHost, IMAGE, ShimUse, SimGpu, cases, matrix, on};
use firn_node::Platform;

/// Cycles of a plain run, per kind.
const FEW: usize = 40;
/// Cycles that one script does.
const BATCH: usize = 10;
/// Cycles between two moves of a GPU container through an image.
const PER_MOVE: usize = 20;
/// Cycles between two reports.
const PER_REPORT: usize = 100;
/// What a shim's private memory may have grown by. Threads that work at the same time have arenas of the
/// allocator each, and on a loaded machine more of them do: shims of 100 cycles and of 1,000 have then grown
/// by 200 to 400 alike.
const GROWTH_KIB: i64 = 1024;

/// Puts containers into one shim.
const GROUP: [&str; 2] = ["--annotation", "io.containerd.runc.v2.group=pod"];

/// One life of a container, with an exec, one that fails, and a container that cannot be made.
const CYCLE: &str = "
    ctr run --detach $OPTIONS $IMAGE c sleep 1000
    ctr tasks exec --exec-id e c echo out >/dev/null
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
        let script = format!(
            "OPTIONS='{options}'; IMAGE={IMAGE}; for n in $(seq {batch}); do\nset -ex\n{CYCLE}\ndone"
        );
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

fn hundreds_of_containers_leave_nothing(platform: Platform) -> Result<()> {
    let count = match std::env::var("FIRN_CYCLES") {
        Ok(count) => count.parse().context("FIRN_CYCLES")?,
        Err(_) => FEW,
    };
    let host = GpuHost::for_test(platform, "cycles", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        let report = |what: &str| println!("{platform}: {what}");
        // The first containers make directories that stay.
        cycles(host, 1, &[])?;
        let empty = Census::take(host)?;
        report(&format!("before: {empty}"));
        let anchor = [&["--runtime", FIRN], &GROUP[..]].concat();
        let anchor = Container::run(host, "anchor", &anchor, &["sleep", "100000"])?;
        // What is made once and kept.
        cycles(host, BATCH + count / 10, &GROUP)?;
        move_once(host)?;
        let full = Census::take(host)?;
        let young = ShimUse::at_rest(host, "anchor", None)?;
        report(&format!("the shim of a group, before: {young}"));

        for begun in (0..count).step_by(PER_MOVE) {
            let some = PER_MOVE.min(count - begun);
            cycles(host, some, &[])?;
            cycles(host, some, &GROUP)?;
            move_once(host)?;
            let done = begun + some;
            if done % PER_REPORT == 0 {
                report(&format!(
                    "{done} cycles of each kind: {}",
                    ShimUse::of(host, "anchor")?
                ));
            }
        }
        full.comes_back(host)?;
        let old = ShimUse::at_rest(host, "anchor", Some(&young))?;
        let moves = count.div_ceil(PER_MOVE);
        report(&format!(
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
        report(&format!(
            "after {count} cycles in shims of their own too: {after}"
        ));
        Ok(())
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        hundreds_of_containers_leave_nothing [FORKY, TRIXIE_V2];
    })
    .only_in_all()
}
