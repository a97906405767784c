//! Real processes, fifos, files and terminals; the test plays the client and the OCI runtime.

use std::fs::{self, File};
use std::io::{IoSlice, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use nix::pty::openpty;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tempfile::TempDir;
use tokio::task::spawn_blocking;

use super::copier::Drained;
use super::*;
use crate::reaper::{Child, Reaper};

/// Longest time for anything here that should happen.
const LIMIT: Duration = Duration::from_secs(30);

/// Waits for whatever should happen.
const PATIENT: Patience = Patience {
    idle: LIMIT,
    limit: LIMIT,
};

/// Waits for what moves.
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

    /// A write side of stdin; opening fails at once when the shim does not read it.
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

/// Reads to the end on a thread of its own, as a client would.
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

/// 100 MiB of 64-bit counters in a file.
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

/// Reads counters to the end; gives how many came in order.
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
    assert_eq!(
        prepared.start().await.unwrap().drain(PATIENT).await,
        Drained::Complete
    );
}

#[tokio::test]
async fn both_outputs_arrive_and_end() {
    let client = Client::new();
    let (stdout, stderr) = (client.reader("stdout"), client.reader("stderr"));
    let mut prepared = client.prepare("", "stdout", "stderr", false).await;
    let child = client.spawn(&mut prepared, "echo out; echo err >&2; exit 3");
    let copier = prepared.start().await.unwrap();
    assert_eq!(exit_code(&child).await, 3);
    assert_eq!(copier.drain(PATIENT).await, Drained::Complete);
    assert_eq!(read_all(stdout).await, "out\n");
    assert_eq!(read_all(stderr).await, "err\n");
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
    assert_eq!(copier.drain(PATIENT).await, Drained::Complete);
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
    assert_eq!(stuck_copier.drain(HASTY).await, Drained::Cut);
    assert!(begun.elapsed() < LIMIT / 2);
    // With the copy gone nobody reads the pipe any more.
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
            thread::sleep(Duration::from_millis(10));
        }
    });
    let slow = Patience {
        idle: Duration::from_millis(150),
        limit: LIMIT,
    };
    assert_eq!(copier.drain(slow).await, Drained::Complete);
    assert_eq!(read.await.unwrap(), 130_000);
}

#[tokio::test]
async fn a_stream_that_never_ends_is_cut_at_the_limit() {
    let client = Client::new();
    let mut stdout = client.reader("stdout");
    let mut prepared = client.prepare("", "stdout", "", false).await;
    let child = client.spawn(&mut prepared, "exec yes");
    let copier = prepared.start().await.unwrap();
    let read = spawn_blocking(move || std::io::copy(&mut stdout, &mut std::io::sink()).unwrap());
    let patience = Patience {
        idle: LIMIT,
        limit: Duration::from_millis(100),
    };
    assert_eq!(copier.drain(patience).await, Drained::Cut);
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
    assert_eq!(copier.drain(PATIENT).await, Drained::Complete);
}

#[tokio::test]
async fn stdin_ends_only_when_it_is_closed() {
    let client = Client::new();
    let stdout = client.reader("stdout");
    let mut prepared = client.prepare("stdin", "stdout", "", false).await;
    let child = client.spawn(&mut prepared, "exec cat");
    let mut copier = prepared.start().await.unwrap();
    for text in ["one\n", "two\n"] {
        // Each writer closes its side again.
        client.writer().write_all(text.as_bytes()).unwrap();
        assert_eq!(read_line(&stdout).await, text);
    }
    let mut last = client.writer();
    copier.close_stdin();
    last.write_all(b"three").unwrap();
    drop(last);
    assert_eq!(exit_code(&child).await, 0);
    assert_eq!(copier.drain(PATIENT).await, Drained::Complete);
    assert_eq!(read_all(stdout).await, "three");
}

#[tokio::test]
async fn a_stdin_that_is_no_fifo_is_read_by_the_process() {
    let client = Client::new();
    let input = client.path("input");
    fs::write(&input, "from a file").unwrap();
    let stdout = client.reader("stdout");
    let mut prepared = client.prepare(input.to_str().unwrap(), "stdout", "", false).await;
    let child = client.spawn(&mut prepared, "exec cat");
    let copier = prepared.start().await.unwrap();
    assert_eq!(exit_code(&child).await, 0);
    assert_eq!(copier.drain(PATIENT).await, Drained::Complete);
    assert_eq!(read_all(stdout).await, "from a file");
}

