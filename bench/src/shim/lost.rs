//! Events that a shim has to publish and does not.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result};
use firn_lab::IMAGE;
use firn_node::wait_for;
use serde_json::Value;

use super::{Lab, Progress, Record, Shim};

/// Containers of each shim.
pub(super) const RUNS: u32 = 100;

/// The events of each container: its exit and its deletion.
const TOPICS: [&str; 2] = ["/tasks/exit", "/tasks/delete"];

/// Deadline of the end of the last shim.
const LIMIT: Duration = Duration::from_secs(30);

/// `ctr run --rm` of a program that ends at once, again and again.
pub(super) fn events(lab: &Lab<'_>, record: &mut Record, progress: &mut Progress) -> Result<()> {
    let node = lab.node();
    let events = lab.host.watch_events()?;
    for round in 0..RUNS {
        for shim in Shim::in_turn(round) {
            node.run(&lab.run(shim, &["--rm"], &[IMAGE, &id(shim, round), "true"]))?;
            progress.step();
        }
    }
    // A shim that has ended publishes no more events.
    wait_for("the end of the last shim", LIMIT, || {
        let mut left = node.processes().into_iter();
        let shim = left.find(|process| process.command.starts_with("containerd-shim"));
        Ok(shim.is_none().then_some(()))
    })?;
    let published = published(&events.until_now(lab.host)?);
    for shim in [Shim::Stock, Shim::Firn] {
        record.add("lost-events", shim, f64::from(lost(shim, &published)?));
    }
    Ok(())
}

fn id(shim: Shim, round: u32) -> String {
    format!("short-{}-{round}", shim.short())
}

/// Topics and containers of lines of `ctr events`: time, namespace, topic, and the event as JSON.
fn published(lines: &[String]) -> BTreeSet<(String, String)> {
    let event = |line: &String| {
        let (head, json) = line.split_once('{')?;
        let topic = head.split_whitespace().last()?;
        let event: Value = serde_json::from_str(&format!("{{{json}")).ok()?;
        Some((topic.to_owned(), event["container_id"].as_str()?.to_owned()))
    };
    lines.iter().filter_map(event).collect()
}

/// Number of events of a shim's containers that are missing.
fn lost(shim: Shim, published: &BTreeSet<(String, String)>) -> Result<u32> {
    let due = (0..RUNS).flat_map(|round| TOPICS.map(|topic| (topic.to_owned(), id(shim, round))));
    let lost = due.filter(|event| !published.contains(event)).count();
    u32::try_from(lost).context("more events than containers")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(topic: &str, container: &str) -> String {
        format!(
            "2026-01-01 00:00:00.5 +0000 UTC default {topic} {{\"container_id\":\"{container}\",\"pid\":7}}\n"
        )
    }

    #[test]
    fn an_event_that_was_not_published_is_lost() {
        let all = |shim| -> Vec<String> {
            let of = |round| TOPICS.map(|topic| line(topic, &id(shim, round)));
            (0..RUNS).flat_map(of).collect()
        };
        let mut lines = all(Shim::Firn);
        lines.push(line("/tasks/start", &id(Shim::Stock, 0)));
        lines.push("no event\n".to_owned());
        assert_eq!(lost(Shim::Firn, &published(&lines)).unwrap(), 0);
        assert_eq!(lost(Shim::Stock, &published(&lines)).unwrap(), 2 * RUNS);
        lines.remove(3);
        // Twice the same is still one.
        lines.push(lines[0].clone());
        assert_eq!(lost(Shim::Firn, &published(&lines)).unwrap(), 1);
    }
}
