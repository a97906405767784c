//! 1.7: programs of the host that read a process's output, and terminals.

use std::time::Duration;

use anyhow::{Context, Result};
use firn_lab::{BUNDLES, describe};
use firn_node::wait_for;

use crate::conformance::client::{Client, Fifo, ID, LIMIT, Stdio, clean, logged, logger, path, text};
use crate::conformance::{On, Place, Point};

pub const POINTS: &[Point] = &[
    Point::same(
        "1.7 binary: arguments, environment and descriptors",
        "args [tag] [a b]",
        environment,
    )
    .on(On::EachDaemon),
    Point::same(
        "1.7 binary: both outputs",
        "code 3, out \"to out\\n\", err \"to err\\n\"",
        both,
    )
    .on(On::EachDaemon),
    Point::same(
        "1.7 binary: the process waits until it is ready",
        "before: started false, ran false",
        waits,
    )
    .on(On::EachDaemon),
    Point::same(
        "1.7 binary: one that is missing",
        "refused, UNKNOWN, names it: true",
        missing,
    )
    .on(On::EachDaemon),
    Point::same(
        "1.7 binary: one that ends before it is ready",
        "ok, code 7",
        dies_early,
    )
    .on(On::EachDaemon),
    Point::same(
        "1.7 binary: one that ends while the process runs",
        "ok, code 7, \"line\\n\"",
        dies_later,
    )
    .on(On::EachDaemon),
    Point::same("1.7 binary: one that waits for SIGTERM", "ended", ends_on_sigterm).on(On::EachDaemon),
    Point::same(
        "1.7 binary: one that writes at the end of its input",
        "nothing",
        writes_late,
    )
    .on(On::EachDaemon)
    .better("\"to out\\n\""),
    Point::same(
        "1.7 binary-v2: one that reports that it is ready",
        "unknown STDIO scheme",
        v2_ready,
    )
    .on(On::EachDaemon)
    .better("\"to out\\n\""),
    Point::same(
        "1.7 binary-v2: one that ends before it is ready",
        "unknown STDIO scheme",
        v2_dies,
    )
    .on(On::EachDaemon)
    .better("ended before it was ready"),
    Point::same("1.7 terminal: of an exec, with its size", "43 132", terminal).on(On::EachDaemon),
    Point::same(
        "1.7 terminal: the end of its stdin",
        "code 129",
        terminal_stdin_ends,
    )
    .on(On::EachDaemon)
    .better("code 4, \"ready\\r\\ngot last\\r\\nend\\r\\n\""),
    Point::same("1.7 terminal: logged by a program", "to out", terminal_binary).on(On::EachDaemon),
    Point::same(
        "1.7 terminal: logged to a file",
        "failed to start console copy",
        terminal_file,
    )
    .on(On::EachDaemon)
    .better("code 4, \"to out\\r\\n\""),
    Point::same("1.7 terminal: ResizePty without one", "ok", resize_nothing).on(On::EachDaemon),
];

/// A logger that copies both outputs until they end.
const COPIES: &str = "exec 5>&-; cat <&4 >err & cat <&3 >out; wait";

fn uri(place: &Place<'_>, script: &str) -> Result<String> {
    Ok(format!("binary://{}", logger(place, script)?))
}

fn both_to(uri: &str) -> Stdio<'_> {
    Stdio {
        stdout: uri,
        stderr: uri,
        ..Stdio::default()
    }
}

fn environment(place: &Place<'_>) -> Result<String> {
    let script = "{ printf 'args'; for a; do printf ' [%s]' \"$a\"; done; echo
        tr '\\0' '\\n' </proc/$$/environ | sort
        for fd in /proc/$$/fd/*; do
            kind=other; [ ! -p $fd ] || kind=pipe; [ ! -c $fd ] || kind=char
            [ \"${fd##*/}\" -gt 9 ] || echo ${fd##*/} $kind
        done
        } >seen.new; mv seen.new seen; exec 5>&-; cat <&3 >/dev/null";
    std::fs::create_dir_all(place.node().path("/tmp/stdio"))?;
    // The stock shim gives several keys in any order.
    let uri = format!("{}?tag=a+b", uri(place, script)?);
    logged(place, &uri, "true")?;
    let seen = text(place, "seen")?;
    clean(place)?;
    Ok(seen)
}

