//! Programs that tests write and run.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Writes a script that can be run at once. Another process writes it: a child that a thread of this one
/// forks meanwhile would have the file open for writing, and it could not be run ("Text file busy").
pub fn write_program(path: &Path, script: &str) {
    let write = ["-c", "umask 077 && cat >\"$0\" && chmod 755 \"$0\""];
    let mut writer = Command::new("sh");
    let mut child = writer
        .args(write)
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(script.as_bytes()).unwrap();
    drop(input);
    // A reaper of the test may have waited for it already; it has ended either way.
    let _ = child.wait();
    assert_eq!(fs::read_to_string(path).unwrap(), script);
}
