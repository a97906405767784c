//! 1.7: standard input, output and error through fifos, files and nothing at all.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use firn_lab::{BUNDLES, describe};
use firn_node::wait_for;
use sha2::{Digest, Sha256};

use crate::conformance::client::{Client, Fifo, ID, LIMIT, Stdio, path};
use crate::conformance::stdio_files::{file_appended, file_exec, file_made, file_refused, unknown_scheme};
use crate::conformance::{On, Place, Point};

pub const POINTS: &[Point] = &[
    Point::same("1.7 null: an exec without paths", "1:3 1:3 1:3", null_exec).on(On::EachDaemon),
    Point::same("1.7 null: a container without paths", "1:3 1:3 1:3", null_init).on(On::EachDaemon),
    Point::same(
        "1.7 fifo: both outputs and the exit code",
        "code 3, out \"to out\\n\", err \"to err\\n\"",
        apart,
    )
    .on(On::EachDaemon),
    Point::same(
        "1.7 fifo: outputs that nobody reads yet",
        "Start waits: true",
        unread,
    )
    .on(On::EachDaemon)
    .better("Start waits: false\nok, code 0"),
    Point::same(
        "1.7 fifo: a reader that goes and one that comes",
        "\"got 1\\n\" \"got 2\\n\"",
        readers_change,
    )
    .on(On::EachDaemon),
    Point::same(
        "1.7 fifo: a restart of containerd",
        "\"got 1\\n\" \"got 2\\n\"",
        daemon_restarts,
    )
    .on(On::EachDaemon),
    Point::same(
        "1.7 fifo: a reader that does not read",
        "State RUNNING\nKill ok\ncode 137\nDelete ok, 6 s or less: false",
        stuck_reader,
    )
    .on(On::Once)
    .better("6 s or less: true"),
    Point::same(
        "1.7 fifo: what is written right before the exit",
        "10 of 10",
        right_before_the_exit,
    )
    .on(On::EachDaemon),
    Point::same("1.7 fifo: many bytes", "22888896 bytes", many_bytes).on(On::EachDaemon),
    Point::same(
        "1.7 fifo: a grandchild that keeps stdout",
        "code 0, \"done\\n\"\nDelete ok, 6 s or less: false",
        grandchild,
    )
    .on(On::Once)
    .better("6 s or less: true"),
    Point::same("1.7 fifo: stdout alone", "UNKNOWN", stdout_alone)
        .on(On::EachDaemon)
        .better("code 0, \"out\\n\""),
    Point::same("1.7 fifo: one that is not there", "refused", missing_fifo).on(On::EachDaemon),
    Point::same("1.7 fifo: output of a failing runc", "\"\" \"\"", failing_exec).on(On::EachDaemon),
    Point::same(
        "1.7 pipes: belong to io_uid and io_gid",
        "out \"1234:1234\\n\", err \"err\\n\"",
        owned,
    )
    .on(On::EachDaemon),
    Point::same(
        "1.7 stdin: CloseIO and the client's end",
        "still open: true\nstill open: true\ncode 0, \"one\\ntwo\\nthree\\n\"",
        close_io,
    )
    .on(On::EachDaemon),
    Point::same("1.7 stdin: many bytes", "as sent", much_stdin).on(On::EachDaemon),
    Point::same("1.7 file: made with its parents", "dir 755, file 644", file_made).on(On::EachDaemon),
    Point::same(
        "1.7 file: both outputs, appended",
        "err 1 err 2 out 1 out 2",
        file_appended,
    )
    .on(On::EachDaemon),
    Point::same("1.7 file: an exec's", "err out", file_exec).on(On::EachDaemon),
    Point::same("1.7 file: one that cannot be made", "refused", file_refused).on(On::EachDaemon),
    Point::same(
        "1.7 uri: an unknown scheme",
        "unknown STDIO scheme",
        unknown_scheme,
    )
    .on(On::EachDaemon),
];

