//! `firn history`: the transactions that have ended on this node.

pub mod args;
mod json;

use std::path::Path;

use anyhow::{Context, Result};
use firn_transaction::history::{Entry, HistoryDir};

use self::args::HistoryArgs;
use crate::output::{self, line};
use crate::text;

/// True: done.
pub fn run(args: &HistoryArgs) -> Result<bool> {
    let place = HistoryDir::new(&args.dir);
    let mut entries = read(&place, &args.dir)?;
    entries.retain(|entry| is_asked_for(args, entry));
    if args.json {
        output::json(&json::History::of(&place, &entries))?;
    } else if entries.is_empty() {
        line!("no such transaction has ended on this node");
    } else {
        const HEAD: [&str; 10] = [
            "BEGUN",
            "CONTAINER",
            "NAMESPACE",
            "OPERATION",
            "OUTCOME",
            "CODE",
            "TOOK",
            "GPU MEMORY",
            "IMAGE",
            "PHASE",
        ];
        output::table(HEAD, entries.iter().map(row));
        let logs = entries
            .iter()
            .filter_map(|entry| Some((entry, place.log_of(entry)?)));
        for (entry, log) in logs {
            let (time, container) = (text::time(entry.at / 1000), &entry.container);
            line!("CRIU's log of {container}, {time}: {}", log.display());
        }
    }
    Ok(true)
}

fn read(place: &HistoryDir, dir: &Path) -> Result<Vec<Entry>> {
    let history = place.read();
    let of = || format!("read the history in {}: try `sudo firn history`", dir.display());
    Ok(history.with_context(of)?.entries)
}

fn is_asked_for(args: &HistoryArgs, entry: &Entry) -> bool {
    let is = |wanted: &Option<String>, has: &str| wanted.as_deref().is_none_or(|wanted| wanted == has);
    is(&args.container, &entry.container)
        && is(&args.namespace, &entry.namespace)
        && args.since.as_ref().is_none_or(|since| entry.time >= *since)
        && !(args.failed && entry.is_done())
}

fn row(entry: &Entry) -> [String; 10] {
    let or_none = |text: &str| if text.is_empty() { "-" } else { text }.to_owned();
    let bytes = |bytes| match bytes {
        0 => "-".to_owned(),
        bytes => text::bytes(bytes),
    };
    [
        text::time(entry.at / 1000),
        entry.container.clone(),
        or_none(&entry.namespace),
        entry.kind.clone(),
        entry.outcome.clone(),
        or_none(&entry.code),
        text::seconds(entry.ms),
        bytes(entry.gpu_bytes),
        bytes(entry.image_bytes),
        phase(entry),
    ]
}

/// The phase that has failed, else the one that took longest.
fn phase(entry: &Entry) -> String {
    let longest = || entry.phases.iter().max_by(|a, b| a.ms.total_cmp(&b.ms));
    let failed = entry.phases.iter().find(|phase| phase.failed);
    match (failed, longest()) {
        (Some(phase), _) => format!("failed in {} after {}", phase.name, text::seconds(phase.ms)),
        (None, Some(phase)) => format!("{} {}", phase.name, text::seconds(phase.ms)),
        (None, None) => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests;
