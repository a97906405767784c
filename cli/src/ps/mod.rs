//! `firn ps`: the containers under firn, and what is in progress.

pub mod args;
pub mod container;
mod gpus;
pub mod transaction;

use std::io::IsTerminal;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, bail};
use serde::Serialize;

use crate::output::{self, line, note, printed};
use crate::text;
use args::PsArgs;
use container::Container;
use gpus::Gpus;
use transaction::{State, Transaction};

/// How often --watch looks.
const EVERY: Duration = Duration::from_secs(1);

/// Moves a terminal's cursor to the top and clears what is below.
const CLEAR: &str = "\x1b[H\x1b[J";

/// Containers under firn.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Containers<'a> {
    /// One for each, in the order of namespaces and ids.
    containers: Vec<container::ContainerRow<'a>>,
}

printed! { Containers<'_>: "ps" }

impl<'a> Containers<'a> {
    fn of(all: &'a [Container]) -> Self {
        Self {
            containers: all.iter().map(Container::shown).collect(),
        }
    }
}

/// True: done.
pub fn run(args: &PsArgs) -> Result<bool> {
    let mut gpus = Gpus::default();
    loop {
        let mut containers = find(args)?;
        gpus.show(&mut containers);
        match (args.json, args.watch) {
            (true, true) => output::json_line(&Containers::of(&containers))?,
            (true, false) => output::json(&Containers::of(&containers))?,
            (false, watch) => {
                if watch && std::io::stdout().is_terminal() {
                    output::raw(CLEAR);
                }
                if args.container.is_some() {
                    containers.iter().for_each(detail);
                } else {
                    print(&containers);
                }
                if let Some(failure) = &gpus.failure {
                    note!("firn: the driver's part is missing: {failure}");
                }
            }
        }
        if !args.watch || output::is_closed() {
            return Ok(true);
        }
        sleep(EVERY);
    }
}

/// Those that are asked for. One that is named has to be there.
fn find(args: &PsArgs) -> Result<Vec<Container>> {
    let found = container::find(&args.at, args.container.as_deref())?;
    match &args.container {
        Some(id) if found.is_empty() => bail!(
            "no container {id} runs under firn here. hint: `firn ps` lists them; --namespace, or --state \
             where containerd's is not {}",
            args.at.state.display()
        ),
        _ => Ok(found),
    }
}

fn print(containers: &[Container]) {
    if containers.is_empty() {
        line!("no container runs under firn");
        return;
    }
    // Of what is in progress only where something is.
    if containers.iter().any(|container| container.transaction.is_some()) {
        output::table(
            [
                "CONTAINER",
                "NAMESPACE",
                "STATE",
                "GPUS",
                "GPU MEMORY",
                "PHASE",
                "SINCE",
                "ELAPSED",
                "COPIED",
                "RATE",
                "LEFT",
            ],
            containers.iter().map(long_row),
        )
    } else {
        output::table(
            ["CONTAINER", "NAMESPACE", "STATE", "GPUS", "GPU MEMORY"],
            containers.iter().map(row),
        )
    }
    for container in containers {
        let (id, state) = (&container.id, container.state());
        if let Some(reason) = container.reason() {
            line!("{id} is {state}: {reason}");
        }
        if let Some(resume) = container.resume() {
            line!("{id} is {state}; to resume it: {resume}");
        }
    }
}

const NONE: &str = "-";

fn or_none(text: Option<String>) -> String {
    text.unwrap_or_else(|| NONE.to_owned())
}

fn row(container: &Container) -> [String; 5] {
    let indexes = container.gpus.iter().map(|gpu| gpu.index.to_string());
    let indexes = indexes.collect::<Vec<_>>().join(",");
    let gpus = match (indexes.is_empty(), container.has_gpus()) {
        (true, true) => "?".to_owned(),
        (true, false) => NONE.to_owned(),
        _ => indexes,
    };
    [
        container.id.clone(),
        container.namespace.clone(),
        container.state().to_owned(),
        gpus,
        or_none(container.gpu_memory().map(text::bytes)),
    ]
}

fn long_row(container: &Container) -> [String; 11] {
    let [id, namespace, state, gpus, memory] = row(container);
    let transaction = container.in_progress();
    let of = |get: &dyn Fn(&Transaction) -> Option<String>| or_none(transaction.and_then(get));
    [
        id,
        namespace,
        state,
        gpus,
        memory,
        of(&|it| Some(it.phase().to_owned())),
        of(&|it| Some(seconds(it.in_phase()))),
        of(&|it| Some(seconds(it.elapsed()))),
        of(&copied),
        of(&|it| it.rate().map(|rate| format!("{}/s", text::bytes(rate)))),
        of(&|it| it.left().map(|left| format!("{} s", left.as_secs()))),
    ]
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

fn copied(transaction: &Transaction) -> Option<String> {
    let (done, all) = transaction.copied()?;
    Some(format!("{} of {}", text::bytes(done), text::bytes(all)))
}

/// Everything that is known of one, a line for each.
fn detail(container: &Container) {
    let pid = container
        .pid()
        .map_or(String::new(), |pid| format!(", pid {pid}"));
    line!(
        "container  {} in namespace {}{pid}",
        container.id,
        container.namespace
    );
    line!("state      {}", container.state());
    if let Some(reason) = container.reason() {
        line!("reason     {reason}");
    }
    if let Some(resume) = container.resume() {
        line!("resume     {resume}");
    }
    for gpu in &container.gpus {
        line!("gpu        {} {}", gpu.index, gpu.uuid);
    }
    if let Some(memory) = container.gpu_memory() {
        line!("memory     {} of GPU memory", text::bytes(memory));
    }
    let Some(transaction) = container.in_progress() else {
        return;
    };
    line!(
        "{:9}  {}, for {} of {}",
        transaction.operation(),
        transaction.phase(),
        seconds(transaction.in_phase()),
        seconds(transaction.elapsed())
    );
    if let Some(copied) = copied(transaction) {
        let rate = transaction
            .rate()
            .map_or(String::new(), |rate| format!(", {}/s", text::bytes(rate)));
        line!("copied     {copied}{rate}");
    }
    if let Some(left) = transaction.left() {
        line!("left       {} s", left.as_secs());
    }
    if transaction.state() == State::Running {
        line!("image      {}", transaction.record.begin.image.display());
    }
}
