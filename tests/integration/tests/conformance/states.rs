//! 1.4: what a task answers to which call in which state, and in which words.

use anyhow::Result;

use crate::conformance::raw::{IMAGE, Raw};
use crate::conformance::{Place, Point};

pub const POINTS: &[Point] = &[
    Point::same(
        "1.4 states: created",
        "pause UNKNOWN: cannot pause task in created state",
        created,
    ),
    Point::same(
        "1.4 states: running",
        "delete UNKNOWN: cannot delete a running process",
        running,
    ),
    Point::same(
        "1.4 states: paused",
        "exec UNKNOWN: cannot exec in a paused state",
        paused,
    ),
    Point::same(
        "1.4 states: stopped",
        "start of exec FAILED_PRECONDITION: container r init process is not running",
        stopped,
    ),
    Point::same(
        "1.4 states: made from a checkpoint",
        "exec UNKNOWN: cannot exec in a created state",
        made_from_checkpoint,
    ),
    Point::same(
        "1.4 states: deleted, unknown, without id, with a strange id",
        "state NOT_FOUND: container not created",
        unknown,
    ),
];

/// What is to be seen after init has begun to run this.
const SLEEP: &str = "exec sleep 1000";

/// Lines that begin with what was called.
struct Seen(Vec<String>);

impl Seen {
    fn add(&mut self, call: &str, answer: String) {
        self.0.push(format!("{call} {answer}"));
    }

    fn text(self) -> String {
        self.0.join("\n")
    }
}

// An exec that runs is not started again here: the stock shim counts its end twice then, and panics when init
// ends.

/// Calls that are refused or change nothing in every state; an exec `x` is there.
fn ask(raw: &Raw<'_>, seen: &mut Seen) {
    seen.add("state", raw.state("r", ""));
    seen.add("state of exec", raw.state("r", "x"));
    seen.add("state of no exec", raw.state("r", "nosuch"));
    seen.add("create of exec again", raw.exec("r", "x", "true"));
    seen.add("start of no exec", raw.start("r", "nosuch"));
    seen.add("delete of no exec", raw.delete("r", "nosuch"));
    seen.add("kill of no exec", raw.kill("r", "nosuch", 9, false));
    seen.add("resize", raw.resize("r", "", 80, 25));
    seen.add("resize of exec", raw.resize("r", "x", 80, 25));
    seen.add("resize of no exec", raw.resize("r", "nosuch", 80, 25));
    seen.add("close of exec", raw.close_io("r", "x", false));
    seen.add("close of no exec", raw.close_io("r", "nosuch", true));
}

fn created(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.make("r", SLEEP)?;
    let mut seen = Seen(Vec::new());
    seen.add("exec", raw.exec("r", "x", "true"));
    ask(&raw, &mut seen);
    seen.add("pause", raw.pause("r"));
    seen.add("resume", raw.resume("r"));
    seen.add("checkpoint", raw.checkpoint("r", IMAGE));
    seen.add("kill of exec", raw.kill("r", "x", 9, false));
    seen.add("pids", raw.pids("r"));
    seen.add("delete of exec", raw.delete("r", "x"));
    seen.add("start", raw.start("r", ""));
    raw.end(&["r"])?;
    Ok(seen.text())
}

fn running(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let mut seen = Seen(Vec::new());
    raw.exec_runs("r", "x", SLEEP)?;
    ask(&raw, &mut seen);
    seen.add("start", raw.start("r", ""));
    seen.add("resume", raw.resume("r"));
    seen.add("pids", raw.pids("r"));
    seen.add("delete", raw.delete("r", ""));
    seen.add("delete of exec", raw.delete("r", "x"));
    seen.add("kill of exec", raw.kill("r", "x", 9, false));
    raw.becomes("r", "x", "STOPPED")?;
    seen.add("state of exec that ended", raw.state("r", "x"));
    seen.add("start of exec that ended", raw.start("r", "x"));
    seen.add("kill of exec that ended", raw.kill("r", "x", 9, false));
    seen.add("resize of exec that ended", raw.resize("r", "x", 80, 25));
    seen.add("wait of exec that ended", raw.wait("r", "x")?);
    seen.add("delete of exec that ended", raw.delete("r", "x"));
    seen.add("delete of exec again", raw.delete("r", "x"));
    raw.end(&["r"])?;
    Ok(seen.text())
}

