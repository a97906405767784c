//! The files of examples/: the scripts for ctr are run here, as they are; others by the suites and scripts
//! that name them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_documents::root;
use firn_lab::{COUNTER, Claims, CommandOutput, Container, FIRN, GpuHost, IMAGE, on};
use firn_node::{Platform, link, wait_for};

use crate::guide::{needs_pages, pair};

/// `examples/ctr/one-node.sh`, on the same GPU and onto the other one.
pub fn one_node_works(platform: Platform) -> Result<()> {
    needs_pages()?;
    on(pair(platform, "example")?, |[a, _]| {
        let script = root().join("examples/ctr/one-node.sh");
        a.node().install(script, "/usr/local/bin/one-node.sh", 0o755)?;
        let map = format!("MAP={}={}", a.uuids()[0], a.uuids()[1]);
        for environment in ["GPU=0", &map] {
            let command = format!("{environment} one-node.sh {IMAGE} {COUNTER}");
            let output = a.node().run(&["sh", "-euc", &command])?.stdout;
            let job = Container::known(a, "firn-example").counting(1).moved_before();
            job.goes_on(3)?;
            let last = output.rsplit("remove it with: ").next().context("no last step")?;
            a.node().run(&["sh", "-euc", last])?;
            a.idle()?;
        }
        Ok(())
    })
}

/// `examples/ctr/two-nodes.sh`.
pub fn two_nodes_work(platform: Platform) -> Result<()> {
    needs_pages()?;
    on(pair(platform, "two")?, |hosts| {
        moves(hosts, "two-nodes.sh", &[], "")?;
        Claims::of_ctr(&hosts[0], FIRN)?
            .works("`images export` and `import` of a checkpoint, onto another node")
    })
}

/// `examples/ctr/two-nodes-registry.sh`, with the registry on the first node.
pub fn two_nodes_and_a_registry_work(platform: Platform) -> Result<()> {
    needs_pages()?;
    on(pair(platform, "registry")?, |hosts| {
        let [a, b] = &*hosts;
        let address = link(a.node(), b.node())?.a;
        a.node().unpack(&["docker-registry"])?;
        let config = format!(
            "version: 0.1\nstorage: {{filesystem: {{rootdirectory: /srv/registry}}}}\n\
             http: {{addr: {address}:5000}}\n"
        );
        a.node().write("/etc/registry.yml", config)?;
        let start =
            "setsid --fork docker-registry serve /etc/registry.yml >/var/log/registry.log 2>&1 </dev/null";
        a.node().run(&["sh", "-euc", start])?;
        let catalog = format!("http://{address}:5000/v2/_catalog");
        let fetch = ["busybox", "wget", "-qO-", &catalog];
        wait_for("the registry", Duration::from_secs(30), || {
            Ok(b.node().run(&fetch).ok().map(drop))
        })?;
        let repository = format!("{address}:5000/checkpoints");
        moves(hosts, "two-nodes-registry.sh", &[&repository], "--plain-http")?;
        let kept = hosts[1].node().run(&fetch)?.stdout;
        ensure!(kept.contains("checkpoints/job"), "{kept}");
        Claims::of_ctr(&hosts[0], FIRN)?
            .works("`images push` and `content fetch` of a checkpoint, by a registry")
    })
}

/// Moves a counter by a script, which runs where it reaches both nodes, onto a GPU of the other node.
fn moves([a, b]: &[GpuHost; 2], script: &str, arguments: &[&str], options: &str) -> Result<()> {
    Container::count(a, "job", &["0"], 1, &[])?.goes_on(3)?;
    let enter = |host: &GpuHost| {
        let pid = host.node().pid();
        format!("nsenter --target={pid} --mount --uts --ipc --net --pid --cgroup --root --wd=/ --")
    };
    let output = Command::new(root().join("examples/ctr").join(script))
        .args([&enter(a), &enter(b), "job"])
        .args(arguments)
        .env("OPTIONS", options)
        .output()?;
    CommandOutput::from(output).expect_success()?;
    let job = Container::known(b, "job").counting(1).moved_before();
    job.goes_on(3)?;
    ensure!(
        job.gpus_in_use()? == [b.uuids()[0].clone()],
        "{:?}",
        job.gpus_in_use()
    );
    job.remove()?;
    a.idle()?;
    b.idle()
}

/// Examples that are not run, and why.
const LEFT: [(&str, &str); 1] = [(
    "turns@.service",
    "needs systemd with journald; test_turns.py runs its program",
)];

/// Every file of the examples but their pages is named by a suite or by a script for machines with GPUs.
pub fn every_example_is_run() -> Result<()> {
    needs_pages()?;
    let mut sources = String::new();
    for dir in ["tests/integration/tests", "tests/gpu"] {
        for path in files(&root().join(dir))? {
            // Programs and data of the suites are no text.
            sources += &fs::read_to_string(path).unwrap_or_default();
        }
    }
    let examples = files(&root().join("examples"))?;
    let unnamed: BTreeSet<String> = examples
        .iter()
        .filter(|path| path.extension().is_none_or(|kind| kind != "md"))
        .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        .filter(|name| !has_name(&sources, name) && LEFT.iter().all(|(left, _)| left != name))
        .collect();
    ensure!(unnamed.is_empty(), "no suite runs {unnamed:?}");
    Ok(())
}

/// Whether the text has this name of a file, and not only as the end of another one.
fn has_name(text: &str, name: &str) -> bool {
    let is_of_name = |before: char| before.is_alphanumeric() || "-_.@".contains(before);
    text.match_indices(name)
        .any(|(at, _)| !text[..at].ends_with(is_of_name))
}

fn files(dir: &Path) -> Result<Vec<std::path::PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path)?)
        } else {
            found.push(path)
        }
    }
    Ok(found)
}
