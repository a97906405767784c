//! What goes into containers and comes out of them: exec, attach, logs.

use anyhow::Result;
use firn_lab::failure;
use serde_json::json;

use crate::cri::Point;
use crate::cri::client::{Cri, LOGS};
use crate::cri::pods::SLEEP;

pub const POINTS: &[Point] = &[
    Point::new(
        "exec: code and output",
        "5 out \"out\\n\" err \"err\\n\"",
        exec_sync,
    )
    .in_every_way(),
    Point::new("exec: one that takes too long", "DeadlineExceeded", exec_too_long),
    Point::new(
        "exec: a program that is not there",
        "stat /nosuch: no such file or directory",
        exec_no_program,
    ),
    Point::new("exec: with standard input", "out \"got one\\n", exec_stream),
    Point::new("exec: with a terminal", "/dev/pts/", exec_terminal),
    Point::new(
        "logs: both streams, line by line",
        "stdout F one\nstderr F two\nstdout P three",
        logs,
    )
    .in_every_way(),
    Point::new("logs: of a terminal", "stdout F", terminal_logs),
    Point::new(
        "logs: a new file when asked for",
        "old \"stdout F one\"",
        log_reopened,
    ),
    Point::new("attach: standard input and output", "got hello", attach),
];

fn exec_sync(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let container = pod.start("c", SLEEP)?;
    let seen = container.exec("echo out; echo err >&2; exit 5")?;
    pod.remove(&[&container])?;
    Ok(seen)
}

fn exec_too_long(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let container = pod.start("c", SLEEP)?;
    let request = json!({ "containerId": container.id, "cmd": ["sleep", "4321"], "timeout": "1" });
    let output = failure(container.exec_of(&request))?;
    let left = container.exec("ps -o args | grep -c '[s]leep 4321'")?;
    pod.remove(&[&container])?;
    Ok(format!("{output}\nleft of it: {left}"))
}

fn exec_no_program(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let container = pod.start("c", SLEEP)?;
    let request = json!({ "containerId": container.id, "cmd": ["/nosuch"], "timeout": "10" });
    let output = failure(container.exec_of(&request))?;
    pod.remove(&[&container])?;
    // The exec's own id is a random one.
    let reported = output.split("OCI runtime").last().unwrap_or_default().to_owned();
    Ok(reported)
}

fn exec_stream(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let container = pod.start("c", SLEEP)?;
    let script = "read a; echo got $a; read b; echo got $b >&2; exit 6";
    let request = json!({ "cmd": ["sh", "-c", script], "stdin": true, "stdout": true, "stderr": true });
    let mut stream = container.open("Exec", &request)?;
    stream.send("one")?;
    stream.send("two")?;
    let seen = stream.end()?;
    pod.remove(&[&container])?;
    Ok(seen)
}

fn exec_terminal(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let container = pod.start("c", SLEEP)?;
    let request = json!({ "cmd": ["tty"], "tty": true, "stdin": true, "stdout": true });
    let seen = container.open("Exec", &request)?.end()?;
    pod.remove(&[&container])?;
    Ok(seen)
}

fn logs(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    // The two streams are read by different readers: one line waits for the other.
    let script = "go() { until [ -e /$1 ]; do sleep 0.05; done; }; \
        echo one; go 1; echo two >&2; go 2; printf three; sleep 0.3";
    let container = pod.start("c", script)?;
    for (line, file) in [("one", "1"), ("two", "2")] {
        pod.logs("c", line)?;
        container.touch(file)?;
    }
    // Longer than one line of a log may be.
    let long = pod.start(
        "long",
        "i=0; while [ $i -lt 2000 ]; do printf 0123456789; i=$((i+1)); done; echo",
    )?;
    container.ended()?;
    long.ended()?;
    let lengths: Vec<String> = pod
        .logs("long", " F ")?
        .lines()
        .map(|line| format!("{} {}", &line[..8], line.len()))
        .collect();
    let seen = format!("{}\n{}", pod.logs("c", "three")?, lengths.join(", "));
    pod.remove(&[&container, &long])?;
    Ok(seen)
}

fn terminal_logs(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let container = pod.start_with(
        "c",
        &json!({ "command": ["sh", "-c", "tty; echo err >&2"], "tty": true, "stdin": true }),
    )?;
    container.ended()?;
    let seen = pod.logs("c", "err")?;
    pod.remove(&[&container])?;
    Ok(seen)
}

fn log_reopened(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let script = "echo one; while [ ! -e /go ]; do sleep 0.05; done; echo two; while :; do sleep 0.05; done";
    let container = pod.start("c", script)?;
    let old = pod.logs("c", "one")?;
    let node = cri.host.node();
    let log = format!("{LOGS}/pod/c.log");
    node.run(&["mv", &log, &format!("{log}.1")])?;
    cri.call("ReopenContainerLog", &json!({ "containerId": container.id }))?;
    container.touch("go")?;
    let new = pod.logs("c", "two")?;
    pod.remove(&[&container])?;
    Ok(format!("old {old:?}\nnew {new:?}"))
}

fn attach(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let script = "while :; do echo tick; sleep 0.05; done &
        while read line; do echo got $line; [ $line = end ] && exit 8; done";
    let container = pod.start_with("c", &json!({ "command": ["sh", "-c", script], "stdin": true }))?;
    let request = json!({ "stdin": true, "stdout": true, "stderr": true });
    let mut stream = container.open("Attach", &request)?;
    // Output is attached by now. What comes right before the end may be lost.
    stream.hears("tick")?;
    stream.send("hello")?;
    stream.hears("got hello")?;
    stream.send("end")?;
    let how = container.ended()?;
    stream.end()?;
    let log = pod.logs("c", "got end")?;
    let output: Vec<&str> = log.lines().filter(|line| !line.ends_with("tick")).collect();
    pod.remove(&[&container])?;
    Ok(format!("ended {how}\n{}", output.join("\n")))
}
