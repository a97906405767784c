//! Programs in a container by `ctr tasks exec`.
//!
//! ctr closes its ends of the streams as soon as it has heard that the process has ended, and loses what is
//! still on its way, with every shim. So the process ends once all that it has written has been read.

use std::io::{Read, Write};
use std::process::Stdio;
use std::sync::mpsc::{self, Sender};
use std::thread;

use anyhow::{Context, Result};

use crate::{CommandOutput, GpuHost};

/// Runs its arguments, marks the end of both streams, and ends when it reads a line.
const HELD: &str =
    "\"$@\" </dev/null; code=$?; printf '<all was read>'; printf '<all was read>' >&2; read line; exit $code";
const END: &[u8] = b"<all was read>";

impl GpuHost {
    /// Runs a program in a container, as the process of this name, and returns how it went, success or not.
    pub fn exec(&self, id: &str, name: &str, argv: &[&str]) -> Result<CommandOutput> {
        let exec = [
            "ctr",
            "tasks",
            "exec",
            "--exec-id",
            name,
            id,
            "sh",
            "-c",
            HELD,
            "sh",
        ];
        let mut command = self.node().command("timeout");
        command.args(["--kill-after=5", "60"]).args(exec).args(argv);
        let piped = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = piped.spawn().with_context(|| argv.join(" "))?;
        let mut input = child.stdin.take().context("no standard input")?;
        let (output, errors) = (child.stdout.take(), child.stderr.take());
        let (sender, read) = mpsc::channel();
        let second = sender.clone();
        let (stdout, stderr) = thread::scope(|scope| {
            let output = scope.spawn(move || all(output, &sender));
            let errors = scope.spawn(move || all(errors, &second));
            // Both, or the end of ctr.
            if read.recv().is_ok() && read.recv().is_ok() {
                // It may have ended meanwhile.
                let _ = input.write_all(b"\n");
            }
            drop(input);
            (
                output.join().unwrap_or_default(),
                errors.join().unwrap_or_default(),
            )
        });
        Ok(CommandOutput {
            code: child.wait()?.code(),
            stdout,
            stderr,
        })
    }
}

/// What a stream has before its end is marked.
fn all(stream: Option<impl Read>, read: &Sender<()>) -> String {
    let mut bytes = Vec::new();
    for byte in stream.into_iter().flat_map(Read::bytes).map_while(Result::ok) {
        bytes.push(byte);
        if bytes.ends_with(END) {
            bytes.truncate(bytes.len() - END.len());
            // Nobody waits any more if the other stream has ended without it.
            let _ = read.send(());
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
