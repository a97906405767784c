//! Checkpoints that need no store, whatever the configuration has.

use anyhow::{Result, ensure};
use firn_lab::on;
use firn_node::Platform;

use crate::stored_memory::{MIB, STORE, host, job, size};

/// A file has all memory: it is for another machine.
pub fn a_file_has_all_memory(platform: Platform) -> Result<()> {
    on([host(platform, "sm-whole", 1)?], |[host]| {
        host.configure(STORE)?;
        let node = host.node();
        let job = job(host, &[])?;
        node.run(&["firn", "checkpoint", "job", "/srv/job.tar"])?;
        job.goes_on(3)?;
        job.remove()?;
        let bytes = size(host, "/srv/job.tar")?;
        ensure!(bytes >= MIB, "the file has {bytes} MiB");
        ensure!(
            !node.path("/srv/store/images").exists(),
            "something is in the store"
        );
        host.configure("")?;
        node.run(&["firn", "restore", "/srv/job.tar", "--name", "back", "--gpus", "0"])?;
        node.run(&["ctr", "tasks", "delete", "--force", "back"])?;
        host.idle()
    })
}
