//! The entries of the history.

use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result, bail, ensure};
use firn_lab::{Container, FIRN, GpuHost, failure, on};
use firn_node::{Platform, wait_for};
use serde_json::{Value, json};

use super::{DIR, LIMIT, history, history_of, host, outcomes, phases};

/// Fails the next checkpoint in the driver.
const FAULT: [&str; 6] = [
    "--call",
    "checkpoint",
    "--error",
    "CUDA_ERROR_UNKNOWN",
    "--times",
    "1",
];

pub fn transactions_are_kept_with_phases_and_codes(platform: Platform) -> Result<()> {
    on([host(platform, "hi-kept", 1)?], |[host]| {
        let parks = ["--annotation", "firn.dev/pause=release-gpu"];
        let shown = host.node().run(&["firn", "history"])?.stdout;
        ensure!(shown.contains("no such transaction"), "{shown}");
        let job = Container::count_with(host, "job", &["0"], 1, &parks, &[])?;
        job.goes_on(3)?;
        ensure!(!host.node().path(DIR).exists(), "a history of nothing");
        let log = host.log_length()?;
        job.checkpoint("checkpoint/job")?;
        host.fault(&FAULT)?;
        failure(job.checkpoint("checkpoint/failed"))?;
        host.no_faults()?;
        job.goes_on(3)?;
        job.task(&["pause"])?;
        job.task(&["resume"])?;
        job.goes_on(3)?;
        job.remove()?;
        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        let all = wait_for("the restore in the history", LIMIT, || {
            let all = history(host, &[])?;
            let is_last = outcomes(&all).iter().any(|kind| kind == "restore done");
            Ok(is_last.then_some(all))
        })?;
        // ctr pauses and resumes its container around a checkpoint: this one gives its GPU free then.
        let kinds = outcomes(&all);
        for expected in ["checkpoint done", "pause done", "resume done", "restore done"] {
            ensure!(
                kinds.iter().any(|kind| kind == expected),
                "no {expected} in {kinds:?}"
            );
        }
        is_complete(host, &all)?;
        failed_one(host)?;
        expect_logged(host, log, &all)?;
        copy.remove()
    })
}

/// The checkpoint and the restore have what is promised of them.
fn is_complete(host: &GpuHost, all: &[Value]) -> Result<()> {
    let of = |kind: &str| {
        let is = |entry: &&Value| entry["kind"] == kind && entry["outcome"] == "done";
        all.iter().find(is).with_context(|| format!("no {kind}"))
    };
    for (kind, expected) in [
        ("checkpoint", &["inspect", "criu-dump", "manifest"][..]),
        ("restore", &["criu-restore", "gpu-restore", "continue"]),
        ("pause", &["gpu-lock", "gpu-checkpoint"]),
        ("resume", &["gpu-restore", "gpu-unlock"]),
    ] {
        let entry = of(kind)?;
        let (names, failed) = phases(entry);
        let has_all = expected.iter().all(|phase| names.contains(phase));
        ensure!(has_all && failed.is_none(), "{kind}: {entry}");
        ensure!(
            entry["container"] == "job" && entry["namespace"] == "default",
            "{entry}"
        );
        ensure!(
            entry["time"].as_str().is_some_and(|time| time.ends_with('Z')),
            "{entry}"
        );
        let sum: f64 = entry["phases"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|phase| phase["ms"].as_f64())
            .sum();
        let ms = entry["ms"].as_f64().context("no ms")?;
        ensure!(
            ms > 0.0 && sum > 0.0 && sum <= ms + 1.0,
            "{sum} of {ms} ms: {entry}"
        );
    }
    ensure!(
        of("pause")?["gpu_bytes"].as_u64() >= Some(8 << 20),
        "{}",
        of("pause")?
    );
    for kind in ["checkpoint", "restore"] {
        ensure!(
            of(kind)?["image_bytes"].as_u64() >= Some(8 << 20),
            "{}",
            of(kind)?
        );
    }
    ensure!(of("pause")?["image"] == firn_lab::IMAGE, "{}", of("pause")?);
    for name in ["", "/transactions.jsonl"] {
        let mode = host.node().path(format!("{DIR}{name}")).metadata()?.mode() & 0o7777;
        ensure!(
            mode == if name.is_empty() { 0o700 } else { 0o600 },
            "{name} has mode {mode:o}"
        );
    }
    Ok(())
}

