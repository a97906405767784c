//! One container at a time: start, end, exec.

use anyhow::Result;
use firn_lab::IMAGE;

use super::{Lab, Readings, Shim};
use crate::timed::timed;

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
