//! Transactions as spans of OpenTelemetry: JSON of OTLP, to a collector over HTTP or into a file.
//!
//! The ids of spans are made of the transaction's id, so that a transaction that is sent twice is the same
//! trace. Its trace is that of the client, as containerd has sent it; one without is a trace of its own, with
//! the transaction's id. What the client does not sample is not sent.

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use firn_transaction::history::{Entry, PhaseTime, Place};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::signal::unix::{SignalKind, signal};

use super::args::HistoryArgs;
use super::{is_asked_for, read};
use crate::containerd::block_on;
use crate::output::{line, note};
use crate::text;

/// How many transactions are sent at once.
const BATCH: usize = 100;
/// How long the collector may take.
const LIMIT: Duration = Duration::from_secs(10);
/// How often the history is looked at.
const EVERY: Duration = Duration::from_secs(2);

/// Kinds and states of OTLP.
const SERVER: u8 = 2;
const INTERNAL: u8 = 1;
const OK: u8 = 1;
const ERROR: u8 = 2;

/// Sends what is asked for. True: done.
pub fn run(args: &HistoryArgs, to: &str) -> Result<bool> {
    block_on(async {
        let target = Target::of(to)?;
        if args.follow {
            follow(args, &target).await
        } else {
            let mut entries = read(&args.dir)?;
            entries.retain(|entry| is_asked_for(args, entry));
            let sent = target.send(&entries).await?;
            line!(
                "{sent} of {} sent to {to}",
                text::count(entries.len(), "transaction")
            );
            Ok(true)
        }
    })?
}

/// Sends every transaction that has ended since this began, or since --since. A collector that does not
/// answer gets them later.
async fn follow(args: &HistoryArgs, target: &Target) -> Result<bool> {
    let mut term = signal(SignalKind::terminate())?;
    let mut sent: HashSet<String> = match args.since {
        Some(_) => HashSet::new(),
        None => read(&args.dir)?.into_iter().map(|entry| entry.id).collect(),
    };
    let (mut failure, mut seen) = (String::new(), None);
    loop {
        let done = async {
            let version = Place::new(&args.dir).version()?;
            if version == seen {
                return Ok(());
            }
            let mut new = read(&args.dir)?;
            let all: HashSet<String> = new.iter().map(|entry| entry.id.clone()).collect();
            new.retain(|entry| !sent.contains(&entry.id) && is_asked_for(args, entry));
            target.send(&new).await?;
            (sent, seen) = (all, version);
            Ok::<_, anyhow::Error>(())
        };
        let error = done
            .await
            .err()
            .map(|error| format!("{error:#}"))
            .unwrap_or_default();
        if error != failure && !error.is_empty() {
            note!("firn: {error}; trying again");
        }
        failure = error;
        tokio::select! {
            _ = term.recv() => return Ok(true),
            () = tokio::time::sleep(EVERY) => {}
        }
    }
}

/// Where they go.
enum Target {
    Collector {
        client: reqwest::Client,
        url: String,
        /// Its name in messages: one from the environment may have a key in it.
        shown: String,
    },
    File(String),
}

/// The word for the endpoint that is in the environment, and its variable there.
const FROM_ENVIRONMENT: &str = "env";
const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

impl Target {
    fn of(to: &str) -> Result<Self> {
        Self::with(to, || std::env::var(ENDPOINT).ok())
    }

    fn with(to: &str, environment: impl FnOnce() -> Option<String>) -> Result<Self> {
        if to == FROM_ENVIRONMENT {
            let endpoint = environment().filter(|endpoint| is_url(endpoint));
            let endpoint = endpoint.with_context(|| format!("{ENDPOINT} is no http://HOST:PORT"))?;
            return Self::collector(&endpoint, Some(format!("the endpoint in {ENDPOINT}")));
        }
        if !is_url(to) {
            ensure!(!to.contains("://"), "{to} is neither http://HOST:PORT nor a file");
            return Ok(Self::File(to.to_owned()));
        }
        Self::collector(to, None)
    }

    fn collector(endpoint: &str, shown: Option<String>) -> Result<Self> {
        // Another one may have been chosen already, by a part of this process.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().timeout(LIMIT).build()?;
        let base = endpoint.trim_end_matches('/');
        let url = if base.ends_with("/v1/traces") {
            base.to_owned()
        } else {
            format!("{base}/v1/traces")
        };
        let shown = shown.unwrap_or_else(|| url.clone());
        Ok(Self::Collector { client, url, shown })
    }

    /// Sends those that are sampled. Returns how many they are.
    async fn send(&self, entries: &[Entry]) -> Result<usize> {
        let is_sampled = |entry: &&Entry| entry.trace.as_ref().is_none_or(|trace| trace.is_sampled());
        let sampled: Vec<&Entry> = entries.iter().filter(is_sampled).collect();
        for batch in sampled.chunks(BATCH) {
            self.send_batch(request(batch).to_string()).await?;
        }
        Ok(sampled.len())
    }

