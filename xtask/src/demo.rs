//! `cargo xtask demo`: a GPU container moves to another machine and another GPU, for whoever wants to see it.

mod account;
mod gpu;
mod proof;
mod story;
mod voice;

use std::process::ExitCode;

use anyhow::{Result, ensure};
use firn_node::{Node, Suite};
use nix::unistd::geteuid;

use story::Nodes;
use voice::Voice;

/// Show a GPU container move to another machine and another GPU
///
/// Builds firn, starts two test nodes (see `cargo xtask node`) with simulated GPUs that have nothing in common, runs a
/// counter in GPU memory on the first, checkpoints it, moves the image, restores it on the second, and proves that it
/// went on. Every command that it shows is the one that it runs. Exit status 0 only if every element of the counter's
/// memory was right in every iteration after the restore and none was left out. Needs root; a minute or two after the
/// build. Ctrl-C at any time leaves nothing behind.
#[derive(clap::Args)]
pub struct Cmd {
    /// Debian suite of the nodes: forky (containerd 2.1) or trixie (containerd 1.7)
    #[arg(long, default_value = "forky")]
    suite: Suite,
    /// Print the figures as one JSON object; the story goes to standard error
    #[arg(long)]
    json: bool,
    /// Leave the nodes running, to look around in them
    #[arg(long)]
    keep: bool,
    /// Use this machine's NVIDIA GPUs, containerd, runc and CRIU instead of test nodes: the second GPU takes over from
    /// the first, or with one GPU that takes over from itself. Runs a containerd of its own and removes it
    #[arg(long, conflicts_with_all = ["suite", "keep"])]
    gpu: bool,
}

/// Runs the demo.
pub fn run(cmd: &Cmd) -> Result<ExitCode> {
    ensure!(
        geteuid().is_root(),
        "the demo makes namespaces, cgroups and containers and needs root\nhint: sudo -E cargo xtask demo"
    );
    let voice = Voice::new(cmd.json);
    if cmd.gpu {
        gpu::run(&voice, cmd.json)?;
    } else {
        on_nodes(cmd, &voice)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn on_nodes(cmd: &Cmd, voice: &Voice) -> Result<()> {
    for name in Nodes::NAMES {
        ensure!(
            Node::find(name).is_err(),
            "node {name} of an earlier demo runs\nhint: cargo xtask node stop {}",
            Nodes::NAMES.join(" ")
        );
    }
    let nodes = Nodes::start(cmd.suite, voice)?;
    let told = nodes.story(voice);
    match &told {
        Ok(account) => account.conclude(voice),
        Err(_) => voice.say(&format!("\n{}", nodes.logs())),
    }
    if cmd.keep {
        nodes.leave()?;
        let [a, b] = Nodes::NAMES;
        voice.say(&format!(
            "\nThe nodes run on. `cargo xtask node shell {b}` gives a shell: try `ctr tasks ls`, `simgpu smi`,\n\
             `tail -f /srv/job/counter.log`. `cargo xtask node stop {a} {b}` ends them."
        ));
    }
    let account = told?;
    if cmd.json {
        println!("{}", serde_json::to_string(&account)?);
    }
    Ok(())
}
