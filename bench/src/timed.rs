//! How long a command takes in a node.

use anyhow::{Context, Result};
use firn_node::Node;

/// Prints the microseconds that a command took; its own output goes to standard error.
const TIMED: &str =
    r#"begun=$EPOCHREALTIME; "$@" >&2; ended=$EPOCHREALTIME; echo $((${ended/./} - ${begun/./}))"#;

/// Milliseconds that a command takes in the node.
pub(crate) fn timed(node: &Node, argv: &[String]) -> Result<f64> {
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
