//! `cargo xtask words`: spelling, banned words and line lengths of the tree, by the rules in `words.toml`.
//!
//! Each area of the tree has a ceiling for each kind of finding. A ceiling may only fall: `--lower` sets it
//! to today's count where that is smaller. New text therefore has to follow the rules while old text is
//! rewritten.
#![forbid(unsafe_code)]

mod check;
mod rules;
mod spelling;
mod text;
mod tree;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use check::{Checker, Finding};
use rules::{Counts, Kind, Rules};
use tree::Tree;

/// Findings that are printed of an area above its ceiling.
const SHOWN: usize = 40;

/// Check spelling, banned words and line lengths by words.toml
#[derive(Parser)]
#[command(name = "cargo xtask words")]
struct Cmd {
    /// Print every finding of this area; `all` for all areas
    #[arg(long, value_name = "AREA")]
    list: Option<String>,
    /// Lower the ceilings in words.toml to today's counts
    #[arg(long)]
    lower: bool,
}

fn main() -> ExitCode {
    match run(&Cmd::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cmd: &Cmd) -> Result<bool> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .context("the crate lies in tests/words")?;
    let file = root.join("words.toml");
    let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    let rules = Rules::parse(&text)?;
    let findings = all(root, &rules)?;
    if cmd.lower {
        let counts = findings.iter().map(|(area, found)| (area.clone(), count(found)));
        let lowered = rules::lowered(&text, &rules, &counts.collect())?;
        fs::write(&file, lowered).with_context(|| format!("write {}", file.display()))?;
    }
    if let Some(area) = &cmd.list {
        let listed = findings.iter().filter(|(name, _)| area == "all" || *name == area);
        listed
            .flat_map(|(_, found)| found)
            .for_each(|finding| println!("{finding}"));
    }
    Ok(report(&rules, &findings))
}

/// All findings of the tree, by area.
fn all(root: &Path, rules: &Rules) -> Result<BTreeMap<String, Vec<Finding>>> {
    let mut checker = Checker::new(rules);
    let areas = rules.areas.keys().map(|area| (area.clone(), Vec::new()));
    let mut findings: BTreeMap<String, Vec<Finding>> = areas.collect();
    for path in Tree::new(root, rules)?.files() {
        let text = fs::read_to_string(root.join(path)).with_context(|| format!("read {path}"))?;
        let found = checker.check(path, &text);
        findings
            .entry(rules.area(path).to_owned())
            .or_default()
            .extend(found);
    }
    let stale = checker.stale_exceptions();
    findings
        .entry(rules.area("words.toml").to_owned())
        .or_default()
        .extend(stale);
    Ok(findings)
}

fn count(findings: &[Finding]) -> Counts {
    let of = |kind| findings.iter().filter(|finding| finding.kind == kind).count();
    Counts {
        spelling: of(Kind::Spelling),
        banned: of(Kind::Banned),
        lines: of(Kind::Lines),
    }
}

/// Prints a line per area, and the findings of those above their ceilings. Returns whether none is above.
fn report(rules: &Rules, findings: &BTreeMap<String, Vec<Finding>>) -> bool {
    let mut good = true;
    for (area, found) in findings {
        let (counts, ceiling) = (count(found), rules.ceiling(area));
        let mut line = format!("{area}:");
        for kind in Kind::ALL {
            let (now, most) = (counts.of(kind), ceiling.of(kind));
            line += &format!(" {kind} {now} of {most};");
            if now > most {
                good = false;
                let shown = found.iter().filter(|finding| finding.kind == kind).take(SHOWN);
                shown.for_each(|finding| println!("{finding}"));
                println!("FAILED {area}: {now} {kind}, the ceiling is {most}");
                println!("hint: cargo xtask words --list {area}");
            }
        }
        println!("{}", line.trim_end_matches(';'));
    }
    good
}
