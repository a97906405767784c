//! `firn images prune`: removes checkpoints that the user names, or that are old.
//!
//! Order matters: everything is looked at before the first is removed.

use std::io;
use std::path::PathBuf;

use anyhow::Result;
use firn_host::{Problem, ProblemReport, clock};
use serde::Serialize;

use super::args::PruneArgs;
use super::find::{self, Checkpoint, Kind};
use super::release::release;
use super::removal::{Used, remove};
use crate::oci_image::ImageError;
use crate::output::{self, line, note, printed};
use crate::text;

/// Why a checkpoint stays.
#[derive(Debug, thiserror::Error, Problem)]
pub enum PruneError {
    #[error("this node has no checkpoint {name}")]
    #[problem(
        "FIRN-PRUNE-UNKNOWN",
        "`firn images ls` lists them; --namespace narrows the choice"
    )]
    Unknown { name: String },
    #[error("there are several checkpoints {name}")]
    #[problem(
        "FIRN-PRUNE-UNKNOWN",
        "name the namespace: `firn images prune NAME --namespace NS`"
    )]
    Several { name: String },
    #[error("checkpoint {name} is in use: {why}")]
    #[problem("FIRN-PRUNE-IN-USE", "wait until that has ended: `firn ps` shows it")]
    InUse { name: String, why: String },
    #[error("{name} holds {foreign}, which is no file of a checkpoint")]
    #[problem(
        "FIRN-PRUNE-FOREIGN",
        "move that file elsewhere, or remove the directory yourself"
    )]
    Foreign { name: String, foreign: String },
    #[error("not every place could be read, so that it is not known what is in use")]
    #[problem(
        "FIRN-CONTAINERD",
        "--address names containerd's socket; --no-containerd is for machines without it"
    )]
    NotAsked,
    #[error("it is not known what is in use: cannot read the bundles in {}", state.display())]
    #[problem(
        "FIRN-CONTAINERD",
        "--state names containerd's state directory; --no-containerd is for machines without it"
    )]
    State { state: PathBuf, source: io::Error },
    #[error("cannot remove {name}")]
    #[problem("FIRN-FILE", "see the cause, and `firn images ls`")]
    Remove { name: String, source: io::Error },
    #[error(transparent)]
    Call(#[from] ImageError),
}

impl PruneError {
    pub fn remove(checkpoint: &Checkpoint, source: io::Error) -> Self {
        Self::Remove {
            name: checkpoint.name.clone(),
            source,
        }
    }
}

/// What was removed.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Pruned<'a> {
    /// Whether nothing was removed: --dry-run.
    dry_run: bool,
    /// The checkpoints that were removed, or would be.
    removed: Vec<find::CheckpointRow<'a>>,
    /// Those that were kept although they are old enough, or could not be removed.
    kept: Vec<Kept<'a>>,
    /// The size of those that were removed, in bytes.
    bytes: u64,
}

/// A checkpoint that was kept.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Kept<'a> {
    /// The image, or the directory.
    name: &'a str,
    /// Why it was kept.
    failure: &'a ProblemReport,
}

printed! { Pruned<'_>: "images prune" }

/// True: all that was wanted is removed, or would be.
pub fn run(args: &PruneArgs) -> Result<bool> {
    let (found, is_whole) = find::find(&args.common)?;
    if !is_whole {
        return output::failed(args.common.json, ProblemReport::from(PruneError::NotAsked));
    }
    let wanted = match wanted(args, &found, clock::now() / 1000) {
        Ok(wanted) => wanted,
        Err(error) => return output::failed(args.common.json, ProblemReport::from(error)),
    };
    let used = Used::find(&args.common)?;
    let (mut removed, mut kept) = (Vec::new(), Vec::new());
    for checkpoint in wanted {
        match used.prove(checkpoint) {
            Ok(_) => removed.push(checkpoint),
            Err(error) if args.names.is_empty() => kept.push((checkpoint, ProblemReport::from(error))),
            Err(error) => return output::failed(args.common.json, ProblemReport::from(error)),
        }
    }
    let mut done = Vec::new();
    for checkpoint in removed {
        let result = if args.dry_run {
            Ok(())
        } else {
            remove(checkpoint, &args.common)
        };
        match result {
            Ok(()) => done.push(checkpoint),
            Err(error) => kept.push((checkpoint, error.into())),
        }
    }
    if !args.dry_run {
        release(used.store(), &found, &done);
    }
    print(args, &done, &kept)?;
    Ok(kept.is_empty())
}

/// The checkpoints that are named, or old enough at `now`, in seconds since 1970.
fn wanted<'a>(
    args: &PruneArgs,
    found: &'a [Checkpoint],
    now: u64,
) -> Result<Vec<&'a Checkpoint>, PruneError> {
    let is_old = |checkpoint: &&Checkpoint| {
        let age = now.saturating_sub(checkpoint.made);
        args.older_than
            .is_none_or(|least| checkpoint.made > 0 && age > least.as_secs())
    };
    let namespace = args.namespace.as_deref();
    let fits = |one: &&Checkpoint| {
        namespace.is_none_or(|namespace| one.namespace == namespace) && (!args.left || one.kind == Kind::Left)
    };
    if args.names.is_empty() {
        return Ok(found.iter().filter(fits).filter(is_old).collect());
    }
    let mut wanted = Vec::new();
    for name in args.names.iter().collect::<std::collections::BTreeSet<_>>() {
        let mut named = found.iter().filter(|one| one.name == *name).filter(fits);
        match (named.next(), named.next()) {
            (Some(one), None) => wanted.extend(Some(one).filter(is_old)),
            (None, _) => return Err(PruneError::Unknown { name: name.clone() }),
            (Some(_), Some(_)) => return Err(PruneError::Several { name: name.clone() }),
        }
    }
    Ok(wanted)
}

