//! The report of an audit as text.

use super::findings::{Certainty, Signal};
use super::{Report, Verdict};
use crate::output::{Tone, line, print_toned};
use crate::text;

/// Prints the verdict, what was found, and sizes. `is_verbose`: also processes, GPUs, and in one line what
/// was not found.
pub(super) fn print(report: &Report, is_verbose: bool) {
    let (tone, verdict) = match report.verdict {
        Verdict::Can => (
            Tone::Good,
            "can be checkpointed and restored, as far as can be seen",
        ),
        Verdict::Cannot => (Tone::Bad, "cannot"),
        Verdict::Suspected => (
            Tone::Warning,
            "nothing refuses it, and something speaks against it",
        ),
    };
    print_toned(Some((tone, verdict)), &format!("verdict    {verdict}"));
    line!("subject    {}", report.subject);
    for signal in report.signals.iter().filter(|signal| !signal.is_quiet()) {
        print_signal(signal);
    }
    let processes = report.processes.iter().filter(|process| process.cuda);
    for process in processes.filter(|_| is_verbose) {
        let memory = process.gpu_bytes.map_or_else(
            || "GPU memory not reported".to_owned(),
            |b| text::bytes(b) + " of GPU memory",
        );
        let by = if process.interposed { ", interposed" } else { "" };
        line!("process    {} ({}), {memory}{by}", process.pid, process.comm);
    }
    for gpu in report.gpus.iter().filter(|_| is_verbose) {
        line!("gpu        {gpu}");
    }
    if report.gpu_bytes > 0 {
        let bytes = text::bytes(report.gpu_bytes);
        line!("memory     {bytes} of the host for GPU memory");
    }
    if let Some(bytes) = report.image_bytes {
        line!("image      {} or more", text::bytes(bytes));
    }
    if let Some(plan) = &report.plan {
        for pair in plan.map.pairs() {
            line!("map        {} -> {}", pair.old, pair.new);
        }
    }
    if !is_verbose {
        return;
    }
    let quiet = report.signals.iter().filter(|signal| signal.is_quiet());
    let quiet: Vec<&str> = quiet.map(|signal| signal.signal).collect();
    if !quiet.is_empty() {
        line!("none of    {}", quiet.join(", "));
    }
}

fn print_signal(signal: &Signal) {
    let Signal {
        signal,
        certainty,
        refused,
        source,
        failure,
        detail,
    } = signal;
    let word = match (refused, certainty) {
        (true, _) => "REFUSED",
        (_, Certainty::None) => "none",
        (_, Certainty::Suspected) => "suspected",
        (_, Certainty::Certain) => "there",
    };
    let detail = match (failure, detail.is_empty()) {
        (Some(failure), true) => format!(": {failure}"),
        (Some(failure), false) => format!(": {failure}; {detail}"),
        (None, false) => format!(": {detail}"),
        (None, true) => String::new(),
    };
    let tone = match (refused, certainty) {
        (true, _) => Some(Tone::Bad),
        (false, Certainty::None) => None,
        _ => Some(Tone::Warning),
    };
    let text = format!("{word:10} {signal} (by {source}){detail}");
    print_toned(tone.map(|tone| (tone, word)), &text);
}
