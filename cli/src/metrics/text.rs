//! The metrics and their names. Names of containers are labels of what continues now, and of nothing that is
//! counted: the number of series does not grow with the number of containers that there were.

use anyhow::Result;
use firn_transaction::history::{BUCKETS, Durations, Totals};
use firn_transaction::lease::Lease;
use prometheus::TextEncoder;
use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};

use crate::ps::container::Container;
use crate::ps::transaction::{State, Transaction};

/// What continues.
pub(super) struct Now {
    pub containers: Vec<Container>,
    pub leases: Vec<Lease>,
}

impl Now {
    /// Transactions, each with the namespace of its container.
    fn in_state(&self, state: State) -> Vec<(&str, &Transaction)> {
        let transactions = self
            .containers
            .iter()
            .filter_map(|container| Some((container.namespace.as_str(), container.transaction.as_ref()?)));
        transactions.filter(|(_, of)| of.state() == state).collect()
    }
}

/// All metrics, in the text format of Prometheus.
pub(super) fn of(totals: &Totals, now: &Now) -> Result<String> {
    let families = counted(totals).into_iter().chain(live(now));
    let families: Vec<_> = families
        .filter(|family| !family.get_metric().is_empty())
        .collect();
    Ok(TextEncoder::new().encode_to_string(&families)?)
}

fn counted(totals: &Totals) -> [MetricFamily; 5] {
    let transactions = totals.transactions.iter();
    let bytes = |name, help, of: &std::collections::BTreeMap<String, u64>| {
        let all = of
            .iter()
            .map(|(kind, bytes)| counter(labels(&["kind"], kind), *bytes));
        family(name, help, MetricType::COUNTER, all.collect())
    };
    let durations =
        |name, help, keys: &[&'static str], of: &std::collections::BTreeMap<String, Durations>| {
            let all = of
                .iter()
                .map(|(key, durations)| histogram(labels(keys, key), durations));
            family(name, help, MetricType::HISTOGRAM, all.collect())
        };
    [
        family(
            "firn_transactions_total",
            "Transactions that have ended, by what became of them and the error code.",
            MetricType::COUNTER,
            transactions
                .map(|(key, count)| counter(labels(&["kind", "outcome", "code"], key), *count))
                .collect(),
        ),
        durations(
            "firn_transaction_duration_seconds",
            "How long transactions took.",
            &["kind"],
            &totals.durations,
        ),
        durations(
            "firn_transaction_phase_duration_seconds",
            "How long the phases of transactions took.",
            &["kind", "phase"],
            &totals.phases,
        ),
        bytes(
            "firn_transaction_gpu_memory_bytes_total",
            "GPU memory that the driver has copied for transactions.",
            &totals.gpu_bytes,
        ),
        bytes(
            "firn_transaction_image_bytes_total",
            "Bytes of the images that were written or restored, with those in a store.",
            &totals.image_bytes,
        ),
    ]
}

/// The containers with GPUs by state, a sample for each.
fn gpu_containers(now: &Now, suspended: &[(&str, &Transaction)]) -> Vec<Metric> {
    let is_suspended = |lease: &Lease| {
        suspended.iter().any(|(namespace, of)| {
            (*namespace, container(of)) == (lease.namespace.as_str(), lease.container.as_str())
        })
    };
    let is_paused = |lease: &Lease| {
        let mut paused = now
            .containers
            .iter()
            .filter(|container| container.state() == "paused");
        paused.any(|container| (&container.namespace, &container.id) == (&lease.namespace, &lease.container))
    };
    let of = |lease: &Lease| match lease {
        _ if is_suspended(lease) => "suspended",
        _ if lease.is_parked() => "parked",
        _ if is_paused(lease) => "paused",
        _ => "running",
    };
    let count = |state: &str| {
        let found = now.leases.iter().filter(|lease| of(lease) == state).count();
        gauge(labels(&["state"], state), precise(found as u64))
    };
    ["running", "paused", "parked", "suspended"].map(count).to_vec()
}

