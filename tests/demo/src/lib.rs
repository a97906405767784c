//! `cargo xtask demo`: a GPU container moves to another machine and another GPU.
#![forbid(unsafe_code)]

mod figures;
mod gpu;
mod nodes;
mod printer;
mod proof;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use firn_node::{Node, Suite};
use nix::unistd::geteuid;

use nodes::Nodes;
use printer::Printer;

/// Show a GPU container move to another machine and another GPU
///
/// Builds firn, starts two test nodes (see `cargo xtask node`) with simulated GPUs that have nothing in
/// common, runs a counter in GPU memory on the first, checkpoints it, moves the image, restores it on the
/// second, and proves that it continues. Commands are printed as they are run. Exit status 0 only if every
/// element of the counter's memory was correct in every iteration after the restore, and no iteration is
/// missing. Needs root; takes a minute or two after the build. Ctrl-C at any time leaves nothing behind.
#[derive(clap::Args)]
pub struct Cmd {
    /// Debian suite of the nodes: forky (containerd 2.1) or trixie (containerd 1.7)
    #[arg(long, default_value = "forky")]
    suite: Suite,
    /// Print the figures as one JSON object, and the progress on standard error
    #[arg(long)]
    json: bool,
    /// Leave the nodes running, to look at them afterwards
    #[arg(long)]
    keep: bool,
    /// Use this machine's NVIDIA GPUs, containerd, runc and CRIU instead of test nodes: the second GPU takes
    /// over from the first, or with one GPU that takes over from itself. Runs a containerd of its own and
    /// removes it
    #[arg(long, conflicts_with_all = ["suite", "keep"])]
    gpu: bool,
}

/// Runs the demo.
///
/// `workspace` is the root of the source tree. `stage` builds firn's programs and a test image into a
/// directory, as `tests/gpu/run.py --bundle` expects them; only `--gpu` needs it.
pub fn run(cmd: &Cmd, workspace: &Path, stage: impl FnOnce(&Path) -> Result<()>) -> Result<ExitCode> {
    ensure!(
        geteuid().is_root(),
        "the demo makes namespaces, cgroups and containers and needs root\nhint: sudo -E cargo xtask demo"
    );
    let printer = Printer::new(cmd.json);
    if cmd.gpu {
        gpu::run(&printer, cmd.json, workspace, stage)?;
    } else {
        on_nodes(cmd, &printer)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn on_nodes(cmd: &Cmd, printer: &Printer) -> Result<()> {
    for name in Nodes::NAMES {
        ensure!(
            Node::find(name).is_err(),
            "node {name} of an earlier demo runs\nhint: cargo xtask node stop {}",
            Nodes::NAMES.join(" ")
        );
    }
    let nodes = Nodes::start(cmd.suite, printer)?;
    let result = nodes.demo(printer);
    match &result {
        Ok(figures) => figures.conclude(printer),
        Err(_) => printer.line(&format!("\n{}", nodes.logs())),
    }
    if cmd.keep {
        nodes.leave()?;
        let [a, b] = Nodes::NAMES;
        printer.line(&format!(
            "\nThe nodes stay. `cargo xtask node shell {b}` gives a shell: try `ctr tasks ls`, `simgpu \
             smi`,\n\
             `tail -f /srv/job/counter.log`. `cargo xtask node stop {a} {b}` ends them."
        ));
    }
    let figures = result?;
    if cmd.json {
        println!("{}", serde_json::to_string(&figures)?);
    }
    Ok(())
}