/// The failed transaction has its code, and is found by options.
fn failed_one(host: &GpuHost) -> Result<()> {
    let failed = history(host, &["--failed", "job"])?;
    let [failed] = failed.as_slice() else {
        anyhow::bail!("{failed:?}");
    };
    ensure!(
        failed["code"]
            .as_str()
            .is_some_and(|code| code.starts_with("FIRN-")),
        "{failed}"
    );
    ensure!(phases(failed).1 == Some("gpu-checkpoint"), "{failed}");
    let shown = host.node().run(&["firn", "history", "--failed"])?.stdout;
    ensure!(shown.contains("failed in gpu-checkpoint after"), "{shown}");
    ensure!(
        history(host, &["--since", "1h"])?.len() > 3,
        "nothing since an hour"
    );
    for nothing in [&["other"][..], &["--since", "2999-01-01"], &["-n", "k8s.io"]] {
        ensure!(history(host, nothing)?.is_empty(), "{nothing:?}");
    }
    Ok(())
}

/// Every line of a transaction names the container and the transaction; all transactions have lines.
fn expect_logged(host: &GpuHost, since: usize, all: &[Value]) -> Result<()> {
    let log = host.log_since(since)?;
    let lines = || log.lines().filter(|line| line.contains("msg=\"op="));
    ensure!(lines().count() > 10, "{log}");
    for line in lines() {
        ensure!(line.contains(" container=job transaction="), "{line}");
    }
    for entry in all {
        let id = entry["id"].as_str().context("no id")?;
        ensure!(log.contains(&format!("transaction={id}")), "no line of {entry}");
    }
    // The error that the client got.
    let error = log
        .lines()
        .find(|line| line.contains("msg=\"pause: FIRN-") || line.contains("msg=\"checkpoint: FIRN-"));
    let error = error.with_context(|| format!("no error in {log}"))?;
    ensure!(error.contains(" container=job transaction="), "{error}");
    Ok(())
}

/// The bundle is removed with the container.
pub fn criu_s_log_outlives_the_bundle(platform: Platform) -> Result<()> {
    const CAUSE: &str = "Unknown socket collected (family 40)";
    on([host(platform, "hi-log", 1)?], |[host]| {
        let node = host.node();
        let command = ["objects", "vsock", "/object", "/log"];
        let job = Container::run(host, "job", &["--runtime", FIRN], &command)?;
        wait_for("the socket", LIMIT, || {
            Ok(job.exec(&["test", "-s", "/log"]).ok().map(drop))
        })?;
        failure(job.checkpoint("checkpoint/job"))?;
        job.remove()?;
        let all = wait_for("the failure in the history", LIMIT, || {
            let all = history(host, &["--failed"])?;
            Ok((!all.is_empty()).then_some(all))
        })?;
        let [Value::String(log)] = &all
            .iter()
            .map(|entry| entry["criu_log"].clone())
            .collect::<Vec<_>>()[..]
        else {
            bail!("not one log: {all:?}");
        };
        ensure!(node.read(log)?.contains(CAUSE), "{log} lacks the cause");
        let mode = node.path(log).metadata()?.mode() & 0o777;
        ensure!(mode == 0o600, "others may read {log}: {mode:o}");
        let shown = node.run(&["firn", "history"])?.stdout;
        ensure!(shown.contains(&format!(": {log}\n")), "{shown}");
        // The dump does not fail in CRIU.
        host.fault(&FAULT)?;
        let other = Container::count(host, "other", &["0"], 1, &[])?;
        failure(other.checkpoint("checkpoint/other"))?;
        let failed = wait_for("the other failure", LIMIT, || {
            let all = history(host, &["--failed"])?;
            Ok((all.len() == 2).then_some(all))
        })?;
        ensure!(failed[1]["criu_log"].is_null(), "{failed:?}");
        node.run(&["rm", log])?;
        let shown = node.run(&["firn", "history"])?.stdout;
        ensure!(!shown.contains("CRIU's log"), "{shown}");
        other.remove()
    })
}

pub fn a_killed_shim_is_remembered(platform: Platform) -> Result<()> {
    on([host(platform, "hi-killed", 1)?], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        host.fault(&["--call", "checkpoint", "--hang"])?;
        let mut client = job.begin_checkpoint("checkpoint/job")?;
        wait_for("the driver's call", LIMIT, || {
            let status = host.node().run(&["firn", "ps"])?.stdout;
            Ok(status.contains("gpu-checkpoint").then_some(()))
        })?;
        let running = host.node().run(&["firn", "metrics"])?.stdout;
        ensure!(running.contains("\nfirn_transactions_running 1\n"), "{running}");
        ensure!(running.contains("phase=\"gpu-checkpoint\""), "{running}");
        host.kill_shim("job")?;
        let _ = client.wait()?;
        host.no_faults()?;
        let killed = wait_for("the entry", LIMIT, || {
            Ok(history(host, &["job"])?.into_iter().next())
        })?;
        ensure!(
            outcomes(std::slice::from_ref(&killed)) == ["checkpoint killed"],
            "{killed}"
        );
        ensure!(phases(&killed).1 == Some("gpu-checkpoint"), "{killed}");
        ensure!(killed["namespace"] == "default", "{killed}");
        job.forget()?;
        ensure!(history(host, &[])?.len() == 1, "more than one entry");
        Ok(())
    })
}