#[tokio::test]
async fn what_a_failing_runtime_prints_stays_here() {
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
    assert_eq!(copier.drain(PATIENT).await, Drained::Complete);
    assert_eq!(read_all(stdout).await, "65534:65534\n");
}

#[tokio::test]
async fn a_log_file_is_made_and_appended_to_by_both_outputs() {
    let client = Client::new();
    let log = client.path("new/dir/box.log");
    let uri = format!("file://{}", log.display());
    for round in ["first", "second"] {
        let mut prepared = client.prepare("", &uri, &uri, false).await;
        let child = client.spawn(
            &mut prepared,
            &format!("echo {round}; exec >&2; echo {round} err"),
        );
        let copier = prepared.start().await.unwrap();
        assert_eq!(exit_code(&child).await, 0);
        assert_eq!(copier.drain(PATIENT).await, Drained::Complete);
    }
    let text = fs::read_to_string(&log).unwrap();
    let mut lines: Vec<_> = text.lines().collect();
    assert!(lines[..2].iter().all(|line| line.starts_with("first")), "{text}");
    lines.sort_unstable();
    assert_eq!(lines, ["first", "first err", "second", "second err"]);
    let umask_free = fs::metadata(&log).unwrap().permissions().mode() & 0o700;
    assert_eq!(umask_free, 0o600);
}

#[tokio::test]
async fn a_full_disk_neither_stops_nor_kills_the_process() {
    let client = Client::new();
    let mut prepared = client.prepare("", "file:///dev/full", "", false).await;
    let child = client.spawn(&mut prepared, "exec head -c 1000000 /dev/zero");
    let copier = prepared.start().await.unwrap();
    assert_eq!(exit_code(&child).await, 0);
    assert_eq!(copier.drain(PATIENT).await, Drained::Complete);
}

