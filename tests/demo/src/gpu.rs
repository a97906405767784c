//! The demo on this machine's own GPUs and container tools.
//!
//! The demo is a case of `tests/gpu/run.py`, the script for GPU machines, which runs a containerd of its own
//! and removes what it sets up. This module gives it firn's programs and a test image, and prints the record
//! that it writes.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::figures::{Step, before_and_after, position};
use crate::printer::Printer;

/// The case, and the size of its buffer in GiB.
const CASE: &str = "size-0.5";
const SIZE: &str = "0.5";

/// Programs that the machine must have.
const TOOLS: [&str; 5] = ["containerd", "ctr", "runc", "criu", "python3"];

/// The version of the kernel module.
const DRIVER: &str = "/proc/driver/nvidia/version";

/// Where run.py unpacks its bundle, in place of the files of an earlier run.
const UNPACKED: &str = "/opt/firn-gpu";

/// Runs the case and prints its record; an error if the case failed.
pub(crate) fn run(
    printer: &Printer,
    json: bool,
    workspace: &Path,
    build: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    check_machine(Path::new(DRIVER), &std::env::var_os("PATH").unwrap_or_default())?;
    let work = workspace.join("target/demo-gpu");
    let (stage, out) = (work.join("stage"), work.join("out"));
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("remove {}", work.display()))?;
    }
    fs::create_dir_all(&out).with_context(|| format!("make {}", out.display()))?;
    printer.line("building firn and the workload");
    build(&stage)?;
    let ran = printer.step("running on this machine's GPUs", || play(workspace, &stage, &out));
    let removed = fs::remove_dir_all(UNPACKED);
    ran.with_context(|| format!("see {}", out.display()))?;
    removed.with_context(|| format!("remove {UNPACKED}"))?;
    let records = fs::read_to_string(out.join("cases.jsonl")).context("read the record")?;
    let record = find(&records)?;
    print(&record, printer)?;
    if json {
        println!("{record}");
    }
    Ok(())
}

/// Refuses a machine on which it cannot work.
fn check_machine(driver: &Path, path: &std::ffi::OsStr) -> Result<()> {
    ensure!(
        driver.exists(),
        "this machine has no NVIDIA driver ({} is not there)\n\
         hint: without --gpu the demo uses simulated GPUs",
        driver.display()
    );
    let missing: Vec<&str> = TOOLS
        .into_iter()
        .filter(|tool| !std::env::split_paths(path).any(|dir| dir.join(tool).is_file()))
        .collect();
    ensure!(
        missing.is_empty(),
        "this machine lacks {}\nhint: install them, or leave --gpu out: test nodes bring their own",
        missing.join(", ")
    );
    Ok(())
}

fn play(workspace: &Path, stage: &Path, out: &Path) -> Result<()> {
    let log = out.join("run.out");
    let file = File::create(&log).with_context(|| format!("make {}", log.display()))?;
    let status = Command::new("python3")
        .arg(workspace.join("tests/gpu/run.py"))
        .arg("--bundle")
        .arg(stage)
        .arg("--out")
        .arg(out)
        .args(["--cases", CASE, "--sizes", SIZE])
        .stdout(file.try_clone()?)
        .stderr(file)
        .status()
        .context("run python3")?;
    if !status.success() {
        let output = fs::read_to_string(&log).unwrap_or_default();
        let lines: Vec<&str> = output.lines().collect();
        bail!(
            "the demo failed:\n{}",
            lines[lines.len().saturating_sub(12)..].join("\n")
        );
    }
    Ok(())
}

/// The record of the case among all that run.py wrote.
fn find(records: &str) -> Result<Value> {
    let mut parsed = records
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let record = parsed.find(|record| record["case"] == CASE);
    let record = record.with_context(|| format!("there is no record of {CASE}"))?;
    ensure!(record["result"] == "ok", "{CASE}: {}", record["result"]);
    Ok(record)
}

fn print(record: &Value, printer: &Printer) -> Result<()> {
    for operation in ["checkpoint", "restore"] {
        printer.title(&format!("ctr containers {operation}"));
        printer.line(step(record, operation)?.table().trim_end());
    }
    let word = |name: &str| match &record[name] {
        Value::Array(words) => words
            .iter()
            .filter_map(Value::as_str)
            .collect::<Vec<_>>()
            .join(" "),
        Value::String(word) => word.clone(),
        other => other.to_string(),
    };
    printer.title("The proof");
    printer.line(&before_and_after(&[
        ("GPU", &word("uuid_before"), &word("uuid_after")),
        ("iteration", &word("iter_before"), &word("iter_after")),
    ]));
    printer.line(&format!(
        "      Iteration {} has the checksum {} before (the source ran on after the checkpoint) and {} \
         after;\n\
         \x20     none is missing or repeated, and all {} GiB were correct in every iteration.",
        word("checksum_of_iter"),
        word("checksum_source"),
        word("checksum_restored"),
        word("gib"),
    ));
    Ok(())
}

fn step(record: &Value, operation: &str) -> Result<Step> {
    let seconds = record[format!("{operation}_s")].as_f64().context("no time")?;
    let phases = record[format!("{operation}_ms")]
        .as_object()
        .context("no phases")?;
    let (mut known, mut total) = (Vec::new(), 0.0);
    for (name, ms) in phases {
        let ms = ms.as_f64().unwrap_or_default();
        match name.as_str() {
            "total" => total = ms,
            _ => known.push((name.clone(), ms)),
        }
    }
    // An object has no order; the phases have.
    known.sort_by_key(|(name, _)| position(name));
    Ok(Step::new(seconds * 1000.0, known, total))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORDS: &str = r#"{"machine": {"cpus": 8}}
        {"case": "size-0.5", "gib": 0.5, "checkpoint_s": 1.5,
         "checkpoint_ms": {"gpu-lock": 3.5, "criu-dump": 1000.0, "total": 1100.0}, "result": "ok"}"#;

    #[test]
    fn the_record_of_the_case_is_found() {
        let records = RECORDS.replace(",\n         ", ", ");
        let step = step(&find(&records).unwrap(), "checkpoint").unwrap();
        let table = step.table();
        assert!(
            table.contains("   3.5 ms  gpu-lock") && table.contains(" 400.0 ms  the rest"),
            "{table}"
        );
        assert!(table.find("gpu-lock") < table.find("criu-dump"), "{table}");
        assert!(find(&records.replace("\"ok\"", "\"FAILED\"")).is_err());
        assert!(find("").is_err());
    }

    #[test]
    fn a_machine_without_driver_or_tools_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |driver: &Path| {
            check_machine(driver, dir.path().as_os_str())
                .unwrap_err()
                .to_string()
        };
        assert!(refused(&dir.path().join("none")).contains("no NVIDIA driver"));
        for tool in ["containerd", "ctr", "runc"] {
            fs::write(dir.path().join(tool), "").unwrap();
        }
        assert!(refused(dir.path()).contains("lacks criu, python3"));
    }
}