/// Writes the numbers of its three files to a file of the container.
const FILES: &str =
    "for fd in 0 1 2; do seen=\"$seen $(stat -L -c %t:%T /proc/$$/fd/$fd)\"; done; echo $seen >/seen";

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Lines of a log in an order that does not depend on which copy was first.
pub fn sorted(text: &str) -> String {
    let mut lines: Vec<_> = text.lines().collect();
    lines.sort_unstable();
    lines.join(" ")
}

fn ok<T>(answer: &ttrpc::Result<T>) -> String {
    describe(answer, |_| "ok".into())
}

/// Whether a call failed, and whether its message names the path.
fn refused<T>(answer: &ttrpc::Result<T>, path: &str) -> String {
    match answer {
        Ok(_) => "taken".to_owned(),
        Err(ttrpc::Error::RpcStatus(status)) => {
            let named = status.message().contains(path);
            format!("refused, {:?}, named: {named}", status.code())
        }
        Err(error) => format!("no answer: {error}"),
    }
}

fn null_exec(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let started = ok(&client.exec("e", &Stdio::default(), FILES));
    let code = client.finish("e")?;
    let seen = words(&client.inside("seen")?);
    client.end()?;
    Ok(format!("{started}, code {code}, {seen}"))
}

fn null_init(place: &Place<'_>) -> Result<String> {
    let client = Client::start_with(place, &["--null-io"], &format!("{FILES}; sleep 1000"))?;
    client.exec(
        "e",
        &Stdio::default(),
        "until grep -q . /seen; do sleep 0.05; done",
    )?;
    client.finish("e")?;
    let seen = words(&client.inside("seen")?);
    client.end()?;
    Ok(seen)
}

fn apart(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let (out, err) = (client.fifo("out")?, client.fifo("err")?);
    let (to_out, to_err) = (out.reader()?, err.reader()?);
    let stdio = outputs(&out, &err);
    client.exec("e", &stdio, "echo to out; echo to err >&2; exit 3")?;
    let code = client.finish("e")?;
    let seen = format!("code {code}, out {:?}, err {:?}", to_out.text()?, to_err.text()?);
    client.end()?;
    Ok(seen)
}

fn outputs<'a>(out: &'a Fifo, err: &'a Fifo) -> Stdio<'a> {
    Stdio {
        stdout: &out.path,
        stderr: &err.path,
        ..Stdio::default()
    }
}

/// What is published when a client starts a process before it has opened its outputs.
fn unread(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let (out, err) = (client.fifo("out")?, client.fifo("err")?);
    let script = [
        "sh",
        "-c",
        "echo early; until [ -e /go ]; do sleep 0.05; done; echo late",
    ];
    client
        .add(0, "e", &outputs(&out, &err), &script)
        .context("Exec")?;
    let starting = client.begin("e")?;
    // For the stock shim a span, not a condition: nothing must happen in it.
    let limit = if place.is_firn() {
        LIMIT
    } else {
        Duration::from_millis(700)
    };
    let answered = wait_for("the answer to Start", limit, || {
        Ok(starting.is_there().then_some(()))
    });
    let waits = answered.is_err();
    let (to_out, _to_err) = (out.reader()?, err.reader()?);
    let started = ok(&client.task.end(starting));
    place.node().write(format!("{BUNDLES}/{ID}/rootfs/go"), "")?;
    let code = client.finish("e")?;
    let seen = format!(
        "Start waits: {waits}\n{started}, code {code}, {:?}",
        to_out.text()?
    );
    client.end()?;
    Ok(seen)
}

/// Prints what it got for every line that it gets, and how that went when it has ended.
const ANSWERS: &str = "while read line; do echo got $line || exit 9; done; exit 5";

