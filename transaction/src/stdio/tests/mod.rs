//! Real processes, fifos, files and terminals. The test acts as the client and the OCI runtime.

mod logs;
mod stdin;
mod terminal;

use std::fs::{self, File};
use std::io::{IoSlice, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use firn_process::reaper::{Child, Reaper};
use nix::pty::openpty;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tempfile::TempDir;
use tokio::task::spawn_blocking;

use super::*;

/// Longest wait for anything that should happen.
const LIMIT: Duration = Duration::from_secs(30);

/// Waits for everything that should happen.
const PATIENT: Patience = Patience {
    idle: LIMIT,
    limit: LIMIT,
};

/// Waits only while data is being copied.
const HASTY: Patience = Patience {
    idle: Duration::from_millis(50),
    limit: LIMIT,
};

struct Client {
    dir: TempDir,
    reaper: Reaper,
}

impl Client {
    fn new() -> Self {
        let client = Self {
            dir: TempDir::new().unwrap(),
            reaper: Reaper::start().unwrap(),
        };
        for name in ["stdin", "stdout", "stderr"] {
            mkfifo(&client.path(name), Mode::from_bits_truncate(0o600)).unwrap();
        }
        client
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Opens the client's read side as containerd does, before the process exists.
    fn reader(&self, name: &str) -> File {
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(self.path(name))
            .unwrap();
        let flags = nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty());
        nix::fcntl::fcntl(&file, flags).unwrap();
        file
    }

    /// A write side of stdin; opening it fails at once when the shim does not read.
    fn writer(&self) -> File {
        File::options()
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(self.path("stdin"))
            .unwrap()
    }

    async fn prepare(&self, stdin: &str, stdout: &str, stderr: &str, terminal: bool) -> Prepared {
        let full = |name: &str| match name {
            "stdin" | "stdout" | "stderr" => self.path(name).to_str().unwrap().to_owned(),
            other => other.to_owned(),
        };
        let (stdin, stdout, stderr) = (full(stdin), full(stdout), full(stderr));
        let request = Request {
            id: "box",
            namespace: "ns",
            stdin: &stdin,
            stdout: &stdout,
            stderr: &stderr,
            terminal,
        };
        StdioConfig::parse(&request)
            .unwrap()
            .prepare(Owner::default(), &self.reaper)
            .await
            .unwrap()
    }

    fn spawn(&self, prepared: &mut Prepared, script: &str) -> Child {
        let mut command = shell(script);
        prepared.attach(&mut command);
        self.reaper.spawn(&mut command).unwrap()
    }
}

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(script);
    command
}

/// Reads to the end on a separate thread, as a client would.
async fn read_all(mut file: File) -> String {
    let read = spawn_blocking(move || {
        let mut text = String::new();
        file.read_to_string(&mut text).map(|_| text)
    });
    tokio::time::timeout(LIMIT, read)
        .await
        .expect("the stream ends")
        .unwrap()
        .unwrap()
}

/// Drains the copies while the client reads to the end, and gives what it has read.
async fn rest(copier: Copier, stdout: File) -> String {
    let (drained, text) = tokio::join!(copier.drain(PATIENT), read_all(stdout));
    assert!(drained);
    text
}

async fn read_line(file: &File) -> String {
    let mut file = file.try_clone().unwrap();
    let read = spawn_blocking(move || {
        let mut line = Vec::new();
        let mut byte = [0];
        while !line.ends_with(b"\n") && file.read(&mut byte).unwrap() > 0 {
            line.push(byte[0]);
        }
        String::from_utf8(line).unwrap()
    });
    tokio::time::timeout(LIMIT, read)
        .await
        .expect("a line arrives")
        .unwrap()
}

async fn exit_code(child: &Child) -> u32 {
    tokio::time::timeout(LIMIT, child.wait())
        .await
        .expect("the process ends")
        .code
}

/// Writes 100 MiB of 64-bit counters to a file.
fn counters(path: &Path) -> u64 {
    let count = (100 << 20) / 8;
    let mut bytes = vec![0; 100 << 20];
    bytes
        .as_chunks_mut::<8>()
        .0
        .iter_mut()
        .zip(0..)
        .for_each(|(word, number)| *word = u64::to_le_bytes(number));
    fs::write(path, bytes).unwrap();
    count
}

