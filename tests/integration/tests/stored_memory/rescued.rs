//! An image that was rescued, of which the store has the memory.

use anyhow::{Context, Result, ensure};
use firn_lab::{GC, failure, on};
use firn_node::Platform;

use crate::stored_memory::{STORE, extents, host, job};

/// gc keeps its memory, though the directory that the store knows is gone, until the image is removed.
pub fn gc_keeps_the_memory_of_a_rescued_image(platform: Platform) -> Result<()> {
    on([host(platform, "sm-rescued", 1)?], |[host]| {
        host.configure(STORE)?;
        let node = host.node();
        let job = job(host, &[])?;
        host.fault(&["--call", "restore", "--error", "CUDA_ERROR_UNKNOWN"])?;
        let output = failure(job.checkpoint("checkpoint/job"))?;
        host.no_faults()?;
        let rescued = node.run(&["sh", "-c", "echo /var/lib/firn/rescue/*"])?.stdout;
        let dir = rescued.trim();
        ensure!(
            output.contains(&format!("the dump in {dir} is complete")),
            "{output}"
        );
        let before = job.lines()?.reached(1);
        let _ = node.run(&["ctr", "tasks", "delete", "--force", "job"]);

        let collect = || node.run(&GC);
        let kept = collect()?.stdout;
        ensure!(kept.contains(&format!("{dir} is there")), "{kept}");
        node.run(&["firn", "restore", "--dir", dir, "job"])?;
        let lines = job.goes_on(3)?;
        let goes_on = lines.0.iter().any(|line| line.iter == before + 1);
        ensure!(goes_on, "it was started afresh");
        job.remove()?;

        node.run(&["rm", "-r", dir])?;
        collect().context("with nothing to keep")?;
        ensure!(extents(host)?.is_empty(), "memory of no image is left");
        host.idle()
    })
}