/// Two lines, each read by a reader of its own; what is done between them happens while nobody reads.
fn two_readers(client: &Client<'_>, between: impl FnOnce() -> Result<()>) -> Result<String> {
    let (input, out, err) = (client.fifo("in")?, client.fifo("out")?, client.fifo("err")?);
    let (mut first, _to_err) = (out.reader()?, err.reader()?);
    let stdio = Stdio {
        stdin: &input.path,
        ..outputs(&out, &err)
    };
    client.exec("e", &stdio, ANSWERS)?;
    let mut writer = input.writer()?;
    writer.write(b"1\n")?;
    first.until("\n")?;
    let one = String::from_utf8_lossy(&first.got).into_owned();
    drop(first);
    writer.write(b"2\n")?;
    between()?;
    let mut second = out.reader()?;
    second.until("\n")?;
    client.close_stdin("e")?;
    drop(writer);
    let code = client.finish("e")?;
    Ok(format!("{one:?} {:?}, code {code}", second.text()?))
}

fn readers_change(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let seen = two_readers(&client, || Ok(()))?;
    client.end()?;
    Ok(seen)
}

fn daemon_restarts(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let seen = two_readers(&client, || place.node().restart_containerd())?;
    let status = client.container.status()?;
    client.end()?;
    Ok(format!("{seen}\n{status}"))
}

/// How a delete went that must not wait for ever for somebody to read; well below the 10 s after which the
/// kubelet gives up.
fn delete_in_time(client: &Client<'_>, id: &str) -> String {
    let begun = Instant::now();
    let deleted = ok(&client.delete(id));
    let in_time = begun.elapsed() <= Duration::from_secs(6);
    format!("Delete {deleted}, 6 s or less: {in_time}")
}

fn stuck_reader(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let (out, err) = (client.fifo("out")?, client.fifo("err")?);
    let _deaf = (out.reader()?, err.reader()?);
    // More than a fifo holds, and less than a fifo and a pipe.
    let script = "head -c 100000 /dev/zero; >/full; exec yes";
    client.exec("e", &outputs(&out, &err), script)?;
    wait_for("a full fifo", LIMIT, || Ok(client.inside("full").ok()))?;
    let state = describe(&client.task.state("e"), |state| {
        format!("{:?}", state.status.enum_value_or_default())
    });
    let killed = ok(&client.task.kill("e", 9, false));
    let code = client.code("e")?;
    let deleted = delete_in_time(&client, "e");
    client.end()?;
    Ok(format!("State {state}\nKill {killed}\ncode {code}\n{deleted}"))
}

fn right_before_the_exit(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let (out, err) = (client.fifo("out")?, client.fifo("err")?);
    let (mut whole, _to_err) = (0, err.reader()?);
    for round in 0..10 {
        let (id, reader) = (format!("e{round}"), out.reader()?);
        client.exec(&id, &outputs(&out, &err), "seq 10000")?;
        client.finish(&id)?;
        whole += usize::from(reader.text()?.ends_with("\n9999\n10000\n"));
    }
    client.end()?;
    Ok(format!("{whole} of 10"))
}

fn digest(bytes: &[u8]) -> String {
    format!("{:02x?}", &Sha256::digest(bytes)[..8])
}

fn many_bytes(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let (out, err) = (client.fifo("out")?, client.fifo("err")?);
    let (reader, _to_err) = (out.reader()?, err.reader()?);
    client.exec("e", &outputs(&out, &err), "seq 3000000")?;
    let finished = std::thread::scope(|scope| {
        let read = scope.spawn(|| reader.rest());
        let code = client.finish("e")?;
        let read = read
            .join()
            .map_err(|_panic| anyhow::anyhow!("the reader panicked"))??;
        Ok::<_, anyhow::Error>(format!("code {code}, {} bytes, {}", read.len(), digest(&read)))
    })?;
    client.end()?;
    Ok(finished)
}

fn grandchild(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let (out, err) = (client.fifo("out")?, client.fifo("err")?);
    let (mut reader, _to_err) = (out.reader()?, err.reader()?);
    client.exec("e", &outputs(&out, &err), "sleep 1000 & echo done")?;
    let code = client.code("e")?;
    reader.until("\n")?;
    let deleted = delete_in_time(&client, "e");
    // With the shim's side gone the client sees the end.
    let read = reader.text()?;
    client.end()?;
    Ok(format!("code {code}, {read:?}\n{deleted}"))
}

