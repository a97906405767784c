use super::*;

#[tokio::test]
async fn stdin_ends_only_when_it_is_closed() {
    let client = Client::new();
    let stdout = client.reader("stdout");
    let mut prepared = client.prepare("stdin", "stdout", "", false).await;
    let child = client.spawn(&mut prepared, "exec cat");
    let mut copier = prepared.start().await.unwrap();
    for text in ["one\n", "two\n"] {
        // Each writer closes its side when it is dropped.
        client.writer().write_all(text.as_bytes()).unwrap();
        assert_eq!(read_line(&stdout).await, text);
    }
    let mut last = client.writer();
    copier.close_stdin();
    last.write_all(b"three").unwrap();
    drop(last);
    assert_eq!(exit_code(&child).await, 0);
    assert_eq!(rest(copier, stdout).await, "three");
}

/// nerdctl looks for the task as soon as its input is written, to close stdin, and gives up if there is none.
#[tokio::test]
async fn a_client_writes_to_stdin_when_the_process_is_there() {
    let client = Client::new();
    let stdout = client.reader("stdout");
    let mut prepared = client.prepare("stdin", "stdout", "", false).await;
    let open = || {
        let mut options = File::options();
        options.write(true).custom_flags(libc::O_NONBLOCK);
        options.open(client.path("stdin"))
    };
    assert_eq!(open().unwrap_err().raw_os_error(), Some(libc::ENXIO));
    let child = client.spawn(&mut prepared, "exec cat");
    assert_eq!(open().unwrap_err().raw_os_error(), Some(libc::ENXIO));
    let mut copier = prepared.start().await.unwrap();
    let mut writer = open().unwrap();
    writer.write_all(b"all").unwrap();
    drop(writer);
    copier.close_stdin();
    assert_eq!(exit_code(&child).await, 0);
    assert_eq!(rest(copier, stdout).await, "all");
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
    assert_eq!(rest(copier, stdout).await, "from a file");
}
