//! One container at a time: start, end, exec.

use anyhow::{Context, Result};
use firn_lab::IMAGE;
use firn_node::Node;

use super::{Lab, Readings, Shim};

/// Prints the microseconds that a command took; its own output goes to standard error.
const TIMED: &str =
    r#"begun=$EPOCHREALTIME; "$@" >&2; ended=$EPOCHREALTIME; echo $((${ended/./} - ${begun/./}))"#;

/// Execs in one container: a round has several, because creating the container takes longer.
const EXECS: usize = 4;

/// `ctr run --detach`, `ctr tasks rm --force`, and `ctr run --rm` of a program that ends at once.
pub(super) fn start_and_end(lab: &Lab<'_>, shim: Shim) -> Result<Readings> {
    let node = lab.node();
    let sleeping = lab.run(shim, &["--detach"], &[IMAGE, "timed", "sleep", "1000000"]);
    let short = lab.run(shim, &["--rm"], &[IMAGE, "timed", "true"]);
    let run = timed(node, &sleeping)?;
    let kill_delete = timed(
        node,
        &["ctr", "tasks", "rm", "--force", "timed"].map(String::from),
    )?;
    node.run(&["ctr", "containers", "rm", "timed"])?;
    let run_delete = timed(node, &short)?;
    Ok(vec![
        ("run", run),
        ("kill-delete", kill_delete),
        ("run-delete", run_delete),
    ])
}

/// `ctr tasks exec` of a program that ends at once, until it is deleted.
pub(super) fn execs(lab: &Lab<'_>, shim: Shim) -> Result<Readings> {
    let node = lab.node();
    node.run(&lab.run(shim, &["--detach"], &[IMAGE, "execs", "sleep", "1000000"]))?;
    let exec = ["ctr", "tasks", "exec", "--exec-id", "timed", "execs", "true"].map(String::from);
    let readings = (0..EXECS).map(|_| Ok(("exec", timed(node, &exec)?)));
    let readings: Result<Readings> = readings.collect();
    node.run(&["ctr", "tasks", "rm", "--force", "execs"])?;
    node.run(&["ctr", "containers", "rm", "execs"])?;
    readings
}

/// Milliseconds that a command takes in the node.
pub(super) fn timed(node: &Node, argv: &[String]) -> Result<f64> {
    let words = argv.iter().map(String::as_str);
    let timer = ["bash", "-euc", TIMED, "timed"];
    let output = node.run(&timer.into_iter().chain(words).collect::<Vec<_>>())?;
    let micros: f64 = output
        .stdout
        .trim()
        .parse()
        .with_context(|| format!("no time in {:?}", output.stdout))?;
    Ok(micros / 1000.0)
}