/// Reads counters to the end and returns how many came in order.
fn verify(mut from: impl std::io::Read) -> u64 {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).unwrap();
    let (words, rest) = bytes.as_chunks::<8>();
    assert!(rest.is_empty());
    words
        .iter()
        .zip(0..)
        .take_while(|(word, expected)| u64::from_le_bytes(**word) == *expected)
        .count() as u64
}

#[tokio::test]
async fn without_any_path_the_process_has_dev_null() {
    let client = Client::new();
    let mut prepared = client.prepare("", "", "", false).await;
    let script = "for fd in 0 1 2; do test /proc/self/fd/$fd -ef /dev/null || exit 1$fd; done";
    let child = client.spawn(&mut prepared, script);
    assert_eq!(exit_code(&child).await, 0);
    assert!(prepared.start().await.unwrap().drain(PATIENT).await);
}

/// A client under load opens its side after it has sent the call, and a short process has ended by then.
#[tokio::test]
async fn a_client_that_is_late_loses_nothing() {
    let client = Client::new();
    let path = client.path("stdout");
    let reader = thread::spawn(move || {
        // A span, not a condition: the shim must wait for the client and not the client for the shim.
        thread::sleep(Duration::from_millis(300));
        fs::read_to_string(path).unwrap()
    });
    let mut prepared = client.prepare("", "stdout", "", false).await;
    let child = client.spawn(&mut prepared, "echo out");
    let copier = prepared.start().await.unwrap();
    assert_eq!(exit_code(&child).await, 0);
    assert!(copier.drain(PATIENT).await);
    assert_eq!(reader.join().unwrap(), "out\n");
}

/// As ctr does, whose reader may not have run before its delete is answered: it closes the fifo then.
#[tokio::test]
async fn a_client_that_closes_after_its_delete_has_read_all() {
    let client = Client::new();
    let mut stdout = client.reader("stdout");
    let mut prepared = client.prepare("", "stdout", "", false).await;
    let child = client.spawn(&mut prepared, "echo out");
    let copier = prepared.start().await.unwrap();
    assert_eq!(exit_code(&child).await, 0);
    let is_deleted = Arc::new(AtomicBool::new(false));
    let read = spawn_blocking({
        let is_deleted = Arc::clone(&is_deleted);
        move || {
            // A span, not a condition: the delete must wait for the client.
            thread::sleep(Duration::from_millis(300));
            let mut text = String::new();
            if !is_deleted.load(Ordering::SeqCst) {
                stdout.read_to_string(&mut text).unwrap();
            }
            text
        }
    });
    assert!(copier.drain(PATIENT).await);
    is_deleted.store(true, Ordering::SeqCst);
    assert_eq!(read.await.unwrap(), "out\n");
}

/// It has read nothing and goes: nothing is left to wait for.
#[tokio::test]
async fn a_client_that_closes_without_reading_does_not_delay_a_delete() {
    let client = Client::new();
    let stdout = client.reader("stdout");
    let mut prepared = client.prepare("", "stdout", "", false).await;
    let child = client.spawn(&mut prepared, "echo out");
    let copier = prepared.start().await.unwrap();
    assert_eq!(exit_code(&child).await, 0);
    drop(stdout);
    let begun = Instant::now();
    assert!(copier.drain(PATIENT).await);
    assert!(begun.elapsed() < LIMIT / 2);
}

/// The process must not wait for a client that has gone.
#[tokio::test]
async fn a_client_that_never_reads_does_not_keep_the_process_from_starting() {
    let client = Client::new();
    tokio::time::pause();
    let mut prepared = client.prepare("", "stdout", "", false).await;
    tokio::time::resume();
    let child = client.spawn(&mut prepared, "echo out; exit 3");
    let copier = prepared.start().await.unwrap();
    assert_eq!(exit_code(&child).await, 3);
    assert!(copier.drain(PATIENT).await);
}

#[tokio::test]
async fn both_outputs_arrive_and_end() {
    let client = Client::new();
    let (stdout, stderr) = (client.reader("stdout"), client.reader("stderr"));
    let mut prepared = client.prepare("", "stdout", "stderr", false).await;
    let child = client.spawn(&mut prepared, "echo out; echo err >&2; exit 3");
    let copier = prepared.start().await.unwrap();
    assert_eq!(exit_code(&child).await, 3);
    let (out, err) = tokio::join!(rest(copier, stdout), read_all(stderr));
    assert_eq!((&*out, &*err), ("out\n", "err\n"));
}

