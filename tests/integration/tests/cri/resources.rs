//! What containers use and may use: statistics, limits, devices.

use anyhow::Result;
use firn_node::CgroupMode;
use serde_json::{Value, json};

use crate::cri::Point;
use crate::cri::client::{Cri, PARENT};
use crate::cri::pods::SLEEP;

pub const POINTS: &[Point] = &[
    Point::new(
        "stats: of a container and of its pod",
        "cpu yes, memory yes",
        stats,
    )
    .in_every_way(),
    Point::new(
        "update: limits of a running container",
        "2 changed, memory 67108864, cpu ",
        update,
    ),
    Point::new("exit: memory ran out", "137 \"OOMKilled\"", out_of_memory).in_every_way(),
    Point::new("devices: by CDI", "/dev/nvidia1", devices).in_every_way(),
];

/// Whether a number of an answer, which JSON holds as text, is there and not zero.
fn counted(value: &Value) -> &'static str {
    let number = value["value"].as_str().and_then(|digits| digits.parse().ok());
    if number.unwrap_or(0_u64) > 0 { "yes" } else { "no" }
}

fn stats(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let container = pod.start("c", "i=0; while :; do i=$((i+1)); done")?;
    container.exec("sleep 0.3")?;
    let own = container.stats()?;
    let of_pod = cri.call("PodSandboxStats", &json!({ "podSandboxId": pod.id }))?;
    let linux = &of_pod["stats"]["linux"];
    let listed = linux["containers"].as_array().map_or(0, Vec::len);
    let seen = format!(
        "cpu {}, memory {}, usage {}\nthe pod: cpu {}, memory {}, processes {}, containers {listed}",
        counted(&own["cpu"]["usageCoreNanoSeconds"]),
        counted(&own["memory"]["workingSetBytes"]),
        counted(&own["memory"]["usageBytes"]),
        counted(&linux["cpu"]["usageCoreNanoSeconds"]),
        counted(&linux["memory"]["workingSetBytes"]),
        counted(&linux["process"]["processCount"]),
    );
    pod.remove(&[&container])?;
    Ok(seen)
}

fn update(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let container = pod.start("c", SLEEP)?;
    let files = match cri.host.node().record().cgroup {
        CgroupMode::V1 => [("/memory", "memory.limit_in_bytes"), ("/cpu", "cpu.shares")],
        CgroupMode::V2 => [("", "memory.max"), ("", "cpu.weight")],
    };
    let limits = || -> Result<Vec<String>> {
        let read = |(controller, file)| {
            let path = format!("/sys/fs/cgroup{controller}{PARENT}/{}/{file}", container.id);
            Ok(cri.host.node().run(&["cat", &path])?.stdout.trim().to_owned())
        };
        files.into_iter().map(read).collect()
    };
    let before = limits()?;
    let wanted = json!({ "memoryLimitInBytes": "67108864", "cpuShares": "512" });
    cri.call(
        "UpdateContainerResources",
        &json!({ "containerId": container.id, "linux": wanted }),
    )?;
    let after = limits()?;
    let changed = before.iter().zip(&after).filter(|(old, new)| old != new).count();
    let reported = container.status()?["resources"]["linux"]["memoryLimitInBytes"].clone();
    let seen = format!(
        "{changed} changed, memory {}, cpu {}, reported {reported}",
        after[0], after[1]
    );
    pod.remove(&[&container])?;
    Ok(seen)
}

fn out_of_memory(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let limits = json!({ "resources": { "memoryLimitInBytes": "16777216" } });
    // The pause before the exit: of two events at once the stock shim may send that of the exit first.
    let command = ["sh", "-c", "tail /dev/zero; code=$?; sleep 1; exit $code"];
    let container = pod.start_with("c", &json!({ "command": command, "linux": limits }))?;
    let seen = container.ended()?;
    pod.remove(&[&container])?;
    Ok(seen)
}

fn devices(cri: Cri<'_>) -> Result<String> {
    let pod = cri.pod("pod")?;
    let container = pod.start_with(
        "c",
        &json!({
            "command": ["sh", "-c", "ls /dev/nvidia*; sleep 0.1"],
            "CDIDevices": [{ "name": "nvidia.com/gpu=1" }],
        }),
    )?;
    container.ended()?;
    let seen = pod.logs("c", "nvidiactl")?;
    let refused = pod.create("d", &json!({ "CDIDevices": [{ "name": "nvidia.com/gpu=7" }] }));
    let refused = match refused {
        Ok(_) => "a GPU that is not there was granted".to_owned(),
        Err(error) => error.to_string(),
    };
    pod.remove(&[&container])?;
    Ok(format!(
        "{seen}\n{}",
        refused.split(": ").last().unwrap_or_default()
    ))
}
