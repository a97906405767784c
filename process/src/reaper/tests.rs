use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::time::Instant;

use super::*;

const SOON: Duration = Duration::from_secs(20);

fn sh(script: &str) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]);
    command
}

#[tokio::test]
async fn reports_exit_status_and_signal() {
    let reaper = Reaper::start().unwrap();
    let started = SystemTime::now();
    for (script, code) in [
        ("exit 0", 0),
        ("exit 7", 7),
        ("kill -KILL $$", 137),
        ("kill -34 $$", 162),
    ] {
        let child = reaper.spawn(&mut sh(script)).unwrap();
        let exit = tokio::time::timeout(SOON, child.wait()).await.unwrap();
        assert_eq!((exit.pid, exit.code), (child.pid(), code), "{script}");
        assert!(exit.at >= started);
        assert_eq!(child.wait().await, exit, "a second look gives the same");
        assert!(!child.signal(Signal::SIGTERM), "a reaped pid is not signalled");
    }
}

#[tokio::test]
async fn a_process_that_is_gone_before_anyone_waits_is_not_lost() {
    let reaper = Reaper::start().unwrap();
    let children: Vec<_> = (0..40)
        .map(|i| (i, reaper.spawn(&mut sh(&format!("exit {i}"))).unwrap()))
        .collect();
    for (code, child) in children {
        assert_eq!(tokio::time::timeout(SOON, child.wait()).await.unwrap().code, code);
    }
}

#[tokio::test]
async fn a_command_that_does_not_exist_is_an_error_and_leaves_nothing() {
    let reaper = Reaper::start().unwrap();
    let error = reaper.spawn(&mut Command::new("/nonexistent")).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
    let error = reaper
        .output(&mut Command::new("/nonexistent"), SOON)
        .await
        .unwrap_err();
    assert_eq!(error.to_string(), "cannot run \"/nonexistent\"");
}

#[tokio::test]
async fn orphans_come_to_subscribers_with_their_exit_codes() {
    nix::sys::prctl::set_child_subreaper(true).unwrap();
    let reaper = Reaper::start().unwrap();
    let mut exits = reaper.subscribe();
    // Each orphan lives until our end of its stdin is closed, so longer than its parent.
    let mut command =
        sh("exec 3<&0; for i in 1 2 3; do sh -c \"read x; exit $i\" <&3 >/dev/null & echo $!; done");
    let mut child = reaper
        .spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()))
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let pids: Vec<i32> = lines.map(|line| line.unwrap().parse().unwrap()).collect();
    assert_eq!(pids.len(), 3);
    assert_eq!(tokio::time::timeout(SOON, child.wait()).await.unwrap().code, 0);
    for pid in &pids {
        assert_eq!(reaper.signal(*pid, 0), Ok(()));
    }
    drop(child.stdin.take());
    let mut left = pids.clone();
    while !left.is_empty() {
        let exit = tokio::time::timeout(SOON, exits.recv()).await.unwrap().unwrap();
        assert_ne!(exit.pid, child.pid(), "a child's exit is its own");
        if let Some(at) = left.iter().position(|pid| *pid == exit.pid) {
            left.remove(at);
            let index = pids.iter().position(|pid| *pid == exit.pid).unwrap();
            assert_eq!(exit.code, u32::try_from(index).unwrap() + 1);
            assert_eq!(reaper.signal(exit.pid, 0), Err(Errno::ESRCH));
        }
    }
}

#[tokio::test]
async fn only_orphans_are_signalled_by_their_number() {
    let reaper = Reaper::start().unwrap();
    let child = reaper.spawn(sh("read x").stdin(Stdio::piped())).unwrap();
    for pid in [child.pid(), std::process::id().cast_signed(), 1, 0, -1] {
        assert_eq!(reaper.signal(pid, 0), Err(Errno::ESRCH), "{pid}");
    }
    child.kill();
}

#[tokio::test]
async fn a_child_is_killed_with_its_process_group() {
    let reaper = Reaper::start().unwrap();
    let mut command = sh("sleep 1000 & echo there; wait");
    let mut child = reaper
        .spawn(command.process_group(0).stdout(Stdio::piped()))
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 6]).unwrap();
    child.kill_group();
    let exit = tokio::time::timeout(SOON, child.wait()).await.unwrap();
    assert_eq!(exit.code, 137);
    // End of file only when both are dead.
    assert_eq!(stdout.read_to_end(&mut Vec::new()).unwrap(), 0);
    child.kill_group();
}