fn live(now: &Now) -> [MetricFamily; 5] {
    let (suspended, running) = (now.in_state(State::Suspended), now.in_state(State::Running));
    let since = |of: &Transaction| of.elapsed().as_secs_f64();
    let gauges = |name, help, all| family(name, help, MetricType::GAUGE, all);
    [
        gauges(
            "firn_gpu_containers",
            "Containers of containerd with GPUs, by whether they run and have their GPU state.",
            gpu_containers(now, &suspended),
        ),
        gauges(
            "firn_transactions_running",
            "Transactions in progress.",
            vec![gauge(Vec::new(), precise(running.len() as u64))],
        ),
        gauges(
            "firn_transaction_running_seconds",
            "How long each transaction in progress has run.",
            running
                .iter()
                .map(|(namespace, of)| {
                    let labels = [("kind", of.operation()), ("phase", of.phase())];
                    gauge(of_container(namespace, of, &labels), since(of))
                })
                .collect(),
        ),
        gauges(
            "firn_container_suspended_seconds",
            "How long ago the transaction began that has left each suspended container.",
            suspended
                .iter()
                .map(|(namespace, of)| gauge(of_container(namespace, of, &[]), since(of)))
                .collect(),
        ),
        gauges(
            "firn_build_info",
            "The version of firn.",
            vec![gauge(vec![label("version", env!("CARGO_PKG_VERSION"))], 1.0)],
        ),
    ]
}

fn family(name: &str, help: &str, kind: MetricType, metrics: Vec<Metric>) -> MetricFamily {
    let mut family = MetricFamily::default();
    family.set_name(name.to_owned());
    family.set_help(help.to_owned());
    family.set_field_type(kind);
    family.set_metric(metrics);
    family
}

fn label(name: &str, value: &str) -> LabelPair {
    let mut label = LabelPair::default();
    label.set_name(name.to_owned());
    label.set_value(value.to_owned());
    label
}

/// The parts of a key of the totals.
fn labels(names: &[&'static str], key: &str) -> Vec<LabelPair> {
    let values = key.splitn(names.len(), '/');
    names
        .iter()
        .zip(values)
        .map(|(name, value)| label(name, value))
        .collect()
}

fn container(of: &Transaction) -> &str {
    &of.record.begin.container
}

fn of_container(namespace: &str, of: &Transaction, more: &[(&str, &str)]) -> Vec<LabelPair> {
    let its = [("container", container(of)), ("namespace", namespace)];
    its.iter()
        .chain(more)
        .map(|(name, value)| label(name, value))
        .collect()
}

fn counter(labels: Vec<LabelPair>, value: u64) -> Metric {
    let mut counter = Counter::default();
    counter.set_value(precise(value));
    let mut metric = Metric::from_label(labels);
    metric.set_counter(counter);
    metric
}

fn gauge(labels: Vec<LabelPair>, value: f64) -> Metric {
    let mut gauge = Gauge::default();
    gauge.set_value(value);
    let mut metric = Metric::from_label(labels);
    metric.set_gauge(gauge);
    metric
}

fn histogram(labels: Vec<LabelPair>, durations: &Durations) -> Metric {
    let mut below = 0;
    let buckets = BUCKETS.iter().zip(durations.counts).map(|(bound, count)| {
        below += count;
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(*bound);
        bucket.set_cumulative_count(below);
        bucket
    });
    let mut histogram = Histogram::default();
    histogram.set_bucket(buckets.collect());
    histogram.set_sample_count(durations.counts.iter().sum());
    // To a microsecond: the sum of many has no more.
    histogram.set_sample_sum((durations.seconds * 1e6).round() / 1e6);
    let mut metric = Metric::from_label(labels);
    metric.set_histogram(histogram);
    metric
}

/// Numbers of Prometheus are floating; above 2^53 the last digits are lost.
#[expect(clippy::cast_precision_loss, reason = "that is Prometheus's own precision")]
fn precise(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests;
