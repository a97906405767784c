//! What commands print on terminals of several widths, into files, and into pipes that nobody reads.

use std::io::Read;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};

use firn_transaction::history::Entry;
use nix::pty::{Winsize, openpty};

use crate::node::{Node, all_output, text};
use crate::{images, ps};

const WIDTHS: [u16; 3] = [40, 80, 200];

/// Commands that show several lines or columns, each with what its output has in a pipe.
const LISTINGS: [(&str, &str); 10] = [
    (
        "ps --state state",
        "a-container-with-quite-a-long-name-of-its-own",
    ),
    ("ps job --state state", "container  job in namespace default"),
    ("history --dir history", "FIRN-DUMP"),
    ("images ls --no-containerd --state state", "NAMESPACE"),
    ("images du --no-containerd --state state", "GPU MEMORY"),
    ("inspect image -v", "Simulated"),
    ("restore ./image --dry-run --spec config.json", "verdict"),
    ("audit image -v", "verdict"),
    ("doctor", "FAIL"),
    ("store du --store store", "memory"),
];

/// A node with containers, a history, a store and checkpoints.
fn node() -> (Node, ps::Shim) {
    let node = images::node();
    let shim = ps::two_at_work(&node);
    let long = "default/a-container-with-quite-a-long-name-of-its-own";
    ps::bundle(&node, long, &ps::journal(shim.0.id(), "restore", "criu-restore"));
    let lines = [
        ("job", ""),
        ("training-of-the-whole-of-the-last-week", "FIRN-DUMP"),
    ]
    .map(|(container, code)| {
        let entry = Entry {
            time: "2026-01-31T23:59:59.000000000Z".to_owned(),
            at: 1_769_903_999_000,
            container: container.to_owned(),
            kind: "checkpoint".to_owned(),
            code: code.to_owned(),
            ..Entry::default()
        };
        serde_json::to_string(&entry).expect("JSON") + "\n"
    });
    std::fs::create_dir(node.path("history")).expect("a directory");
    node.write("history/transactions.jsonl", &lines.concat());
    (node, shim)
}