#[tokio::test]
async fn a_dropped_child_leaves_no_zombie() {
    let reaper = Reaper::start().unwrap();
    let child = reaper.spawn(sh("read x").stdin(Stdio::piped())).unwrap();
    let pid = child.pid();
    drop(child);
    let deadline = Instant::now() + SOON;
    while std::fs::exists(format!("/proc/{pid}")).unwrap() {
        assert!(Instant::now() < deadline, "pid {pid} was not reaped");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn output_has_all_that_was_printed() {
    let reaper = Reaper::start().unwrap();
    let script = "head -c 3000000 /dev/zero; echo oops >&2; exit 3";
    let output = reaper.output(&mut sh(script), SOON).await.unwrap();
    assert_eq!(output.exit.code, 3);
    assert!(!output.success());
    assert_eq!(output.stdout.len(), 3_000_000);
    assert_eq!(output.stderr, b"oops\n");
}

#[tokio::test]
async fn a_helper_that_fails_gives_a_reason() {
    let reaper = Reaper::start().unwrap();
    for (script, printed) in [
        ("echo fine", Ok(b"fine\n".to_vec())),
        (
            "echo 'no such thing' >&2; exit 3",
            Err("no such thing".to_owned()),
        ),
        ("kill -KILL $$", Err("it ended with exit status 137".to_owned())),
    ] {
        let output = reaper.output(&mut sh(script), SOON).await.unwrap();
        assert_eq!(output.printed(), printed, "{script}");
    }
}

#[tokio::test]
async fn output_is_bounded() {
    let reaper = Reaper::start().unwrap();
    let output = reaper
        .output(&mut sh("head -c 9000000 /dev/zero"), SOON)
        .await
        .unwrap();
    assert!(output.success(), "the command could write everything");
    assert_eq!(output.stdout.len(), OUTPUT_LIMIT);
}

#[tokio::test]
async fn output_does_not_wait_for_descendants() {
    let reaper = Reaper::start().unwrap();
    let (hold, release) = std::io::pipe().unwrap();
    let mut command = sh("exec 3<&0; sh -c 'read x' <&3 & echo done");
    let output = reaper
        .output_with_input(command.stdin(hold), &[], SOON)
        .await
        .unwrap();
    assert_eq!(output.stdout, b"done\n");
    drop(release);
}

#[tokio::test]
async fn what_is_in_a_pipe_at_the_end_is_taken_and_nothing_waited_for() {
    // Somebody keeps it open.
    let (reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(&[b'x'; 40_000]).unwrap();
    let mut capture = Capture::new(Some(reader.into())).unwrap();
    capture.drain();
    assert_eq!(capture.bytes, [b'x'; 40_000]);
    // Somebody writes faster than it is read.
    let mut capture = Capture::new(None).unwrap();
    capture.read_pending(std::fs::File::open("/dev/zero").unwrap());
    assert_eq!(capture.bytes.len(), MAX_PIPE);
}

#[tokio::test]
async fn input_reaches_the_command() {
    let reaper = Reaper::start().unwrap();
    let input = vec![b'x'; 500_000];
    let output = reaper
        .output_with_input(&mut sh("wc -c"), &input, SOON)
        .await
        .unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), "500000");
    let unread = reaper
        .output_with_input(&mut sh("exit 5"), &input, SOON)
        .await
        .unwrap();
    assert_eq!(unread.exit.code, 5);
}

/// Writes its pid to the pipe, which ends when it is dead.
fn sleeper() -> (Command, std::io::PipeReader) {
    let mut command = sh("echo $$ >&3; exec sleep 1000");
    let (reader, writer) = std::io::pipe().unwrap();
    command_fds::CommandFdExt::fd_mappings(
        &mut command,
        vec![command_fds::FdMapping {
            parent_fd: writer.into(),
            child_fd: 3,
        }],
    )
    .unwrap();
    (command, reader)
}

#[tokio::test]
async fn an_overdue_command_is_killed() {
    let reaper = Reaper::start().unwrap();
    let (mut command, mut reader) = sleeper();
    let result = reaper.output(&mut command, Duration::from_millis(300)).await;
    drop(command);
    assert!(matches!(result, Err(OutputError::TimedOut { .. })), "{result:?}");
    let mut pid = String::new();
    reader.read_to_string(&mut pid).unwrap();
    assert!(!std::fs::exists(format!("/proc/{}", pid.trim())).unwrap());
}

#[tokio::test]
async fn a_command_that_nobody_waits_for_any_more_is_killed() {
    let reaper = Reaper::start().unwrap();
    let (mut command, mut reader) = sleeper();
    let left = tokio::time::timeout(Duration::from_millis(300), reaper.output(&mut command, SOON)).await;
    assert!(left.is_err());
    drop(command);
    reader.read_to_string(&mut String::new()).unwrap();
}

#[test]
fn children_die_with_the_thread_that_spawned_them() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let reaper = Reaper::start().unwrap();
            reaper.spawn(sh("exec sleep 1000").stdout(writer)).unwrap();
        });
    })
    .join()
    .unwrap();
    // End of file only when the child, the last holder of the write end, is dead.
    assert_eq!(reader.read_to_end(&mut Vec::new()).unwrap(), 0);
}

/// Every call of the shim that calls the OCI runtime has room for this future.
#[tokio::test]
async fn a_call_of_a_program_is_a_small_future() {
    let reaper = Reaper::start().unwrap();
    let mut command = Command::new("true");
    let call = reaper.output(&mut command, Duration::from_secs(20));
    let size = size_of_val(&call);
    assert!(size < 2048, "{size} bytes");
    assert!(call.await.unwrap().success());
}