fn both(place: &Place<'_>) -> Result<String> {
    let code = logged(
        place,
        &uri(place, COPIES)?,
        "echo to out; echo to err >&2; exit 3",
    )?;
    let seen = format!(
        "code {code}, out {:?}, err {:?}",
        text(place, "out")?,
        text(place, "err")?
    );
    clean(place)?;
    Ok(seen)
}

fn waits(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let script = "echo here >here; until [ -e go ]; do sleep 0.02; done; exec 5>&-; cat <&3 >out";
    let uri = uri(place, script)?;
    let argv = ["sh", "-c", "echo ran; echo ran >/ran"];
    client.add(0, "e", &both_to(&uri), &argv).context("Exec")?;
    let starting = client.begin("e")?;
    text(place, "here")?;
    // A span, not a condition: a process that does not wait would start in it.
    std::thread::sleep(Duration::from_millis(300));
    let (started, ran) = (starting.is_there(), client.inside("ran").is_ok());
    place.node().write(path("go"), "")?;
    let start = describe(&client.task.end(starting), |_| "ok".into());
    client.finish("e")?;
    let out = text(place, "out")?;
    client.end()?;
    Ok(format!(
        "before: started {started}, ran {ran}\nafter: {start}, {out:?}"
    ))
}

/// Starts an exec that must fail; returns what is published about it.
fn refusal(client: &Client<'_>, uri: &str, terminal: bool) -> String {
    let stdio = Stdio {
        terminal,
        ..both_to(uri)
    };
    let started = client.exec("e", &stdio, "true");
    let deleted = describe(&client.delete("e"), |_| "ok".into());
    match started {
        Ok(()) => format!("taken\nDelete {deleted}"),
        Err(error) => {
            let text = describe(&Err::<(), _>(error), |()| String::new());
            let named = text.contains("/tmp/stdio/nosuch") && text.to_lowercase().contains("no such file");
            let code = text.split(':').next().unwrap_or_default();
            format!("refused, {code}, names it: {named}\nDelete {deleted}")
        }
    }
}

fn missing(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let seen = refusal(&client, &format!("binary://{}", path("nosuch")), false);
    client.end()?;
    Ok(seen)
}

/// Writes until that fails, and shows by its exit code that it was not killed.
const WRITES: &str = "trap '' PIPE; until [ -e /stop ]; do echo line || exit 7; sleep 0.02; done";

fn dies_early(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let uri = uri(place, "exit 1")?;
    let started = describe(&client.exec("e", &both_to(&uri), WRITES), |()| "ok".into());
    let code = client.finish("e")?;
    client.end()?;
    Ok(format!("{started}, code {code}"))
}

fn dies_later(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let uri = uri(place, "exec 5>&-; read line <&3; echo $line >out")?;
    let started = describe(&client.exec("e", &both_to(&uri), WRITES), |()| "ok".into());
    let code = client.finish("e")?;
    let out = text(place, "out")?;
    client.end()?;
    Ok(format!("{started}, code {code}, {out:?}"))
}

fn ends_on_sigterm(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let script = "trap 'echo ended >ended; exit' TERM; exec 5>&-; while :; do sleep 0.05; done";
    let uri = uri(place, script)?;
    client.exec("e", &both_to(&uri), "true")?;
    client.finish("e")?;
    let seen = text(place, "ended")?;
    client.end()?;
    Ok(seen)
}

/// A logger without a handler for SIGTERM that holds what it has read until its input ends.
fn writes_late(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let uri = uri(
        place,
        "exec 5>&-; all=$(cat <&3); sleep 0.2; echo \"$all\" >out; echo >done",
    )?;
    client.exec("e", &both_to(&uri), "echo to out")?;
    client.finish("e")?;
    // The stock shim ends it at once; firn lets it come to its end.
    let limit = if place.is_firn() {
        LIMIT
    } else {
        Duration::from_secs(1)
    };
    let done = wait_for("the logger's end", limit, || {
        Ok(place.node().read(path("done")).ok())
    });
    let seen = match done {
        Ok(_) => format!("{:?}", text(place, "out")?),
        Err(_) => "nothing".to_owned(),
    };
    client.end()?;
    Ok(seen)
}