#[tokio::test]
async fn a_hundred_mebibytes_pass_a_fifo_unchanged() {
    let client = Client::new();
    let source = client.path("counters");
    let count = counters(&source);
    let stdout = client.reader("stdout");
    let mut prepared = client.prepare("", "stdout", "", false).await;
    // Order matters: without a writer the fifo would be at its end.
    let reader = thread::spawn(move || verify(stdout));
    let child = client.spawn(&mut prepared, &format!("exec cat {}", source.display()));
    let copier = prepared.start().await.unwrap();
    assert_eq!(exit_code(&child).await, 0);
    assert!(copier.drain(PATIENT).await);
    assert_eq!(reader.join().unwrap(), count);
}

#[tokio::test]
async fn a_hundred_mebibytes_pass_stdin_unchanged() {
    let client = Client::new();
    let (source, sink) = (client.path("counters"), client.path("copy"));
    let count = counters(&source);
    let mut prepared = client.prepare("stdin", "", "", false).await;
    let child = client.spawn(&mut prepared, &format!("exec cat > {}", sink.display()));
    let mut copier = prepared.start().await.unwrap();
    let mut writer = File::options().write(true).open(client.path("stdin")).unwrap();
    let written =
        spawn_blocking(move || std::io::copy(&mut File::open(source).unwrap(), &mut writer).unwrap());
    assert_eq!(written.await.unwrap(), count * 8);
    copier.close_stdin();
    assert_eq!(exit_code(&child).await, 0);
    assert_eq!(verify(File::open(sink).unwrap()), count);
}

#[tokio::test]
async fn a_client_that_does_not_read_stops_only_its_own_process() {
    let client = Client::new();
    let _deaf = client.reader("stdout");
    let mut prepared = client.prepare("", "stdout", "", false).await;
    let stuck = client.spawn(&mut prepared, "exec yes");
    let stuck_copier = prepared.start().await.unwrap();

    let other = Client::new();
    let stdout = other.reader("stdout");
    let mut prepared = other.prepare("stdin", "stdout", "", false).await;
    let child = other.spawn(&mut prepared, "exec cat");
    let mut copier = prepared.start().await.unwrap();
    other.writer().write_all(b"still alive\n").unwrap();
    assert_eq!(read_line(&stdout).await, "still alive\n");
    copier.close_stdin();
    assert_eq!(exit_code(&child).await, 0);

    let begun = Instant::now();
    assert!(!stuck_copier.drain(HASTY).await);
    assert!(begun.elapsed() < LIMIT / 2);
    // Nothing reads the pipe any more once the copy has ended.
    assert_eq!(exit_code(&stuck).await, 128 + 13);
}

#[tokio::test]
async fn a_client_that_reads_slowly_loses_nothing() {
    let client = Client::new();
    let mut stdout = client.reader("stdout");
    let mut prepared = client.prepare("", "stdout", "", false).await;
    let child = client.spawn(&mut prepared, "head -c 130000 /dev/zero");
    let copier = prepared.start().await.unwrap();
    assert_eq!(exit_code(&child).await, 0);
    let read = spawn_blocking(move || {
        let mut piece = [0; 4096];
        let mut count = 0;
        loop {
            match stdout.read(&mut piece).unwrap() {
                0 => return count,
                read => count += read,
            }
            thread::sleep(Duration::from_millis(40));
        }
    });
    // Shorter than reading everything takes, and much longer than one chunk takes.
    let slow = Patience {
        idle: Duration::from_secs(1),
        limit: LIMIT,
    };
    assert!(copier.drain(slow).await);
    assert_eq!(read.await.unwrap(), 130_000);
}