    async fn send_batch(&self, body: String) -> Result<()> {
        match self {
            Self::File(path) => {
                // Names of containers and errors are for root.
                let mut options = OpenOptions::new();
                let mut file = options.append(true).create(true).mode(0o600).open(path);
                let written = file.as_mut().map_err(|error| std::io::Error::from(error.kind()));
                written
                    .and_then(|file| file.write_all((body + "\n").as_bytes()))
                    .with_context(|| format!("write {path}"))
            }
            Self::Collector { client, url, shown } => {
                let request = client.post(url).header("Content-Type", "application/json");
                let answer = request
                    .body(body)
                    .send()
                    .await
                    .map_err(reqwest::Error::without_url);
                let answer = answer.with_context(|| format!("send traces to {shown}"))?;
                let status = answer.status();
                let message = answer.text().await.unwrap_or_default();
                ensure!(
                    status.is_success(),
                    "{shown} does not take the traces: {status}: {message}"
                );
                let reply: Value = serde_json::from_str(&message).unwrap_or_default();
                match &reply["partialSuccess"]["errorMessage"] {
                    Value::String(error) if !error.is_empty() => bail!("{shown} refuses spans: {error}"),
                    _ => Ok(()),
                }
            }
        }
    }
}

fn is_url(text: &str) -> bool {
    text.starts_with("http://") || text.starts_with("https://")
}

/// `ExportTraceServiceRequest` of OTLP, in JSON.
fn request(entries: &[&Entry]) -> Value {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let spans: Vec<Value> = entries.iter().flat_map(|entry| spans(entry)).collect();
    let resource = [
        text("service.name", "firn"),
        text("service.version", env!("CARGO_PKG_VERSION")),
        text("host.name", host.trim()),
    ];
    json!({"resourceSpans": [{
        "resource": {"attributes": resource},
        "scopeSpans": [{
            "scope": {"name": "firn", "version": env!("CARGO_PKG_VERSION")},
            "spans": spans,
        }],
    }]})
}

/// The span of the transaction, then those of its phases.
fn spans(entry: &Entry) -> Vec<Value> {
    let own: String = entry.id.chars().filter(char::is_ascii_hexdigit).collect();
    let trace = entry.trace.as_ref().map_or(&*own, |trace| trace.trace_id());
    let root = span_id(&entry.id, "");
    let mut attributes = vec![
        text("firn.transaction.id", &entry.id),
        text("firn.outcome", &entry.outcome),
        text("container.id", &entry.container),
        text("firn.namespace", &entry.namespace),
    ];
    for (name, value) in [("firn.code", &entry.code), ("container.image.name", &entry.image)] {
        if !value.is_empty() {
            attributes.push(text(name, value));
        }
    }
    for (name, bytes) in [
        ("firn.gpu.memory.bytes", entry.gpu_bytes),
        ("firn.image.bytes", entry.image_bytes),
    ] {
        if bytes > 0 {
            attributes.push(json!({"key": name, "value": {"intValue": bytes.to_string()}}));
        }
    }
    let mut span = json!({
        "traceId": trace, "spanId": root, "name": format!("firn {}", entry.kind), "kind": SERVER,
        "startTimeUnixNano": nanos(entry.at, 0.0), "endTimeUnixNano": nanos(entry.at, entry.ms),
        "attributes": attributes,
    });
    if let Some(parent) = &entry.trace {
        span["parentSpanId"] = parent.span_id().into();
    }
    span["status"] = match (entry.is_done(), entry.code.is_empty()) {
        (true, _) => json!({"code": OK}),
        (false, true) => json!({"code": ERROR, "message": entry.outcome}),
        (false, false) => json!({"code": ERROR, "message": entry.code}),
    };
    let phases = entry.phases.iter().enumerate();
    let phases = phases.map(|(nth, phase)| {
        let status = if phase.failed {
            json!({"code": ERROR})
        } else {
            json!({})
        };
        let PhaseTime { name, at_ms, ms, .. } = phase;
        json!({
            "traceId": trace, "spanId": span_id(&entry.id, &nth.to_string()), "parentSpanId": root,
            "name": name, "kind": INTERNAL, "status": status,
            "startTimeUnixNano": nanos(entry.at, *at_ms), "endTimeUnixNano": nanos(entry.at, at_ms + ms),
            "attributes": [text("firn.phase", name)],
        })
    });
    std::iter::once(span).chain(phases).collect()
}

fn text(key: &str, value: &str) -> Value {
    json!({"key": key, "value": {"stringValue": value}})
}

