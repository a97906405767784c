//! What a shell proposes for an argument: containers and checkpoints of this node.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap_complete::CompleteEnv;
use clap_complete::engine::{
    ArgValueCandidates, ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter,
};
use firn_config::names;
use tokio::time::timeout;

use crate::containerd::{CallError, Containerd, block_on, bundles};
use crate::oci_image::{Index, media};
use crate::text;

/// The variable by which a shell asks. A general name, as COMPLETE, may be set for something else.
pub const VARIABLE: &str = "FIRN_COMPLETE";

/// How long a person waits for proposals.
const LIMIT: Duration = Duration::from_secs(2);

/// Answers a shell, if one asks. Returns whether it did: then this is no call of a command.
///
/// A shell sends the words that are to be completed after `--`, which begin with `firn`. The variable alone
/// means nothing: no command does anything else because of it.
pub fn answer(command: fn() -> clap::Command) -> bool {
    let mut asked = std::env::args_os().skip(1);
    if asked.next().is_none_or(|word| word != "--") || asked.next().is_none() {
        return false;
    }
    let here = std::env::current_dir().ok();
    let asked = CompleteEnv::with_factory(command)
        .var(VARIABLE)
        .try_complete(std::env::args_os(), here.as_deref());
    asked.unwrap_or_else(|error| error.exit())
}

/// Proposes ids of containers that have a task, in the namespace that a command would look at.
pub fn tasks() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let words = words();
        proposals(with_task(&state(&words), Some(&namespace(&words))))
    })
}

/// Proposes ids of containers that have a task, of all namespaces unless the command names one.
pub fn all_tasks() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let words = words();
        let namespace = value(&words, "--namespace", "-n");
        proposals(with_task(&state(&words), namespace.as_deref()))
    })
}

/// Proposes ids of containers that have a task, and of those whose output firn keeps.
pub fn logs() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let words = words();
        let namespace = namespace(&words);
        let kept = std::fs::read_dir(Path::new(names::LOGS).join(&namespace))
            .into_iter()
            .flatten();
        let kept = kept.filter_map(|file| {
            let name = file.ok()?.file_name().into_string().ok()?;
            Some(name.strip_suffix(".log")?.to_owned())
        });
        let all: BTreeSet<String> = with_task(&state(&words), Some(&namespace))
            .into_iter()
            .chain(kept)
            .collect();
        proposals(all)
    })
}

/// Proposes ids of containers that containerd knows.
pub fn containers() -> ArgValueCandidates {
    ArgValueCandidates::new(|| proposals(asked(known)))
}

/// Proposes images in containerd that are checkpoints.
pub fn images() -> ArgValueCandidates {
    ArgValueCandidates::new(|| proposals(asked(checkpoints)))
}

/// Proposes checkpoints: those among containerd's images, files and directories.
pub fn places() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let begins = |name: &String| current.to_str().is_some_and(|begin| name.starts_with(begin));
        let mut all = proposals(asked(checkpoints).into_iter().filter(begins));
        all.extend(PathCompleter::any().complete(current));
        all
    })
}

/// Proposes containers that have a task, and checkpoints.
pub fn subjects() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let (tasks, places) = (tasks().candidates(), places().complete(current));
        let begin = current.as_encoded_bytes();
        let begins = |task: &CompletionCandidate| task.get_value().as_encoded_bytes().starts_with(begin);
        tasks.into_iter().filter(begins).chain(places).collect()
    })
}

/// Names that a shell takes as they are: it gets them without quotes.
fn proposals(names: impl IntoIterator<Item = String>) -> Vec<CompletionCandidate> {
    let is_plain = |name: &String| {
        name.chars()
            .all(|c| c.is_ascii_alphanumeric() || "._/:@+-".contains(c))
    };
    let plain = names.into_iter().filter(is_plain);
    plain.map(CompletionCandidate::new).collect()
}

fn with_task(state: &Path, namespace: Option<&str>) -> Vec<String> {
    let of_namespace = |bundle: &PathBuf| {
        namespace.is_none_or(|namespace| bundle.parent().is_some_and(|dir| dir.ends_with(namespace)))
    };
    let all = bundles(state)
        .unwrap_or_default()
        .into_iter()
        .filter(of_namespace);
    all.filter_map(|bundle| Some(bundle.file_name()?.to_str()?.to_owned()))
        .collect()
}

