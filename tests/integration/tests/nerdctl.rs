//! nerdctl, the client: what it shows with firn is what it shows with the stock shim, and containers with
//! GPUs continue by its checkpoint commands.
//!
//! Needs root, and Go to build nerdctl.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use firn_lab::{
    COUNT, Claims, Client, DAY, FIRN, GpuHost, IMAGE, STOCK, SimGpu, Skip, cases, matrix, nothing_left, on,
};
use firn_node::{GoOptions, Platform, go_build_of, go_lacks, wait_for};
use serde_json::Value;

const MODULE: &str = "github.com/containerd/nerdctl/v2";
const VERSION: &str = "v2.3.5";
const PROGRAM: &str = "/usr/local/bin/nerdctl";
const PAGE: &str = include_str!("../../../examples/nerdctl/README.md");
const LIMIT: Duration = Duration::from_secs(30);
const COMPOSE: &str = include_str!("../../../examples/nerdctl/compose.yaml");

/// Its tests use a module that is a directory of its repository and no part of what is published.
fn without_tests(source: &Path) -> Result<()> {
    for entry in fs::read_dir(source.join("cmd/nerdctl/helpers"))? {
        let path = entry?.path();
        if path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("testing"))
        {
            fs::remove_file(path)?;
        }
    }
    let dir = source.join("mod/tigron");
    fs::create_dir_all(&dir)?;
    fs::write(
        dir.join("go.mod"),
        "module github.com/containerd/nerdctl/mod/tigron\n",
    )?;
    Ok(())
}

fn host(platform: Platform, name: &str, gpus: &[SimGpu]) -> Result<GpuHost> {
    if let Some(reason) = go_lacks() {
        return Err(Skip::new(format!("nerdctl is not built: {reason}")).into());
    }
    let program = go_build_of(
        MODULE,
        VERSION,
        "cmd/nerdctl",
        GoOptions::default(),
        without_tests,
    )?;
    let host = GpuHost::for_test(platform, name, gpus)?;
    host.node().install(&program, PROGRAM, 0o755)?;
    Ok(host)
}

/// Exit statuses of its commands. `run` and `exec` report failures, and busybox's `ps` is not what `top`
/// needs.
const CODES: &str = "0071101000000000000000";

fn client<'h>(host: &'h GpuHost, runtime: &'static str) -> Result<(Client<'h>, Claims)> {
    let client = Client {
        host,
        program: PROGRAM,
        runtime,
    };
    Ok((client, Claims::on_containerd(host, "nerdctl", VERSION, runtime)?))
}

fn a_day_with_it_is_as_with_the_stock_shim(platform: Platform) -> Result<()> {
    on([host(platform, "ne-day", &[])?], |[node]| {
        let (stock, _) = client(node, STOCK)?;
        let (firn, claims) = client(node, FIRN)?;
        firn.has_a_day_as(&stock, CODES)?;
        claims.works(DAY)?;
        node.idle()
    })
}

/// Under firn's own name a container continues after its checkpoint. In the stock shim's place it ends with
/// it where nerdctl asks for that. It begins again from there.
fn containers_with_gpus_go_on_from_their_checkpoints(platform: Platform) -> Result<()> {
    on([host(platform, "ne-gpu", &[SimGpu::h200(1)])?], |[node]| {
        node.drop_in()?;
        for runtime in [FIRN, STOCK] {
            let (client, claims) = client(node, runtime)?;
            client.checkpoint_story(&[], &claims)?;
        }
        node.idle()
    })
}

/// examples/nerdctl: the file for compose and the commands, as they are.
fn the_examples_work(platform: Platform) -> Result<()> {
    let gpus = [SimGpu::h200(1), SimGpu::h200(2)];
    on([host(platform, "ne-compose", &gpus)?], |[node]| {
        node.node().unpack(&["containernetworking-plugins"])?;
        let (client, claims) = client(node, FIRN)?;
        client.compose_story(COMPOSE, &claims)?;
        client.example(PAGE)?;
        node.idle()
    })
}

/// The container writes on, where nerdctl looks for it.
fn logs_grow(client: &Client<'_>) -> Result<()> {
    let written = || Ok::<_, anyhow::Error>(client.does(&["logs", "job"])?.lines().count());
    let before = written()?;
    wait_for("more lines in nerdctl's log", LIMIT, || {
        Ok((written()? > before + 3).then_some(()))
    })
}