fn paused(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let mut seen = Seen(Vec::new());
    raw.exec_runs("r", "x", SLEEP)?;
    seen.add("exec before", raw.exec("r", "y", "true"));
    seen.add("pause", raw.pause("r"));
    ask(&raw, &mut seen);
    seen.add("start", raw.start("r", ""));
    seen.add("start of exec from before", raw.start("r", "y"));
    seen.add("state of exec that failed", raw.state("r", "y"));
    seen.add("exec", raw.exec("r", "z", "true"));
    seen.add("pause", raw.pause("r"));
    seen.add("delete", raw.delete("r", ""));
    seen.add("delete of exec", raw.delete("r", "x"));
    seen.add("update", raw.update("r", "{}"));
    seen.add("pids", raw.pids("r"));
    seen.add("resume", raw.resume("r"));
    seen.add("state", raw.state("r", ""));
    raw.end(&["r"])?;
    Ok(seen.text())
}

fn stopped(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let mut seen = Seen(Vec::new());
    seen.add("exec", raw.exec("r", "x", "true"));
    seen.add("exec of another", raw.exec("r", "y", "true"));
    seen.add("kill", raw.kill("r", "", 15, false));
    seen.add("kill", raw.kill("r", "", 9, false));
    raw.becomes("r", "", "STOPPED")?;
    ask(&raw, &mut seen);
    seen.add("start", raw.start("r", ""));
    seen.add("start of exec", raw.start("r", "x"));
    seen.add("start of no exec", raw.start("r", "nosuch"));
    seen.add("state of exec", raw.state("r", "x"));
    seen.add("exec", raw.exec("r", "z", "true"));
    seen.add("pause", raw.pause("r"));
    seen.add("resume", raw.resume("r"));
    seen.add("checkpoint", raw.checkpoint("r", IMAGE));
    seen.add("update", raw.update("r", "{}"));
    seen.add("kill", raw.kill("r", "", 9, false));
    seen.add("kill of all", raw.kill("r", "", 9, true));
    seen.add("kill of exec", raw.kill("r", "x", 9, false));
    seen.add("pids", raw.pids("r"));
    seen.add("wait", raw.wait("r", "")?);
    seen.add("delete of exec", raw.delete("r", "x"));
    seen.add("delete", raw.delete("r", ""));
    seen.add("delete again", raw.delete("r", ""));
    raw.end(&["r"])?;
    Ok(seen.text())
}

fn made_from_checkpoint(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let mut seen = Seen(Vec::new());
    seen.add("checkpoint", raw.checkpoint("r", IMAGE));
    raw.make_bundle("t", SLEEP, |_| {})?;
    let mut request = Raw::create_request("t");
    request.checkpoint = IMAGE.to_owned();
    seen.add("create", raw.create(&request));
    seen.add("state", raw.state("t", ""));
    seen.add("exec", raw.exec("t", "x", "true"));
    seen.add("pause", raw.pause("t"));
    seen.add("resume", raw.resume("t"));
    seen.add("checkpoint", raw.checkpoint("t", "/run/raw/other"));
    seen.add("kill", raw.kill("t", "", 9, false));
    seen.add("pids", raw.pids("t"));
    seen.add("delete", raw.delete("t", ""));
    seen.add("delete again", raw.delete("t", ""));
    raw.end(&["r", "t"])?;
    Ok(seen.text())
}

fn unknown(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", "exit 0")?;
    raw.becomes("r", "", "STOPPED")?;
    let mut seen = Seen(Vec::new());
    seen.add("delete", raw.delete("r", ""));
    let huge = "x".repeat(70_000);
    for (name, id) in [
        ("deleted", "r"),
        ("unknown", "nosuch"),
        ("empty", ""),
        ("strange", "../c\n"),
        ("huge", &huge),
    ] {
        seen.add(name, String::new());
        seen.add("state", raw.state(id, ""));
        seen.add("state of exec", raw.state(id, "x"));
        seen.add("start", raw.start(id, ""));
        seen.add("start of exec", raw.start(id, "x"));
        seen.add("delete", raw.delete(id, ""));
        seen.add("delete of exec", raw.delete(id, "x"));
        seen.add("pids", raw.pids(id));
        seen.add("pause", raw.pause(id));
        seen.add("resume", raw.resume(id));
        seen.add("checkpoint", raw.checkpoint(id, IMAGE));
        seen.add("kill", raw.kill(id, "", 9, false));
        seen.add("exec", raw.exec(id, "x", "true"));
        seen.add("resize", raw.resize(id, "", 1, 1));
        seen.add("close", raw.close_io(id, "", true));
        seen.add("update", raw.update(id, "{}"));
        seen.add("wait", raw.wait(id, "")?);
        seen.add("stats", raw.stats(id));
        seen.add("connect", raw.connect(id));
    }
    seen.add(
        "exec with a huge id",
        raw.state("c", &huge).replace(&huge, "HUGE"),
    );
    raw.end(&[])?;
    Ok(seen.text())
}
