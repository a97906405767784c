//! The tables that the suites write: what each client does with firn (docs/guide/clients.md), and what
//! becomes of each object that a container may hold (docs/guide/objects.md).
//!
//! A suite reports what it has seen. If the table claims anything else, the trial fails. A suite that has run
//! all its trials fails too if the table claims something in its name that it has not seen. With [`WRITE`] in
//! the environment the table is changed instead.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Mutex;

use anyhow::{Context, Result, ensure};

use crate::GpuHost;

/// Environment variable that has the tables written.
const WRITE: &str = "FIRN_WRITE_CLIENTS";

/// A page with a table. The last cell of a row is the suite, the one before it what was seen, and the others
/// what it is about.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Page {
    name: &'static str,
    /// The lines before the rows.
    head: &'static str,
}

static CLIENTS: Page = Page {
    name: "docs/guide/clients.md",
    head: "| client | runtime | operation | outcome | suite |\n|---|---|---|---|---|\n",
};

static OBJECTS: Page = Page {
    name: "docs/guide/objects.md",
    head: "| object | container | outcome | suite |\n|---|---|---|---|\n",
};

/// The line after the rows.
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

/// The cells of a row.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Row(Vec<String>);

/// What this program has reported.
static SEEN: Mutex<BTreeSet<(&Page, Row)>> = Mutex::new(BTreeSet::new());

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
        let outcome = match outcome {
            Outcome::Works => "works".to_owned(),
            Outcome::Limited(why) => format!("limited: {why}"),
            Outcome::Broken(link) => format!("broken upstream: {link}"),
        };
        CLIENTS.saw(&[&self.client, &self.runtime, operation], &outcome)
    }

    /// As [`Self::saw`], for one that works.
    pub fn works(&self, operation: &str) -> Result<()> {
        self.saw(operation, Outcome::Works)
    }
}

/// Reports what has become of an object in a container of a kind.
pub fn saw_object(object: &str, container: &str, outcome: &str) -> Result<()> {
    OBJECTS.saw(&[object, container], outcome)
}

/// After all trials of a suite have passed: whether a table claims nothing else in its name.
pub(crate) fn nothing_else_is_claimed(suite: &str) -> Result<()> {
    let suite = format!("`{suite}`");
    let seen = SEEN.lock().expect("no trial panics here").clone();
    for page in [&CLIENTS, &OBJECTS] {
        let is_seen = |row: &Row| seen.iter().any(|(of, other)| *of == page && other.is_about(row));
        page.change(|rows| {
            let is_left = |row: &Row| row.0.last() == Some(&suite) && !is_seen(row);
            if writes() {
                rows.retain(|row| !is_left(row));
            }
            let left: Vec<&Row> = rows.iter().filter(|row| is_left(row)).collect();
            ensure!(
                left.is_empty(),
                "{} claims what the suite has not seen: {left:?}\nhint: run it with {WRITE}=1",
                page.name
            );
            Ok(())
        })?;
    }
    Ok(())
}

impl Page {
    fn saw(&'static self, about: &[&str], outcome: &str) -> Result<()> {
        let suite = format!("`{}`", suite()?);
        let cells = about.iter().copied().chain([outcome, &suite]);
        let row = Row(cells.map(str::to_owned).collect());
        SEEN.lock()
            .expect("no trial panics here")
            .insert((self, row.clone()));
        self.change(|rows| {
            if writes() {
                rows.retain(|other| !other.is_about(&row));
                rows.push(row);
                return Ok(());
            }
            ensure!(
                rows.contains(&row),
                "{} claims {:?}, but seen was {row:?}\nhint: if that is right, run the suite with {WRITE}=1",
                self.name,
                rows.iter().find(|other| other.is_about(&row))
            );
            Ok(())
        })
    }

    /// Lets the rows be looked at and changed. There is no page where the suites run without their
    /// repository.
    fn change(&self, change: impl FnOnce(&mut Vec<Row>) -> Result<()>) -> Result<()> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../..")
            .join(self.name);
        if !path.exists() {
            return Ok(());
        }
        // Other suites may write it too.
        let file = File::open(&path)?;
        file.lock()?;
        let text = fs::read_to_string(&path)?;
        let (before, mut rows, after) = self.parts(&text)?;
        let known = rows.clone();
        change(&mut rows)?;
        if rows != known {
            rows.sort();
            let lines: Vec<String> = rows.iter().map(Row::line).collect();
            let head = self.head;
            fs::write(path, format!("{before}{head}{}{END}{after}", lines.join("\n")))?;
        }
        Ok(())
    }

    /// What is before the table, its rows, and what is after it.
    fn parts<'a>(&self, page: &'a str) -> Result<(&'a str, Vec<Row>, &'a str)> {
        let table = || format!("{} has no table of the suites", self.name);
        let (before, rest) = page.split_once(self.head).with_context(table)?;
        let (rows, after) = rest.split_once(END).with_context(table)?;
        let cells = self.head.lines().next().unwrap_or_default().split(" | ").count();
        let rows: Option<Vec<Row>> = rows.lines().map(|line| Row::read(line, cells)).collect();
        let of_other_length = || format!("a row of {} has not {cells} cells", self.name);
        Ok((before, rows.with_context(of_other_length)?, after))
    }
}

impl Row {
    fn read(line: &str, cells: usize) -> Option<Self> {
        let line = line.strip_prefix("| ")?.strip_suffix(" |")?;
        let row: Vec<String> = line.split(" | ").map(str::to_owned).collect();
        (row.len() == cells).then_some(Self(row))
    }

    fn line(&self) -> String {
        format!("| {} |", self.0.join(" | "))
    }

    /// Whether both are about the same.
    fn is_about(&self, other: &Self) -> bool {
        let about = |row: &Self| row.0[..row.0.len() - 2].to_vec();
        about(self) == about(other)
    }
}

fn writes() -> bool {
    std::env::var_os(WRITE).is_some()
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
        let page = format!("text\n{}{row}\n{row}{END}more\n", CLIENTS.head);
        let (before, rows, after) = CLIENTS.parts(&page).unwrap();
        assert_eq!((before, after), ("text\n", "more\n"));
        assert_eq!(rows.iter().map(Row::line).collect::<Vec<_>>(), [row, row]);
        assert!(rows[0].is_about(&rows[1]));
        assert!(OBJECTS.parts(&page).is_err() && CLIENTS.parts("no table").is_err());
    }

    #[test]
    fn versions_are_shown_without_their_last_number() {
        assert_eq!(short("v28.5.2+dfsg4\n"), "28.5");
        assert_eq!(short("1.7.24~ds1"), "1.7");
    }
}
