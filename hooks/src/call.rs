//! Calls a hook of the job in its container (docs/design/decisions/0018-hooks-of-the-job.md).
//!
//! The shim sends a [`Call`] on standard input, and reads an [`Answer`] from standard output. The shim kills
//! this process if it does not end in time: a file of the container may be on a file system that hangs. After
//! a call without an answer it starts another one that ends what the first has left.

mod exec;
mod http;
mod init;
mod job_dir;
mod remains;
mod signal;

use std::io::{Read, stdin};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use firn_host::atomic_file;
use firn_oci::Spec;
use firn_oci::job_hook::{Action, Answer, Call};

use http::User;
use init::Init;
use job_dir::JobDir;

/// Longest call that is read.
const CALL: u64 = 1 << 20;

/// How much of a hook's output is kept: its end.
const OUTPUT: usize = 16 << 10;

/// How long a hook is polled between two looks at it.
const POLL: Duration = Duration::from_millis(20);

/// What a hook wrote, or the HTTP server answered: the end of it.
#[derive(Default)]
struct Output(Vec<u8>);

impl Output {
    fn add(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
        let excess = self.0.len().saturating_sub(OUTPUT);
        self.0.drain(..excess);
    }

    fn into_text(self) -> String {
        String::from_utf8_lossy(&self.0).trim().to_owned()
    }
}

fn read() -> Result<Call> {
    let mut call = Vec::new();
    stdin().take(CALL).read_to_end(&mut call)?;
    serde_json::from_slice(&call).context("the call is not understood")
}

/// Ends the processes of the call that standard input has: whoever made it was killed.
pub fn end() -> Result<()> {
    let call = read()?;
    let ended = remains::end(&call);
    exec::forget(&call);
    ended
}

/// Calls the hook that standard input names.
pub fn run() -> Result<()> {
    let call = read()?;
    let mut output = Output::default();
    let failure = make(&call, &mut output).err();
    let answer = Answer {
        failure: failure.map(|error| format!("{error:#}")),
        output: output.into_text(),
    };
    if call.calls {
        keep(&call, &answer);
    }
    super::answer(serde_json::to_string(&answer)?)
}

/// Writes the facts, and calls what the annotation names.
fn make(call: &Call, output: &mut Output) -> Result<()> {
    let deadline = Instant::now() + Duration::from_millis(call.limit);
    let spec = Spec::load(&call.bundle)?;
    let init = Init::open(call.init, call.started)?;
    let dir = JobDir::open(&init)?;
    dir.write(call.file(), &serde_json::to_vec_pretty(&call.facts)?)?;
    if !call.calls {
        return Ok(());
    }
    match call.facts.hook.action(&spec)? {
        None | Some(Action::Look) => Ok(()),
        Some(Action::Exec(argv)) => exec::run(call, &spec, &argv, deadline, output),
        Some(Action::Http { address, path, body }) => {
            let url = format!("http://{address}{path}");
            let body = match body {
                Some(body) => body,
                None => serde_json::to_string(&call.facts)?,
            };
            let user = User::of(&spec)?;
            let response = http::post(&init, user, &url, body, deadline)?;
            response.result(&url, output)
        }
        Some(Action::Signal(signal)) => signal::send(&init, signal, &dir, deadline),
    }
}

/// Keeps the output in the bundle, for people.
fn keep(call: &Call, answer: &Answer) {
    let name = format!("firn-hook-{}.log", call.facts.hook.name());
    let text = match &answer.failure {
        Some(failure) => format!("{}\nfailed: {failure}\n", answer.output),
        None => format!("{}\n", answer.output),
    };
    if let Err(error) = atomic_file::write(&call.bundle, &name, text.as_bytes(), 0o600) {
        report!("firn-hook: cannot keep {name}: {error}");
    }
}
