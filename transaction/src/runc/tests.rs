use firn_process::testing::write_program;

use super::*;

#[test]
fn last_error_is_the_last_line_of_level_error() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        file.path(),
        concat!(
            "{\"level\":\"error\",\"msg\":\"first\"}\n",
            "not json\n",
            "{\"level\":\"error\",\"msg\":\" second \",\"time\":\"now\"}\n",
            "{\"level\":\"info\",\"msg\":\"third\"}\n",
        ),
    )
    .unwrap();
    assert_eq!(last_error(file.path(), 0).as_deref(), Some("second"));
    std::fs::write(
        file.path(),
        "{\n  \"msg\": \"of crun\",\n  \"level\": \"error\"\n}\nno {json\n",
    )
    .unwrap();
    assert_eq!(last_error(file.path(), 0).as_deref(), Some("of crun"));
    let length = file.as_file().metadata().unwrap().len();
    assert_eq!(
        last_error(file.path(), length),
        None,
        "an error of an earlier call was quoted"
    );
}

#[test]
fn only_the_end_of_a_long_log_is_read() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let info = "{\"level\":\"info\",\"msg\":\"x\"}\n".repeat(4096);
    let error = |msg: &str| format!("{{\"level\":\"error\",\"msg\":\"{msg}\"}}\n");
    std::fs::write(file.path(), error("old") + &info).unwrap();
    assert_eq!(last_error(file.path(), 0), None);
    std::fs::write(file.path(), info + &error("new")).unwrap();
    assert_eq!(last_error(file.path(), 7).as_deref(), Some("new"));
    assert_eq!(last_error(file.path(), u64::MAX), None, "the log was truncated");
}

#[test]
fn absent_and_finished_are_distinguished() {
    let failed = |message: &str| RuncError::Failed {
        verb: "kill",
        message: message.into(),
        output: String::new(),
    };
    assert!(failed("container does not exist").is_absent());
    assert!(failed("container not running").is_finished());
    assert!(!failed("permission denied").is_finished());
}

/// Freezes at the third pause, or never if there is a file `busy`.
const FREEZES_LATE: &str = r#"#!/bin/sh
while [ "$1" != pause ]; do
[ "$1" = --log ] && log=$2
shift
done
here=$(dirname "$0")
echo x >>"$here/tried"
[ "$(wc -l <"$here/tried")" -lt 3 ] || [ -e "$here/busy" ] || exit 0
echo '{"level":"error","msg":"unable to freeze"}' >>"$log"
exit 1
"#;

#[tokio::test]
async fn a_pause_that_does_not_freeze_is_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let runc = stub(&dir, FREEZES_LATE);
    runc.pause().await.unwrap();
    let tried = || {
        std::fs::read_to_string(dir.path().join("tried"))
            .unwrap()
            .lines()
            .count()
    };
    assert_eq!(tried(), 3);
    std::fs::write(dir.path().join("busy"), "").unwrap();
    assert_eq!(runc.pause().await.unwrap_err().to_string(), "unable to freeze");
    assert_eq!(tried(), 9);
}

/// runc's place has this script.
fn stub(dir: &tempfile::TempDir, script: &str) -> Runc {
    let runtime = dir.path().join("runtime");
    write_program(&runtime, script);
    let options = RuncOptions {
        binary_name: runtime.display().to_string(),
        ..RuncOptions::default()
    };
    Runc::new("job", "default", dir.path(), &options, Reaper::start().unwrap())
}

/// Both calls fail, and the log of the first ends with the error of the second.
const BOTH_FAIL: &str = r#"#!/bin/sh
while [ "$1" != kill ] && [ "$1" != ps ]; do
[ "$1" = --log ] && log=$2
shift
done
here=$(dirname "$0")
while [ "$1" = ps ] && [ ! -e "$here/kill" ]; do sleep 0.01; done
echo "{\"level\":\"error\",\"msg\":\"of $1\"}" >>"$log"
touch "$here/$1"
while [ ! -e "$here/ps" ]; do sleep 0.01; done
exit 1
"#;

#[tokio::test]
async fn concurrent_calls_fail_with_their_own_errors() {
    let dir = tempfile::tempdir().unwrap();
    let runc = stub(&dir, BOTH_FAIL);
    let (killed, listed) = tokio::join!(runc.kill(9, false), runc.ps());
    assert_eq!(killed.unwrap_err().to_string(), "of kill");
    assert_eq!(listed.unwrap_err().to_string(), "of ps");
    let log = std::fs::read_to_string(dir.path().join("log.json")).unwrap();
    assert!(log.contains("of kill") && log.contains("of ps"), "{log}");
    let quoted = last_error(&dir.path().join("log.json"), 0);
    assert_eq!(
        quoted, None,
        "a call that shares the log fails with another's error"
    );
    let names = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    let logs = names.filter(|name| name.to_string_lossy().ends_with(".json"));
    assert_eq!(logs.count(), 1, "a log was left");
}