/// Makes `job` on a GPU, by `run -d` or `create`. Gives its id.
fn ticks(client: &Client<'_>, verb: &[&str], gpu: usize) -> Result<String> {
    let device = format!("nvidia.com/gpu={gpu}");
    let options = [
        "--pull",
        "never",
        "--runtime",
        FIRN,
        "--network",
        "none",
        "--name",
        "job",
    ];
    let command = ["--device", &device, IMAGE];
    client.does(&[verb, &options, &command, &COUNT].concat())
}

/// `job` continues from its checkpoint, on this GPU.
fn came_back(client: &Client<'_>, gpu: usize) -> Result<()> {
    client.came_back()?;
    let (all, used) = (client.host.uuids(), client.gpus_in_use()?);
    ensure!(used == all[gpu..=gpu], "it is on {used:?}, not on {}", all[gpu]);
    logs_grow(client)
}

/// firn's commands take nerdctl's names and the ids that it shows. A container that was removed is made again
/// by nerdctl, and restored into.
fn firns_commands_take_its_containers(platform: Platform) -> Result<()> {
    let gpus = [SimGpu::h200(1), SimGpu::h200(2)];
    on([host(platform, "ne-firn", &gpus)?], |[node]| {
        let (client, _) = client(node, FIRN)?;
        let id = ticks(&client, &["run", "-d"], 0)?;
        client.goes_on(3)?;
        let done = node.firn(&["checkpoint", "job", "checkpoint/job"])?;
        ensure!(done["container"] == *id, "{done}");
        client.goes_on(3)?;
        let written = client.writes_on()?;
        node.firn(&["checkpoint", &id[..12], "/srv/job"])?;
        client.writes_on()?;
        let status = node.firn(&["ps", "job"])?;
        ensure!(status["containers"][0]["container"] == *id, "{status}");
        client.kills()?;
        // Into the container that nerdctl still has.
        node.firn(&["restore", "/srv/job", "--into", "job", "--gpus", "1"])?;
        came_back(&client, 1)?;
        client.writes_again(written[written.len() - 1])?;
        client.does(&["rm", "-f", "job"])?;
        // Into another one.
        let refused = node
            .output_of(&["firn", "restore", "checkpoint/job"], "")?
            .failed()?;
        ensure!(
            refused.contains("FIRN-RESTORE-CLIENT:") && refused.contains("nerdctl create"),
            "{refused}"
        );
        let other = ticks(&client, &["create"], 1)?;
        node.firn(&["restore", "checkpoint/job", "--into", "job"])?;
        came_back(&client, 1)?;
        let written = client.writes_on()?;
        ensure!(written[0] > 1, "it began again: {written:?}");
        let state = client.state()?;
        ensure!(state == "running 0", "{state}");
        client.does(&["rm", "-f", "job"])?;
        node.remove_image("checkpoint/job")?;
        nothing_left(node, &id)?;
        nothing_left(node, &other)?;
        node.idle()
    })
}

/// What is ambiguous, or has another root file system, is refused.
fn firns_commands_refuse_what_is_not_meant(platform: Platform) -> Result<()> {
    on([host(platform, "ne-not", &[SimGpu::h200(1)])?], |[node]| {
        let (client, _) = client(node, FIRN)?;
        for id in ["a", "b"] {
            let create = [
                "ctr",
                "containers",
                "create",
                "--label",
                "nerdctl/name=twin",
                IMAGE,
                id,
            ];
            node.node().run(&create)?;
        }
        let several = node
            .output_of(&["firn", "checkpoint", "twin", "/srv/twin"], "")?
            .failed()?;
        ensure!(several.contains("FIRN-SEVERAL-CONTAINERS: "), "{several}");
        ticks(&client, &["run", "-d"], 0)?;
        client.goes_on(3)?;
        node.firn(&["checkpoint", "job", "checkpoint/job"])?;
        let moved = node
            .output_of(&["firn", "move", "job", "root@b", "--dry-run"], "")?
            .failed()?;
        ensure!(
            moved.contains("FIRN-MOVE-TARGET: ") && moved.contains("--into"),
            "{moved}"
        );
        // Its root file system is a directory.
        let script = "mkdir -p /srv/empty; ctr containers create --rootfs /srv/empty c";
        node.node().run(&["sh", "-ec", script])?;
        let several = node
            .output_of(&["firn", "restore", "checkpoint/job", "--into", "twin"], "")?
            .failed()?;
        ensure!(several.contains("FIRN-SEVERAL-CONTAINERS: "), "{several}");
        let other = node
            .output_of(&["firn", "restore", "checkpoint/job", "--into", "c"], "")?
            .failed()?;
        ensure!(
            other.contains("FIRN-RESTORE-CLIENT:") && other.contains(IMAGE),
            "{other}"
        );
        node.node().run(&["ctr", "containers", "delete", "a", "b", "c"])?;
        client.does(&["rm", "-f", "job"])?;
        node.remove_image("checkpoint/job")?;
        node.idle()
    })
}

