//! Commands on the other node.

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};

use serde_json::Value;

use crate::args::relocate::MoveArgs;

/// Most bytes of an answer.
const MAX_ANSWER: u64 = 4 << 20;

/// firn on the other node, which answers with JSON.
pub struct Remote {
    child: Child,
    stdin: Option<ChildStdin>,
}

impl Remote {
    /// In a process group of its own: Ctrl-C is for firn, which ends it in an orderly way.
    pub fn start(args: &MoveArgs, words: &[&str]) -> io::Result<Self> {
        let mut ssh = args.ssh.split_whitespace();
        let program = ssh.next().unwrap_or("ssh");
        let words = std::iter::once(&*args.remote_firn).chain(words.iter().copied());
        let command = words.map(quoted).collect::<Vec<_>>().join(" ");
        let mut child = Command::new(program)
            .args(ssh)
            .args([&args.target, &command])
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = child.stdin.take();
        Ok(Self { child, stdin })
    }

    /// Ends its standard input, and waits for its answer; none if it ended without one.
    pub fn answer(self) -> Option<Value> {
        self.ended().ok()
    }

    /// The same, or why there is no answer.
    pub fn ended(mut self) -> Result<Value, &'static str> {
        self.stdin = None;
        let mut text = Vec::new();
        if let Some(stdout) = self.child.stdout.take() {
            // What was cut off is no JSON.
            let _read = stdout.take(MAX_ANSWER).read_to_end(&mut text);
        }
        let status = self.child.wait().ok().and_then(|status| status.code());
        serde_json::from_slice(&text).map_err(|_| why(status))
    }
}

/// What the exit status of a command without an answer means.
fn why(status: Option<i32>) -> &'static str {
    match status {
        // ssh's own, which has printed the reason.
        Some(255) => "ssh has failed, for the reason above: no connection, another host key, or no login",
        // A shell's.
        Some(126 | 127) => "the program cannot be started there",
        _ => "no answer",
    }
}

impl Write for Remote {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        match &mut self.stdin {
            Some(stdin) => stdin.write(data),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stdin.as_mut().map_or(Ok(()), Write::flush)
    }
}

/// One that was not waited for is cut off: what it has received is not complete.
impl Drop for Remote {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _waited = self.child.wait();
    }
}

/// A word of a shell's command line.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:@+".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ssh_and_the_shell_there_fail_by_their_status() {
        assert!(why(Some(255)).contains("host key"));
        assert!(why(Some(127)).contains("cannot be started"));
        assert_eq!((why(Some(1)), why(None)), ("no answer", "no answer"));
    }

    #[test]
    fn words_stay_words_for_a_shell() {
        for (word, expected) in [
            ("GPU-1=GPU-2,GPU-3=GPU-4", "GPU-1=GPU-2,GPU-3=GPU-4"),
            ("a b", "'a b'"),
            ("$(reboot)", "'$(reboot)'"),
            ("it's", "'it'\\''s'"),
            ("", "''"),
        ] {
            assert_eq!(quoted(word), expected);
        }
    }
}
