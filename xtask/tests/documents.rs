//! Every `cargo xtask` command line in the documents is one that xtask accepts.
#![allow(
    clippy::unwrap_used,
    reason = "a program that cannot be run is a test that fails"
)]

use std::process::Command;

use firn_documents::{At, pages};

#[test]
fn xtask_accepts_the_command_lines_in_the_documents() {
    let mut refused = Vec::new();
    let mut count = 0;
    for page in pages() {
        for At { line, what } in page.commands() {
            let Some(arguments) = what.for_help(&["cargo", "xtask"]) else {
                continue;
            };
            count += 1;
            let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
                .args(&arguments)
                .output()
                .unwrap();
            if !output.status.success() {
                let error = String::from_utf8_lossy(&output.stderr).into_owned();
                refused.push(format!("{}:{line}: {arguments:?}: {error}", page.path.display()));
            }
        }
    }
    assert!(count > 10, "the command lines are elsewhere: {count}");
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}