/// Asks the containerd of the command line. A shell that gets no answer proposes nothing.
fn asked<F>(ask: impl FnOnce(Containerd) -> F) -> Vec<String>
where
    F: Future<Output = Result<Vec<String>, CallError>>,
{
    let words = words();
    let asked = async {
        let containerd = Containerd::connect(&address(&words), &namespace(&words)).await?;
        ask(containerd).await
    };
    let answer = block_on(async { timeout(LIMIT, asked).await });
    answer
        .ok()
        .and_then(Result::ok)
        .and_then(Result::ok)
        .unwrap_or_default()
}

async fn known(containerd: Containerd) -> Result<Vec<String>, CallError> {
    let all = containerd.containers().await?.into_iter();
    Ok(all.map(|container| container.id).collect())
}

async fn checkpoints(containerd: Containerd) -> Result<Vec<String>, CallError> {
    let mut names = Vec::new();
    for image in containerd.images().await? {
        let target = image.target.unwrap_or_default();
        if target.media_type == media::INDEX
            && let Ok(index) = Index::read(&containerd, &image.name, &target.digest).await
            && index.part(media::CHECKPOINT).is_some()
        {
            names.push(image.name);
        }
    }
    Ok(names)
}

/// The command line that is to be completed.
fn words() -> Vec<String> {
    let words = std::env::args_os().skip_while(|word| word != "--").skip(1);
    words.map(|word| word.to_string_lossy().into_owned()).collect()
}

fn namespace(words: &[String]) -> String {
    let given = value(words, "--namespace", "-n").or_else(|| of("CONTAINERD_NAMESPACE"));
    given.unwrap_or_else(|| "default".to_owned())
}

fn address(words: &[String]) -> PathBuf {
    let given = value(words, "--address", "-a").or_else(|| of("CONTAINERD_ADDRESS"));
    PathBuf::from(given.unwrap_or_else(|| text::CONTAINERD.to_owned()))
}

/// containerd's state directory: that of the command line, or that of its socket.
fn state(words: &[String]) -> PathBuf {
    let given = value(words, "--state", "--state").map(PathBuf::from);
    given.unwrap_or_else(|| address(words).parent().map(Path::to_owned).unwrap_or_default())
}

fn of(variable: &str) -> Option<String> {
    std::env::var_os(variable).and_then(|value: OsString| value.into_string().ok())
}

/// The value of an option, in the forms in which clap takes it.
fn value(words: &[String], long: &str, short: &str) -> Option<String> {
    words.iter().enumerate().find_map(|(nth, word)| {
        if word == long || word == short {
            // bash makes three words of `--long=value`.
            let next = words.get(nth + 1)?;
            let value = if next == "=" { words.get(nth + 2)? } else { next };
            return Some(value.clone());
        }
        let joined = word.strip_prefix(long).and_then(|rest| rest.strip_prefix('='));
        let joined = joined.or_else(|| word.strip_prefix(short).filter(|rest| !rest.is_empty()));
        joined.map(|value| value.trim_start_matches('=').to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_before_the_word_count_in_each_form() {
        for line in [
            "firn ps -n gpu",
            "firn ps --namespace gpu",
            "firn ps --namespace=gpu",
            "firn ps -ngpu",
            "firn ps -n=gpu",
            "firn ps --namespace = gpu",
        ] {
            let words: Vec<_> = line.split(' ').map(str::to_owned).collect();
            assert_eq!(
                value(&words, "--namespace", "-n").as_deref(),
                Some("gpu"),
                "{line}"
            );
            assert_eq!(value(&words, "--address", "-a"), None, "{line}");
        }
        let without = ["firn".to_owned(), "-n".to_owned()];
        assert_eq!(value(&without, "--namespace", "-n"), None);
    }

    #[test]
    fn tasks_are_those_of_the_namespace() {
        let state = tempfile::tempdir().unwrap();
        let tasks = state.path().join(crate::containerd::BUNDLES);
        for bundle in ["default/a", "default/b", "gpu/c"] {
            std::fs::create_dir_all(tasks.join(bundle)).unwrap();
        }
        assert_eq!(with_task(state.path(), Some("default")), ["a", "b"]);
        assert_eq!(with_task(state.path(), Some("gpu")), ["c"]);
        assert_eq!(with_task(state.path(), None), ["a", "b", "c"]);
        assert!(with_task(&tasks, Some("gpu")).is_empty());
    }

    #[test]
    fn a_name_that_a_shell_would_run_is_not_proposed() {
        let names = ["checkpoint/job:1", "a b", "$(reboot)", "x;y", "*"].map(str::to_owned);
        let shown = proposals(names);
        assert_eq!(shown.len(), 1, "{shown:?}");
        assert_eq!(shown[0].get_value(), "checkpoint/job:1");
    }
}
