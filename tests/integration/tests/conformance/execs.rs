//! 1.4: processes that are added to a container.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;

use anyhow::{Context, Result};
use containerd_shim_protos::api::ExecProcessRequest;
use containerd_shim_protos::protobuf::MessageField;
use firn_node::wait_for;
use serde_json::json;

use crate::conformance::raw::{LIMIT, Raw, process};
use crate::conformance::{Place, Point};

pub const POINTS: &[Point] = &[
    Point::same(
        "1.4 exec: it runs in a container whose init has not been started",
        "wait code 5 at set",
        in_a_created_container,
    ),
    Point::same(
        "1.4 exec: one that cannot run is reported in the runtime's words, ends a Wait, and is deleted",
        "start UNKNOWN: OCI runtime exec failed: exec failed:",
        that_cannot_run,
    ),
    Point::same(
        "1.4 exec: it gets a terminal, and its size",
        "33 77",
        with_a_terminal,
    ),
    Point::same(
        "1.4 exec: stdin ends with CloseIO, not with the client",
        "wait code 3 at set\none two end",
        stdin_ends,
    ),
    Point::same(
        "1.4 exec: one whose stdio cannot be had does not run",
        "pids 2 processes",
        without_stdio,
    )
    .better("pids 1 processes"),
    Point::same(
        "1.4 exec: its pid file goes with it",
        "x.pid after delete false",
        pid_file,
    ),
    Point::same(
        "1.4 exec: a spec that is no JSON is refused and takes no id",
        "exec again ok",
        spec_without_sense,
    ),
    Point::same(
        "1.4 exec: one that runs continues when init's stdio is closed, and ends with init",
        "exec code 137",
        ends_with_init,
    ),
];

const SLEEP: &str = "exec sleep 1000";

/// As on Linux.
const O_NONBLOCK: i32 = 0o4000;

fn in_a_created_container(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.make("r", SLEEP)?;
    raw.exec_runs("r", "x", "exit 5")?;
    let seen = format!("wait {}\n{}", raw.wait("r", "x")?, raw.state("r", ""));
    raw.end(&["r"])?;
    Ok(seen)
}

fn that_cannot_run(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let mut request = Raw::exec_request("r", "x", "");
    let spec = json!({"args": ["/nosuch"], "cwd": "/", "user": {"uid": 0, "gid": 0}});
    request.spec = MessageField::some(process(&spec));
    let mut seen = vec![format!("exec {}", raw.exec_as(&request))];
    let wait = raw.begin_wait("r", "x")?;
    seen.push(format!("start {}", raw.start("r", "x")));
    seen.push(format!("wait {}", raw.waited(wait)));
    seen.push(format!("state {}", raw.state("r", "x")));
    seen.push(format!("kill {}", raw.kill("r", "x", 9, false)));
    seen.push(format!("pids {}", raw.pids("r")));
    seen.push(format!("delete {}", raw.delete("r", "x")));
    seen.push(format!("delete again {}", raw.delete("r", "x")));
    seen.push(format!("its id is free {}", raw.exec("r", "x", "true")));
    raw.end(&["r"])?;
    Ok(seen.join("\n"))
}

/// The client's ends of an exec's fifos.
struct Fifos {
    keys: File,
    screen: File,
    shown: String,
}

impl Fifos {
    const STDIN: &str = "/run/raw/in";
    const STDOUT: &str = "/run/raw/out";

    /// Makes the fifos and has an exec ask for them.
    fn make(place: &Place<'_>, request: &mut ExecProcessRequest) -> Result<Self> {
        place.node().run(&["mkfifo", Self::STDIN, Self::STDOUT])?;
        request.stdin = Self::STDIN.to_owned();
        request.stdout = Self::STDOUT.to_owned();
        request.stderr = Self::STDOUT.to_owned();
        Ok(Self {
            keys: open(place, Self::STDIN)?,
            screen: open(place, Self::STDOUT)?,
            shown: String::new(),
        })
    }

    /// Waits until the exec has written this.
    fn shows(&mut self, text: &str) -> Result<()> {
        let shown = wait_for(&format!("{text:?} to be written"), LIMIT, || {
            let mut chunk = [0; 256];
            if let Ok(got) = self.screen.read(&mut chunk) {
                self.shown.push_str(&String::from_utf8_lossy(&chunk[..got]));
            }
            Ok(self.shown.contains(text).then_some(()))
        });
        shown.with_context(|| format!("{:?}", self.shown))
    }

