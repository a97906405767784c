//! The binary as the shim and people start it, on a node without driver and with one that hangs.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use command_fds::{CommandFdExt, FdMapping};
use firn_gpu::protocol::{Reply, Request};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_firn-gpu");
const DEADLINE: Duration = Duration::from_secs(20);

/// A directory with a libcuda.so.1 made from the fixture.
fn hanging_driver() -> TempDir {
    let directory = tempfile::tempdir().expect("temporary directory");
    let rustc = Path::new(env!("CARGO")).with_file_name("rustc");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hanging_driver.rs");
    let status = Command::new(rustc)
        .args([
            "--edition",
            "2024",
            "--crate-type",
            "cdylib",
            "--crate-name",
            "cuda",
            "-C",
            "panic=abort",
            "-o",
        ])
        .arg(directory.path().join("libcuda.so.1"))
        .arg(source)
        .status()
        .expect("start rustc");
    assert!(status.success());
    directory
}

/// A worker whose first libraries are those in `libraries`, and the shim's end of its socket.
fn serve(libraries: Option<&Path>) -> (Child, BufReader<UnixStream>) {
    let (ours, theirs) = UnixStream::pair().expect("socket pair");
    ours.set_read_timeout(Some(DEADLINE)).expect("read timeout");
    let mut command = Command::new(PROGRAM);
    command
        .args(["serve", "--fd", "3"])
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command.env("CUDA_VISIBLE_DEVICES", "7").env("FIRN_TEST", "kept");
    if let Some(libraries) = libraries {
        command.env("LD_LIBRARY_PATH", libraries);
    }
    command
        .fd_mappings(vec![FdMapping {
            parent_fd: OwnedFd::from(theirs),
            child_fd: 3,
        }])
        .expect("one mapping");
    let child = command.spawn().expect("start firn-gpu");
    // `command` holds the worker's end of the socket until here.
    drop(command);
    (child, BufReader::new(ours))
}

fn ask(stream: &mut BufReader<UnixStream>, request: &Request) {
    let line = serde_json::to_string(request).expect("plain data") + "\n";
    stream
        .get_mut()
        .write_all(line.as_bytes())
        .expect("the worker reads");
}

fn read(stream: &mut BufReader<UnixStream>) -> Reply {
    let mut line = String::new();
    stream.read_line(&mut line).expect("a reply in time");
    serde_json::from_str(&line).expect("a reply line")
}

fn wait(child: &mut Child) -> ExitStatus {
    let until = Instant::now() + DEADLINE;
    loop {
        if let Some(status) = child.try_wait().expect("our child") {
            return status;
        }
        if Instant::now() > until {
            child.kill().expect("our child");
            child.wait().expect("our child");
            panic!("the worker does not end");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn run(args: &[&str]) -> (Option<i32>, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new(PROGRAM).args(args).output().expect("start firn-gpu");
    (
        status.code(),
        String::from_utf8(stdout).expect("text"),
        String::from_utf8(stderr).expect("text"),
    )
}

#[test]
fn the_worker_ends_with_the_socket_although_the_driver_hangs_in_a_call_and_at_exit() {
    let driver = hanging_driver();
    let (mut child, mut stream) = serve(Some(driver.path()));
    ask(&mut stream, &Request::Checkpoint { pids: vec![1, 2] });
    let Reply::Process(reply) = read(&mut stream) else {
        panic!()
    };
    assert_eq!((reply.pid, reply.error), (1, None));
    assert_eq!(child.try_wait().unwrap(), None);
    stream.get_ref().shutdown(Shutdown::Both).unwrap();
    assert_eq!(wait(&mut child).code(), Some(0));
}

#[test]
fn the_worker_does_not_inherit_what_hides_gpus() {
    let (mut child, mut stream) = serve(None);
    ask(&mut stream, &Request::Discover { pids: vec![] });
    assert!(matches!(read(&mut stream), Reply::Done { .. }));
    let environment = fs::read_to_string(format!("/proc/{}/environ", child.id())).unwrap();
    assert!(environment.split('\0').any(|entry| entry == "FIRN_TEST=kept"));
    assert!(!environment.contains("CUDA_"), "{environment:?}");
    drop(stream);
    assert_eq!(wait(&mut child).code(), Some(0));
}

#[test]
fn a_descriptor_that_is_no_socket_is_refused() {
    let (code, _, stderr) = run(&["serve", "--fd", "77"]);
    assert_eq!(code, Some(1));
    assert!(stderr.starts_with("firn-gpu: cannot serve: "), "{stderr}");
}

#[test]
fn help_version_and_wrong_usage() {
    let (code, stdout, _) = run(&["--version"]);
    assert_eq!(
        (code, stdout.as_str()),
        (Some(0), concat!("firn-gpu ", env!("CARGO_PKG_VERSION"), "\n"))
    );
    let (code, stdout, _) = run(&["--help"]);
    assert_eq!(code, Some(0));
    assert!(stdout.contains("firn-gpu inventory"), "{stdout}");
    let (code, stdout, stderr) = run(&["inventory", "--yaml"]);
    assert_eq!((code, stdout.as_str()), (Some(2), ""));
    assert_eq!(
        stderr,
        "firn-gpu: unknown argument \"--yaml\". hint: see firn-gpu --help\n"
    );
}
