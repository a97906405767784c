//! A checkpoint with a name in the store.

use anyhow::{Context, Result, ensure};
use firn_lab::{GC, failure, on};
use firn_node::Platform;

use crate::stored_memory::{STORE, extents, host, job};

pub fn gc_keeps_the_memory_of_a_named_checkpoint(platform: Platform) -> Result<()> {
    on([host(platform, "sm-named", 1)?], |[host]| {
        host.configure(STORE)?;
        let node = host.node();
        let job = job(host, &["--runtime", host.runtime_for_options()?])?;
        job.checkpoint_and_exit("/srv/warm")?;
        let before = job.lines()?.reached(1);
        job.task(&["delete"])?;
        for (name, code) in [("warm", "FIRN-STORE-NAME"), ("../warm", "FIRN-STORE-NAME")] {
            let output = failure(node.run(&["firn", "store", "name", "/srv/warm", name]).map(drop))?;
            ensure!(output.contains(code), "{name}: {output}");
        }
        let named = host.firn(&["store", "name", "/srv/warm", "default/warm"])?;
        ensure!(named["dir"] == "/srv/store/named/default/warm", "{named}");
        node.run(&["rm", "-r", "/srv/warm"])?;
        let dir = "/srv/store/named/default/warm/checkpoint";
        let collect = || node.run(&GC);
        let kept = collect()?.stdout;
        ensure!(kept.contains(&format!("{dir} is there")), "{kept}");
        let modes = node.run(&[
            "sh",
            "-ec",
            "cd /srv/store; stat -c %a named named/*/*/* named/*/*/*/*",
        ])?;
        let is_private = |mode: &str| ["700", "600"].contains(&mode);
        ensure!(modes.stdout.lines().all(is_private), "modes: {}", modes.stdout);
        node.run(&["firn", "restore", "--dir", dir, "job"])?;
        let lines = job.goes_on(3)?;
        let goes_on = lines.0.iter().any(|line| line.iter == before + 1);
        ensure!(goes_on, "it was started afresh");
        job.remove()?;

        node.run(&["rm", "-r", "/srv/store/named/default/warm"])?;
        collect().context("with nothing to keep")?;
        ensure!(extents(host)?.is_empty(), "memory of no image is left");
        host.idle()
    })
}
