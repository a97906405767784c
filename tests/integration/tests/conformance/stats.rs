//! 1.4: Stats, field by field.

use anyhow::{Context, Result, bail};
use containerd_shim_protos::api::{StatsRequest, StatsResponse};
use containerd_shim_protos::cgroups::metrics::Metrics as V1;
use containerd_shim_protos::cgroups_v2::metrics::Metrics as V2;
use firn_lab::{Container, Task, describe};
use protobuf::reflect::{ReflectFieldRef, ReflectValueRef};
use protobuf::{Message, MessageDyn};

use crate::conformance::client::{Client, ID, Stdio};
use crate::conformance::{On, Place, Point};

pub const POINTS: &[Point] = &[
    Point::same(
        "1.4 Stats: every field",
        "type io.containerd.cgroups.v",
        every_field,
    ),
    Point::same("1.4 Stats: as ctr prints them", "pids", by_ctr),
    Point::same("1.4 Stats: limits", "67108864", limits).on(On::Memory),
    Point::same(
        "1.4 Stats: of a container in a deeper cgroup",
        "pids.current 3",
        nested,
    )
    .on(On::Memory),
    Point::same(
        "1.4 Stats: after init has moved to a cgroup below",
        "below: true",
        moved,
    )
    .on(On::Memory),
    Point::same("1.4 Stats: of a paused container", "pids.current 3", paused).on(On::Memory),
    Point::same(
        "1.4 Stats: after the exit",
        "type io.containerd.cgroups.v",
        stopped,
    ),
    Point::same("1.4 Stats: after a restore", "\nRUNNING", restored).on(On::Memory),
    Point::same(
        "1.4 Stats: after a restore of an init in a cgroup below",
        "RUNNING, below: false",
        restored_below,
    )
    .on(On::Memory),
    Point::same(
        "1.4 Start: controllers of the cgroups above",
        "handed on: true",
        controllers,
    )
    .on(On::UnifiedMemory),
];

/// Counters that are zero at one time and not at another, whatever the container does.
const FICKLE: &[&str] = &[
    "dirty",
    "per_cpu[",
    "writeback",
    "majfault",
    "maj_fault",
    "huge",
    "psi",
    "sock",
    "usec",
    "failcnt",
    "pg_pg_out",
    "throttled",
    "kernel",
    // Counted in ticks: a short program may take none.
    "usage.user",
    "workingset",
    "pgscan",
    "pgsteal",
    "pgrefill",
    "shmem",
    "active",
    "activate",
    "unevictable",
    "swap.",
    "slab_rec",
    "pglazy",
    "thp",
    "under_oom",
];

/// Fields whose value depends on nothing but the container.
const STABLE: &[&str] = &[
    "limit",
    "pids.current",
    "pagesize",
    "pages",
    "device",
    "major",
    "minor",
    ".op",
    "max_limit",
    "oom_kill",
];

/// Does a little of everything that is counted, and then stays with two children, whose program it has
/// written: pages of the image's are counted for whoever was the first to read them. A restore interrupts
/// sleeps and waits.
const WORK: &str = "dd if=/dev/zero of=/file bs=1M count=4 2>/dev/null; cat /file >/dev/null; \
                    mkfifo /fifo; \
                    mkdir /own; cp /bin/busybox /own; /own/busybox cat /fifo & /own/busybox cat /fifo & \
                    >/worked; while :; do wait; done";

fn works<'p>(place: &'p Place<'p>, options: &[&str]) -> Result<Client<'p>> {
    let client = Client::start_with(place, &[&["--null-io"], options].concat(), WORK)?;
    client
        .exec(
            "e",
            &Stdio::default(),
            "until [ -e /worked ]; do sleep 0.05; done",
        )
        .context("exec")?;
    client.finish("e")?;
    Ok(client)
}

fn call(task: &Task, id: &str) -> ttrpc::Result<StatsResponse> {
    let mut request = StatsRequest::new();
    request.id = id.to_owned();
    task.call("Stats", &request)
}