/// What containerd knows of a container: its spec and its snapshot.
fn known(node: &GpuHost, id: &str) -> Result<[Value; 2]> {
    let printed = node.node().run(&["ctr", "containers", "info", id])?.stdout;
    let mut known: Value = serde_json::from_str(&printed)?;
    Ok([known["Spec"].take(), known["SnapshotKey"].take()])
}

/// A restore into a container that fails or is interrupted leaves it as it was, and one that runs continues.
fn a_restore_into_a_container_that_fails_costs_nothing(platform: Platform) -> Result<()> {
    let gpus = [SimGpu::h200(1), SimGpu::h200(2)];
    on([host(platform, "ne-fail", &gpus)?], |[node]| {
        let (client, _) = client(node, FIRN)?;
        let id = ticks(&client, &["run", "-d"], 0)?;
        client.goes_on(3)?;
        node.firn(&["checkpoint", "job", "checkpoint/job"])?;
        client.does(&["exec", "job", "sh", "-c", "echo text >/newer"])?;
        let restore = ["firn", "restore", "checkpoint/job", "--into", "job"];
        let fails = |before: &[&str], after: &[&str], code: &str| {
            let output = node
                .output_of(&[before, &restore, after].concat(), "")?
                .failed()?;
            ensure!(output.contains(&format!("{code}: ")), "not {code} but {output}");
            Ok(())
        };
        fails(&[], &[], "FIRN-TASK-EXISTS")?;
        client.goes_on(3)?;
        client.kills()?;
        let before = known(node, &id)?;
        let is_as_before = || {
            ensure!(
                known(node, &id)? == before,
                "containerd knows something else of it"
            );
            let list = "ctr tasks ls -q; ctr snapshots ls | grep firn; true";
            let left = node.node().run(&["sh", "-c", list])?.stdout;
            ensure!(left.is_empty(), "left: {left}");
            node.no_faults()
        };
        node.fault(&["--call", "restore", "--error", "CUDA_ERROR_UNKNOWN"])?;
        fails(&[], &[], "FIRN-GPU-DRIVER")?;
        is_as_before()?;
        node.fault(&["--call", "restore", "--delay-ms", "8000", "--times", "1"])?;
        fails(
            &["timeout", "--signal", "INT", "4"],
            &["--gpus", "1"],
            "FIRN-INTERRUPTED",
        )?;
        is_as_before()?;
        client.does(&["start", "job"])?;
        let file = client.does(&["exec", "job", "cat", "/newer"])?;
        ensure!(file == "text", "its file has {file:?}");
        client.kills()?;
        node.firn(&restore[1..])?;
        came_back(&client, 0)?;
        client.does(&["exec", "job", "sh", "-c", "! [ -e /newer ]"])?;
        client.does(&["rm", "-f", "job"])?;
        node.remove_image("checkpoint/job")?;
        nothing_left(node, &id)?;
        node.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        a_day_with_it_is_as_with_the_stock_shim [FORKY];
        containers_with_gpus_go_on_from_their_checkpoints [FORKY];
        firns_commands_take_its_containers [FORKY];
        firns_commands_refuse_what_is_not_meant [FORKY];
        a_restore_into_a_container_that_fails_costs_nothing [FORKY];
        the_examples_work [FORKY];
    })
}
