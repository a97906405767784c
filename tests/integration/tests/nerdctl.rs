//! nerdctl, the client: what it shows with firn is what it shows with the stock shim, and containers with
//! GPUs go on by its checkpoint commands.
//!
//! Needs root, and Go to build nerdctl.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use firn_lab::{Claims, Client, DAY, FIRN, GpuHost, STOCK, SimGpu, Skip, cases, matrix, on};
use firn_node::{GoOptions, Platform, go_build_of, go_lacks};

const MODULE: &str = "github.com/containerd/nerdctl/v2";
const VERSION: &str = "v2.3.5";
const PROGRAM: &str = "/usr/local/bin/nerdctl";
const PAGE: &str = include_str!("../../../examples/nerdctl/README.md");
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

/// Under firn's own name a container goes on after its checkpoint. In the stock shim's place it ends with it
/// where nerdctl asks for that. It begins again from there.
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

fn main() -> ExitCode {
    matrix::run(&cases! {
        a_day_with_it_is_as_with_the_stock_shim [FORKY];
        containers_with_gpus_go_on_from_their_checkpoints [FORKY];
        the_examples_work [FORKY];
    })
}