/// What a command prints on a terminal.
fn on_terminal(mut command: Command, columns: u16) -> String {
    let size = Winsize {
        ws_row: 24,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let pty = openpty(Some(&size), None).expect("a terminal");
    let end = || Stdio::from(pty.slave.as_fd().try_clone_to_owned().expect("a descriptor"));
    let mut child = command
        .env("TERM", "xterm")
        .stdin(end())
        .stdout(end())
        .spawn()
        .expect("firn starts");
    drop((command, pty.slave));
    let mut shown = Vec::new();
    // Ends with an error once the program has closed the terminal.
    let _closed = std::fs::File::from(pty.master).read_to_end(&mut shown);
    child.wait().expect("its end");
    String::from_utf8(shown).expect("text").replace("\r\n", "\n")
}

fn split(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

/// Without the escape sequences of colours.
fn plain(text: &str) -> String {
    let mut parts = text.split('\u{1b}');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |all, part| {
        all + part.split_once('m').map_or("", |(_, rest)| rest)
    })
}

#[test]
fn listings_fit_the_terminal() {
    let (node, _shim) = node();
    for (line, piped) in LISTINGS {
        let output = node
            .command(&split(line))
            .env_remove("NO_COLOR")
            .output()
            .expect("firn starts");
        let whole = text(&output);
        assert!(whole.contains(piped), "{line}: {}", all_output(&output));
        assert!(!whole.contains(['…', '\u{1b}']), "{line}: {whole}");
        for columns in WIDTHS {
            let mut command = node.command(&split(line));
            command.env_remove("COLUMNS").env("NO_COLOR", "1");
            let shown = on_terminal(command, columns);
            assert!(!shown.contains('\u{1b}'), "{line}: {shown}");
            assert!(
                shown.lines().count() >= whole.lines().count(),
                "{line} at {columns}: {shown}"
            );
            for line in shown.lines() {
                // A path or UUID is not cut: it may be longer than what is left of a line.
                let words = line.split_whitespace().count();
                let fits = line.chars().count() <= usize::from(columns);
                assert!(fits || words <= 2 || line.contains('`'), "at {columns}: {line:?}");
            }
        }
    }
}

#[test]
fn a_table_loses_characters_and_no_columns() {
    let (node, _shim) = node();
    for (columns, cut) in [(80, true), (200, false)] {
        let mut command = node.command(&["images", "ls", "--no-containerd", "--state", "state"]);
        command.env("NO_COLOR", "1");
        let shown = on_terminal(command, columns);
        assert_eq!(shown.contains('…'), cut, "at {columns}: {shown}");
        let head = shown.lines().next().expect("a head").split_whitespace().count();
        assert_eq!(head, 7, "at {columns}: {shown}");
    }
    // Too narrow for seven columns.
    let mut command = node.command(&["images", "ls", "--no-containerd", "--state", "state"]);
    command.env("NO_COLOR", "1");
    let shown = on_terminal(command, 40);
    assert!(
        shown.contains("\nNAMESPACE  ml\n") && shown.contains("\n\nNAME "),
        "{shown}"
    );
    // A person may ask for another width.
    let mut command = node.command(&["images", "ls", "--no-containerd", "--state", "state"]);
    command.env("NO_COLOR", "1").env("COLUMNS", "200");
    assert!(!on_terminal(command, 40).contains('…'));
}

#[test]
fn colours_are_for_terminals_that_have_them() {
    let (node, _shim) = node();
    let shown = |name: &str, value: &str| {
        let mut command = node.command(&["doctor"]);
        command.env_remove("NO_COLOR").env(name, value);
        on_terminal(command, 200)
    };
    let coloured = shown("LANG", "C");
    assert!(coloured.contains("\u{1b}[32mok"), "{coloured}");
    assert!(plain(&coloured).contains("ok  "), "{coloured}");
    assert!(!shown("NO_COLOR", "1").contains('\u{1b}'));
    let mut command = node.command(&["ps", "--state", "state"]);
    command.env_remove("NO_COLOR");
    assert!(on_terminal(command, 200).starts_with("\u{1b}[1mCONTAINER"));
    // JSON has none, not even there.
    let mut command = node.command(&["ps", "--state", "state", "--json"]);
    command.env_remove("NO_COLOR");
    assert!(!on_terminal(command, 40).contains('\u{1b}'));
}

/// The names of the commands below one, as its help lists them.
fn below(words: &[String]) -> Vec<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_firn"))
        .args(words)
        .arg("--help")
        .output();
    let help = text(&output.expect("firn starts"));
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let names = lines
        .take_while(|line| !line.is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names = names.filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

#[test]
fn no_command_panics_when_nobody_reads() {
    let (node, _shim) = node();
    let mut all: Vec<Vec<String>> = LISTINGS
        .iter()
        .flat_map(|(line, _)| {
            [
                line.to_string(),
                format!("{} --json", line.trim_end_matches(" -v")),
            ]
        })
        .chain(
            [
                "metrics --dir history --state state",
                "completions bash",
                "cdi generate",
                "cdi list",
                "labels",
            ]
            .map(str::to_owned),
        )
        .map(|line| line.split(' ').map(str::to_owned).collect())
        .collect();
    let mut open = vec![Vec::new()];
    let mut helps = 0;
    while let Some(words) = open.pop() {
        open.extend(
            below(&words)
                .into_iter()
                .map(|name| [&words[..], &[name]].concat()),
        );
        all.push([&words[..], &["--help".to_owned()]].concat());
        helps += 1;
    }
    assert!(helps > 35, "the commands are elsewhere: {helps}");
    for words in all {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let usual = node.firn(&words).status.code();
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = node.command(&words).stdout(writer).output().expect("firn starts");
        let error = all_output(&output);
        assert!(
            !error.contains("panicked") && !error.contains("roken pipe"),
            "{words:?}: {error}"
        );
        assert_eq!(output.status.code(), usual, "{words:?}: {error}");
    }
}
