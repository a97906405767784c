//! docker, the client and its daemon: what it shows with firn is what it shows with the stock shim, and
//! containers with GPUs continue by its checkpoint commands, where docker itself can.
//!
//! Needs root. docker is Debian's: 28 with containerd 2.1, 26 with containerd 1.7.

use std::time::Duration;

use anyhow::{Result, ensure};
use firn_lab::{Claims, Client, DAY, FIRN, GpuHost, IMAGE, Outcome, START, STOCK, SimGpu, cases, matrix, on};
use firn_node::{Platform, wait_for};

const PACKAGES: [&str; 3] = ["docker.io", "docker-cli", "docker-compose"];

/// As in the example, for the node's containerd and on its file system, which lets docker make no overlays.
const CONFIG: &str = include_str!("../../../examples/docker/daemon.json");
const OPTIONS: &str = "--containerd /run/containerd/containerd.sock --storage-driver vfs";

const LOG: &str = "/var/log/dockerd.log";

const PAGE: &str = include_str!("../../../examples/docker/README.md");
const COMPOSE: &str = include_str!("../../../examples/docker/compose.yaml");

/// What docker reports of a network that it wants to make from a process that is not there yet.
const NO_PROCESS: &str = "/proc/0/ns/net";

/// What docker has to `start --checkpoint-dir`.
const NO_DIRECTORY: &str = "custom checkpointdir is not supported";

/// The same, reported with docker and the stock shim.
const REPORTED: &str = "[containerd issue 12141](https://github.com/containerd/containerd/issues/12141)";

const HOST_NETWORK: [&str; 2] = ["--network", "host"];

/// A node with docker, and firn under both names.
fn host(platform: Platform, name: &str, gpus: &[SimGpu]) -> Result<GpuHost> {
    let host = GpuHost::for_test(platform, name, gpus)?;
    let node = host.node();
    node.unpack(&PACKAGES)?;
    if !gpus.is_empty() {
        host.drop_in()?;
    }
    node.write("/etc/docker/daemon.json", CONFIG)?;
    let start = format!("setsid --fork dockerd {OPTIONS} >>{LOG} 2>&1 </dev/null");
    node.run(&["sh", "-euc", &start])?;
    let is_up = || Ok(node.run(&["docker", "info"]).ok().map(drop));
    wait_for("dockerd", Duration::from_secs(30), is_up)?;
    // Without --local ctr 2.1 may end before it has written the whole file.
    let load = format!("ctr images export --local /tmp/image.tar {IMAGE}; docker load -i /tmp/image.tar");
    node.run(&["sh", "-euc", &load])?;
    Ok(host)
}

fn client<'h>(host: &'h GpuHost, runtime: &'static str) -> Result<(Client<'h>, Claims)> {
    let client = Client {
        host,
        program: "docker",
        runtime,
    };
    let version = client.does(&["version", "--format", "{{.Server.Version}}"])?;
    Ok((client, Claims::on_containerd(host, "docker", &version, runtime)?))
}

fn a_day_with_it_is_as_with_the_stock_shim(platform: Platform) -> Result<()> {
    on([host(platform, "do-day", &[])?], |[node]| {
        let (stock, _) = client(node, STOCK)?;
        let (firn, claims) = client(node, FIRN)?;
        firn.has_a_day_as(&stock, CODES)?;
        claims.works(DAY)?;
        node.idle()
    })
}

/// Exit statuses of its commands: `run` and `exec` report failures; `top` has no
/// pids to show, and `update` would need a limit for swap too.
const CODES: &str = "007127501000100000000000";

fn containers_with_gpus_go_on_from_their_checkpoints(platform: Platform) -> Result<()> {
    on([host(platform, "do-gpu", &[SimGpu::h200(1)])?], |[node]| {
        for runtime in [FIRN, STOCK] {
            let (client, claims) = client(node, runtime)?;
            client.checkpoint_story(&HOST_NETWORK, &claims)?;
        }
        node.idle()
    })
}

/// docker makes a container's network from the process that Create returns. At a restore there is none before
/// Start.
fn networks_of_its_own_are_in_the_way_of_a_start(platform: Platform) -> Result<()> {
    on([host(platform, "do-net", &[SimGpu::h200(1)])?], |[node]| {
        let (client, claims) = client(node, FIRN)?;
        for network in ["bridge", "none"] {
            let id = client.counts(&["--network", network])?;
            client.checkpoints("first")?;
            client.kills()?;
            let elsewhere = [
                "start",
                "--checkpoint",
                "first",
                "--checkpoint-dir",
                "/srv",
                "job",
            ];
            let refused = client.output(&elsewhere, "")?.failed()?;
            ensure!(refused.contains(NO_DIRECTORY), "{refused}");
            claims.saw("`start --checkpoint-dir`", Outcome::Broken(NO_DIRECTORY))?;
            let started = client.output(&["start", "--checkpoint", "first", "job"], "")?;
            let outcome = if started.is_ok() {
                client.came_back()?;
                if network == "bridge" {
                    client.does(&["exec", "job", "ip", "address", "show", "eth0"])?;
                }
                Outcome::Works
            } else {
                let text = started.failed()?;
                ensure!(text.contains(NO_PROCESS), "{text}");
                Outcome::Broken(REPORTED)
            };
            claims.saw(&format!("{START}, `--network {network}`"), outcome)?;
            client.clears(&id, &["first"])?;
        }
        client.does(&["run", "-d", "--name", "net", IMAGE, "sleep", "600"])?;
        let id = client.counts(&["--network", "container:net"])?;
        client.checkpoints("first")?;
        client.kills()?;
        client.does(&["start", "--checkpoint", "first", "job"])?;
        client.came_back()?;
        claims.works(&format!("{START}, `--network container:NAME`"))?;
        client.clears(&id, &["first"])?;
        client.does(&["rm", "-f", "net"])?;
        node.idle()
    })
}

/// examples/docker: the file for compose and the commands, as they are.
fn the_examples_work(platform: Platform) -> Result<()> {
    let gpus = [SimGpu::h200(1), SimGpu::h200(2)];
    on([host(platform, "do-compose", &gpus)?], |[node]| {
        let (client, claims) = client(node, FIRN)?;
        client.compose_story(COMPOSE, &claims)?;
        client.example(PAGE)?;
        client.does(&["rm", "-f", "net"])?;
        node.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        a_day_with_it_is_as_with_the_stock_shim [FORKY, TRIXIE];
        containers_with_gpus_go_on_from_their_checkpoints [FORKY, TRIXIE];
        networks_of_its_own_are_in_the_way_of_a_start [FORKY, TRIXIE];
        the_examples_work [FORKY, TRIXIE];
    })
    .only_in_all()
}