fn v2_ready(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let logger = client.logger("echo >&5; exec 5>&-; cat <&3 >out; echo >done")?;
    let uri = format!("binary-v2://{logger}");
    let started = client.exec("e", &both_to(&uri), "echo to out");
    let seen = match started {
        Ok(()) => {
            client.finish("e")?;
            text(place, "done")?;
            format!("{:?}", text(place, "out")?)
        }
        Err(error) => describe(&Err::<(), _>(error), |()| String::new()),
    };
    client.end()?;
    Ok(seen)
}

fn v2_dies(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let uri = format!("binary-v2://{}", client.logger("exit 1")?);
    let seen = describe(&client.exec("e", &both_to(&uri), "echo to out"), |()| "ok".into());
    client.end()?;
    Ok(seen)
}

fn on_terminal<'a>(input: &'a Fifo, out: &'a Fifo) -> Stdio<'a> {
    Stdio {
        stdin: &input.path,
        stdout: &out.path,
        terminal: true,
        ..Stdio::default()
    }
}

fn terminal(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let (input, out) = (client.fifo("in")?, client.fifo("out")?);
    let mut reader = out.reader()?;
    let script = "stty -echo; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo ready; read line; stty size; \
                  echo to err >&2; exit 4";
    client.exec("e", &on_terminal(&input, &out), script)?;
    reader.until("ready")?;
    let resized = client.resize("e", 132, 43);
    input.writer()?.write(b"go\n")?;
    reader.until("to err\r\n")?;
    let code = client.finish("e")?;
    let seen = format!("{resized}, code {code}, {:?}", reader.text()?);
    client.end()?;
    Ok(seen)
}

fn terminal_stdin_ends(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let (input, out) = (client.fifo("in")?, client.fifo("out")?);
    let mut reader = out.reader()?;
    let script = "stty -echo; echo ready; read line; echo got $line; sleep 0.5; echo end; exit 4";
    client.exec("e", &on_terminal(&input, &out), script)?;
    reader.until("ready")?;
    let mut writer = input.writer()?;
    client.close_stdin("e")?;
    writer.write(b"last\n")?;
    drop(writer);
    let code = client.finish("e")?;
    let seen = format!("code {code}, {:?}", reader.text()?);
    client.end()?;
    Ok(seen)
}

fn terminal_binary(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let uri = uri(place, COPIES)?;
    let stdio = Stdio {
        terminal: true,
        ..both_to(&uri)
    };
    // The last lines of a terminal are lost by the stock shim now and then.
    let script = "echo to out; echo to err >&2; until [ -e /logged ]; do sleep 0.05; done; exit 4";
    client.exec("e", &stdio, script)?;
    let seen = wait_for("both lines", LIMIT, || {
        let seen = place.node().read(path("out")).unwrap_or_default();
        Ok(seen.contains("err\r\n").then_some(seen))
    })?;
    place.node().write(format!("{BUNDLES}/{ID}/rootfs/logged"), "")?;
    let code = client.finish("e")?;
    client.end()?;
    Ok(format!("code {code}, {seen:?}"))
}

fn terminal_file(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let uri = format!("file://{}", path("log"));
    let stdio = Stdio {
        terminal: true,
        ..both_to(&uri)
    };
    let started = client.exec("e", &stdio, "echo to out; sleep 0.5; exit 4");
    let seen = match started {
        Ok(()) => format!("code {}, {:?}", client.finish("e")?, text(place, "log")?),
        Err(error) => describe(&Err::<(), _>(error), |()| String::new()),
    };
    client.end()?;
    Ok(seen)
}

fn resize_nothing(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    client.exec("e", &Stdio::default(), "exec sleep 1000")?;
    let resized = client.resize("e", 132, 43);
    client.task.kill("e", 9, false).context("kill")?;
    client.finish("e")?;
    client.end()?;
    Ok(resized)
}