pub fn a_full_disk_costs_the_history_alone(platform: Platform) -> Result<()> {
    on([host(platform, "hi-full", 1)?], |[host]| {
        let node = host.node();
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        node.run(&["mkdir", "-p", DIR])?;
        node.run(&["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", DIR])?;
        job.goes_on(3)?;
        job.checkpoint("checkpoint/a")?;
        // Room for less than a line is left.
        let fill =
            format!("cd {DIR} && dd if=/dev/zero of=fill bs=1k 2>/dev/null; truncate -s -100 fill; true");
        node.run(&["sh", "-c", &fill])?;
        let log = host.log_length()?;
        for nth in 0..6 {
            job.checkpoint(&format!("checkpoint/full-{nth}"))?;
        }
        job.goes_on(3)?;
        let log = host.log_since(log)?;
        ensure!(
            log.contains("into the history: ") && log.contains("No space left"),
            "{log}"
        );
        node.run(&["rm", &format!("{DIR}/fill")])?;
        job.checkpoint("checkpoint/b")?;
        let kept = outcomes(&history_of(host, &[], 2)?);
        ensure!(kept.len() >= 2 && kept.len() < 8, "{kept:?}");
        ensure!(kept.iter().all(|kept| kept == "checkpoint done"), "{kept:?}");
        let text = node.read(format!("{DIR}/transactions.jsonl"))?;
        let whole = |line: &str| serde_json::from_str::<Value>(line).is_ok();
        ensure!(text.lines().all(whole), "half a line is left: {text}");
        node.run(&["umount", DIR])?;
        job.remove()
    })
}

pub fn the_history_is_bounded_whatever_is_in_it(platform: Platform) -> Result<()> {
    on([host(platform, "hi-bound", 1)?], |[host]| {
        let node = host.node();
        let hostile = "x\u{1b}[2J\"} 1\n# TYPE y\\";
        let line = |nth: usize| {
            let entry = json!({
                "id": format!("{nth:036}"), "kind": "checkpoint", "container": hostile, "outcome": "failed",
                "code": "FIRN-TEST", "namespace": "default", "time": "2026-01-01T00:00:00.000000000Z",
                "ms": 1.0, "image": "i".repeat(2000),
            });
            entry.to_string() + "\n"
        };
        let full: String = (0..400).map(line).collect();
        let before: String = (400..800).map(line).collect();
        node.run(&["mkdir", "-p", DIR])?;
        // Larger than a file may be: the next entry begins another one.
        node.write(
            format!("{DIR}/transactions.jsonl"),
            full + &" ".repeat(1 << 19) + "\n",
        )?;
        node.write(format!("{DIR}/transactions.1.jsonl"), before)?;
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        job.checkpoint("checkpoint/job")?;
        let all = history_of(host, &[], 401)?;
        ensure!(all.len() == 401, "{} entries", all.len());
        ensure!(all[0]["container"] == hostile, "{}", all[0]);
        ensure!(history(host, &["job"])?.len() == 1, "the new entry is missing");
        let mut bytes = 0;
        for file in node.path(DIR).read_dir()? {
            bytes += file?.metadata()?.len();
        }
        ensure!(bytes < 3 << 20, "{bytes} bytes");
        let shown = node.run(&["firn", "history"])?.stdout;
        ensure!(
            !shown.contains('\u{1b}') && shown.contains("x\\u{1b}[2J"),
            "{shown}"
        );
        ensure!(shown.lines().count() == 402, "{} lines", shown.lines().count());
        // Nothing that was counted is lost with the file that is gone.
        let metrics = node.run(&["firn", "metrics"])?.stdout;
        for counted in [
            "firn_transactions_total{code=\"FIRN-TEST\",kind=\"checkpoint\",outcome=\"failed\"} 800",
            "firn_transactions_total{code=\"\",kind=\"checkpoint\",outcome=\"done\"} 1",
        ] {
            ensure!(
                super::metrics::has(&metrics, counted),
                "no {counted} in\n{metrics}"
            );
        }
        job.remove()
    })
}
