//! `cargo xtask node`: test nodes to work in. `tests/node` describes what a node is.

use std::env;
use std::ffi::OsString;
use std::process::{Command, ExitCode};
use std::thread;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use firn_node::{Cgroup, Node, Record, Status, Store, Suite};

use crate::tools::exit_as;

/// Make, enter and remove test nodes
///
/// A test node is a Debian root with its own namespaces, /dev and cgroups, and with containerd, runc and CRIU
/// inside: trixie has containerd 1.7, runc 1.1 and CRIU 4.1, forky has containerd 2.1, runc 1.3 and CRIU 4.2.
/// The roots are made by debootstrap from the Debian mirror that apt is configured with (or
/// $FIRN_DEBIAN_MIRROR) and cached in target/node. Needs root. Packages that the host lacks (debootstrap,
/// iproute2) are installed with apt-get; a message announces that. Nothing else of the host is changed.
#[derive(Args)]
pub struct Cmd {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Start a node and leave it running
    Start(Start),
    /// Open a shell in a node; a temporary one if none of that suite runs
    Shell {
        /// Name of a running node, or a suite: trixie, forky
        node: String,
    },
    /// Run a command in a node and exit as it does
    Exec {
        /// Name of a running node
        node: String,
        /// The command
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Join two running nodes with a network cable
    Link {
        /// Name of a running node
        a: String,
        /// Name of another
        b: String,
    },
    /// List the nodes
    List,
    /// Stop nodes and remove all of them
    Stop {
        /// Names
        #[arg(required = true)]
        nodes: Vec<String>,
    },
    /// Remove what crashed nodes have left: processes, cgroups, loop devices, files
    Clean {
        /// Also stop the nodes that `start` left running
        #[arg(long)]
        all: bool,
        /// Also remove the cached roots
        #[arg(long)]
        roots: bool,
    },
    /// Make the cached roots of both suites
    Roots,
}

#[derive(Args)]
struct Start {
    /// trixie or forky
    suite: Suite,
    /// Name and hostname [default: the suite's]
    #[arg(long)]
    name: Option<String>,
    /// Cgroup version [default: v1 where the host has it, else v2]
    #[arg(long)]
    cgroup: Option<Version>,
    /// Run containerd with its CRI plugins
    #[arg(long)]
    cri: bool,
    /// Keep the node's files on disk instead of in memory
    #[arg(long)]
    disk: bool,
    /// Make systemd the node's init; needs cgroup v2
    #[arg(long)]
    systemd: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Version {
    V1,
    V2,
}

/// Runs the command.
pub fn run(cmd: Cmd) -> Result<ExitCode> {
    match cmd.action {
        Action::Start(options) => start(options)?,
        Action::Shell { node } => return shell(&node),
        Action::Exec { node, command } => return exec(&node, &command),
        Action::Link { a, b } => {
            let link = firn_node::link(&Node::find(&a)?, &Node::find(&b)?)?;
            println!("{a} {}\n{b} {}", link.a, link.b);
        }
        Action::List => list()?,
        Action::Stop { nodes } => nodes.iter().try_for_each(|name| Node::find(name)?.stop())?,
        Action::Clean { all, roots } => clean(all, roots)?,
        Action::Roots => roots()?,
    }
    Ok(ExitCode::SUCCESS)
}

fn start(options: Start) -> Result<()> {
    let cgroup = match options.cgroup {
        None => Cgroup::Auto,
        Some(Version::V1) => Cgroup::V1,
        Some(Version::V2) => Cgroup::V2,
    };
    let name = options.name.unwrap_or_else(|| options.suite.to_string());
    let builder = Node::builder(options.suite)
        .name(&name)
        .cgroup(cgroup)
        .cri(options.cri)
        .disk(options.disk)
        .systemd(options.systemd);
    builder.start()?.leave()?;
    println!("node {name} runs; enter it with `cargo xtask node shell {name}`");
    Ok(())
}

fn shell(wanted: &str) -> Result<ExitCode> {
    if let Some(node) = find(wanted)? {
        return status(shell_in(&node));
    }
    let Ok(suite) = wanted.parse::<Suite>() else {
        bail!("neither a running node nor a suite: {wanted:?}\nhint: cargo xtask node list");
    };
    let node = Node::builder(suite).start()?;
    println!("temporary node {}: it ends with this shell", node.name());
    let code = status(shell_in(&node))?;
    node.stop()?;
    Ok(code)
}

/// The running node of that name, else one of that suite that was left running.
fn find(wanted: &str) -> Result<Option<Node>> {
    let runs = |record: &Record| record.status() == Status::Running;
    let nodes = Store::open()?.nodes()?;
    let named = nodes.iter().find(|record| record.name == wanted && runs(record));
    let of_suite = || {
        nodes
            .iter()
            .find(|record| record.suite.as_str() == wanted && record.left && runs(record))
    };
    named
        .or_else(of_suite)
        .map(|record| Node::find(&record.name))
        .transpose()
}

fn shell_in(node: &Node) -> Command {
    let mut shell = node.command("bash");
    if let Some(term) = env::var_os("TERM") {
        shell.env("TERM", term);
    }
    shell
}

fn exec(name: &str, command: &[OsString]) -> Result<ExitCode> {
    let (program, args) = command.split_first().context("no command given")?;
    let mut inside = Node::find(name)?.command(program);
    inside.args(args);
    status(inside)
}

fn status(mut command: Command) -> Result<ExitCode> {
    Ok(exit_as(command.status().context("enter the node")?))
}

fn list() -> Result<()> {
    println!(
        "{:<20} {:<8} {:<7} {:<9} {:>8}",
        "NAME", "SUITE", "CGROUP", "STATUS", "PID"
    );
    for record in Store::open()?.nodes()? {
        let status = match record.status() {
            Status::Running if record.left => "running",
            Status::Running | Status::Held => "in use",
            Status::Crashed => "crashed",
        };
        let pid = record.pid().map_or("-".into(), |pid| pid.to_string());
        println!(
            "{:<20} {:<8} {:<7} {status:<9} {pid:>8}",
            record.name,
            record.suite.as_str(),
            record.cgroup.as_str()
        );
    }
    Ok(())
}

fn clean(all: bool, roots: bool) -> Result<()> {
    let store = Store::open()?;
    for name in store.clean(all)? {
        println!("removed node {name}");
    }
    if roots {
        store.clean_roots()?;
        println!("removed the cached roots");
    }
    Ok(())
}

fn roots() -> Result<()> {
    let store = &Store::open()?;
    thread::scope(|scope| {
        let makers = Suite::ALL.map(|suite| scope.spawn(move || store.root(suite, &[])));
        for maker in makers {
            match maker.join() {
                Ok(root) => println!("{}", root?.display()),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok(())
    })
}