fn logger(client: &Client, body: &str) -> String {
    let path = client.path("logger");
    fs::write(
        &path,
        format!("#!/bin/sh\ncd {}\n{body}\n", client.dir.path().display()),
    )
    .unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.to_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_logging_binary_reads_both_outputs() {
    let client = Client::new();
    let body = "echo \"$@\" > args\nenv > env\nexec 5>&-\ncat <&3 > out\ncat <&4 > err\n: > done";
    let uri = format!("binary://{}?tag=a+b&x=1", logger(&client, body));
    let mut prepared = client.prepare("", &uri, &uri, false).await;
    let child = client.spawn(&mut prepared, "echo to out; echo to err >&2");
    let copier = prepared.start().await.unwrap();
    assert_eq!(exit_code(&child).await, 0);
    assert_eq!(copier.drain(PATIENT).await, Drained::Complete);
    let text = |name: &str| fs::read_to_string(client.path(name)).unwrap();
    assert_eq!((text("out"), text("err")), ("to out\n".into(), "to err\n".into()));
    assert_eq!(text("args"), "tag a b x 1\n");
    let env = text("env");
    assert!(
        env.contains("CONTAINER_ID=box\n") && env.contains("CONTAINER_NAMESPACE=ns\n"),
        "{env}"
    );
    // The shell adds PWD and the like; nothing of ours may be there.
    assert!(!env.contains("CARGO"), "{env}");
    assert!(client.path("done").exists());
}

#[tokio::test]
async fn a_logging_binary_that_stays_is_told_to_end() {
    let client = Client::new();
    let body =
        "trap 'echo told > told; exit' TERM\necho $$ > pid\nexec 5>&-\nwhile :; do read x < stdin; done";
    let uri = format!("binary://{}", logger(&client, body));
    let prepared = client.prepare("", &uri, &uri, false).await;
    let copier = prepared.start().await.unwrap();
    assert_eq!(copier.drain(HASTY).await, Drained::Cut);
    let begun = Instant::now();
    while !client.path("told").exists() {
        assert!(begun.elapsed() < LIMIT, "the logging binary got no SIGTERM");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_logging_binary_that_is_not_ready_is_refused() {
    let client = Client::new();
    let path = logger(&client, "exit 1");
    let prepare = async |uri: &str| {
        let request = Request {
            id: "",
            namespace: "",
            stdin: "",
            stdout: uri,
            stderr: uri,
            terminal: false,
        };
        StdioConfig::parse(&request)
            .unwrap()
            .prepare(Owner::default(), &client.reaper)
            .await
    };
    assert!(matches!(
        prepare(&format!("binary-v2://{path}")).await,
        Err(Error::LoggerNotReady { .. })
    ));
    assert!(matches!(
        prepare("binary:///no/such/logger").await,
        Err(Error::LoggerSpawn { .. })
    ));
}

#[tokio::test]
async fn a_logging_binary_that_never_says_that_it_is_ready_is_given_up() {
    let client = Client::new();
    let uri = format!("binary://{}", logger(&client, "echo $$ > pid; exec sleep 1000"));
    let request = Request {
        id: "",
        namespace: "",
        stdin: "",
        stdout: &uri,
        stderr: &uri,
        terminal: false,
    };
    let config = StdioConfig::parse(&request).unwrap();
    // All of its time passes at once.
    tokio::time::pause();
    let error = config
        .prepare(Owner::default(), &client.reaper)
        .await
        .unwrap_err();
    assert!(matches!(error, Error::LoggerTimeout { .. }), "{error}");
}

#[tokio::test]
async fn a_logging_binary_that_ignores_being_told_is_killed() {
    let client = Client::new();
    let body = "trap '' TERM\necho $$ > pid\nexec 5>&-\nwhile :; do sleep 0.05; done";
    let uri = format!("binary://{}", logger(&client, body));
    let prepared = client.prepare("", &uri, &uri, false).await;
    let copier = prepared.start().await.unwrap();
    let pid = fs::read_to_string(client.path("pid")).unwrap();
    let alive = || Path::new(&format!("/proc/{}", pid.trim())).exists();
    assert_eq!(copier.drain(HASTY).await, Drained::Cut);
    assert!(alive());
    // Its grace passes at once.
    tokio::time::pause();
    tokio::time::advance(LIMIT).await;
    tokio::time::resume();
    let begun = Instant::now();
    while alive() {
        assert!(begun.elapsed() < LIMIT, "the logging binary was not killed");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Plays runc: a shell on a new pty, whose master goes to the console socket.
fn spawn_on_terminal(client: &Client, prepared: &Prepared, script: &str) -> Child {
    let pty = openpty(None, None).unwrap();
    let socket = UnixStream::connect(prepared.console_socket().unwrap()).unwrap();
    let fds = [pty.master.as_raw_fd()];
    let (name, rights) = ([IoSlice::new(b"/dev/pts/0")], [ControlMessage::ScmRights(&fds)]);
    sendmsg::<()>(socket.as_raw_fd(), &name, &rights, MsgFlags::empty(), None).unwrap();
    let end = |fd: &OwnedFd| Stdio::from(fd.try_clone().unwrap());
    let mut command = Command::new("setsid");
    command.args(["--ctty", "--wait", "sh", "-c", script]);
    command
        .stdin(end(&pty.slave))
        .stdout(end(&pty.slave))
        .stderr(end(&pty.slave));
    client.reaper.spawn(&mut command).unwrap()
}

#[tokio::test]
async fn a_terminal_is_read_written_and_resized() {
    let client = Client::new();
    let stdout = client.reader("stdout");
    let prepared = client.prepare("stdin", "stdout", "", true).await;
    let socket_dir = prepared.console_socket().unwrap().parent().unwrap().to_owned();
    let script = "stty -echo; echo ready; read line; echo got $line; stty size; exit 7";
    let child = spawn_on_terminal(&client, &prepared, script);
    let copier = prepared.start().await.unwrap();
    assert!(!socket_dir.exists());
    assert_eq!(read_line(&stdout).await, "ready\r\n");
    copier.resize(132, 43).unwrap();
    client.writer().write_all(b"hello\n").unwrap();
    assert_eq!(exit_code(&child).await, 7);
    assert_eq!(copier.drain(PATIENT).await, Drained::Complete);
    assert_eq!(read_all(stdout).await, "got hello\r\n43 132\r\n");
}

#[tokio::test]
async fn a_terminal_outlives_the_end_of_its_stdin() {
    let client = Client::new();
    let stdout = client.reader("stdout");
    let prepared = client.prepare("stdin", "stdout", "", true).await;
    let child = spawn_on_terminal(
        &client,
        &prepared,
        "stty -echo; echo ready; read line; echo $line; echo end",
    );
    let mut copier = prepared.start().await.unwrap();
    assert_eq!(read_line(&stdout).await, "ready\r\n");
    client.writer().write_all(b"last\n").unwrap();
    copier.close_stdin();
    assert_eq!(exit_code(&child).await, 0);
    assert_eq!(copier.drain(PATIENT).await, Drained::Complete);
    assert_eq!(read_all(stdout).await, "last\r\nend\r\n");
}

#[tokio::test]
async fn a_terminal_is_told_the_end_of_its_stdin() {
    let cases = [
        ("whole\n", "got whole\r\nrest\r\n"),
        ("part", "rest part\r\n"),
        ("", "rest\r\n"),
    ];
    for (typed, expected) in cases {
        let client = Client::new();
        let stdout = client.reader("stdout");
        let prepared = client.prepare("stdin", "stdout", "", true).await;
        let script = "stty -echo; echo ready; while read line; do echo got $line; done; echo rest $line";
        let child = spawn_on_terminal(&client, &prepared, script);
        let mut copier = prepared.start().await.unwrap();
        assert_eq!(read_line(&stdout).await, "ready\r\n");
        let mut writer = client.writer();
        writer.write_all(typed.as_bytes()).unwrap();
        copier.close_stdin();
        drop(writer);
        assert_eq!(exit_code(&child).await, 0, "{typed:?}");
        assert_eq!(copier.drain(PATIENT).await, Drained::Complete);
        assert_eq!(read_all(stdout).await, expected);
    }
}

#[tokio::test]
async fn a_terminal_without_a_reader_still_runs() {
    let client = Client::new();
    let prepared = client.prepare("", "", "", true).await;
    let child = spawn_on_terminal(&client, &prepared, "head -c 1000000 /dev/zero; exit 4");
    let copier = prepared.start().await.unwrap();
    assert_eq!(exit_code(&child).await, 4);
    assert_eq!(copier.drain(PATIENT).await, Drained::Complete);
}

#[tokio::test]
async fn a_terminal_is_logged_by_a_binary() {
    let client = Client::new();
    let uri = format!(
        "binary://{}",
        logger(&client, "exec 5>&-\ncat <&3 > out\n: > done")
    );
    let prepared = client.prepare("", &uri, &uri, true).await;
    let child = spawn_on_terminal(&client, &prepared, "echo to out; echo to err >&2");
    let copier = prepared.start().await.unwrap();
    assert_eq!(exit_code(&child).await, 0);
    assert_eq!(copier.drain(PATIENT).await, Drained::Complete);
    assert_eq!(
        fs::read_to_string(client.path("out")).unwrap(),
        "to out\r\nto err\r\n"
    );
    assert!(client.path("done").exists());
}

#[tokio::test]
async fn a_terminal_that_does_not_come_is_an_error() {
    let client = Client::new();
    let socket = console::ConsoleSocket::bind_below(client.dir.path()).unwrap();
    let error = socket
        .receive_within(Duration::from_millis(20))
        .await
        .unwrap_err();
    assert!(matches!(error, Error::ConsoleTimeout { .. }), "{error}");

    let socket = console::ConsoleSocket::bind_below(client.dir.path()).unwrap();
    drop(UnixStream::connect(socket.path()).unwrap());
    let error = socket.receive_within(LIMIT).await.unwrap_err();
    assert!(matches!(error, Error::ConsoleEmpty), "{error}");

    let deep = client.path(&"d".repeat(100));
    fs::create_dir(&deep).unwrap();
    let error = console::ConsoleSocket::bind_below(&deep).unwrap_err();
    assert!(matches!(error, Error::ConsolePathTooLong { .. }), "{error}");
}
