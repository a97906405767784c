//! A store on a file system that the operator has not mounted.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{failure, on};
use firn_node::{Platform, wait_for};

use crate::stored_memory::{host, job, restores};

const ON_DISK: &str = "[images]\nstore = \"/srv/disk/store\"\nbulk = \"store\"\n";

/// How long the history may take: it is written after the client has its answer.
const WRITTEN: Duration = Duration::from_secs(60);

/// A checkpoint fails and costs the job nothing, and the root file system gets nothing.
pub fn a_store_that_is_not_mounted_is_not_made_again(platform: Platform) -> Result<()> {
    on([host(platform, "sm-unmounted", 1)?], |[host]| {
        let node = host.node();
        let mount = |name: &str| {
            let argv = [
                "mount",
                "-t",
                "tmpfs",
                "-o",
                "size=1g,mode=700",
                name,
                "/srv/disk",
            ];
            node.run(&argv).map(drop)
        };
        node.run(&["mkdir", "-p", "/srv/disk"])?;
        mount("first")?;
        host.configure(ON_DISK)?;
        let job = job(host, &[])?;
        job.checkpoint("checkpoint/first")?;
        node.run(&["umount", "/srv/disk"])?;

        let output = failure(job.checkpoint("checkpoint/job").map(drop))?;
        for part in [
            "FIRN-STORE-UNUSABLE:",
            "/srv/disk, which is not mounted",
            "hint: mount",
        ] {
            ensure!(output.contains(part), "no {part:?} in:\n{output}");
        }
        ensure!(!node.path("/srv/disk/store").exists(), "there is another store");
        // It was looked for before the job stood still.
        let failed = wait_for("the failure in the history", WRITTEN, || {
            let history = host.firn(&["history", "--failed"])?;
            let last = history["transactions"].as_array().and_then(|all| all.last());
            Ok(last.cloned())
        })?;
        let phases = failed["phases"].as_array().context("no phases")?;
        let names: Vec<&str> = phases.iter().filter_map(|phase| phase["name"].as_str()).collect();
        ensure!(names == ["inspect"], "the phases are {names:?}");
        job.goes_on(3)?;

        mount("second")?;
        job.checkpoint("checkpoint/job")?;
        job.remove()?;
        restores(host)
    })
}
