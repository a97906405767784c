//! How far a copy is, while it lasts: in `firn ps` and in the log.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{BUNDLES, Container, GpuHost, StallFs, failure, on};
use firn_node::{Platform, wait_for};
use serde_json::Value;

use crate::stored_memory::{MIB, STORE, host, job};

/// How long a copy may take to begin, and to be logged.
const SOON: Duration = Duration::from_secs(30);

/// Where a shim that is built for tests waits for as long as it is named, and what it makes when it does.
const HOLD: &str = "/run/firn-hold";
const HELD: &str = "/run/firn-held";

/// What `firn ps` shows of the job, once it is in this phase.
fn in_phase(host: &GpuHost, phase: &str) -> Result<Value> {
    let mut last = Value::Null;
    let seen = wait_for(&format!("phase {phase}"), SOON, || {
        // Before its Create the container is not known.
        (_, last) = host.firn_shows(&["ps", "job"])?;
        let now = &last["containers"][0]["transaction"];
        Ok((now["phase"] == phase && now["of"].as_u64() > Some(0)).then(|| now.clone()))
    });
    seen.with_context(|| format!("firn ps shows {last}"))
}

/// A copy that takes long is shown and logged; nothing is left of that.
fn is_shown(
    host: &GpuHost,
    operation: &str,
    phase: &str,
    goes_on: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let logged = host.log_length()?;
    let seen = in_phase(host, phase)?;
    ensure!(
        seen["operation"] == operation && seen["state"] == "running",
        "{seen}"
    );
    let (of, copied) = (seen["of"].as_u64(), seen["copied"].as_u64());
    ensure!(of >= Some(MIB << 20) && copied < of, "{seen}");
    let table = host.node().run(&["firn", "ps"])?.stdout;
    ensure!(table.contains(phase) && table.contains(" of 2"), "{table}");
    let line = format!("phase={phase} s=");
    let count = || Ok::<_, anyhow::Error>(host.log_since(logged)?.matches(&line).count());
    wait_for("a line in the log", SOON, || Ok((count()? > 0).then_some(())))?;
    goes_on()?;
    let after = host.node().run(&["firn", "ps", "job"])?.stdout;
    ensure!(
        after.contains("state      running") && !after.contains("copied"),
        "{after}"
    );
    let left = host.node().path(format!("{BUNDLES}/job/firn-progress.json"));
    ensure!(!left.exists(), "its file is left");
    Ok(())
}

/// runc whose checkpoints fail.
pub const FAILING: &str =
    "#!/bin/sh\ncase \" $* \" in *\" checkpoint \"*) exit 1 ;; esac\nexec /usr/sbin/runc \"$@\"\n";

/// The container stands still for the copy: when CRIU has failed, nobody waits for it.
pub fn a_dump_that_fails_ends_the_copy(platform: Platform) -> Result<()> {
    on([host(platform, "sm-ends", 1)?], |[host]| {
        let store = StallFs::mount(host, "/srv/store")?;
        host.configure(STORE)?;
        let job = job(host, &[])?;
        job.checkpoint("checkpoint/first")?;
        store.stall(&["write"])?;
        host.replace_runc(FAILING)?;
        let output = failure(job.checkpoint("checkpoint/job").map(drop))?;
        ensure!(output.contains("FIRN-DUMP:"), "{output}");
        job.goes_on(3)?;
        store.go_on()?;
        host.node().run(&["rm", "/usr/local/sbin/runc"])?;
        job.checkpoint("checkpoint/job")?;
        job.remove()?;
        host.idle()
    })
}

pub fn a_copy_that_takes_long_is_shown(platform: Platform) -> Result<()> {
    on([host(platform, "sm-slow", 1)?], |[host]| {
        let store = StallFs::mount(host, "/srv/store")?;
        host.configure(STORE)?;
        let job = job(host, &[])?;
        // Now the store is there, and hangs where it gets what has changed.
        job.checkpoint("checkpoint/first")?;
        store.stall(&["write"])?;
        let node = host.node();
        let mut checkpoint = job.begin_checkpoint("checkpoint/job")?;
        is_shown(host, "checkpoint", "copy-memory", || {
            store.go_on()?;
            ensure!(checkpoint.wait()?.success(), "the checkpoint failed");
            job.goes_on(3).map(drop)
        })?;
        job.remove()?;
        host.idle()?;

        // Create looks into the store, too: it hangs later.
        node.write(HOLD, "dev-repair")?;
        let mut restore = Container::begin_restore(host, "job", "checkpoint/job")?;
        wait_for("the phase before", SOON, || {
            Ok(node.path(HELD).exists().then_some(()))
        })?;
        store.stall(&["read"])?;
        node.run(&["rm", HOLD, HELD])?;
        is_shown(host, "restore", "fill-memory", || {
            store.go_on()?;
            ensure!(restore.wait()?.success(), "the restore failed");
            Ok(())
        })?;
        let copy = Container::known(host, "job").counting(1).moved_before();
        copy.goes_on(3)?;
        copy.remove()?;
        host.idle()
    })
}
