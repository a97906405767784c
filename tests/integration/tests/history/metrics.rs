//! The metrics, as Prometheus and node_exporter get them.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;

use anyhow::{Result, ensure};
use firn_lab::{Container, GpuHost, failure, on};
use firn_node::Platform;

use super::{history_of, host};

const FILE: &str = "/var/lib/textfile/firn.prom";

/// Whether the text has this sample. Its labels may be in another order.
pub fn has(metrics: &str, sample: &str) -> bool {
    let parts = |line: &str| -> Option<(String, BTreeSet<String>, String)> {
        let (head, value) = line.rsplit_once(' ')?;
        let (name, labels) = head.trim_end_matches('}').split_once('{').unwrap_or((head, ""));
        let labels = labels.split(',').map(str::to_owned).collect();
        Some((name.to_owned(), labels, value.to_owned()))
    };
    let wanted = parts(sample);
    metrics
        .lines()
        .any(|line| !line.starts_with('#') && parts(line) == wanted)
}

pub fn metrics_are_printed_and_written(platform: Platform) -> Result<()> {
    on([host(platform, "hi-metrics", 1)?], |[host]| {
        let job = Container::count_with(
            host,
            "job",
            &["0"],
            1,
            &["--annotation", "firn.dev/pause=release-gpu"],
            &[],
        )?;
        job.goes_on(3)?;
        let metrics = || Ok::<_, anyhow::Error>(host.node().run(&["firn", "metrics"])?.stdout);
        let first = metrics()?;
        ensure!(has(&first, "firn_gpu_containers{state=\"running\"} 1"), "{first}");
        ensure!(!first.contains("firn_transactions_total"), "{first}");
        job.task(&["pause"])?;
        history_of(host, &[], 1)?;
        let parked = metrics()?;
        for sample in [
            "firn_gpu_containers{state=\"parked\"} 1",
            "firn_gpu_containers{state=\"running\"} 0",
            "firn_transactions_total{kind=\"pause\",outcome=\"done\",code=\"\"} 1",
            "firn_transaction_duration_seconds_count{kind=\"pause\"} 1",
            "firn_transaction_phase_duration_seconds_count{kind=\"pause\",phase=\"gpu-checkpoint\"} 1",
            "firn_transactions_running 0",
        ] {
            ensure!(has(&parked, sample), "no {sample} in\n{parked}");
        }
        expect_written(host)?;
        job.task(&["resume"])?;
        let resumed = metrics()?;
        ensure!(
            has(&resumed, "firn_gpu_containers{state=\"running\"} 1"),
            "{resumed}"
        );
        let still = Container::count_with(host, "still", &["0"], 1, &[], &[])?;
        still.task(&["pause"])?;
        let paused = metrics()?;
        for state in ["paused", "running"] {
            let sample = format!("firn_gpu_containers{{state=\"{state}\"}} 1");
            ensure!(has(&paused, &sample), "no {sample} in\n{paused}");
        }
        still.task(&["resume"])?;
        still.remove()?;
        job.remove()
    })
}

/// The file for node_exporter is whole, for everybody to read, and alone.
fn expect_written(host: &GpuHost) -> Result<()> {
    let node = host.node();
    node.run(&["mkdir", "/var/lib/textfile"])?;
    for _ in 0..2 {
        node.run(&["firn", "metrics", "--textfile", FILE])?;
        let text = node.read(FILE)?;
        ensure!(
            text.ends_with('\n') && has(&text, "firn_gpu_containers{state=\"parked\"} 1"),
            "{text}"
        );
        ensure!(
            node.path(FILE).metadata()?.mode() & 0o777 == 0o644,
            "not for node_exporter to read"
        );
        ensure!(
            node.path("/var/lib/textfile").read_dir()?.count() == 1,
            "another file is left"
        );
    }
    let other = failure(node.run(&["firn", "metrics", "--textfile", "/var/lib/textfile/firn.txt"]))?;
    ensure!(
        other.contains("hint: name it /var/lib/textfile/firn.prom"),
        "{other}"
    );
    Ok(())
}