fn stdout_alone(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let out = client.fifo("out")?;
    let reader = out.reader()?;
    let stdio = Stdio {
        stdout: &out.path,
        ..Stdio::default()
    };
    let started = client.exec("e", &stdio, "echo out; echo err >&2");
    let seen = match started {
        Ok(()) => format!("code {}, {:?}", client.finish("e")?, reader.text()?),
        Err(error) => describe(&Err::<(), _>(error), |()| String::new()),
    };
    client.end()?;
    Ok(seen)
}

fn missing_fifo(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let missing = path("nosuch");
    let stdio = Stdio {
        stdout: &missing,
        stderr: &missing,
        ..Stdio::default()
    };
    let started = client.exec("e", &stdio, "true");
    let deleted = ok(&client.delete("e"));
    client.end()?;
    Ok(format!("{}\nDelete {deleted}", refused(&started, &missing)))
}

fn failing_exec(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let (out, err) = (client.fifo("out")?, client.fifo("err")?);
    let (to_out, to_err) = (out.reader()?, err.reader()?);
    let started = client.exec_as(0, "e", &outputs(&out, &err), &["/nosuch"]);
    let deleted = ok(&client.delete("e"));
    let refused = refused(&started, "\"/nosuch\": stat /nosuch: no such file or directory");
    let seen = format!(
        "{refused}\nDelete {deleted}\n{:?} {:?}",
        to_out.text()?,
        to_err.text()?
    );
    client.end()?;
    Ok(seen)
}

fn close_io(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let (input, out, err) = (client.fifo("in")?, client.fifo("out")?, client.fifo("err")?);
    let (mut reader, _to_err) = (out.reader()?, err.reader()?);
    let stdio = Stdio {
        stdin: &input.path,
        ..outputs(&out, &err)
    };
    client.exec("e", &stdio, "exec cat")?;
    let waiting = client.task.wait("e").context("wait")?;
    let mut seen = Vec::new();
    for line in ["one\n", "two\n"] {
        // Each writer closes its side.
        input.writer()?.write(line.as_bytes())?;
        reader.until(line)?;
        seen.push(format!("still open: {}", !waiting.is_there()));
    }
    let mut last = input.writer()?;
    client.close_stdin("e")?;
    last.write(b"three\n")?;
    reader.until("three\n")?;
    drop(last);
    let code = client.finish("e")?;
    seen.push(format!("code {code}, {:?}", reader.text()?));
    client.task.end(waiting).context("wait")?;
    client.end()?;
    Ok(seen.join("\n"))
}

fn much_stdin(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let (input, out, err) = (client.fifo("in")?, client.fifo("out")?, client.fifo("err")?);
    let (mut reader, _to_err) = (out.reader()?, err.reader()?);
    let stdio = Stdio {
        stdin: &input.path,
        ..outputs(&out, &err)
    };
    client.exec("e", &stdio, "exec sha256sum")?;
    let sent: Vec<u8> = (0..1_000_000_u32).flat_map(u32::to_le_bytes).collect();
    let mut writer = input.writer()?;
    writer.write(&sent)?;
    client.close_stdin("e")?;
    drop(writer);
    reader.until("\n")?;
    client.finish("e")?;
    let whole: String = Sha256::digest(&sent)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let seen = reader.text()?;
    client.end()?;
    Ok(if seen.starts_with(&whole) {
        "as sent".to_owned()
    } else {
        seen
    })
}

/// Runs a container whose pipes belong to this user, as `io_uid` and `io_gid` of the runc options set.
fn owned(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let (out, err) = (client.fifo("out")?, client.fifo("err")?);
    let (to_out, to_err) = (out.reader()?, err.reader()?);
    // A shell opens its outputs again, as programs do that log to /dev/stdout.
    let script = "stat -L -c %u:%g /proc/self/fd/1 >/proc/self/fd/1; echo err >/proc/self/fd/2";
    let code = client.second(1234, &outputs(&out, &err), script, || Ok(()))?;
    let seen = format!("code {code}, out {:?}, err {:?}", to_out.text()?, to_err.text()?);
    client.end()?;
    Ok(seen)
}
