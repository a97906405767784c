//! Tests of what changes a whole process, in a process of their own.

use std::ffi::OsStr;
use std::process::{Command, Output};

/// Runs an ignored test of this program with more variables. Its output, whether it passed or not.
pub fn run(test: &str, variables: &[(&str, &OsStr)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--test-threads=1"]);
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(
        shown.contains("running 1 test\n"),
        "there is no test {test}: {shown}"
    );
    output
}
