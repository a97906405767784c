//! Shared memory of all kinds under equal numbers, of which the job compares every word.

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, on};
use firn_node::Platform;

use super::{STORE, host};

const INLINE: &str = "[images]\ninline-copy = \"firn\"\n";

/// Whether firn has copied the memory, and not CRIU in a second dump.
const CRIU_COPIES: &str = "CRIU copies all memory";

/// SysV segments, files of /dev/shm and memory files: the source and the copy have their own words. What is
/// mapped nowhere CRIU copies.
pub fn shared_memory_keeps_every_word(platform: Platform) -> Result<()> {
    on([host(platform, "sm-words", 1)?], |[host]| {
        for (config, which, is_criu) in [
            (STORE, "mapped", false),
            (INLINE, "mapped", false),
            (STORE, "detached", true),
        ] {
            let context = || format!("{config}{which}");
            host.configure(config)?;
            let before = host.log_length()?;
            let words = format!("--shared-words={which}");
            let job = Container::count(host, "job", &["0"], 1, &["--mib=40", &words])?;
            job.goes_on(3)?;
            job.checkpoint("checkpoint/job").with_context(context)?;
            job.goes_on(3).context("the source").with_context(context)?;
            job.remove()?;
            let log = host.log_since(before)?;
            ensure!(log.contains(CRIU_COPIES) == is_criu, "{}: {log}", context());
            let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
            copy.goes_on(3).context("the copy").with_context(context)?;
            copy.remove()?;
            host.node()
                .run(&["ctr", "images", "delete", "--sync", "checkpoint/job"])?;
        }
        host.idle()
    })
}
