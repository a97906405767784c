//! `firn config check`: all mistakes in a configuration file, and what they prevent.

use std::path::Path;

use anyhow::Result;
use firn_config::{Config, Keys, Mistake, MistakeKind, Reading};
use firn_host::{Chain, ProblemReport};
use firn_remap::RequestedMap;
use serde_json::json;

use crate::args::config::{ConfigCheckArgs, ConfigCommand};
use crate::output::{self, line};

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
        let all: Vec<_> = mistakes.iter().map(as_json).collect();
        output::json(&json!({"file": path, "present": is_there, "mistakes": all}))?;
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

fn as_json(mistake: &Mistake) -> serde_json::Value {
    json!({
        "line": mistake.line, "key": mistake.key, "problem": mistake.problem,
        "prevents": prevented(mistake),
    })
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
