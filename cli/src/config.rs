//! `firn config check`: all mistakes in a configuration file, and what they prevent.

use std::path::Path;

use anyhow::Result;
use firn_config::{Config, Keys, Mistake, MistakeKind, Reading};
use firn_host::{Chain, ProblemReport};
use firn_remap::RequestedMap;
use serde::Serialize;

use crate::args::config::{ConfigCheckArgs, ConfigCommand};
use crate::output::{self, line, printed};
use crate::text;

/// A configuration file that was checked.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Checked<'a> {
    /// The file.
    file: &'a Path,
    /// Whether it is there. If it is not, the defaults are in force.
    present: bool,
    /// Its mistakes, in the order of the lines.
    mistakes: Vec<MistakeReport<'a>>,
}

/// A mistake.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct MistakeReport<'a> {
    /// The line, counted from 1.
    line: usize,
    /// The key, as `restore.gpu-map`; absent if the line has none.
    key: Option<&'a str>,
    /// What is wrong.
    problem: &'a str,
    /// The operations that are refused until it is corrected.
    prevents: Vec<&'static str>,
}

printed! { Checked<'_>: "config check" }

pub fn run(command: &ConfigCommand) -> Result<bool> {
    match command {
        ConfigCommand::Check(args) => check(args),
    }
}

/// True: there is none.
fn check(args: &ConfigCheckArgs) -> Result<bool> {
    let path = args.file.clone().unwrap_or_else(Config::path);
    let is_there = path.exists();
    if args.file.is_some() && !is_there {
        anyhow::bail!("there is no {}", path.display());
    }
    let mistakes = mistakes(Config::read(&path).map_err(ProblemReport::from)?);
    if args.json {
        output::json(&Checked {
            file: &path,
            present: is_there,
            mistakes: mistakes.iter().map(MistakeReport::of).collect(),
        })?;
    } else {
        print(&path, is_there, &mistakes);
    }
    Ok(mistakes.is_empty())
}

/// All mistakes of a file, also those that are seen when a value is used.
pub fn mistakes(reading: Reading) -> Vec<Mistake> {
    let Reading {
        config,
        mut mistakes,
        lines,
    } = reading;
    let mut add = |key: &str, problem: String| {
        mistakes.push(Mistake {
            line: lines.get(key).copied().unwrap_or_default(),
            key: key.to_owned(),
            kind: MistakeKind::Value,
            problem,
        });
    };
    if let Err(error) = RequestedMap::of_client(&config.restore.gpu_map.join(","))
        && !config.restore.gpu_map.is_empty()
    {
        let cause = std::error::Error::source(&error).map(|cause| Chain(cause).to_string());
        add("restore.gpu-map", cause.unwrap_or_default());
    }
    let is_rule = |rule: &&String| {
        rule.split_once('=')
            .is_some_and(|(of, image)| !of.is_empty() && !image.is_empty())
    };
    for rule in config.restore.from_images.iter().filter(|rule| !is_rule(rule)) {
        add("restore.from-images", format!("not NAMESPACE=IMAGE: {rule:?}"));
    }
    mistakes.sort_by_key(|mistake| mistake.line);
    mistakes
}

/// What the mistake prevents.
pub fn prevented(mistake: &Mistake) -> Vec<&'static str> {
    let operations = Keys::OPERATIONS.iter();
    operations
        .filter(|(_, keys)| mistake.prevents(*keys))
        .map(|(name, _)| *name)
        .collect()
}

impl<'a> MistakeReport<'a> {
    fn of(mistake: &'a Mistake) -> Self {
        Self {
            line: mistake.line,
            key: text::some(&mistake.key),
            problem: &mistake.problem,
            prevents: prevented(mistake),
        }
    }
}

fn print(path: &Path, is_there: bool, mistakes: &[Mistake]) {
    let shown = path.display();
    for mistake in mistakes {
        let Mistake {
            line, key, problem, ..
        } = mistake;
        let key = if key.is_empty() {
            String::new()
        } else {
            format!("{key}: ")
        };
        line!("{shown}:{line}: {key}{problem}");
        let prevented = prevented(mistake);
        if !prevented.is_empty() {
            line!("  refused until it is corrected: {}", prevented.join(", "));
        }
    }
    match (mistakes.len(), is_there) {
        (0, true) => line!("{shown}: no mistakes"),
        (0, false) => line!("there is no {shown}: the defaults are in force"),
        (1, _) => line!("1 mistake; containers start as if its line were not there"),
        (count, _) => line!("{count} mistakes; containers start as if these lines were not there"),
    }
}
