//! What a shell proposes.

use anyhow::{Result, ensure};
use firn_lab::{GpuHost, on};
use firn_node::Platform;

use super::{counter, host};

/// What a shell proposes for the last word of a command.
fn proposed(host: &GpuHost, command: &str) -> Result<String> {
    let last = command.split(' ').count() - 1;
    let ask = format!("FIRN_COMPLETE=bash _CLAP_COMPLETE_INDEX={last} firn -- {command} 2>&1");
    Ok(host.node().run(&["sh", "-c", &ask])?.stdout)
}

pub fn a_shell_proposes_containers_and_checkpoints(platform: Platform) -> Result<()> {
    on([host(platform, "to-tab", 1)?], |[host]| {
        let job = counter(host)?;
        host.firn(&["checkpoint", "job", "checkpoint/one"])?;
        host.firn(&["checkpoint", "job", "/srv/job.tar"])?;
        for (command, expected) in [
            ("firn checkpoint ''", "job"),
            ("firn move jo", "job"),
            ("firn inspect j", "job"),
            ("firn restore c", "checkpoint/one"),
            ("firn restore /srv/j", "/srv/job.tar"),
            ("firn images prune ''", "checkpoint/one"),
            ("firn restore checkpoint/one --into ''", "job"),
            ("firn restore -n other c", ""),
            ("firn checkpoint -n other ''", ""),
            ("firn restore -a /srv/none c", ""),
            ("firn ps ''", "job"),
            ("firn checkpo", "checkpoint"),
        ] {
            let shown = proposed(host, command)?;
            let is_option = |word: &&str| !word.starts_with('-');
            let words: Vec<&str> = shown.lines().filter(is_option).collect();
            ensure!(words.join(" ") == expected, "{command}: {shown}");
        }
        // The variable alone changes no command.
        let version = host
            .node()
            .run(&["sh", "-c", "FIRN_COMPLETE=bash firn version"])?
            .stdout;
        ensure!(version.starts_with("firn 0."), "{version}");
        job.remove()?;
        host.remove_image("checkpoint/one")?;
        host.idle()
    })
}
