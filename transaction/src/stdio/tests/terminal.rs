//! Terminals.

use super::logs::logger;
use super::*;

/// Acts as runc: starts a shell on a new pty and sends the master to the console socket.
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
    assert_eq!(rest(copier, stdout).await, "got hello\r\n43 132\r\n");
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
    assert_eq!(rest(copier, stdout).await, "last\r\nend\r\n");
}

#[tokio::test]
async fn a_terminal_reads_the_end_of_its_stdin() {
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
        assert_eq!(rest(copier, stdout).await, expected);
    }
}

#[tokio::test]
async fn a_terminal_without_a_reader_still_runs() {
    let client = Client::new();
    let prepared = client.prepare("", "", "", true).await;
    let child = spawn_on_terminal(&client, &prepared, "head -c 1000000 /dev/zero; exit 4");
    let copier = prepared.start().await.unwrap();
    assert_eq!(exit_code(&child).await, 4);
    assert!(copier.drain(PATIENT).await);
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
    assert!(copier.drain(PATIENT).await);
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