/// All fields of a container's metrics: paths and values.
fn fields(task: &Task, id: &str) -> Result<Vec<(String, String)>> {
    let answer = call(task, id).map_err(|error| anyhow::anyhow!("Stats: {error}"))?;
    let any = answer.stats.into_option().context("no stats")?;
    let message: Box<dyn MessageDyn> = match any.type_url.as_str() {
        "io.containerd.cgroups.v1.Metrics" => Box::new(V1::parse_from_bytes(&any.value)?),
        "io.containerd.cgroups.v2.Metrics" => Box::new(V2::parse_from_bytes(&any.value)?),
        other => bail!("stats of type {other:?}"),
    };
    let mut all = vec![("type".to_owned(), any.type_url)];
    flatten("", &*message, &mut all);
    Ok(all)
}

fn flatten(prefix: &str, message: &dyn MessageDyn, all: &mut Vec<(String, String)>) {
    for field in message.descriptor_dyn().fields() {
        let path = format!("{prefix}{}", field.name());
        match field.get_reflect(message) {
            ReflectFieldRef::Optional(value) => match value.value() {
                Some(ReflectValueRef::Message(message)) => {
                    all.push((path.clone(), "there".to_owned()));
                    flatten(&format!("{path}."), &*message, all);
                }
                Some(value) => all.push((path, value.to_string())),
                None => {}
            },
            ReflectFieldRef::Repeated(values) => {
                all.push((path.clone(), format!("{} of them", values.len())));
                for (number, value) in values.into_iter().enumerate() {
                    match value {
                        ReflectValueRef::Message(message) => {
                            flatten(&format!("{path}[{number}]."), &*message, all);
                        }
                        value => all.push((format!("{path}[{number}]"), value.to_string())),
                    }
                }
            }
            ReflectFieldRef::Map(_) => {}
        }
    }
}