#[tokio::test]
async fn output_written_while_the_shim_was_suspended_is_copied() {
    let client = Client::new();
    let stdout = client.reader("stdout");
    let (go, done) = (client.path("go"), client.path("done"));
    let script = format!(
        "until [ -e {} ]; do sleep 0.01; done; echo late; exec >&-; : > {}",
        go.display(),
        done.display()
    );
    let mut prepared = client.prepare("", "stdout", "", false).await;
    let _child = client.spawn(&mut prepared, &script);
    let copier = prepared.start().await.unwrap();
    let stands_still = async {
        fs::write(&go, "").unwrap();
        let begun = Instant::now();
        while !done.exists() || begun.elapsed() < 2 * HASTY.idle {
            assert!(begun.elapsed() < LIMIT, "nothing is written");
            thread::sleep(Duration::from_millis(5));
        }
    };
    let (drained, (), text) = tokio::join!(copier.drain(HASTY), stands_still, read_all(stdout));
    assert!(drained);
    assert_eq!(text, "late\n");
}

#[tokio::test]
async fn a_stream_that_never_ends_is_closed_at_the_limit() {
    let client = Client::new();
    let mut stdout = client.reader("stdout");
    let mut prepared = client.prepare("", "stdout", "", false).await;
    let child = client.spawn(&mut prepared, "exec yes");
    let copier = prepared.start().await.unwrap();
    // The first line is read before the timer starts, however long it takes to arrive.
    assert_eq!(read_line(&stdout).await, "y\n");
    let read = spawn_blocking(move || std::io::copy(&mut stdout, &mut std::io::sink()).unwrap());
    let patience = Patience {
        idle: LIMIT,
        limit: Duration::from_millis(100),
    };
    assert!(!copier.drain(patience).await);
    assert!(read.await.unwrap() > 0);
    assert_eq!(exit_code(&child).await, 128 + 13);
}

#[tokio::test]
async fn output_survives_a_client_that_goes_and_comes_back() {
    let client = Client::new();
    let first = client.reader("stdout");
    let mut prepared = client.prepare("stdin", "stdout", "", false).await;
    let child = client.spawn(&mut prepared, "while read line; do echo got $line; done");
    let mut copier = prepared.start().await.unwrap();
    client.writer().write_all(b"one\n").unwrap();
    assert_eq!(read_line(&first).await, "got one\n");
    drop(first);
    client.writer().write_all(b"two\n").unwrap();
    let second = client.reader("stdout");
    assert_eq!(read_line(&second).await, "got two\n");
    copier.close_stdin();
    assert_eq!(exit_code(&child).await, 0);
    assert!(copier.drain(PATIENT).await);
}

#[tokio::test]
async fn output_of_a_failing_runtime_never_reaches_the_client() {
    let client = Client::new();
    let (stdout, stderr) = (client.reader("stdout"), client.reader("stderr"));
    let mut prepared = client.prepare("", "stdout", "stderr", false).await;
    let child = client.spawn(&mut prepared, "echo leak; echo leak >&2; exit 1");
    assert_eq!(exit_code(&child).await, 1);
    prepared.abort().await;
    assert_eq!(read_all(stdout).await, "");
    assert_eq!(read_all(stderr).await, "");
}

#[tokio::test]
async fn a_missing_fifo_is_named() {
    let client = Client::new();
    let request = Request {
        id: "",
        namespace: "",
        stdin: "",
        stdout: "/no/such",
        stderr: "",
        terminal: false,
    };
    let config = StdioConfig::parse(&request).unwrap();
    let error = config
        .prepare(Owner::default(), &client.reaper)
        .await
        .unwrap_err();
    assert_eq!(error.to_string(), "cannot open /no/such for the process's stdout");
}

#[tokio::test]
async fn the_process_may_reopen_its_pipes_as_another_user() {
    let client = Client::new();
    let stdout = client.reader("stdout");
    let text = client.path("stdout").to_str().unwrap().to_owned();
    let request = Request {
        id: "",
        namespace: "",
        stdin: "",
        stdout: &text,
        stderr: "",
        terminal: false,
    };
    let config = StdioConfig::parse(&request).unwrap();
    let mut prepared = config
        .prepare(
            Owner {
                uid: 65534,
                gid: 65534,
            },
            &client.reaper,
        )
        .await
        .unwrap();
    let child = client.spawn(
        &mut prepared,
        "stat -L -c %u:%g /proc/self/fd/1 > /proc/self/fd/1",
    );
    let copier = prepared.start().await.unwrap();
    assert_eq!(exit_code(&child).await, 0);
    assert_eq!(rest(copier, stdout).await, "65534:65534\n");
}
