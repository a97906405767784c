//! The table of docs/guide/clients.md, which the suites write: what each client does with firn.
//!
//! A suite reports what it has seen an operation of a client come to. If the table claims anything else, the
//! trial fails. A suite that has run all its trials fails too if the table claims something in its name that
//! it has not seen. With [`WRITE`] in the environment the table is changed instead.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Mutex;

use anyhow::{Context, Result, ensure};

use crate::GpuHost;

/// Environment variable that has the table written.
const WRITE: &str = "FIRN_WRITE_CLIENTS";

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/guide/clients.md");

/// The lines before and after the rows.
const HEAD: &str = "| client | runtime | operation | outcome | suite |\n|---|---|---|---|---|\n";
const END: &str = "\n<!-- the suites write the table above -->\n";

/// A client of a version, and the name of the runtime that is firn.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claims {
    client: String,
    runtime: String,
}

/// What an operation came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome<'a> {
    /// It does what it does with the stock shim and a container without GPUs.
    Works,
    /// It does less, for a reason, and there may be a way round.
    Limited(&'a str),
    /// No shim can make it work; where that is reported.
    Broken(&'a str),
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    client: String,
    runtime: String,
    operation: String,
    outcome: String,
    suite: String,
}

/// What this program has reported.
static SEEN: Mutex<BTreeSet<Row>> = Mutex::new(BTreeSet::new());

impl Claims {
    /// Of a client (`docker`) whose version is as it reports itself (`v28.5.2+dfsg4`), for a runtime name.
    pub fn new(client: &str, version: &str, runtime: &str) -> Self {
        Self {
            client: format!("{client} {}", short(version)),
            runtime: format!("`{runtime}`"),
        }
    }

    /// Of a client that drives the node's containerd.
    pub fn on_containerd(host: &GpuHost, client: &str, version: &str, runtime: &str) -> Result<Self> {
        let mut claims = Self::new(client, version, runtime);
        claims.client += &format!(", containerd {}", short(&containerd_version(host)?));
        Ok(claims)
    }

    /// Of a client or interface that is the node's containerd's own.
    pub fn of_containerd(host: &GpuHost, client: &str, runtime: &str) -> Result<Self> {
        Ok(Self::new(client, &containerd_version(host)?, runtime))
    }

    /// Of the node's ctr.
    pub fn of_ctr(host: &GpuHost, runtime: &str) -> Result<Self> {
        Self::of_containerd(host, "ctr", runtime)
    }

    /// Reports what an operation has come to.
    pub fn saw(&self, operation: &str, outcome: Outcome<'_>) -> Result<()> {
        let row = Row {
            client: self.client.clone(),
            runtime: self.runtime.clone(),
            operation: operation.to_owned(),
            outcome: match outcome {
                Outcome::Works => "works".to_owned(),
                Outcome::Limited(why) => format!("limited: {why}"),
                Outcome::Broken(link) => format!("broken upstream: {link}"),
            },
            suite: format!("`{}`", suite()?),
        };
        SEEN.lock().expect("no trial panics here").insert(row.clone());
        on_page(|rows| {
            if writes() {
                rows.retain(|other| !other.is_about(&row));
                rows.push(row);
                return Ok(());
            }
            ensure!(
                rows.contains(&row),
                "docs/guide/clients.md claims {:?}, but seen was {row:?}\nhint: if that is right, run the \
                 suite with {WRITE}=1",
                rows.iter().find(|other| other.is_about(&row))
            );
            Ok(())
        })
    }

    /// As [`Self::saw`], for one that works.
    pub fn works(&self, operation: &str) -> Result<()> {
        self.saw(operation, Outcome::Works)
    }
}

/// After all trials of a suite have passed: whether the table claims nothing else in its name.
pub(crate) fn nothing_else_is_claimed(suite: &str) -> Result<()> {
    let suite = format!("`{suite}`");
    let seen = SEEN.lock().expect("no trial panics here").clone();
    on_page(|rows| {
        let is_left = |row: &Row| row.suite == suite && !seen.iter().any(|other| other.is_about(row));
        if writes() {
            rows.retain(|row| !is_left(row));
        }
        let left: Vec<&Row> = rows.iter().filter(|row| is_left(row)).collect();
        ensure!(
            left.is_empty(),
            "docs/guide/clients.md claims what the suite has not seen: {left:?}\nhint: run it with {WRITE}=1"
        );
        Ok(())
    })
}

impl Row {
    fn read(line: &str) -> Option<Self> {
        let cells: Vec<&str> = line
            .strip_prefix("| ")?
            .strip_suffix(" |")?
            .split(" | ")
            .collect();
        let [client, runtime, operation, outcome, suite] = cells[..] else {
            return None;
        };
        Some(Self {
            client: client.to_owned(),
            runtime: runtime.to_owned(),
            operation: operation.to_owned(),
            outcome: outcome.to_owned(),
            suite: suite.to_owned(),
        })
    }

    fn line(&self) -> String {
        let Self {
            client,
            runtime,
            operation,
            outcome,
            suite,
        } = self;
        format!("| {client} | {runtime} | {operation} | {outcome} | {suite} |")
    }

    /// Whether both are about the same operation of the same client.
    fn is_about(&self, other: &Self) -> bool {
        (&self.client, &self.runtime, &self.operation) == (&other.client, &other.runtime, &other.operation)
    }
}

fn writes() -> bool {
    std::env::var_os(WRITE).is_some()
}

/// Lets the rows of the page be looked at and changed. There is no page where the suites run without their
/// repository.
fn on_page(change: impl FnOnce(&mut Vec<Row>) -> Result<()>) -> Result<()> {
    if !Path::new(PAGE).exists() {
        return Ok(());
    }
    // Other suites may write it too.
    let file = File::open(PAGE)?;
    file.lock()?;
    let text = fs::read_to_string(PAGE)?;
    let (before, mut rows, after) = parts(&text)?;
    let known = rows.clone();
    change(&mut rows)?;
    if rows != known {
        rows.sort();
        let lines: Vec<String> = rows.iter().map(Row::line).collect();
        fs::write(PAGE, format!("{before}{HEAD}{}{END}{after}", lines.join("\n")))?;
    }
    Ok(())
}

/// What is before the table, its rows, and what is after it.
fn parts(page: &str) -> Result<(&str, Vec<Row>, &str)> {
    let table = || "docs/guide/clients.md has no table of the suites";
    let (before, rest) = page.split_once(HEAD).with_context(table)?;
    let (rows, after) = rest.split_once(END).with_context(table)?;
    let rows: Option<Vec<Row>> = rows.lines().map(Row::read).collect();
    Ok((
        before,
        rows.context("a row of clients.md has not five cells")?,
        after,
    ))
}

thread_local! {
    /// The suite whose trial this thread runs.
    static SUITE: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Runs a trial of this suite, in a thread of its own.
pub(crate) fn of_suite(name: &'static str, trial: impl FnOnce() -> Result<()>) -> Result<()> {
    SUITE.set(Some(name));
    trial()
}

fn suite() -> Result<&'static str> {
    SUITE.get().context("this thread runs no trial of a suite")
}

fn containerd_version(host: &GpuHost) -> Result<String> {
    let shown = host.node().run(&["containerd", "--version"])?.stdout;
    // `containerd NAME VERSION COMMIT`
    Ok(shown
        .split_whitespace()
        .nth(2)
        .context("containerd's version")?
        .to_owned())
}

/// `28.5` of `v28.5.2+dfsg4`.
fn short(version: &str) -> String {
    let numbers = version.trim().trim_start_matches('v');
    numbers.splitn(3, '.').take(2).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_read_and_written_alike() {
        let row = "| docker 28.5, containerd 2.1 | `firn` | `start` | limited: so | `docker` |";
        let page = format!("text\n{HEAD}{row}\n{row}{END}more\n");
        let (before, rows, after) = parts(&page).unwrap();
        assert_eq!((before, after), ("text\n", "more\n"));
        assert_eq!(rows.iter().map(Row::line).collect::<Vec<_>>(), [row, row]);
        assert!(rows[0].is_about(&rows[1]));
        assert!(parts("no table").is_err());
    }

    #[test]
    fn versions_are_shown_without_their_last_number() {
        assert_eq!(short("v28.5.2+dfsg4\n"), "28.5");
        assert_eq!(short("1.7.24~ds1"), "1.7");
    }
}