/// Fields as they can be compared: stable ones with their value, counters as zero or not.
fn shown(fields: &[(String, String)]) -> String {
    let contains = |names: &[&str], path: &str| names.iter().any(|name| path.contains(name));
    let lines = fields.iter().filter_map(|(path, value)| {
        let number: Option<f64> = value.parse().ok();
        match number {
            None => Some(format!("{path} {value}")),
            Some(_) if contains(STABLE, path) => Some(format!("{path} {value}")),
            Some(_) if contains(FICKLE, path) => None,
            Some(number) => Some(format!("{path} {}", if number == 0.0 { "zero" } else { "some" })),
        }
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn only(fields: &[(String, String)], wanted: &[&str]) -> String {
    let lines = fields
        .iter()
        .filter(|(path, _)| wanted.iter().any(|wanted| path.contains(wanted)));
    lines
        .map(|(path, value)| format!("{path} {value}"))
        .collect::<Vec<_>>()
        .join("\n")
}

fn every_field(place: &Place<'_>) -> Result<String> {
    let client = works(place, &[])?;
    let seen = shown(&fields(&client.task, ID)?);
    client.end()?;
    Ok(seen)
}

fn limits(place: &Place<'_>) -> Result<String> {
    let client = works(
        place,
        &[
            "--memory-limit",
            "67108864",
            "--cpu-quota",
            "50000",
            "--cpu-period",
            "100000",
        ],
    )?;
    let fields = fields(&client.task, ID)?;
    client.end()?;
    let used = fields.iter().any(|(path, value)| {
        let number: f64 = value.parse().unwrap_or_default();
        path.starts_with("cpu.usage") && number > 0.0
    });
    Ok(format!("{}\ncpu used: {used}", only(&fields, &["limit", "type"])))
}

const FEW: &[&str] = &["type", "pids."];

fn nested(place: &Place<'_>) -> Result<String> {
    let client = works(place, &["--cgroup", "/outer/middle/inner"])?;
    let seen = only(&fields(&client.task, ID)?, FEW);
    client.end()?;
    // The runtime removes its own directory alone.
    place.node().run(&[
        "sh",
        "-c",
        "find /sys/fs/cgroup -depth -path '*/outer*' -type d -exec rmdir {} +",
    ])?;
    Ok(seen)
}

/// As systemd does in a container.
const MOVE: &str = "find /sys/fs/cgroup -type d -path '*/default/c' | while read dir; do \
                    mkdir $dir/init.scope; echo $1 >$dir/init.scope/cgroup.procs; done";

fn move_init(client: &Client<'_>) -> Result<()> {
    let pid = client.container.pid()?.to_string();
    client
        .place
        .node()
        .run(&["sh", "-c", MOVE, "move", &pid])
        .map(drop)
}

/// Whether init is in a cgroup below the container's.
fn is_below(container: &Container<'_>, place: &Place<'_>) -> Result<bool> {
    let cgroups = place
        .node()
        .run(&["cat", &format!("/proc/{}/cgroup", container.pid()?)])?;
    Ok(cgroups.stdout.contains("/init.scope"))
}

fn moved(place: &Place<'_>) -> Result<String> {
    let client = works(place, &[])?;
    move_init(&client)?;
    let seen = only(&fields(&client.task, ID)?, FEW);
    let below = is_below(&client.container, place)?;
    client.end()?;
    Ok(format!("{seen}\nbelow: {below}"))
}

fn paused(place: &Place<'_>) -> Result<String> {
    let client = works(place, &[])?;
    client.container.task(&["pause"])?;
    let seen = only(&fields(&client.task, ID)?, FEW);
    client.container.task(&["resume"])?;
    client.end()?;
    Ok(seen)
}

fn stopped(place: &Place<'_>) -> Result<String> {
    let client = works(place, &[])?;
    client.container.task(&["kill", "--signal", "SIGKILL"])?;
    client.container.becomes("STOPPED")?;
    let seen = describe(&call(&client.task, ID), |_| String::new());
    let seen = match seen.as_str() {
        "" => only(&fields(&client.task, ID)?, FEW),
        _ => seen,
    };
    client.end()?;
    Ok(seen)
}

fn restored(place: &Place<'_>) -> Result<String> {
    restored_after(place, |_| Ok(()))
}

fn restored_below(place: &Place<'_>) -> Result<String> {
    restored_after(place, move_init)
}

fn restored_after(place: &Place<'_>, before: impl FnOnce(&Client<'_>) -> Result<()>) -> Result<String> {
    let client = works(place, &[])?;
    before(&client)?;
    client.container.checkpoint("checkpoint/stats")?;
    client.end()?;
    let (container, _) = Container::restore(place.host, "d", "checkpoint/stats", 0)?;
    let task = Task::of(place.host, "d")?;
    let seen = match fields(&task, "d") {
        Ok(fields) => only(&fields, FEW),
        Err(_) => describe(&call(&task, "d"), |_| "there after all".into()),
    };
    drop(task);
    let status = container.status()?;
    let below = is_below(&container, place)?;
    container.remove()?;
    place.host.remove_image("checkpoint/stats")?;
    Ok(format!("{seen}\n{status}, below: {below}"))
}

/// Takes the controllers from the cgroup above the container's, after Create, as a manager of cgroups might.
fn controllers(place: &Place<'_>) -> Result<String> {
    let client = Client::start(place)?;
    let mut all = place.node().read("/sys/fs/cgroup/cgroup.controllers")?;
    let above = "/sys/fs/cgroup/default/cgroup.subtree_control";
    let script = format!("for name in {}; do echo -$name >{above}; done", all.trim());
    let mut between = String::new();
    client.second(0, &Stdio::default(), "true", || {
        place.node().run(&["sh", "-c", &script])?;
        between = place.node().read(above)?;
        Ok(())
    })?;
    let mut after = place.node().read(above)?;
    client.end()?;
    for text in [&mut all, &mut after] {
        let mut names: Vec<_> = text.split_whitespace().collect();
        names.sort_unstable();
        *text = names.join(" ");
    }
    Ok(format!(
        "taken: {:?}, handed on: {}",
        between.trim(),
        all == after
    ))
}

fn by_ctr(place: &Place<'_>) -> Result<String> {
    let client = works(place, &[])?;
    let text = client.container.task(&["metrics", "--format", "json"])?;
    client.end()?;
    let json: serde_json::Value = serde_json::from_str(&text)?;
    let names = json.as_object().context("no object")?.keys();
    Ok(names.map(String::as_str).collect::<Vec<_>>().join(" "))
}
