//! Output that goes to files and to logging binaries.

use firn_process::testing::write_program;

use super::*;

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
        assert!(copier.drain(PATIENT).await);
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
    assert!(copier.drain(PATIENT).await);
}

pub(super) fn logger(client: &Client, body: &str) -> String {
    let path = client.path("logger");
    let script = format!("#!/bin/sh\ncd {}\n{body}\n", client.dir.path().display());
    write_program(&path, &script);
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
    assert!(copier.drain(PATIENT).await);
    let text = |name: &str| fs::read_to_string(client.path(name)).unwrap();
    assert_eq!((text("out"), text("err")), ("to out\n".into(), "to err\n".into()));
    assert_eq!(text("args"), "tag a b x 1\n");
    let env = text("env");
    assert!(
        env.contains("CONTAINER_ID=box\n") && env.contains("CONTAINER_NAMESPACE=ns\n"),
        "{env}"
    );
    // The shell adds PWD and the like; no variable of the test may be there.
    assert!(!env.contains("CARGO"), "{env}");
    assert!(client.path("done").exists());
}

#[tokio::test]
async fn a_logging_binary_that_does_not_end_gets_sigterm() {
    let client = Client::new();
    let body =
        "trap 'echo got > terminated; exit' TERM\necho $$ > pid\nexec 5>&-\nwhile :; do read x < stdin; done";
    let uri = format!("binary://{}", logger(&client, body));
    let prepared = client.prepare("", &uri, &uri, false).await;
    let copier = prepared.start().await.unwrap();
    assert!(!copier.drain(HASTY).await);
    let begun = Instant::now();
    while !client.path("terminated").exists() {
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
async fn a_logging_binary_that_never_becomes_ready_is_a_timeout() {
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
    // Paused time: its deadline passes at once.
    tokio::time::pause();
    let error = config
        .prepare(Owner::default(), &client.reaper)
        .await
        .unwrap_err();
    assert!(matches!(error, Error::LoggerTimeout { .. }), "{error}");
}

#[tokio::test]
async fn a_logging_binary_that_ignores_sigterm_is_killed() {
    let client = Client::new();
    let body = "trap '' TERM\necho $$ > pid\nexec 5>&-\nwhile :; do sleep 0.05; done";
    let uri = format!("binary://{}", logger(&client, body));
    let prepared = client.prepare("", &uri, &uri, false).await;
    let copier = prepared.start().await.unwrap();
    let pid = fs::read_to_string(client.path("pid")).unwrap();
    let alive = || Path::new(&format!("/proc/{}", pid.trim())).exists();
    assert!(!copier.drain(HASTY).await);
    assert!(alive());
    // Paused time: its grace period passes at once.
    tokio::time::pause();
    tokio::time::advance(LIMIT).await;
    tokio::time::resume();
    let begun = Instant::now();
    while alive() {
        assert!(begun.elapsed() < LIMIT, "the logging binary was not killed");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