fn print(args: &PruneArgs, done: &[&Checkpoint], kept: &[(&Checkpoint, ProblemReport)]) -> Result<()> {
    let bytes: u64 = done.iter().map(|one| one.sizes.all()).sum();
    if args.common.json {
        let kept = kept.iter().map(|(one, failure)| Kept {
            name: &one.name,
            failure,
        });
        return output::json(&Pruned {
            dry_run: args.dry_run,
            removed: done.iter().map(|one| one.shown()).collect(),
            kept: kept.collect(),
            bytes,
        });
    }
    let does = if args.dry_run { "removes" } else { "removed" };
    for one in done {
        line!("{does}  {}, {}", one.name, text::bytes(one.sizes.all()));
    }
    for (_, failure) in kept {
        note!("firn: kept: {failure}");
    }
    let done_text = if args.dry_run {
        "would be removed"
    } else {
        "removed"
    };
    line!(
        "{}, {}, {done_text}",
        text::count(done.len(), "checkpoint"),
        text::bytes(bytes)
    );
    if done.iter().any(|one| {
        one.manifest
            .as_ref()
            .is_some_and(|manifest| manifest.bulk.is_some())
    }) {
        line!("their memory in the store goes with `firn store gc`");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser;

    use super::super::args::ImagesCommand;
    use super::*;
    use crate::args::{Args, Command};

    /// When the checkpoints of the test are looked at, in seconds since 1970.
    const NOW: u64 = 1_800_000_000;

    /// Places of those that a command line wants, or the code.
    fn of(words: &str, found: &[Checkpoint]) -> Result<Vec<usize>, String> {
        let line = "firn images prune".split(' ').chain(words.split(' '));
        let Command::Images(ImagesCommand::Prune(args)) = Args::try_parse_from(line).unwrap().command else {
            panic!("another command");
        };
        let wanted = wanted(&args, found, NOW);
        let wanted = wanted.map_err(|error| ProblemReport::from(error).code.to_string())?;
        let place = |one: &Checkpoint| found.iter().position(|other| std::ptr::eq(one, other));
        Ok(wanted.into_iter().filter_map(place).collect())
    }

    #[test]
    fn only_what_is_named_and_old_enough_is_wanted() {
        let one = |kind, name: &str, namespace: &str, age: u64| Checkpoint {
            made: NOW - age,
            ..Checkpoint::unread(kind, name, namespace)
        };
        let hour = Duration::from_secs(3600).as_secs();
        let found = [
            one(Kind::Image, "a", "ml", 2 * hour),
            one(Kind::Image, "a", "web", 60),
            one(Kind::Left, "/tmp/x", "", 3 * hour),
            one(Kind::Left, "/tmp/y", "", NOW),
            one(Kind::Image, "b", "ml", 0),
        ];
        let unknown = || Err("FIRN-PRUNE-UNKNOWN".to_owned());
        assert_eq!(
            of("--older-than 1h", &found),
            Ok(vec![0, 2]),
            "the time of one is not known"
        );
        assert_eq!(of("--older-than 1h --left", &found), Ok(vec![2]));
        assert_eq!(of("--older-than 1h -n web", &found), Ok(vec![]));
        assert_eq!(of("--older-than 30s -n web", &found), Ok(vec![1]));
        assert_eq!(of("a", &found), unknown());
        assert_eq!(of("a -n ml", &found), Ok(vec![0]));
        assert_eq!(of("a b -n ml", &found), Ok(vec![0, 4]));
        assert_eq!(of("b b", &found), Ok(vec![4]));
        assert_eq!(of("b c", &found), unknown());
        assert_eq!(of("/tmp/y", &found), Ok(vec![3]));
        assert_eq!(of("/tmp/x /tmp/y --older-than 1h", &found), Ok(vec![2]));
        assert_eq!(of("b --left", &found), unknown());
        // Not older than that.
        assert_eq!(of("b --older-than 0s", &found), Ok(vec![]));
    }
}
