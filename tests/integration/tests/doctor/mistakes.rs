//! Mistakes in the configuration.

use anyhow::{Result, ensure};
use firn_lab::{Container, failure, on};
use firn_node::Platform;

use super::host;

/// A mistake, and whether it refuses a checkpoint and a restore.
const MISTAKES: &[(&str, bool, bool)] = &[
    ("[restore]\ngpu = [\"0\"]\n", false, true),
    ("[deadlines]\nlokc = \"3s\"\n", true, true),
    ("[pause]\ngpu-busy = \"never\"\n", false, false),
    ("[checkpoint]\nhooks = \"refused\"\n", true, true),
    ("[restoring]\ncri = true\n", true, true),
    ("no configuration", true, true),
];

pub fn a_mistake_fails_what_goes_by_it_and_no_start(platform: Platform) -> Result<()> {
    on([host(platform, "dr-m")?], |[host]| {
        let source = Container::count(host, "source", &["0"], 1, &[])?;
        source.goes_on(1)?;
        source.checkpoint("checkpoint/source")?;
        source.remove()?;
        for (text, refuses_checkpoint, refuses_restore) in MISTAKES {
            host.configure(text)?;
            let check = host.node().run(&["firn", "config", "check"]);
            ensure!(check.is_err(), "no mistake in {text:?}");
            let logged = host.log_length()?;
            let job = Container::count(host, "job", &["0"], 1, &[])?;
            job.goes_on(1)?;
            let log = host.log_since(logged)?;
            ensure!(
                log.contains("FIRN-CONFIG-INVALID"),
                "{text:?} is not logged: {log}"
            );
            let ended = job.begin_checkpoint("checkpoint/job")?.wait_with_output()?;
            let shown = String::from_utf8_lossy(&ended.stderr);
            let is_refused = !ended.status.success() && shown.contains("FIRN-CONFIG-INVALID");
            ensure!(
                is_refused == *refuses_checkpoint,
                "checkpoint with {text:?}: {shown}"
            );
            job.goes_on(1)?;
            job.remove()?;
            if ended.status.success() {
                host.remove_image("checkpoint/job")?;
            }
            if *refuses_restore {
                let error = failure(Container::restore(host, "source", "checkpoint/source", 1).map(drop))?;
                ensure!(
                    error.contains("FIRN-CONFIG-INVALID") && error.contains("firn config check"),
                    "restore with {text:?}: {error}"
                );
                Container::known(host, "source").forget()?;
            } else {
                let (copy, _) = Container::restore(host, "source", "checkpoint/source", 1)?;
                copy.goes_on(1)?;
                copy.remove()?;
            }
        }
        host.configure("")?;
        host.remove_image("checkpoint/source")?;
        host.idle()
    })
}
