//! Traces, to a stand-in of a collector that also takes containerd's own spans.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, GpuHost, on};
use firn_node::{Platform, Suite, wait_for};
use serde_json::Value;

use super::network::{Collector, Received};
use super::{LIMIT, history, host};

const ENDPOINT: &str = "http://127.0.0.1:4318";

pub fn a_checkpoint_is_a_trace(platform: Platform) -> Result<()> {
    on([host(platform, "hi-traces", 1)?], |[host]| {
        let collector = Collector::start(host)?;
        let variables = format!(
            "OTEL_EXPORTER_OTLP_ENDPOINT={ENDPOINT}\nOTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf\n\
             OTEL_BSP_SCHEDULE_DELAY=200\n"
        );
        host.node().write("/etc/default/containerd", variables)?;
        host.node().restart_containerd()?;
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(3)?;
        job.checkpoint("checkpoint/job")?;
        let entries = history(host, &["job"])?;
        let sent = host.node().run(&["firn", "history", "--otlp", ENDPOINT])?.stdout;
        ensure!(sent.starts_with("1 of 1 transaction sent to "), "{sent}");
        let is_ours = |received: &Received| received.kind == "application/json";
        let received = collector
            .received()
            .into_iter()
            .find(is_ours)
            .context("nothing was received")?;
        ensure!(received.path == "/v1/traces", "{}", received.path);
        let request: Value = serde_json::from_slice(&received.body)?;
        let spans = is_shaped(&request)?;
        let entry = entries.first().context("no entry")?;
        ensure!(
            spans.len() == 1 + entry["phases"].as_array().map_or(0, Vec::len),
            "{request:#}"
        );
        ensure!(spans[0]["name"] == "firn checkpoint", "{}", spans[0]);
        // containerd 1.7 sends no trace to shims.
        match host.suite() {
            Suite::Trixie | Suite::Noble => ensure!(spans[0].get("parentSpanId").is_none(), "{}", spans[0]),
            Suite::Forky => below_containerds(&spans[0], &collector)?,
        }
        into_a_file(host, &request)?;
        follows(host, &job, &collector)?;
        job.remove()
    })
}

/// Every transaction is sent when it has ended, once.
fn follows(host: &GpuHost, job: &Container<'_>, collector: &Collector) -> Result<()> {
    let command = ["firn", "history", "--since", "1h", "--follow", "--otlp", ENDPOINT];
    let before = collector.received().len();
    let mut follower = host.node().spawn(&command)?;
    let sent_with = |text: &str| {
        let received = collector.received().into_iter().skip(before);
        let of_ours = received.filter(|received| received.kind == "application/json");
        of_ours
            .filter(|received| String::from_utf8_lossy(&received.body).contains(text))
            .count()
    };
    let is_sent = |text: &str| wait_for("the spans", LIMIT, || Ok((sent_with(text) > 0).then_some(())));
    is_sent("firn checkpoint")?;
    job.checkpoint("checkpoint/again")?;
    let entries = history(host, &["job"])?;
    let last = entries.last().context("no entry")?;
    let id = last["id"].as_str().context("no id")?;
    is_sent(id)?;
    let processes = host.node().processes();
    let its = processes
        .iter()
        .find(|process| process.args.iter().any(|word| word == "--follow"));
    host.node()
        .run(&["kill", &its.context("no follower")?.pid.to_string()])?;
    ensure!(follower.wait()?.success(), "SIGTERM is no failure");
    ensure!(sent_with(id) == 1, "{id} was sent again");
    Ok(())
}

/// The parent is a span that containerd has sent.
fn below_containerds(span: &Value, collector: &Collector) -> Result<()> {
    let bytes = |key: &str| -> Result<Vec<u8>> {
        let text = span[key].as_str().with_context(|| format!("no {key}: {span}"))?;
        let pairs = (0..text.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&text[at..at + 2], 16));
        Ok(pairs.collect::<std::result::Result<_, _>>()?)
    };
    let (trace, parent) = (bytes("traceId")?, bytes("parentSpanId")?);
    let holds = |body: &[u8], id: &[u8]| body.windows(id.len()).any(|part| part == id);
    wait_for("containerd's span", LIMIT, || {
        let received = collector.received();
        let mut of_containerd = received
            .iter()
            .filter(|received| received.kind != "application/json");
        Ok(of_containerd
            .any(|received| holds(&received.body, &trace) && holds(&received.body, &parent))
            .then_some(()))
    })
}

/// The request is one of OTLP: ids, times, parents and attributes have their forms. Returns its spans.
fn is_shaped(request: &Value) -> Result<Vec<Value>> {
    let list = |of: &Value, key: &str| {
        let list = of[key].as_array().filter(|list| !list.is_empty()).cloned();
        list.with_context(|| format!("no {key} in {of:#}"))
    };
    let attribute = |of: &Value| {
        let value = of["value"].as_object().filter(|value| value.len() == 1)?;
        let is_text = value.values().all(Value::is_string);
        (of["key"].is_string() && is_text).then_some(())
    };
    let resources = list(request, "resourceSpans")?;
    let service = list(&resources[0]["resource"], "attributes")?;
    ensure!(
        service.iter().any(|of| of["key"] == "service.name"),
        "{request:#}"
    );
    let scopes = list(&resources[0], "scopeSpans")?;
    let spans = list(&scopes[0], "spans")?;
    let is_id = |id: &Value, length| {
        let id = id.as_str().unwrap_or_default();
        id.len() == length && id.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let time = |of: &Value, key: &str| -> Result<u64> { Ok(of[key].as_str().context("no time")?.parse()?) };
    let whole = (
        time(&spans[0], "startTimeUnixNano")?,
        time(&spans[0], "endTimeUnixNano")?,
    );
    let mut ids = BTreeSet::new();
    for (nth, span) in spans.iter().enumerate() {
        ensure!(
            is_id(&span["traceId"], 32) && is_id(&span["spanId"], 16),
            "{span:#}"
        );
        ensure!(span["traceId"] == spans[0]["traceId"], "another trace: {span:#}");
        ensure!(
            ids.insert(span["spanId"].to_string()),
            "an id that is there twice: {span:#}"
        );
        ensure!(nth == 0 || span["parentSpanId"] == spans[0]["spanId"], "{span:#}");
        ensure!(span["kind"].is_u64() && span["name"].is_string(), "{span:#}");
        let (start, end) = (time(span, "startTimeUnixNano")?, time(span, "endTimeUnixNano")?);
        // Clocks of milliseconds and of finer ones are compared.
        let slack = 2_000_000;
        ensure!(
            start <= end && start >= whole.0 && end <= whole.1 + slack,
            "{span:#}"
        );
        let attributes = list(span, "attributes")?;
        ensure!(attributes.iter().all(|of| attribute(of).is_some()), "{span:#}");
    }
    Ok(spans)
}

/// The same into a file, as lines.
fn into_a_file(host: &GpuHost, request: &Value) -> Result<()> {
    const FILE: &str = "/tmp/spans.jsonl";
    for _ in 0..2 {
        host.node().run(&["firn", "history", "job", "--otlp", FILE])?;
    }
    let lines = host.node().read(FILE)?;
    ensure!(lines.lines().count() == 2, "{lines}");
    for line in lines.lines() {
        ensure!(serde_json::from_str::<Value>(line)? == *request, "{line}");
    }
    Ok(())
}
