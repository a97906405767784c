//! What holds of every command and subcommand of `firn`.

use std::collections::BTreeSet;

use crate::output::schema;
use clap::error::ErrorKind;
use clap::{Command, CommandFactory, Parser};

use super::Args;

/// Calls `look` with each command that help shows, and with its name, as `firn images ls`.
fn each(command: &Command, name: &str, look: &mut impl FnMut(&str, &Command)) {
    look(name, command);
    let shown = |below: &&Command| !below.is_hide_set() && below.get_name() != "help";
    for below in command.get_subcommands().filter(shown) {
        each(below, &format!("{name} {}", below.get_name()), look);
    }
}

fn each_command(mut look: impl FnMut(&str, &Command)) {
    let mut all = Args::command();
    all.build();
    each(&all, "firn", &mut look);
}

/// The examples in a help text: what follows its head, up to an empty line.
fn examples(command: &Command) -> Vec<String> {
    let text = command
        .get_after_help()
        .map(ToString::to_string)
        .unwrap_or_default();
    let lines = text.lines().skip_while(|line| *line != "Examples:").skip(1);
    lines
        .take_while(|line| !line.is_empty())
        .map(|line| line.trim().to_owned())
        .collect()
}

/// The words up to those that the shell acts on; what is in quotation marks is one.
fn words(line: &str) -> Vec<&str> {
    let mut words = Vec::new();
    for (at, piece) in line.trim_start_matches("./").split('\'').enumerate() {
        match at % 2 {
            0 => words.extend(piece.split_whitespace()),
            _ => words.push(piece),
        }
    }
    let end = words.iter().position(|word| word.starts_with(['>', '|', '&']));
    words.truncate(end.unwrap_or(words.len()));
    words
}

#[test]
fn every_command_has_examples_that_firn_accepts() {
    let mut count = 0;
    each_command(|name, command| {
        let lines = examples(command);
        let own = |line: &&String| words(line).first() == Some(&"firn");
        assert!(lines.iter().any(|line| own(&line)), "{name} has no examples");
        for line in lines.iter().filter(own) {
            count += 1;
            match Args::try_parse_from(words(line)) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::DisplayHelp => {}
                Err(error) => panic!("{name}: {line}: {error}"),
            }
            let alias = name == "firn install" && line.contains("upgrade");
            assert!(words(line).join(" ").starts_with(name) || alias, "{name}: {line}");
        }
    });
    assert!(count > 60, "the examples are elsewhere: {count}");
}

#[test]
fn every_command_explains_its_exit_status_and_its_options() {
    each_command(|name, command| {
        let help = command
            .get_after_help()
            .map(ToString::to_string)
            .unwrap_or_default();
        let is_group = command.has_subcommands() && name != "firn";
        assert!(is_group || help.contains("Exit status: "), "{name}");
        assert!(
            help.lines()
                .all(|line| !line.starts_with("  firn") || line.len() <= 80),
            "{name}: {help}"
        );
        for argument in command.get_arguments() {
            assert!(argument.get_help().is_some(), "{name}: {argument} has no help");
        }
    });
}

#[test]
fn every_command_with_json_has_a_schema() {
    // What any of them prints if it fails.
    let mut wanted = BTreeSet::from(["failure".to_owned()]);
    each_command(|name, command| {
        let mut arguments = command.get_arguments();
        if arguments.any(|argument| argument.get_id() == "json") {
            wanted.insert(name.trim_start_matches("firn ").to_owned());
        }
    });
    assert_eq!(
        schema::names().map(str::to_owned).collect::<BTreeSet<_>>(),
        wanted
    );
    assert!(wanted.len() > 30, "the commands are elsewhere: {wanted:?}");
}

/// Texts of two commands that are alike describe neither.
#[test]
fn no_two_commands_have_the_same_text() {
    let mut texts = std::collections::BTreeMap::new();
    each_command(|name, command| {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        let other = texts.insert(about, name.to_owned());
        assert_eq!(other, None, "{name} has the text of another command");
    });
}