    /// All that was written, its lines as words.
    fn words(&self) -> String {
        self.shown.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

/// Opens a fifo for both directions, so that it neither waits for a shim nor ends with one.
fn open(place: &Place<'_>, fifo: &str) -> Result<File> {
    let mut options = File::options();
    options.read(true).write(true).custom_flags(O_NONBLOCK);
    options
        .open(place.node().path(fifo))
        .with_context(|| format!("open {fifo}"))
}

fn with_a_terminal(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let mut request = Raw::exec_request("r", "x", "read line; stty size; exit 4");
    // The request's word on the terminal is the one that counts: the process does not set it.
    request.terminal = true;
    let mut fifos = Fifos::make(place, &mut request)?;
    let mut seen = vec![format!("exec {}", raw.exec_as(&request))];
    seen.push(format!("start {}", raw.start("r", "x")));
    seen.push(format!("state {}", raw.state("r", "x")));
    seen.push(format!("resize {}", raw.resize("r", "x", 77, 33)));
    fifos.keys.write_all(b"go\n")?;
    fifos.shows("77")?;
    seen.push(fifos.words());
    seen.push(format!("wait {}", raw.wait("r", "x")?));
    seen.push(format!("resize {}", raw.resize("r", "x", 77, 33)));
    seen.push(format!("delete {}", raw.delete("r", "x")));
    raw.end(&["r"])?;
    Ok(seen.join("\n"))
}

fn stdin_ends(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let script = "while read word; do echo $word; done; echo end; exit 3";
    let mut request = Raw::exec_request("r", "x", script);
    let mut fifos = Fifos::make(place, &mut request)?;
    let mut seen = vec![format!("exec {}", raw.exec_as(&request))];
    seen.push(format!("start {}", raw.start("r", "x")));
    fifos.keys.write_all(b"one\n")?;
    fifos.shows("one")?;
    // This client goes, and another one comes.
    drop(std::mem::replace(&mut fifos.keys, File::open("/dev/null")?));
    seen.push(format!("state {}", raw.state("r", "x")));
    fifos.keys = open(place, Fifos::STDIN)?;
    fifos.keys.write_all(b"two\n")?;
    fifos.shows("two")?;
    seen.push(format!("close {}", raw.close_io("r", "x", false)));
    drop(std::mem::replace(&mut fifos.keys, File::open("/dev/null")?));
    fifos.shows("end")?;
    seen.push(format!("wait {}", raw.wait("r", "x")?));
    seen.push(fifos.words());
    raw.end(&["r"])?;
    Ok(seen.join("\n"))
}

fn without_stdio(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let mut request = Raw::exec_request("r", "x", SLEEP);
    request.stdout = "/run/raw/nosuch/out".to_owned();
    request.stderr = request.stdout.clone();
    raw.exec_as(&request);
    let started = raw.start("r", "x");
    let code = started.split(':').next().unwrap_or_default().to_owned();
    let seen = format!("start {code}\npids {}\n{}", raw.pids("r"), raw.state("r", "x"));
    raw.end(&["r"])?;
    Ok(seen)
}

fn pid_file(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let file = place.node().path(format!("{}/x.pid", Raw::bundle("r")));
    raw.exec_runs("r", "x", "exit 0")?;
    raw.wait("r", "x")?;
    let before = file.exists();
    let deleted = raw.delete("r", "x");
    let seen = format!(
        "x.pid after start {before}\ndelete {deleted}\nx.pid after delete {}",
        file.exists()
    );
    raw.end(&["r"])?;
    Ok(seen)
}

fn spec_without_sense(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    let mut request = Raw::exec_request("r", "x", "true");
    request.spec.mut_or_insert_default().value = b"no JSON".to_vec();
    let refused = raw.exec_as(&request);
    let code = refused.split(':').next().unwrap_or_default().to_owned();
    let seen = format!(
        "exec {code}\nstate {}\nexec again {}",
        raw.state("r", "x"),
        raw.exec("r", "x", "true")
    );
    raw.end(&["r"])?;
    Ok(seen)
}

fn ends_with_init(place: &Place<'_>) -> Result<String> {
    let raw = Raw::begin(place)?;
    raw.run("r", SLEEP)?;
    raw.exec_runs("r", "x", SLEEP)?;
    let mut seen = vec![format!("close {}", raw.close_io("r", "", true))];
    seen.push(format!("close again {}", raw.close_io("r", "", true)));
    seen.push(raw.state("r", "x"));
    let wait = raw.begin_wait("r", "x")?;
    seen.push(format!("kill {}", raw.kill("r", "", 9, false)));
    seen.push(format!("exec {}", raw.waited(wait)));
    seen.push(format!("init {}", raw.wait("r", "")?));
    seen.push(format!("delete {}", raw.delete("r", "")));
    raw.end(&["r"])?;
    Ok(seen.join("\n"))
}
