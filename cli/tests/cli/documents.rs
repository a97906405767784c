//! Every command line of `firn` in the documents is one that it accepts.

use std::process::Command;

use firn_documents::{At, pages};

#[test]
fn firn_accepts_the_command_lines_in_the_documents() {
    let mut refused = Vec::new();
    let mut count = 0;
    for page in pages() {
        for At { line, what } in page.commands() {
            let Some(arguments) = what.for_help(&["firn"]) else {
                continue;
            };
            count += 1;
            let output = Command::new(env!("CARGO_BIN_EXE_firn"))
                .args(&arguments)
                .output()
                .unwrap();
            if !output.status.success() {
                let error = String::from_utf8_lossy(&output.stderr).into_owned();
                refused.push(format!("{}:{line}: {arguments:?}: {error}", page.path.display()));
            }
        }
    }
    assert!(count > 20, "the command lines are elsewhere: {count}");
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}
