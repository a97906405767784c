//! A hook by HTTP: a POST to a loopback address of the container's network namespace.

use std::fs::File;
use std::io::Read;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use firn_oci::job_hook::Call;
use nix::sched::{CloneFlags, setns};
use ureq::Agent;

use super::{OUTPUT, Output};

/// Posts `body`, or the facts, and expects a status of success.
///
/// Moves the calling thread into the container's network namespace.
pub fn post(
    call: &Call,
    url: &str,
    body: Option<String>,
    deadline: Instant,
    output: &mut Output,
) -> Result<()> {
    let body = match body {
        Some(body) => body,
        None => serde_json::to_string(&call.facts)?,
    };
    let namespace = format!("/proc/{}/ns/net", call.init);
    let file = File::open(&namespace).with_context(|| format!("cannot open {namespace}"))?;
    setns(file, CloneFlags::CLONE_NEWNET).with_context(|| format!("cannot enter {namespace}"))?;
    let left = deadline.saturating_duration_since(Instant::now());
    let agent = Agent::config_builder()
        .timeout_global(Some(left.max(Duration::from_millis(1))))
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .proxy(None)
        .user_agent(concat!("firn/", env!("CARGO_PKG_VERSION")))
        .build()
        .new_agent();
    let mut response = agent
        .post(url)
        .content_type("application/json")
        .send(body)
        .with_context(|| format!("cannot call {url}"))?;
    let mut text = Vec::new();
    let limit = u64::try_from(OUTPUT).unwrap_or(u64::MAX);
    let read = response.body_mut().as_reader().take(limit).read_to_end(&mut text);
    output.add(&text);
    let status = response.status();
    if !status.is_success() {
        bail!("{url} answered {}", status.as_u16());
    }
    read.map(drop)
        .with_context(|| format!("cannot read the answer of {url}"))
}