/// Eight bytes in hexadecimal.
fn span_id(transaction: &str, part: &str) -> String {
    let digest = Sha256::digest(format!("{transaction}/{part}"));
    digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// A time, in nanoseconds since 1970; text, as JSON of 64 bits is in OTLP.
fn nanos(at: u64, ms: f64) -> String {
    let after = Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default();
    (Duration::from_millis(at) + after).as_nanos().to_string()
}

#[cfg(test)]
mod tests {
    use firn_transaction::journal::TraceParent;

    use super::*;

    fn entry() -> Entry {
        let phase = |name: &str, at_ms, failed| PhaseTime {
            name: name.to_owned(),
            at_ms,
            ms: 2.5,
            failed,
        };
        Entry {
            id: "0af76519-16cd-43dd-8448-eb211c80319c".to_owned(),
            kind: "checkpoint".to_owned(),
            at: 1_700_000_000_000,
            container: "a\"b\n".to_owned(),
            outcome: "failed".to_owned(),
            code: "FIRN-DUMP".to_owned(),
            ms: 10.0,
            gpu_bytes: 1 << 62,
            phases: vec![phase("inspect", 0.0, false), phase("criu-dump", 2.5, true)],
            ..Entry::default()
        }
    }

    #[tokio::test]
    async fn messages_do_not_have_an_endpoint_of_the_environment() {
        // Nobody listens there.
        let endpoint = "http://127.0.0.1:1/key-4711";
        let target = Target::with("env", || Some(endpoint.to_owned())).unwrap();
        let error = target.send_batch("{}".to_owned()).await.unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains(ENDPOINT) && !error.contains("4711"), "{error}");
        assert!(Target::with("env", || None).is_err());
        assert!(Target::with("env", || Some("localhost:4318".to_owned())).is_err());
    }

    #[tokio::test]
    async fn a_file_is_made_for_root_alone() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("traces");
        let target = Target::of(path.to_str().unwrap()).unwrap();
        target.send_batch("{}".to_owned()).await.unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_transaction_is_a_span_with_one_for_each_phase() {
        let spans = spans(&entry());
        let names: Vec<_> = spans.iter().map(|span| span["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["firn checkpoint", "inspect", "criu-dump"]);
        assert_eq!(spans[0]["traceId"], "0af7651916cd43dd8448eb211c80319c");
        assert!(spans[0].get("parentSpanId").is_none());
        assert_eq!(spans[0]["status"], json!({"code": 2, "message": "FIRN-DUMP"}));
        assert_eq!(spans[2]["status"], json!({"code": 2}));
        assert_eq!(spans[2]["startTimeUnixNano"], "1700000000002500000");
        assert_eq!(spans[2]["endTimeUnixNano"], "1700000000005000000");
        for phase in &spans[1..] {
            assert_eq!(phase["parentSpanId"], spans[0]["spanId"]);
            assert_eq!(phase["traceId"], spans[0]["traceId"]);
        }
        let mut ids: Vec<_> = spans
            .iter()
            .map(|span| span["spanId"].as_str().unwrap())
            .collect();
        assert!(ids.iter().all(|id| id.len() == 16));
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 3);
        let attributes = spans[0]["attributes"].as_array().unwrap();
        let bytes = json!({"key": "firn.gpu.memory.bytes", "value": {"intValue": "4611686018427387904"}});
        assert!(attributes.contains(&bytes) && attributes.contains(&text("container.id", "a\"b\n")));
    }

    #[test]
    fn the_span_of_the_client_is_its_parent() {
        let trace = TraceParent::parse("00-0af7651916cd43dd8448eb211c80319d-b7ad6b7169203331-01");
        let spans = spans(&Entry { trace, ..entry() });
        assert_eq!(spans[0]["parentSpanId"], "b7ad6b7169203331");
        assert!(
            spans
                .iter()
                .all(|span| span["traceId"] == "0af7651916cd43dd8448eb211c80319d")
        );
    }

    #[test]
    fn what_the_client_does_not_sample_is_not_sent() {
        let trace = TraceParent::parse("00-0af7651916cd43dd8448eb211c80319d-b7ad6b7169203331-00");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("spans").to_str().unwrap().to_owned();
        let target = Target::of(&path).unwrap();
        let sent = block_on(target.send(&[entry(), Entry { trace, ..entry() }])).unwrap();
        assert_eq!(sent.unwrap(), 1);
        let lines = std::fs::read_to_string(&path).unwrap();
        let [line] = lines.lines().collect::<Vec<_>>()[..] else {
            panic!("{lines}");
        };
        let request: Value = serde_json::from_str(line).unwrap();
        let scope = &request["resourceSpans"][0]["scopeSpans"][0];
        assert_eq!(scope["spans"].as_array().unwrap().len(), 3);
        assert!(Target::of("ftp://host").is_err());
    }
}
