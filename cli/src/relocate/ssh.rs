//! Commands on the other node.

use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use crate::args::relocate::MoveArgs;

/// Most bytes of an answer.
const MAX_ANSWER: u64 = 4 << 20;

/// How often it is looked whether ssh has ended.
const POLL: Duration = Duration::from_millis(20);

/// firn on the other node, which answers with JSON.
pub struct Remote {
    child: Child,
    /// What it prints, once it has closed its output.
    printed: oneshot::Receiver<Vec<u8>>,
}

impl Remote {
    /// In a process group of its own: Ctrl-C is for firn, which ends it in an orderly way. Its standard input
    /// is returned.
    pub fn start(args: &MoveArgs, words: &[&str]) -> io::Result<(Self, ChildStdin)> {
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
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (send, printed) = oneshot::channel();
        let remote = Self { child, printed };
        let (Some(stdin), Some(stdout)) = (stdin, stdout) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        // A thread: it may never be closed.
        thread::Builder::new().name("answer".to_owned()).spawn(move || {
            let mut text = Vec::new();
            // What was cut off is no JSON.
            let _read = stdout.take(MAX_ANSWER).read_to_end(&mut text);
            let _dropped = send.send(text);
        })?;
        Ok((remote, stdin))
    }

    /// Waits for its answer, or returns why there is none. Its standard input has to be closed before.
    pub async fn answer(mut self, limit: Duration) -> Result<Value, &'static str> {
        let ended = async {
            let text = (&mut self.printed).await.unwrap_or_default();
            loop {
                match self.child.try_wait() {
                    Ok(None) => sleep(POLL).await,
                    Ok(Some(status)) => return (text, status.code()),
                    Err(_) => return (text, None),
                }
            }
        };
        let (text, status) = timeout(limit, ended)
            .await
            .map_err(|_late| "it does not answer")?;
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
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
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
