//! Many containers: started at the same time, and in pods, whose containers share a shim.
//!
//! The containers are created before, so the time is that of their tasks: `ctr tasks start --detach` for each
//! of them, until the last one runs.

use anyhow::Result;
use firn_lab::IMAGE;
use firn_node::Node;

use super::{Lab, Readings, Shim};
use crate::timed::timed;

/// Containers of a pod.
pub(super) const POD: usize = 10;

/// Puts a container into the pod that is named.
const POD_ANNOTATION: &str = "io.kubernetes.cri.sandbox-id";

/// Starts the task of each of its arguments at the same time.
const AT_ONCE: &str = r#"for id; do ctr tasks start --detach "$id" & pids="${pids-} $!"; done
for pid in $pids; do wait "$pid"; done"#;

/// Starts the task of each of its arguments after the one before.
const ONE_BY_ONE: &str = r#"for id; do ctr tasks start --detach "$id"; done"#;

/// The first one creates the pod, as the pause container does; the others are started at the same time.
const POD_AT_ONCE: &str = r#"ctr tasks start --detach "$1"; shift
for id; do ctr tasks start --detach "$id" & pids="${pids-} $!"; done
for pid in $pids; do wait "$pid"; done"#;

/// Kills and removes its arguments, a few at a time.
const REMOVE: &str = r#"printf '%s\n' "$@" | xargs -P 4 -n 5 ctr tasks rm --force >/dev/null
printf '%s\n' "$@" | xargs -n 50 ctr containers rm"#;

/// As `REMOVE`, for a shim that may end before it has answered that the last task is deleted. containerd
/// removes such a task by itself, a little later.
const REMOVE_LENIENT: &str = r#"printf '%s\n' "$@" | xargs -P 4 -n 5 ctr tasks rm --force >/dev/null ||
while ctr tasks ls -q | grep -qxF -f <(printf '%s\n' "$@"); do sleep 0.1; done
printf '%s\n' "$@" | xargs -n 50 ctr containers rm"#;

/// Runs its arguments but the first, a count, with each number up to it, a few at a time.
const MAKE: &str = r#"count=$1; shift; seq "$count" | xargs -P 4 -I @ "$@""#;

/// 20 containers at the same time.
pub(super) fn twenty(lab: &Lab<'_>, shim: Shim) -> Result<Readings> {
    Ok(vec![("starts-20", starts(lab, shim, 20, &[], AT_ONCE)?)])
}

/// 100 containers at the same time.
pub(super) fn hundred(lab: &Lab<'_>, shim: Shim) -> Result<Readings> {
    Ok(vec![("starts-100", starts(lab, shim, 100, &[], AT_ONCE)?)])
}

/// The containers of a pod, one by one and, but for the first, at the same time.
pub(super) fn pods(lab: &Lab<'_>, shim: Shim) -> Result<Readings> {
    let annotation = format!("{POD_ANNOTATION}=pod");
    let options = ["--annotation", &annotation];
    Ok(vec![
        ("pod", starts(lab, shim, POD, &options, ONE_BY_ONE)?),
        ("pod-at-once", starts(lab, shim, POD, &options, POD_AT_ONCE)?),
    ])
}

fn starts(lab: &Lab<'_>, shim: Shim, count: usize, options: &[&str], how: &str) -> Result<f64> {
    let ids = make(lab, shim, "crowd", count, options)?;
    let took = timed(lab.node(), &script(how, &ids))?;
    remove(lab.node(), shim, &ids)?;
    Ok(took)
}

/// Creates a pod and starts its containers.
pub(super) fn pod(lab: &Lab<'_>, shim: Shim, name: &str) -> Result<Vec<String>> {
    let annotation = format!("{POD_ANNOTATION}={name}");
    let ids = make(lab, shim, name, POD, &["--annotation", &annotation])?;
    lab.node().run(&script(POD_AT_ONCE, &ids))?;
    Ok(ids)
}

/// Creates containers without tasks and returns their ids.
fn make(lab: &Lab<'_>, shim: Shim, prefix: &str, count: usize, options: &[&str]) -> Result<Vec<String>> {
    let id = format!("{prefix}-@");
    let create = Lab::create(shim, options, &[IMAGE, &id, "sleep", "1000000"]);
    let mut words = script(MAKE, &[count.to_string()]);
    words.extend(create);
    lab.node().run(&words)?;
    Ok((1..=count).map(|number| format!("{prefix}-{number}")).collect())
}

/// Ends and removes containers.
pub(super) fn remove(node: &Node, shim: Shim, ids: &[String]) -> Result<()> {
    let how = match shim {
        Shim::Stock => REMOVE_LENIENT,
        Shim::Firn => REMOVE,
    };
    node.run(&script(how, ids)).map(drop)
}

fn script(script: &str, arguments: &[String]) -> Vec<String> {
    let mut words = ["bash", "-euc", script, "crowd"].map(String::from).to_vec();
    words.extend_from_slice(arguments);
    words
}
