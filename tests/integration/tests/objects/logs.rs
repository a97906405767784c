//! The logs of all objects in a container, as a command in it shows them: for containers of other clients.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use firn_node::wait_for;

use super::LIMIT;
use super::table::Object;

/// Shows the logs.
pub(crate) const SHOW: &str = "for log in /log-*; do echo \"= $log\"; cat $log; done";

/// The number that each object has reached, by its kind.
pub(crate) type Reached = BTreeMap<String, u64>;

/// Starts a process for each of these objects, with a log of its own.
pub(crate) fn start(objects: &[Object<'_>]) -> String {
    let start = |(kind, ..): &Object<'_>| format!("{} & ", process(kind));
    objects.iter().map(start).collect()
}

/// The process of a kind of objects, with a log of its own.
pub(super) fn process(kind: &str) -> String {
    format!("/bin/objects {kind} /object-{kind} /log-{kind}")
}

/// The capabilities that they need, as `CAP_SYS_ADMIN`.
pub(crate) fn capabilities<'o>(objects: &[Object<'o>]) -> BTreeSet<&'o str> {
    let words = objects.iter().flat_map(|object| object.2).copied();
    words.filter(|word| word.starts_with("CAP_")).collect()
}

/// Waits until each log has three lines more, which are numbers one after the other, beyond those that were
/// reached before. `show` shows the logs by [`SHOW`].
pub(crate) fn all_go_on(
    show: impl Fn() -> Result<String>,
    objects: &[Object<'_>],
    before: &Reached,
) -> Result<Reached> {
    let known = read(&show()?)?;
    let count = |logs: &BTreeMap<String, Vec<u64>>, kind: &str| logs.get(kind).map_or(0, Vec::len);
    let mut missing = Vec::new();
    let grown = wait_for("all logs to grow", LIMIT, || {
        let logs = read(&show()?)?;
        let is_short = |kind: &&str| {
            let reached = logs.get(*kind).and_then(|numbers| numbers.last());
            count(&logs, kind) < count(&known, kind) + 3 || reached <= before.get(*kind)
        };
        missing = objects.iter().map(|object| object.0).filter(is_short).collect();
        Ok(missing.is_empty().then_some(logs))
    });
    let grown = grown.with_context(|| {
        let shown = show().unwrap_or_else(|error| error.to_string());
        let begin: String = shown.chars().take(200).collect();
        format!("{missing:?} of {begin:?}")
    })?;
    for (kind, name, _) in objects {
        let new = &grown[*kind][count(&known, kind)..];
        let is_next = new.windows(2).all(|pair| pair[1] == pair[0] + 1);
        // The log of a copy is that of the checkpoint, and may lack what was written while that was made.
        ensure!(is_next && new.first() > before.get(*kind), "{name}: {new:?}");
    }
    let last = |(kind, numbers): (String, Vec<u64>)| Some((kind, numbers.last().copied()?));
    Ok(grown.into_iter().filter_map(last).collect())
}

/// What [`SHOW`] prints. The last line of a log may not be whole.
fn read(shown: &str) -> Result<BTreeMap<String, Vec<u64>>> {
    let mut logs = BTreeMap::new();
    for log in shown.split("= /log-").skip(1) {
        let (kind, text) = log.split_once('\n').context("no log")?;
        let numbers = numbers(text).with_context(|| kind.to_owned())?;
        logs.insert(kind.to_owned(), numbers);
    }
    Ok(logs)
}

/// The numbers of a log.
pub(super) fn numbers(log: &str) -> Result<Vec<u64>> {
    let whole = &log[..log.rfind('\n').map_or(0, |end| end + 1)];
    firn_lab::numbers(whole.lines())
}
